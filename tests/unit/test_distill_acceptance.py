"""Tokens per verification from where drafter and target choose alike."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minedraft.distill.acceptance import MOST_DRAFTS, agreement, tokens_per_verification

ANSWERS = st.lists(st.lists(st.booleans(), max_size=40), max_size=8)


def decoded(target: list[int], drafter: list[int], num_drafts: int) -> list[int]:
    """Speculative decoding, token by token: how many tokens each verification emits.

    ``drafter[i]`` is what the drafter proposes after ``target[:i]``; what it proposes after a token
    that is not the target's is rejected with that token.
    """
    emitted, at = [], 1
    while at < len(target):
        drafts = drafter[at : at + min(num_drafts, len(target) - at - 1)]
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == target[at + accepted]:
            accepted += 1
        emitted.append(accepted + 1)
        at += accepted + 1
    return emitted


@given(ANSWERS, st.integers(1, MOST_DRAFTS))
def test_as_many_as_speculative_decoding_emits(answers: list[list[bool]], num_drafts: int) -> None:
    emitted: list[int] = []
    for alike in answers:
        target = list(range(len(alike)))
        drafter = [token if same else -1 for token, same in zip(target, alike, strict=True)]
        emitted += decoded(target, drafter, num_drafts)
    expected = sum(emitted) / len(emitted) if emitted else 1.0
    assert tokens_per_verification(answers, num_drafts) == pytest.approx(expected)


@given(ANSWERS)
def test_between_one_and_all_drafts(answers: list[list[bool]]) -> None:
    for k in range(1, MOST_DRAFTS + 1):
        assert 1 <= tokens_per_verification(answers, k) <= k + 1


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_independent_agreement_gives_the_geometric_sum(share: float) -> None:
    rng = random.Random(0)
    answers = [[rng.random() < share for _ in range(20_000)] for _ in range(3)]
    assert agreement(answers) == pytest.approx(share, abs=0.01)
    expected = (1 - share**5) / (1 - share)  # Leviathan et al., arXiv 2211.17192, equation 1
    assert tokens_per_verification(answers, 4) == pytest.approx(expected, rel=0.02)


def test_nothing_to_verify() -> None:
    assert tokens_per_verification([[], [True]], 4) == 1.0
    assert agreement([]) == 0.0

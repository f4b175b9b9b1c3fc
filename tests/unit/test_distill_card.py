"""Which K pays, and what the card says of it."""

from pathlib import Path

import pytest

from minedraft.distill.acceptance import MOST_DRAFTS
from minedraft.distill.card import draw, model_card, summary, table
from minedraft.distill.evaluation import Evaluation, OnMachine, OnText, best, lines
from minedraft.distill.recipe import Recipe

TEXT = OnText(20, 900, 0.7, [(1 - 0.7 ** (k + 1)) / 0.3 for k in range(1, MOST_DRAFTS + 1)])
TRAINED = {"answers": 90, "distinct": 8000, "held_out": 10, "tokens": 30_000, "seconds": 600.0}


def machine(t1_s: float, plain: float = 20.0) -> OnMachine:
    """V is 0.1 s and 0.01 s for each draft token, of 4 requests at a time."""
    drafts = (1, 2, 4, 8)
    return OnMachine(
        devices="CPU 0-1",
        concurrency=4,
        plain_tokens_per_s=plain,
        plain_step_s=0.15,
        overlap_tokens_per_s={k: 20.0 + k for k in drafts},
        verify_s={k: 0.1 + 0.01 * k for k in drafts},
        draft_s={k: t1_s * k for k in drafts},
        tokens_per_verification={k: 1.0 + k / 4 for k in drafts},
    )


def test_what_was_not_run_is_between_what_was() -> None:
    found = lines(Evaluation(TEXT, None, machine(0.02)))
    assert [line.num_drafts for line in found] == list(range(1, MOST_DRAFTS + 1))
    three = found[2]
    assert three.verify_s == pytest.approx(0.13)
    assert three.draft_s == pytest.approx(0.06)
    assert three.measured_tokens_per_s is None
    assert found[3].measured_tokens_per_s == 24.0


@pytest.mark.parametrize(("t1_s", "k"), [(0.001, 4), (0.05, 2), (1.0, 1)])
def test_the_best_k_is_where_tokens_over_the_longer_of_both_are_most(t1_s: float, k: int) -> None:
    found = lines(Evaluation(TEXT, None, machine(t1_s)))
    speeds = [
        4 * TEXT.tokens_per_verification[n - 1] / (2 * max(0.1 + 0.01 * n, t1_s * n))
        for n in range(1, MOST_DRAFTS + 1)
    ]
    assert [line.expected_tokens_per_s for line in found] == pytest.approx(speeds)
    assert best(found).num_drafts == k == 1 + speeds.index(max(speeds))


def test_without_a_run_there_is_no_time() -> None:
    evaluation = Evaluation(TEXT, TEXT, None)
    assert best(lines(evaluation)).num_drafts == MOST_DRAFTS
    assert "ms" not in table(evaluation)
    assert "CPU" not in summary(evaluation)


def test_a_drafter_that_does_not_pay_is_said_to_be_one() -> None:
    slow = summary(Evaluation(TEXT, None, machine(1.0, plain=100.0)))
    assert "drafting does not pay" in slow
    assert "does not pay" not in summary(Evaluation(TEXT, None, machine(0.001)))


def test_the_card_says_what_it_is_made_of(tmp_path: Path) -> None:
    recipe = Recipe(target=str(tmp_path), prompts=("sharegpt",), layers=(0, 3), quantise="int8")
    evaluation = Evaluation(TEXT, TEXT, machine(0.02))
    card = model_card(recipe, evaluation, TRAINED, "minedraft distill A --seed 0")
    assert str(tmp_path) not in card
    for words in ("layers 0, 3", "int8", "sharegpt", "`minedraft distill A --seed 0`", "8,000"):
        assert words in card
    assert card.count("\n| ") == 2 + MOST_DRAFTS


def test_the_plot_is_drawn_with_and_without_a_run(tmp_path: Path) -> None:
    for name, run in (("with", machine(0.02)), ("without", None)):
        files = draw(Evaluation(TEXT, None, run), tmp_path / name)
        assert {file.suffix for file in files} == {".png", ".svg"}
        assert all(file.stat().st_size > 1000 for file in files)

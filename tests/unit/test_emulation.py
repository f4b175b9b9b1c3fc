"""Emulated models: which token comes next, how often a drafter says the same, and their folders."""

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, chisquare

from minedraft.config import ConfigError
from minedraft.costmodel.curve import CostModel, Curve
from minedraft.emulation import folder
from minedraft.emulation.law import NUM_SPECIAL, Law
from minedraft.emulation.settings import Emulation

CURVE = Curve(
    source="made up",
    overhead_s=0.001,
    weights_s=0.0,
    per_token_s=0.0,
    per_request_s=0.0,
    per_context_token_s=0.0,
)
COST = CostModel(version=1, name="made up", target=CURVE, drafter=CURVE)
SIZES = st.integers(8, 4096)
SEEDS = st.integers(0, (1 << 31) - 1)
POSITIONS = st.integers(0, 1 << 20)


# --- the text --------------------------------------------------------------------------------


@given(SEEDS, SIZES, POSITIONS)
def test_at_every_position_each_token_comes_after_one_other(
    seed: int, vocab_size: int, position: int
) -> None:
    tokens = np.arange(NUM_SPECIAL, vocab_size)
    following = Law(seed, vocab_size).next_tokens(np.full_like(tokens, position), tokens)
    assert sorted(following) == list(tokens)


@given(SEEDS, SIZES, POSITIONS, st.integers(0, NUM_SPECIAL - 1))
def test_special_tokens_do_not_come_and_may_be_before(
    seed: int, vocab_size: int, position: int, token: int
) -> None:
    for law in (Law(seed, vocab_size), Law(seed, vocab_size, (0.0,))):
        assert NUM_SPECIAL <= law.next_tokens(position, token) < vocab_size


@given(SEEDS, st.lists(st.integers(0, 999), min_size=1, max_size=8))
def test_a_text_goes_on_from_any_of_its_places(seed: int, prompt: list[int]) -> None:
    law = Law(seed, 1000)
    text = law.continuation(prompt, 20)
    assert law.continuation(prompt + text[:7], 13) == text[7:]


def test_tokens_are_spread_over_the_vocabulary() -> None:
    law = Law(1, 128)
    text = law.continuation([5], 12_500)
    assert chisquare(np.bincount(text, minlength=128)[NUM_SPECIAL:]).pvalue > 1e-4
    steps = np.diff(text) % (128 - NUM_SPECIAL)
    assert chisquare(np.bincount(steps, minlength=128 - NUM_SPECIAL)).pvalue > 1e-4


def test_seeds_give_other_texts() -> None:
    texts = {tuple(Law(seed, 1000).continuation([7], 20)) for seed in range(100)}
    assert len(texts) == 100


# --- a drafter's agreement -------------------------------------------------------------------


def agreements(law: Law, positions: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    target = Law(law.seed, law.vocab_size)
    same: np.ndarray = law.next_tokens(positions, tokens) == target.next_tokens(positions, tokens)
    return same


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.8, 0.99, 1.0])
def test_a_drafter_agrees_at_its_rate(rate: float) -> None:
    positions, tokens = np.meshgrid(np.arange(200), np.arange(NUM_SPECIAL, 1024))
    same = agreements(Law(0, 1024, (rate,)), positions, tokens)
    low, high = binom.interval(1 - 1e-6, same.size, rate)
    assert low <= same.sum() <= high
    # Of the place before, and of the token at the same place, it is independent.
    for pairs in (same[:, 1:] & same[:, :-1], same[1:] & same[:-1]):
        assert pairs.mean() == pytest.approx(rate**2, abs=0.01)


def test_several_rates_take_turns_along_the_text() -> None:
    rates = (0.9, 0.5, 0.0)
    tokens = np.arange(NUM_SPECIAL, 1024)
    for position in range(9):
        same = agreements(Law(0, 1024, rates), np.full_like(tokens, position), tokens)
        low, high = binom.interval(1 - 1e-6, same.size, rates[position % 3])
        assert low <= same.sum() <= high


@pytest.mark.parametrize("rate", [0.6, 0.9])
def test_each_draft_token_is_accepted_at_the_rate(rate: float) -> None:
    """A walk through texts as a verifier takes it: drafts up to the first wrong one, then on."""
    target, drafter = Law(3, 1024), Law(3, 1024, (rate,))
    tokens, at = np.arange(NUM_SPECIAL, 1024), np.zeros(1021, np.int64)
    drafted, accepted = np.zeros(4, np.int64), np.zeros(4, np.int64)
    for _ in range(40):
        alive = np.ones(1021, np.bool_)
        for place in range(4):
            right = alive & agreements(drafter, at, tokens)
            drafted[place] += alive.sum()
            accepted[place] += right.sum()
            tokens = np.where(alive, target.next_tokens(at, tokens), tokens)
            at, alive = at + alive, right
        tokens = np.where(alive, target.next_tokens(at, tokens), tokens)
        at = at + alive
    low, high = binom.interval(1 - 1e-6, drafted, rate)
    assert np.all((low <= accepted) & (accepted <= high))


# --- settings and folders --------------------------------------------------------------------


@given(st.floats(0.05, 0.999), st.integers(128, 16384))
def test_the_top_token_has_its_probability(probability: float, vocab_size: int) -> None:
    gap = Emulation(curve=CURVE, top_probability=probability).logit_gap(vocab_size)
    others = vocab_size - NUM_SPECIAL - 1
    assert gap > 0
    assert math.exp(gap) / (math.exp(gap) + others) == pytest.approx(probability)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"agreement": 1.1}, "<= 1.0 - at `$.agreement`"),
        ({"agreement": [0.5, -0.1]}, ">= 0.0 - at `$.agreement[1]`"),
        ({"agreement": []}, "length >= 1 - at `$.agreement`"),
        ({"seed": -1}, ">= 0 - at `$.seed`"),
        ({"top_probability": 1.0}, "< 1.0 - at `$.top_probability`"),
        ({"speed": 1}, "unknown field `speed`"),
        ({"curve": {}}, "missing required field `source` - at `$.curve`"),
        ({"curve": msgspec.to_builtins(CURVE) | {"weights_s": -1}}, "weights_s=-1"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(change: dict[str, Any], says: str) -> None:
    entry = {"curve": msgspec.to_builtins(CURVE)} | change
    with pytest.raises(ConfigError) as error:
        Emulation.parse(entry, "models/target")
    assert str(error.value).startswith("models/target: emulation in config.json: ")
    assert says in str(error.value)
    assert "its fields are curve, seed, agreement, top_probability" in str(error.value)


def test_a_pair_has_one_text_and_two_speeds(tmp_path: Path) -> None:
    slow = msgspec.structs.replace(CURVE, overhead_s=0.02)
    cost = CostModel(version=1, name="made up", target=slow, drafter=CURVE)
    pair = folder.write_pair(tmp_path, cost, agreement=(0.5, 0.7), seed=5, vocab_size=500)
    target, drafter = (json.loads((path / "config.json").read_text()) for path in pair)
    assert target["vocab_size"] == drafter["vocab_size"] == 500
    both = [Emulation.parse(config["emulation"], "") for config in (target, drafter)]
    assert both == [
        Emulation(curve=slow, seed=5),
        Emulation(curve=CURVE, seed=5, agreement=(0.5, 0.7)),
    ]
    assert both[0].law(500) == Law(5, 500)
    assert both[1].law(500) == Law(5, 500, (0.5, 0.7))


@pytest.mark.parametrize("vocab_size", [127, 16385])
def test_a_vocabulary_that_cannot_be(tmp_path: Path, vocab_size: int) -> None:
    with pytest.raises(ConfigError, match="give 128 to 16384"):
        folder.write_pair(tmp_path, COST, agreement=0.5, vocab_size=vocab_size)


def test_a_rate_that_cannot_be_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"agreement"):
        folder.write_pair(tmp_path, COST, agreement=2.0)


def test_its_tokenizer_takes_text_there_and_back(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    target, _ = folder.write_pair(tmp_path, COST, agreement=0.5, vocab_size=300)
    tokenizer = AutoTokenizer.from_pretrained(target)
    assert len(tokenizer) == 300
    ids = list(range(NUM_SPECIAL, 300))
    text = tokenizer.decode(ids)
    assert len(text) == 297
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(tokenizer.encode("def f(x):\n  return 1")) == "def f(x):\n  return 1"

"""The report on emulated pairs: which runs it compares, and what it says of them."""

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from results import benchmark, run

from minedraft.bench.records import Benchmark, Engine, Load, Setting, System
from minedraft.costmodel.curve import CostModel

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
K = 4
SPEEDS = {"plain": 100.0, "draft_model": 200.0, "sequential": 240.0, "overlap": 300.0}
FREE = 320.0


@pytest.fixture(scope="module")
def script() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(BENCHMARKS / "emulated.py")))


def whole(script: SimpleNamespace, *, repetitions: int = 2, name: str = "a pair") -> Benchmark:
    """At 8 and 16 requests; with 16 all are 1.5 times as fast, in the second repetition half."""
    runs = []
    for repetition in range(repetitions):
        for load in script.loads([8]):
            for system in script.systems(name, K):
                speed = FREE if system.free else SPEEDS[system.name]
                speed *= (1.5 if load.concurrency == 16 else 1.0) / (1 + repetition)
                step_s = 0.024 if system.free else 0.025
                engine = Engine(step_s=step_s, verifications=10, drafted=40, accepted=26)
                runs.append(run(Setting(system, load), speed, repetition, engine=engine))
    found = benchmark(*runs, title="a pair | made up")
    cost = CostModel.load(BENCHMARKS / "pairs" / "qwen3-32b-0.6b.json")
    found.provenance["curves"] = msgspec.to_builtins(cost)
    return found


def line(script: SimpleNamespace, concurrency: int, found: Benchmark) -> Any:
    lines = script.summed("a pair", found).lines
    return next(line for line in lines if line.concurrency == concurrency)


def test_every_concurrency_is_run_with_its_double_too_and_once(script: SimpleNamespace) -> None:
    assert script.loads([32, 8, 16]) == [Load(concurrency=n) for n in (8, 16, 32, 64)]


def test_vllms_own_systems_are_never_given_the_drafters_device(script: SimpleNamespace) -> None:
    kinds = {system.name: system.devices for system in script.systems("a pair", K)}
    assert kinds == {
        "plain": "target", "draft_model": "target", "sequential": "all", "overlap": "all",
    }  # fmt: skip


def test_prompts_have_the_lengths_that_the_report_says_and_differ(script: SimpleNamespace) -> None:
    drawn = script.conversations(400, 128, 0)
    lengths = {len(text) + 1 for conversation in drawn for text in conversation.turns}
    assert min(lengths) >= script.LENGTHS[0]
    assert max(lengths) <= script.LENGTHS[-1]
    assert len({conversation.turns for conversation in drawn}) == 400
    assert {conversation.output_tokens for conversation in drawn} == {128}
    assert script.conversations(100, 128, 0) == drawn[:100]


def test_ratios_are_over_vllms_own_drafter_at_the_same_number_of_requests(
    script: SimpleNamespace,
) -> None:
    over = line(script, 8, whole(script)).over_native
    assert over["sequential"].median == pytest.approx(1.2)
    assert over["overlap"].median == pytest.approx(1.5)
    assert over["overlap"].width == pytest.approx(0)  # within a repetition


def test_at_twice_is_overlapped_with_2n_over_vllms_own_with_n(script: SimpleNamespace) -> None:
    found = whole(script, repetitions=1)
    eight, sixteen = (line(script, count, found) for count in (8, 16))
    assert eight.tokens_per_s[script.AT_TWICE] == sixteen.tokens_per_s["overlap"]
    assert eight.over_native[script.AT_TWICE].median == pytest.approx(2.25)
    assert script.AT_TWICE not in sixteen.tokens_per_s  # 32 was not run


def test_what_is_added_is_the_step_less_that_of_the_free_drafts(script: SimpleNamespace) -> None:
    bound = line(script, 8, whole(script)).bound
    assert bound.added_s.median == pytest.approx(0.001)
    assert bound.added_share.median == pytest.approx(0.04)
    assert bound.share.median == pytest.approx(SPEEDS["overlap"] / FREE)


def test_v_and_t_by_the_curves_are_those_of_half_of_the_requests(script: SimpleNamespace) -> None:
    found = whole(script)
    cost = CostModel.load(BENCHMARKS / "pairs" / "qwen3-32b-0.6b.json")
    halfway = 10 + (4 + 8) / 2 / 2  # of the requests in tests/results.py
    of_pass = (K, 8, 8 * halfway)
    sixteen = line(script, 16, found)
    assert sixteen.curve_verify_s == pytest.approx(cost.verification_s(*of_pass))
    assert sixteen.curve_draft_s == pytest.approx(cost.drafting_s(*of_pass))


def test_an_output_that_is_not_plain_vllms_is_counted(script: SimpleNamespace) -> None:
    found = whole(script, repetitions=1)
    assert line(script, 8, found).identical == "6 of 6"
    changed = next(
        run
        for run in found.runs
        if run.setting == Setting(System("overlap", "all", K), Load(concurrency=8))
    )
    changed.requests[1].token_ids[0] += 1
    assert line(script, 8, found).identical == "5 of 6"


def test_the_report_shows_each_number_and_says_what_is_no_equal_comparison(
    script: SimpleNamespace,
) -> None:
    report = script.summed("a pair", whole(script, repetitions=1))
    text = script.markdown([report])
    said = " ".join(text.split())
    assert "**not equal hardware**" in said
    assert "**not an equal comparison either**" in said
    rows = [row for row in text.splitlines() if row.startswith("| 8 |")]
    speeds, steps = rows
    for number in ("100.0", "200.0", "240.0", "300.0", "450.0", "1.20", "1.50", "2.25", "6 of 6"):
        assert f" {number} " in speeds
    for number in ("3.60", "25.0", "320.0", "1.00", "4.00"):
        assert f" {number} " in steps
    assert "a pair \\| made up" in text
    for source in report.sources.values():
        assert source in text


def test_the_same_numbers_come_back_from_json(script: SimpleNamespace) -> None:
    report = script.summed("a pair", whole(script))
    assert msgspec.json.decode(msgspec.json.encode(report), type=script.Report) == report


def test_of_the_pair_without_models_only_the_added_time_is_shown(script: SimpleNamespace) -> None:
    name = script.ADDED_ONLY
    text = script.markdown([script.summed(name, whole(script, name=name))])
    speeds, steps = text.split("## What MineDraft adds to a step")
    assert "a pair" not in speeds
    assert "a pair \\| made up" in steps
    assert "1.00 (1.00..1.00) | 4.00 (4.00..4.00)" in steps

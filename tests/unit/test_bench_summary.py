"""What is computed from a benchmark's runs, on runs whose answers are known."""

from dataclasses import astuple
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from results import (
    FREE,
    NATIVE,
    NATIVE_ON_TARGET,
    OVERLAP,
    PLAIN,
    PLAIN_ON_TARGET,
    benchmark,
    request,
    run,
    setting,
)

from minedraft.bench import records
from minedraft.bench.latency import end_to_end_s, inter_token_s, latencies, percentiles, ttft_s
from minedraft.bench.records import Engine, Load, Request, Run, Setting, System
from minedraft.bench.summary import (
    Agreement,
    Spread,
    Summary,
    agreement,
    best,
    compared_on,
    count_devices,
    ratio,
    spread,
    summarize,
    tokens_per_s,
)

SECONDS = st.floats(0.001, 100)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    gaps = draw(st.lists(SECONDS, min_size=1, max_size=6))
    counts = draw(st.lists(st.integers(0, 4), min_size=len(gaps), max_size=len(gaps)))
    times = [10 + sum(gaps[: index + 1]) for index in range(len(gaps))]
    return Request(5, 10.0, times, counts)


@st.composite
def repeated(draw: st.DrawFn, of: Setting) -> list[Run]:
    speeds = draw(st.lists(st.floats(0.1, 1e4), min_size=1, max_size=5))
    return [run(of, speed, repetition) for repetition, speed in enumerate(speeds)]


def only(*runs: Run) -> Summary:
    """The summary of the first run's setting."""
    (found,) = (s for s in summarize(benchmark(*runs)) if s.setting == runs[0].setting)
    return found


# --- one request ------------------------------------------------------------------------------


def test_tokens_that_come_together_share_the_gap_before_them() -> None:
    found = Request(5, arrived_s=1.0, times_s=[1.5, 2.1, 2.3], counts=[2, 3, 1])
    assert ttft_s(found) == pytest.approx(0.5)
    assert inter_token_s(found) == pytest.approx([0.2, 0.2, 0.2, 0.2])
    assert end_to_end_s(found) == pytest.approx(1.3)


def test_outputs_without_tokens_are_no_outputs() -> None:
    found = Request(5, arrived_s=0.0, times_s=[1.0, 2.0, 3.0, 4.0], counts=[0, 1, 0, 1])
    assert (ttft_s(found), inter_token_s(found), end_to_end_s(found)) == (2.0, [2.0], 4.0)


def test_a_request_without_tokens_has_no_latency() -> None:
    found = Request(5, arrived_s=0.0, times_s=[], counts=[])
    assert (ttft_s(found), inter_token_s(found), end_to_end_s(found)) == (None, [], None)
    assert set(astuple(latencies([found]))) == {None}


@given(requests())
def test_inter_token_latencies_are_what_is_left_of_end_to_end_after_ttft(found: Request) -> None:
    first, whole = ttft_s(found), end_to_end_s(found)
    if first is None or whole is None:
        assert found.tokens == 0
        return
    assert first + sum(inter_token_s(found)) == pytest.approx(whole)
    came_first = next(count for count in found.counts if count)
    assert len(inter_token_s(found)) == found.tokens - came_first


@given(st.lists(SECONDS, min_size=1))
def test_percentiles_are_ordered_and_within_what_was_measured(values: list[float]) -> None:
    found = percentiles(values)
    assert found is not None
    almost = 1 + 1e-12
    assert min(values) <= found.p50 * almost
    assert found.p50 <= found.p90 * almost
    assert found.p90 <= found.p99 * almost
    assert found.p99 <= max(values) * almost


def test_percentiles_pool_the_requests_of_all_repetitions() -> None:
    firsts = [index / 100 for index in range(101)]
    half = [request(first=first) for first in firsts[::2]]
    rest = [request(first=first) for first in firsts[1::2]]
    found = only(run(PLAIN, 1, 0, requests=half), run(PLAIN, 1, 1, requests=rest))
    assert found.latencies.ttft is not None
    assert astuple(found.latencies.ttft) == pytest.approx((0.5, 0.9, 0.99))


def test_a_failed_request_has_no_latency_and_its_tokens_do_not_count() -> None:
    asked = [request(4), request(400, first=9.0, failed="timeout")]
    one = Run(PLAIN, 0, 2.0, asked, Engine(), 0.0)
    found = only(one)
    assert tokens_per_s(one) == 2.0
    assert (found.requests, found.failed) == (2, 1)
    assert found.latencies.ttft is not None
    assert found.latencies.ttft.p99 == pytest.approx(0.5)


# --- repetitions ------------------------------------------------------------------------------


def test_spread_is_median_lowest_and_highest() -> None:
    assert spread([3, 1, 2]) == Spread(2, 1, 3)
    assert Spread(2, 1, 3).width == 1.0
    assert spread([]) is None


@given(repeated(PLAIN))
def test_a_setting_over_itself_is_one(runs: list[Run]) -> None:
    assert ratio(runs, runs) == Spread(1, 1, 1)


@given(repeated(OVERLAP), st.floats(0.5, 2))
def test_a_machine_that_drifts_does_not_change_a_ratio(runs: list[Run], factor: float) -> None:
    baseline = [run(PLAIN, tokens_per_s(r) * factor, r.repetition) for r in reversed(runs)]
    found = ratio(runs, baseline)
    assert found is not None
    assert astuple(found) == pytest.approx((1 / factor,) * 3)


def test_ratios_are_taken_within_a_repetition() -> None:
    ours = [run(OVERLAP, speed, repetition) for repetition, speed in ((0, 10), (1, 30), (2, 99))]
    plain = [run(PLAIN, speed, repetition) for repetition, speed in ((1, 10), (0, 5), (3, 1))]
    assert ratio(ours, plain) == Spread(2.5, 2, 3)
    assert ratio(ours, []) is None


def test_ratios_to_plain_are_those_of_the_comparisons_that_a_system_is_in() -> None:
    runs = [
        run(OVERLAP, 30), run(PLAIN, 20), run(PLAIN_ON_TARGET, 10), run(NATIVE, 25),
        run(NATIVE_ON_TARGET, 12), run(Setting(System("plain"), Load(concurrency=8)), 99),
    ]  # fmt: skip
    found = {s.setting: {d: v.median for d, v in s.over_plain.items()}
             for s in summarize(benchmark(*runs))}  # fmt: skip
    assert found[OVERLAP] == {"all": 1.5, "target": 3.0}
    assert found[NATIVE] == {"all": 1.25}
    assert found[NATIVE_ON_TARGET] == {"target": 1.2}
    assert found[PLAIN] == {"all": 1.0}


def test_the_two_comparisons_differ_in_vllms_own_systems_only() -> None:
    every = (PLAIN, PLAIN_ON_TARGET, NATIVE, NATIVE_ON_TARGET, OVERLAP, FREE)
    summaries = summarize(benchmark(*(run(one, 10) for one in every)))
    assert [s.setting for s in compared_on("all", summaries)] == [PLAIN, NATIVE, OVERLAP]
    on_target = [PLAIN_ON_TARGET, NATIVE_ON_TARGET, OVERLAP]
    assert [s.setting for s in compared_on("target", summaries)] == on_target


def test_summaries_come_by_load_system_and_drafts_in_whatever_order_they_ran() -> None:
    rate = Setting(System("plain"), Load(rate=0.5))
    more = Setting(System("plain"), Load(concurrency=16))
    ordered = [PLAIN, setting("overlap", 2), setting("overlap", 4), setting("auto", 1), more, rate]
    runs = [run(one, 10) for one in reversed(ordered)]
    assert [s.setting for s in summarize(benchmark(*runs))] == ordered


@pytest.mark.parametrize(
    ("words", "count"),
    [("CPU 0-1", 2), ("CPU 0", 1), ("GPU 0,2-4", 4), ("two H200", None), ("http://h:80", None)],
)
def test_devices_are_counted_in_words(words: str, count: int | None) -> None:
    assert count_devices(words) == count


def test_tokens_per_device_by_count_or_by_what_the_caller_says() -> None:
    one = benchmark(run(OVERLAP, 30), run(PLAIN_ON_TARGET, 10))
    assert [s.per_device for s in summarize(one)] == pytest.approx([10, 15])
    assert [s.per_device for s in summarize(one, {"all": 3})] == [None, pytest.approx(10)]


# --- the engine -------------------------------------------------------------------------------


def test_acceptance_is_of_all_verifications_together() -> None:
    first = Engine(verifications=10, drafted=20, accepted=10, accepted_by_position=[8, 2])
    second = Engine(verifications=30, drafted=100, accepted=50, accepted_by_position=[22, 18, 10])
    found = only(run(OVERLAP, 1, 0, engine=first), run(OVERLAP, 1, 1, engine=second)).acceptance
    assert found is not None
    assert found.tokens_per_verification == 1 + 60 / 40
    assert found.share == 0.5
    assert found.by_position == (30 / 40, 20 / 40, 10 / 40)


@pytest.mark.parametrize("engine", [Engine(), Engine(verifications=0, accepted=0)])
def test_no_verifications_no_acceptance(engine: Engine) -> None:
    assert only(run(PLAIN, 1, engine=engine)).acceptance is None


def test_measures_are_over_the_repetitions_that_have_them() -> None:
    engines = [
        Engine(verify_s=0.02, hidden=0.5, peak_bytes={"target": 5, "drafter": 1}, choices={"a": 1}),
        Engine(verify_s=0.04, hidden=None, peak_bytes={"target": 3, "drafter": 2}),
        Engine(verify_s=0.03, hidden=0.9, choices={"a": 2, "b": 7}),
    ]
    found = only(*(run(OVERLAP, 1, index, engine=engine) for index, engine in enumerate(engines)))
    assert found.measures.verify_s == Spread(0.03, 0.02, 0.04)
    assert found.measures.hidden == Spread(0.7, 0.5, 0.9)
    assert found.measures.draft_s is None
    assert found.peak_bytes == {"target": 5, "drafter": 2}
    assert found.choices == {"a": 3, "b": 7}


def test_the_bound_is_the_same_system_with_drafts_for_nothing() -> None:
    steps = [Engine(step_s=seconds) for seconds in (0.020, 0.025, 0.018, 0.020)]
    runs = [
        run(OVERLAP, 90, 0, engine=steps[0]), run(OVERLAP, 40, 1, engine=steps[1]),
        run(FREE, 100, 0, engine=steps[2]), run(FREE, 50, 1, engine=steps[3]),
        run(setting("overlap", 3), 50, 0), run(Setting(FREE.system, Load(concurrency=5)), 1, 0),
    ]  # fmt: skip
    found = only(*runs)
    assert found.bound is not None
    assert found.bound.free_tokens_per_s == Spread(75, 50, 100)
    assert found.bound.added_s
    assert found.bound.added_share
    assert astuple(found.bound.share) == pytest.approx((0.85, 0.8, 0.9))
    assert astuple(found.bound.added_s) == pytest.approx((0.0035, 0.002, 0.005))
    assert astuple(found.bound.added_share) == pytest.approx((0.15, 0.1, 0.2))
    others = [s for s in summarize(benchmark(*runs)) if s.setting != OVERLAP]
    assert {s.bound for s in others} == {None}


# --- outputs ----------------------------------------------------------------------------------


def test_outputs_are_compared_by_index_within_a_repetition() -> None:
    one, other = request(4), request(4)
    other.token_ids = [7, 7, 7, 7]
    ours = [run(OVERLAP, 1, 0, requests=[one, other]), run(OVERLAP, 1, 1, requests=[other, one])]
    assert agreement(ours, [run(PLAIN, 1, 0, requests=[one, other])]) == Agreement(2, 2)
    swapped = [run(PLAIN, 1, 0, requests=[one, other]), run(PLAIN, 1, 1, requests=[one, other])]
    assert agreement(ours, swapped) == Agreement(2, 4)


def test_without_token_ids_nothing_is_said_about_outputs() -> None:
    silent = request(4)
    silent.token_ids = []
    ours = [run(OVERLAP, 1, requests=[silent, request(2, failed="gone")])]
    assert agreement(ours, [run(PLAIN, 1, requests=[request(4), request(2)])]) is None


def test_ours_is_compared_with_plain_on_the_targets_devices_if_it_was_run() -> None:
    other = request(4)
    other.token_ids = [7, 7, 7, 7]
    runs = [run(OVERLAP, 1, requests=[request(4)]), run(PLAIN, 1, requests=[other])]
    assert only(*runs).identical == Agreement(0, 1)
    runs.append(run(PLAIN_ON_TARGET, 1, requests=[request(4)]))
    assert only(*runs).identical == Agreement(1, 1)
    assert only(*runs[::-1]).identical is None


# --- noise and the best -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("speeds", "others", "says"),
    [
        ((100, 107, 114), (0.3, 0.0, 0.0), []),
        ((100, 107, 114), (0.1, 0.5, 0.4), ["others used up to 0.5 cores during 2 of 3"]),
        ((100, 107, 117), (0.0, 0.0, 0.0), ["the repetitions lie 16% of their median apart"]),
        ((100, 107, 117), (0.0, 0.4, 0.0), ["others used up to 0.4 cores", "the repetitions lie"]),
    ],
)
def test_noisy_is_what_others_disturbed_or_what_differs_by_itself(
    speeds: tuple[float, ...], others: tuple[float, ...], says: list[str]
) -> None:
    pairs = enumerate(zip(speeds, others, strict=True))
    found = only(*(run(PLAIN, speed, index, others=share) for index, (speed, share) in pairs))
    assert len(found.noise) == len(says)
    assert all(reason.startswith(say) for reason, say in zip(found.noise, says, strict=True))


def test_the_best_has_the_highest_median_for_its_load_and_devices() -> None:
    runs = [
        *(run(setting("overlap", 2), speed, i) for i, speed in enumerate((10, 20, 90))),
        *(run(setting("overlap", 4), speed, i) for i, speed in enumerate((21, 25, 30))),
        run(FREE, 500), run(NATIVE, 30), run(NATIVE_ON_TARGET, 20), run(PLAIN, 1),
        run(setting("overlap", 2, Load(concurrency=8)), 5),
    ]  # fmt: skip
    found = [s.setting for s in best(summarize(benchmark(*runs)))]
    eight = setting("overlap", 2, Load(concurrency=8))
    assert found == [PLAIN, NATIVE, NATIVE_ON_TARGET, setting("overlap", 4), eight]


def test_in_an_open_loop_the_best_has_the_lowest_median_latency() -> None:
    rate = Load(rate=1.0)
    slow, fast = setting("overlap", 4, rate), setting("overlap", 2, rate)
    runs = [run(slow, 101, requests=[request(gap=0.2)]), run(fast, 100, requests=[request()])]
    assert [s.setting for s in best(summarize(benchmark(*runs)))] == [fast]


def test_a_file_that_was_written_and_read_says_the_same(tmp_path: Path) -> None:
    engine = Engine(verifications=3, accepted=2, accepted_by_position=[2], peak_bytes={"target": 9})
    one = benchmark(run(PLAIN, 10), run(OVERLAP, 13, engine=engine))
    one.write(tmp_path / "a.json")
    assert summarize(records.read(tmp_path / "a.json")) == summarize(one)

"""What is published of the verifier's measurements, in one process and across several."""

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from minedraft.config import ENV_METRICS
from minedraft.verifier import metrics
from minedraft.verifier.metrics import COUNTERS, DECISION, GAUGES, Metrics
from minedraft.verifier.session import Counters
from minedraft.verifier.stats import Outcome, Stats


@contextmanager
def publishing(model: str = "m", engine: int = 0) -> Iterator[Metrics]:
    page = Metrics(model, engine)
    try:
        yield page
    finally:
        page.close()


def shown(name: str, model: str = "m", engine: int = 0, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, {"model_name": model, "engine": str(engine), **labels})


def report(**drafter: Any) -> dict[str, Any]:
    return {"drafter": drafter}


def test_what_the_verifier_reports_is_found() -> None:
    stats, counters = Stats(), Counters(drafter_busy_s=2.0, waited_s=0.5)
    counters.dropped["late"] = 3
    stats.step(Outcome(rows=3, drafted_rows=2, drafted=8, emitted=7), "overlap", 4)
    found = stats.report(counters)
    missing = {family.name for family in COUNTERS + GAUGES if not family.values(found)}
    assert not missing
    with publishing("reports") as page:
        page.publish(found)
        assert shown("minedraft:hidden_share", "reports") == 0.75
        assert shown("minedraft:num_speculative_tokens", "reports") == 4
        assert shown("minedraft:steps_total", "reports", mode="overlap") == 1
        assert shown("minedraft:dropped_answers_total", "reports", reason="late") == 3
        assert shown("minedraft:waited_seconds_total", "reports") == 0.5
        assert shown(DECISION, "reports", mode="overlap") == 1


def test_a_counter_that_was_never_counted_is_shown_as_zero() -> None:
    with publishing("zero") as page:
        page.publish(Stats().report(Counters()))
        assert shown("minedraft:draft_tokens_verified_total", "zero") == 0
        assert shown("minedraft:hidden_share", "zero") is None, "nothing was drafted"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 1000), min_size=1), st.lists(st.integers(0, 50), min_size=1))
def test_a_counter_shows_the_sum_of_what_was_reported(first: list[int], second: list[int]) -> None:
    name = "minedraft:draft_tokens_requested_total"
    before = shown(name, "sums") or 0.0
    for grown in (first, second):
        # Each engine counts from zero, and its reports may be published any number of times.
        with publishing("sums") as page:
            for value in sorted(grown + grown):
                page.publish(report(requested=value))
    assert shown(name, "sums") == before + max(first) + max(second)


def test_a_report_that_counts_from_zero_again_takes_nothing_back() -> None:
    with publishing("again") as page:
        for value in (5, 2, 4):
            page.publish({"accepted": value})
    assert shown("minedraft:draft_tokens_accepted_total", "again") == 7


def test_one_mode_is_in_force_at_a_time() -> None:
    with publishing("modes") as page:
        for mode in ("off", "overlap", "sequential", "overlap"):
            page.publish({"decision": mode})
        found = {
            mode: shown(DECISION, "modes", mode=mode) for mode in ("off", "overlap", "sequential")
        }
    assert found == {"off": 0, "overlap": 1, "sequential": 0}


def test_engines_are_apart_and_one_that_ends_takes_only_its_gauges() -> None:
    with publishing("e", 0) as first:
        first.publish(report(sessions=1, requested=1) | {"decision": "off"})
        with publishing("e", 1) as second:
            second.publish(report(sessions=2, requested=2) | {"decision": "overlap"})
            assert [shown("minedraft:sessions", "e", engine) for engine in (0, 1)] == [1, 2]
        assert shown("minedraft:sessions", "e", 1) is None
        assert shown(DECISION, "e", 1, mode="overlap") is None
        assert shown("minedraft:draft_tokens_requested_total", "e", 1) == 2
        assert shown("minedraft:sessions", "e", 0) == 1
        assert shown(DECISION, "e", 0, mode="off") == 1


# --- several processes ------------------------------------------------------------------------


def engine(requested: int, sessions: int, goodbye: bool) -> None:
    """An engine's process, which has PROMETHEUS_MULTIPROC_DIR from the start."""
    page = Metrics("m", 0)
    page.publish(report(requested=requested, sessions=sessions) | {"decision": "overlap"})
    if goodbye:
        page.close()
    os._exit(0)


def run_engine(*args: Any) -> None:
    process = multiprocessing.get_context("spawn").Process(target=engine, args=args)
    process.start()
    process.join(60)
    assert process.exitcode == 0


def page_of(folder: Path) -> dict[str, float]:
    """What the web server's process shows."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(folder))  # type: ignore[no-untyped-call]
    samples = [sample for metric in registry.collect() for sample in metric.samples]
    assert all(
        (s.labels["model_name"], s.labels["engine"], "pid" in s.labels) == ("m", "0", False)
        for s in samples
    )
    return {s.name + s.labels.get("mode", ""): s.value for s in samples}


def test_another_process_shows_engines_and_no_ghosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV_METRICS, str(tmp_path))
    requested, sessions = "minedraft:draft_tokens_requested_total", "minedraft:sessions"
    run_engine(3, 7, False)  # killed
    shows = page_of(tmp_path)
    assert (shows[requested], shows[sessions], shows[DECISION + "overlap"]) == (3, 7, 1)
    run_engine(4, 2, False)
    shows = page_of(tmp_path)
    assert (shows[requested], shows[sessions]) == (7, 2), "its successor, counters summed"
    for file in tmp_path.glob("gauge_*"):
        file.unlink()
    run_engine(5, 9, True)
    shows = page_of(tmp_path)
    assert shows[requested] == 12
    assert sessions not in shows
    assert DECISION + "overlap" not in shows


def test_every_metric_has_the_labels_of_vllm_and_a_name_of_ours() -> None:
    assert metrics.LABELS == ("model_name", "engine")
    names = [family.name for family in COUNTERS + GAUGES] + [DECISION]
    assert len(set(names)) == len(names)
    assert all(name.startswith("minedraft:") for name in names)

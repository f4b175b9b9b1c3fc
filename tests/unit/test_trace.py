"""The trace: its file whole or cut off, its lanes, and the drafter's clock."""

import itertools
import json
import logging
import math
import os
import time
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minedraft.config import ConfigError
from minedraft.protocol import Span
from minedraft.verifier import trace as trace_module
from minedraft.verifier.trace import DRIFT, ClockOffset, Lane, Trace

times = st.floats(0, 1e6)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.json"


def new(path: Path, *, shared_clock: bool = True) -> Trace:
    return Trace(str(path), shared_clock=shared_clock)


def spans(events: Iterable[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [event for event in events if event["name"] == name]


def by_line(text: str) -> list[dict[str, Any]]:
    """The events of a file that may be cut off, read as its lines."""
    first, *lines = text.splitlines()
    assert first == "["
    return [json.loads(line.removesuffix(",")) for line in lines]


def record(trace: Trace, steps: int = 3) -> None:
    now = time.monotonic()
    for i in range(steps):
        start = now + i
        trace.waited(start, start + 0.25)
        trace.verification(start + 0.25, start + 1, rows=2, drafts=6, mode="overlap")
        trace.drafting([Span(start + 0.1, start + 0.5, 2)], start + 0.6, start + 0.6)


def test_a_closed_trace_is_one_json_array(path: Path) -> None:
    trace = new(path)
    record(trace)
    trace.flush()
    trace.flush()
    record(trace, 1)
    trace.close()
    events = json.loads(path.read_text())
    assert events == by_line(path.read_text().removesuffix("\n]\n"))
    verify = spans(events, "verify")[0]
    assert verify["args"] == {"rows": 2, "draft_tokens": 6, "mode": "overlap", "ahead": False}
    assert (verify["ph"], verify["dur"]) == ("X", pytest.approx(750_000, abs=2))
    assert [len(spans(events, name)) for name in ("verify", "wait for drafts", "draft")] == [
        3,
        3,
        3,
    ]
    names = {e["pid"]: e["args"]["name"] for e in spans(events, "process_name")}
    assert names == {e["pid"]: e["args"]["name"] for e in spans(events, "thread_name")}
    assert names[verify["pid"]] == "target"
    assert {names[e["pid"]] for e in spans(events, "draft")} == {"drafter"}
    assert {e["pid"] for e in spans(events, "wait for drafts")} == {verify["pid"]}


def test_a_trace_that_was_not_closed_is_read_by_its_lines(path: Path) -> None:
    trace = new(path)
    assert len(by_line(path.read_text())) == 1, "from the first moment"
    record(trace)
    trace.flush()
    events = by_line(path.read_text())
    assert len(spans(events, "verify")) == 3
    trace.close()
    assert json.loads(path.read_text()) == events


def test_nothing_is_written_after_the_end(path: Path) -> None:
    trace = new(path)
    trace.close()
    assert trace.path == ""
    text = path.read_text()
    record(trace)
    trace.flush()
    trace.close()
    assert path.read_text() == text


@given(st.lists(st.tuples(times, times), max_size=20))
def test_spans_of_a_lane_do_not_overlap_and_lie_within_what_was_said(
    said: list[tuple[float, float]],
) -> None:
    lane = Lane("x", 1)
    events = [(lane.span("s", start, end, {}), start, end) for start, end in said]
    for event, start, end in events:
        if event is not None:
            assert event["dur"] > 0
            assert start * 1e6 - 1 <= event["ts"]
            assert event["ts"] + event["dur"] <= end * 1e6
    kept = [event for event, _, _ in events if event is not None]
    assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in pairwise(kept))
    in_order = sorted({t for pair in said for t in pair})
    lane = Lane("x", 1)
    assert all(
        lane.span("s", a, b, {}) is not None for a, b in pairwise(in_order) if b - a > 3e-6
    ), "spans that do not overlap are all kept"


# --- the drafter's clock ----------------------------------------------------------------------

delays = st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5)), min_size=1, max_size=30)


@given(st.floats(-1e5, 1e5), delays)
def test_the_offset_is_true_up_to_the_smallest_delay(
    true: float, messages: list[tuple[float, float]]
) -> None:
    """Each message is sent so long after the one before, and is so long on its way."""
    offset = ClockOffset()
    now = received = 1e5
    for pause, delay in messages:
        now += pause
        received = max(received, now + delay)  # they come in their order
        found = offset.seen(now - true, received)
        least = min(delay for _, delay in messages)
        assert true + least - 1e-6 <= found <= received - (now - true) + 1e-6, (
            "nothing is drawn before it was, nor after it was heard of"
        )


@given(st.floats(-1e5, 1e5), st.floats(0, 1))
def test_after_one_quick_message_slow_ones_change_little(true: float, slow: float) -> None:
    offset = ClockOffset()
    offset.seen(1e5 - true, 1e5)
    found = offset.seen(1e5 + 1 - true, 1e5 + 1 + slow)
    assert true - 1e-6 <= found <= true + 2 * DRIFT + 1e-6


@pytest.mark.parametrize("shift", [-1000.0, 1000.0])
def test_another_drafter_has_another_clock(shift: float) -> None:
    offset = ClockOffset()
    offset.seen(5000.0, 100.0)
    assert offset.seen(5001.0 + shift, 101.0) == pytest.approx(101.0 - 5001.0 - shift)


def test_the_drafters_spans_are_on_the_verifiers_clock(path: Path) -> None:
    trace = new(path, shared_clock=False)
    now = time.monotonic()
    ahead = 5e4
    for i in range(3):
        done = now + i + 1
        trace.drafting([Span(done - 0.5 + ahead, done + ahead, 1)], done + ahead, done + 0.001)
    trace.close()
    drafts = spans(json.loads(path.read_text()), "draft")
    starts = [event["ts"] for event in drafts]
    assert [b - a for a, b in pairwise(starts)] == pytest.approx([1e6, 1e6], abs=1e3)
    assert starts[0] == pytest.approx(0.501e6, abs=0.1e6)
    assert [event["dur"] for event in drafts] == pytest.approx([0.5e6] * 3, abs=2e3)


@pytest.mark.parametrize("shared_clock", [True, False])
@pytest.mark.parametrize(
    ("start", "end"),
    [
        (math.nan, 1.0),
        (0.0, math.nan),
        (-math.inf, 1.0),
        (0.0, math.inf),
        (1.0, 0.5),
        (0.0, 99.0),
        (-1e308, 1.0),
    ],
)
def test_spans_that_cannot_be_are_counted_and_dropped(
    path: Path, shared_clock: bool, start: float, end: float
) -> None:
    trace = new(path, shared_clock=shared_clock)
    now = time.monotonic()
    wrong, right = Span(now + start, now + end, 1), Span(now + 2, now + 3, 1)
    assert trace.drafting([wrong, right], now + 3, now + 3) == 1
    for sent_s in (math.nan, math.inf, -math.inf, 1e308, -1e308):
        assert trace.drafting([right, right], sent_s, now + 3) == 2
    assert trace.drafting([], math.inf, now + 3) == 0
    trace.close()
    assert len(spans(json.loads(path.read_text()), "draft")) == 1


@settings(deadline=None)
@given(
    st.booleans(),
    st.lists(
        st.tuples(st.lists(st.builds(Span, st.floats(), st.floats(), st.just(1))), st.floats())
    ),
)
def test_whatever_a_drafter_says_nothing_fails(
    tmp_path_factory: pytest.TempPathFactory,
    shared_clock: bool,
    messages: list[tuple[list[Span], float]],
) -> None:
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    trace = new(path, shared_clock=shared_clock)
    for said, sent_s in messages:
        assert 0 <= trace.drafting(said, sent_s, time.monotonic()) <= len(said)
    trace.close()
    drafts = spans(json.loads(path.read_text()), "draft")
    assert all(event["ts"] >= 0 and event["dur"] > 0 for event in drafts)


# --- disks and floods -------------------------------------------------------------------------


def test_a_trace_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trace .*: No such file"):
        new(tmp_path / "no" / "trace.json")
    with pytest.raises(ConfigError, match="absolute"):
        Trace("trace.json", shared_clock=True)


def test_a_file_belongs_to_one_trace(path: Path) -> None:
    path.write_text("an older trace\n" * 1000)
    trace = new(path)
    record(trace)
    with pytest.raises(ConfigError, match="written to it already"):
        new(path)
    trace.close()
    whole = path.read_text()
    assert len(spans(json.loads(whole), "verify")) == 3
    new(path).close()
    assert len(json.loads(path.read_text())) < len(json.loads(whole)), "anew"


def test_a_pipe_without_a_reader_stops_nobody(path: Path) -> None:
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="No such device"):
        new(path)


class FullDisk:
    """A file that cannot be written any more."""

    def write(self, text: bytes) -> int:
        raise OSError(28, "No space left on device")

    def flush(self) -> None: ...

    def __enter__(self) -> "FullDisk":
        return self

    def __exit__(self, *_: object) -> None:
        raise OSError(28, "No space left on device")


def test_a_disk_that_fails_ends_the_trace_and_is_said_once(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trace = new(path)
    trace._file = FullDisk()  # type: ignore[assignment]
    with caplog.at_level(logging.WARNING, "vllm.minedraft"):
        for _ in range(3):
            record(trace)
            trace.flush()
        trace.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"MineDraft: trace ended: file={path} reason=No space left on device"
    ]
    assert trace.path == ""


def test_a_trace_does_not_grow_for_ever(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trace_module, "MAX_BYTES", 1 << 20)
    trace = new(path)
    steps = itertools.count(int(time.monotonic()) + 1)
    with caplog.at_level(logging.WARNING, "vllm.minedraft"):
        while trace.path:
            for start in itertools.islice(steps, 1000):
                trace.verification(start, start + 1, 2, 6, "overlap")
            trace.flush()
    assert "it has reached 1 MiB" in caplog.text
    assert path.stat().st_size < 2 << 20
    assert len(json.loads(path.read_text())) > 1000


def test_events_that_nobody_writes_take_bounded_memory(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_module, "MAX_EVENTS", 10)
    trace = new(path)
    record(trace, 10)
    assert len(trace._events) == 10
    trace.flush()
    record(trace, 1)
    trace.close()
    events = json.loads(path.read_text())
    lost = [event for event in events if "lost" in event["name"]]
    assert [event["name"] for event in lost] == ["23 events lost"]

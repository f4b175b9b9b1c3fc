"""The picture of a trace: whose half a span is, and what is drawn of it."""

import re
import time
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path

import pytest

from minedraft.demo.timeline import LEFT, WIDTH, TraceError, bars, read, svg
from minedraft.protocol import Span
from minedraft.verifier.trace import Trace

STEP_S = 0.05


def write(path: Path, *, mode: str = "overlap", steps: int = 20, close: bool = True) -> None:
    """Verifications one after the other, and drafting that begins a little after each."""
    trace = Trace(str(path), shared_clock=True)
    now = time.monotonic()
    for i in range(steps):
        start = now + i * STEP_S
        trace.waited(start, start + 0.005)
        trace.verification(start + 0.005, start + STEP_S, 3, 9, mode)
        done = start + STEP_S + 0.041
        trace.drafting([Span(start + STEP_S + 0.001, done, 3)], done, done)
    trace.flush()
    if close:
        trace.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.json"


def test_halves_take_turns_and_are_drafted_for_while_the_other_is_verified(path: Path) -> None:
    write(path)
    found = bars(read(path))
    verified = [bar for bar in found if bar.name == "verify"]
    drafted = [bar for bar in found if bar.name == "draft"]
    assert len(verified) == len(drafted) == 20
    assert all({a.half, b.half} == {"A", "B"} for a, b in pairwise(verified))
    assert [bar.half for bar in drafted] == [bar.half for bar in verified]
    for bar in drafted:
        beside = [v.half for v in verified if v.start_s < bar.end_s and bar.start_s < v.end_s]
        assert bar.half not in beside
    assert {bar.half for bar in found if bar.name == "wait for drafts"} == {""}


def test_in_sequential_mode_there_is_one_half(path: Path) -> None:
    write(path, mode="sequential")
    assert {bar.half for bar in bars(read(path)) if bar.name != "wait for drafts"} == {"A"}
    assert "half B" not in svg(path)


@pytest.mark.parametrize("cut", [0, 1, 7, 40])
def test_a_trace_that_is_cut_off_is_read_as_far_as_it_goes(path: Path, cut: int) -> None:
    write(path, close=False)
    whole = read(path)
    path.write_bytes(path.read_bytes()[: -cut or None])
    assert read(path) == whole[: len(whole) - (cut > 0)]


def test_the_picture_is_xml_with_both_lanes_inside_its_frame(path: Path) -> None:
    write(path)
    picture = svg(path, window_s=0.3)
    root = ElementTree.fromstring(picture)
    drawn = [g.find("{*}rect") for g in root.iter("{http://www.w3.org/2000/svg}g")
             if g.get("class") == "bar"]  # fmt: skip
    places = [{k: float(r.attrib[k]) for k in ("x", "y", "width")} for r in drawn if r is not None]
    assert len({place["y"] for place in places}) == 2
    assert all(p["x"] >= LEFT and p["x"] + p["width"] <= WIDTH for p in places)
    titles = [title.text or "" for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert 5 <= sum("verify" in title for title in titles) <= 7, "of a step each 50 ms"
    assert any(re.fullmatch(r"draft [AB], 40\.\d ms, 3 requests", title) for title in titles)


def test_a_part_without_steps_is_refused(path: Path) -> None:
    write(path, steps=0)
    with pytest.raises(TraceError, match="no step"):
        svg(path)
    write(path)
    with pytest.raises(TraceError, match="no step"):
        svg(path, start_s=1000.0)

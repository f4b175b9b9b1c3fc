"""A picture of a trace: a lane for the target, one for the drafter, a colour for each half."""

import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from minedraft.verifier.trace import DRAFT, DRAFTER, TARGET, VERIFY, WAIT

WINDOW_S = 0.3
WIDTH, LEFT, LANE, GAP, TOP = 960, 76, 44, 10, 34
"""Pixels: the whole, the names, a lane, between lanes, and the legend."""
MIN_LABEL = 62
HALVES = ("A", "B")
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f }
.bar text { fill: #fff; font-size: 12px; text-anchor: middle }
.tick text { font-size: 11px; text-anchor: middle; fill: #656d76 }
.tick line { stroke: #8b949e; stroke-opacity: .35 }
.A { fill: #2f6fde } .B { fill: #c2570c }
.wait { fill: #8b949e; fill-opacity: .25; stroke: #8b949e; stroke-dasharray: 3 2 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .tick text { fill: #9198a1 } }
"""


class TraceError(ValueError):
    """There is nothing to draw; one line says why."""


@dataclass(frozen=True)
class Bar:
    """A span of a lane, in seconds; ``half`` is A, B or empty."""

    lane: str
    name: str
    start_s: float
    end_s: float
    half: str
    rows: int


def read(path: Path) -> list[dict[str, Any]]:
    """The events of a trace, which may be cut off anywhere."""
    found = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            event = json.loads(line.rstrip(","))
        except ValueError:
            continue
        if isinstance(event, dict):
            found.append(event)
    return found


def bars(events: Sequence[dict[str, Any]]) -> list[Bar]:
    """The spans, each with the half it is for.

    Two halves take turns at the target. What the drafter begins after a turn is for the half that
    had it: of this half it was just told.
    """
    spans = [event for event in events if event.get("ph") == "X"]
    verified = [event for event in spans if event["name"] == VERIFY]
    turns = list(_turns(verified))
    ends = [event["ts"] + event["dur"] for event in verified]
    found = []
    for event in spans:
        start, end = event["ts"], event["ts"] + event["dur"]
        turn = bisect_right(ends, start) - (event["name"] != VERIFY)
        half = turns[turn] if event["name"] != WAIT and 0 <= turn < len(turns) else ""
        lane = DRAFTER if event["name"] == DRAFT else TARGET
        rows = int(event["args"].get("rows", 0))
        found.append(Bar(lane, event["name"], start / 1e6, end / 1e6, half, rows))
    return found


def _turns(verified: Sequence[dict[str, Any]]) -> Iterator[str]:
    turn = 0
    for event in verified:
        turn = 1 - turn if event["args"]["mode"] == "overlap" else 0
        yield HALVES[turn]


def svg(path: Path, start_s: float | None = None, window_s: float = WINDOW_S) -> str:
    """The picture of a part of a trace, from the middle if no start is given.

    Raises TraceError if no verification lies in it.
    """
    found = bars(read(path))
    verified = [bar.start_s for bar in found if bar.name == VERIFY]
    if start_s is None and verified:
        start_s = verified[len(verified) // 2]
    shown = [
        bar
        for bar in found
        if start_s is not None and bar.end_s > start_s and bar.start_s < start_s + window_s
    ]
    if start_s is None or not any(bar.name == VERIFY for bar in shown):
        raise TraceError(f"{path}: no step of the target in this part of the trace")
    height = TOP + 2 * (LANE + GAP) + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="target and drafter over time">\n<style>{STYLE}</style>',
        *_legend(any(bar.half == HALVES[1] for bar in shown)),
        *_ticks(window_s, height),
        *(f'<text x="0" y="{_y(lane) + LANE / 2 + 5}">{lane}</text>' for lane in (TARGET, DRAFTER)),
        *(_bar(bar, start_s, window_s) for bar in shown),
        "</svg>\n",
    ]
    return "\n".join(parts)


def _y(lane: str) -> int:
    return TOP + (LANE + GAP) * (lane == DRAFTER)


def _x(seconds: float, window_s: float) -> float:
    inside = min(max(seconds, 0.0), window_s)
    return round(LEFT + inside / window_s * (WIDTH - LEFT - 12), 1)


def _bar(bar: Bar, start_s: float, window_s: float) -> str:
    left, right = _x(bar.start_s - start_s, window_s), _x(bar.end_s - start_s, window_s)
    width, y = round(max(right - left, 0.5), 1), _y(bar.lane)
    about = f"{bar.name} {bar.half}, {1000 * (bar.end_s - bar.start_s):.1f} ms, {bar.rows} requests"
    label = ""
    if bar.half and width >= MIN_LABEL:
        middle = round(left + width / 2, 1)
        label = f'<text x="{middle}" y="{y + LANE / 2 + 4}">{escape(bar.name)} {bar.half}</text>'
    return (
        f'<g class="bar"><title>{escape(about)}</title><rect class="{bar.half or "wait"}" '
        f'x="{left}" y="{y}" width="{width}" height="{LANE}" rx="2"/>{label}</g>'
    )


def _legend(halves: bool) -> Iterator[str]:
    entries = [("A", "half A"), ("B", "half B")] if halves else [("A", "all requests")]
    for index, (style, text) in enumerate([*entries, ("wait", "target waits for drafts")]):
        x = LEFT + 90 * index
        yield f'<rect class="{style}" x="{x}" y="6" width="14" height="14" rx="2"/>'
        yield f'<text x="{x + 20}" y="18">{text}</text>'


def _ticks(window_s: float, height: int) -> Iterator[str]:
    step_s = window_s / 6
    for index in range(7):
        x = _x(index * step_s, window_s)
        bottom = height - 20
        yield (
            f'<g class="tick"><line x1="{x}" x2="{x}" y1="{TOP - 6}" y2="{bottom}"/>'
            f'<text x="{x}" y="{height - 6}">{1000 * index * step_s:.0f} ms</text></g>'
        )

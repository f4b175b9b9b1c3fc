"""A picture of some steps: what the target and the drafter did at the same time."""

from pathlib import Path
from typing import TYPE_CHECKING

from minedraft.bench.plots import save
from minedraft.config import ConfigError
from minedraft.demo.timeline import Bar, TraceError, bars, read
from minedraft.verifier.trace import DRAFTER, TARGET, VERIFY

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {"A": "#0072B2", "B": "#D55E00", "": "#CCCCCC"}
"""Of the halves, and of waits."""
STEPS = 6
"""That are shown."""


def timeline(trace: Path, stem: Path) -> list[Path]:
    """Writes STEM-timeline, and returns the files: the steps in the middle of a trace.

    Raises ConfigError without matplotlib, or if nothing lies in the trace.
    """
    try:
        found = bars(read(trace))
    except (OSError, TraceError) as error:
        raise ConfigError(f"{trace}: {error}") from error
    verified = [bar for bar in found if bar.name == VERIFY]
    if not verified:
        raise ConfigError(f"{trace}: no step of the target in it")
    middle = len(verified) // 2
    shown = verified[max(0, middle - STEPS // 2) :][:STEPS]
    begin, end = shown[0].start_s, shown[-1].end_s
    inside = [bar for bar in found if bar.end_s > begin and bar.start_s < end]
    return save(lambda: _draw(inside, begin, end), stem, "timeline")


def _draw(shown: list[Bar], begin: float, end: float) -> "Figure":
    from matplotlib import patches
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.4), layout="constrained")
    axes = figure.subplots()
    lanes = {TARGET: 1.0, DRAFTER: 0.0}
    for bar in shown:
        left, right = max(bar.start_s, begin), min(bar.end_s, end)
        axes.barh(
            lanes[bar.lane],
            1e3 * (right - left),
            left=1e3 * (left - begin),
            height=0.8,
            color=COLOURS[bar.half],
            edgecolor="white",
            linewidth=0.5,
        )
    axes.set_yticks(list(lanes.values()), list(lanes))
    axes.set_xlim(0, 1e3 * (end - begin))
    axes.set_xlabel("ms")
    labels = {"A": "half A", "B": "half B", "": "target waits for drafts"}
    figure.legend(
        handles=[patches.Patch(color=COLOURS[half], label=text) for half, text in labels.items()],
        loc="outside upper center",
        ncols=len(labels),
    )
    return figure

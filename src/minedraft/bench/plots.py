"""Plots of a benchmark, each as PNG and SVG; matplotlib is imported only when one is drawn."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from minedraft.bench.latency import Latencies, latencies
from minedraft.bench.records import Benchmark, Devices, Name, Run, System
from minedraft.bench.summary import Spread, best, by_setting, spread, summarize, tokens_per_s
from minedraft.config import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS: dict[Name, str] = {
    "plain": "#000000",
    "ngram": "#E69F00",
    "draft_model": "#56B4E9",
    "sequential": "#009E73",
    "overlap": "#D55E00",
    "auto": "#CC79A7",
}
"""Of Okabe and Ito's palette, which colour-blind readers can tell apart."""
MARKERS: dict[Name, str] = {
    "plain": "o",
    "ngram": "v",
    "draft_model": "s",
    "sequential": "D",
    "overlap": "^",
    "auto": "P",
}
LINES: dict[Devices, str] = {"all": "-", "target": "--"}
FORMATS: dict[str, dict[str, Any]] = {"png": {"dpi": 150}, "svg": {"metadata": {"Date": None}}}
FEWEST_LOADS = 2
"""That a line needs."""

LATENCIES = (
    ("ttft", "time to first token, ms", 1e3),
    ("inter_token", "inter-token latency, ms", 1e3),
    ("end_to_end", "end-to-end latency, s", 1.0),
)
PERCENTILES = (("p50", "median"), ("p99", "99th percentile"))
"""Fields of Latencies and of Percentiles."""

T = TypeVar("T")
Line = tuple[Name, Devices]
Points = Mapping[Line, list[tuple[float, Sequence[T]]]]
"""For each line where its points are, and what was measured there in each repetition."""


def draw(benchmark: Benchmark, stem: Path) -> list[Path]:
    """Writes STEM-throughput and STEM-latency, and returns the files that it wrote.

    A plot is left out if fewer than two loads of its kind were run. At each load each system is
    at its best K. Raises ConfigError without matplotlib, or if a file cannot be written.
    """
    written: list[Path] = []
    if closed := _points(benchmark, is_closed=True):
        written += save(lambda: _throughput(benchmark, closed), stem, "throughput")
    if opened := _points(benchmark, is_closed=False):
        written += save(lambda: _latency(benchmark, opened), stem, "latency")
    return written


def _points(benchmark: Benchmark, *, is_closed: bool) -> Points[Run]:
    runs = by_setting(benchmark)
    points: dict[Line, list[tuple[float, Sequence[Run]]]] = defaultdict(list)
    for summary in best(summarize(benchmark)):
        system, load = summary.setting.system, summary.setting.load
        if bool(load.concurrency) == is_closed:
            where = load.concurrency or load.rate
            points[system.name, system.devices].append((where, runs[summary.setting]))
    loads = {where for line in points.values() for where, _ in line}
    return points if len(loads) >= FEWEST_LOADS else {}


def _throughput(benchmark: Benchmark, points: Points[Run]) -> "Figure":
    figure, [[axes]] = _figure(benchmark, 1, 1)
    _lines(axes, benchmark, points, tokens_per_s)
    places = sorted({where for line in points.values() for where, _ in line})
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [f"{place:g}" for place in places], minor=False)
    axes.set_xlabel("requests at a time")
    axes.set_ylabel("output tokens/s")
    _legend(figure, axes)
    return figure


def _latency(benchmark: Benchmark, points: Points[Run]) -> "Figure":
    waits: Points[Latencies] = {
        name: [(where, [latencies(run.requests) for run in runs]) for where, runs in line]
        for name, line in points.items()
    }
    figure, grid = _figure(benchmark, len(LATENCIES), len(PERCENTILES))
    for row, (kind, label, scale) in zip(grid, LATENCIES, strict=True):
        for axes, (which, title) in zip(row, PERCENTILES, strict=True):
            _lines(axes, benchmark, waits, _seconds(kind, which, scale))
            axes.set_xlabel("requests a second")
            axes.set_ylabel(f"{label}, {title}")
    _legend(figure, grid[0][0])
    return figure


def _seconds(kind: str, which: str, scale: float) -> Callable[[Latencies], float | None]:
    def read(waits: Latencies) -> float | None:
        found = getattr(waits, kind)
        return None if found is None else scale * float(getattr(found, which))

    return read


def _lines(
    axes: "Axes", benchmark: Benchmark, points: Points[T], of: Callable[[T], float | None]
) -> None:
    """Medians over repetitions as points, from lowest to highest as error bars."""
    highest = 0.0
    for (name, devices), line in points.items():
        spreads: list[tuple[float, Spread]] = []
        for where, runs in line:
            if found := spread(value for run in runs if (value := of(run)) is not None):
                spreads.append((where, found))
                highest = max(highest, found.high)
        axes.errorbar(
            [where for where, _ in spreads],
            [found.median for _, found in spreads],
            yerr=[
                [found.median - found.low for _, found in spreads],
                [found.high - found.median for _, found in spreads],
            ],
            label=f"{System(name)} ({benchmark.devices.get(devices, devices)})",
            color=COLOURS[name],
            marker=MARKERS[name],
            linestyle=LINES[devices],
            markersize=4,
            linewidth=1.2,
            capsize=2,
        )
    axes.set_ylim(0, 1.05 * highest or 1)
    axes.grid(alpha=0.3)


def _figure(benchmark: Benchmark, rows: int, columns: int) -> tuple["Figure", Any]:
    """The figure, and its axes by row and column."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3 + 4 * columns, 1.5 + 3 * rows), layout="constrained")
    figure.suptitle(
        f"{benchmark.title}\nmedian, lowest and highest of the repetitions; each system at its "
        "best K",
        fontsize="medium",
        parse_math=False,
        wrap=True,
    )
    return figure, figure.subplots(rows, columns, squeeze=False)


def _legend(figure: "Figure", axes: "Axes") -> None:
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)


def save(draw_it: Callable[[], "Figure"], stem: Path, name: str) -> list[Path]:
    """Draws and writes STEM-NAME in each format. Raises ConfigError."""
    try:
        from matplotlib import rc_context
    except ImportError as error:
        raise ConfigError("plots need matplotlib: pip install matplotlib") from error
    written = []
    # Text stays text, and the same benchmark gives the same file.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "minedraft", "font.size": 9}):
        figure = draw_it()
        for kind, options in FORMATS.items():
            path = stem.with_name(f"{stem.name}-{name}.{kind}")
            try:
                figure.savefig(path, **options)
            except OSError as error:
                raise ConfigError(f"{path}: {error.strerror}") from error
            written.append(path)
    return written

"""Two benchmarks side by side, in Markdown."""

from collections.abc import Iterator, Mapping

from minedraft.bench.markdown import cell, flat, grid, number, spread
from minedraft.bench.records import Benchmark, Setting
from minedraft.bench.report import WHAT
from minedraft.bench.summary import Spread, Summary, summarize

SAME_PROVENANCE = "Nothing that was recorded."


def compare(a: Benchmark, b: Benchmark) -> str:
    """What differs between them in provenance, and in every setting that both have."""
    first = {summary.setting: summary for summary in summarize(a)}
    second = {summary.setting: summary for summary in summarize(b)}
    sections = [
        "# Two benchmarks side by side",
        f"A: {cell(a.title)}\n\nB: {cell(b.title)}",
        "## What differs",
        _differences(_said(a), _said(b)),
        "## Settings in both",
        "The two were not run in turn, so what else the machine did counts here. The range of the "
        "ratio is the widest that the repetitions allow; where it holds 1, the difference may be "
        "noise.",
        _both(first, second),
        *_alone("A", first, second),
        *_alone("B", second, first),
    ]
    return "\n\n".join(sections) + "\n"


def ratio_of(b: Spread, a: Spread) -> Spread | None:
    """Of medians, with the widest range; None if one of `a` is 0."""
    return Spread(b.median / a.median, b.low / a.high, b.high / a.low) if a.low else None


def _said(benchmark: Benchmark) -> dict[str, str]:
    devices = {f"devices, {name}": words for name, words in benchmark.devices.items()}
    return {"title": benchmark.title, **devices, **flat(benchmark.provenance)}


def _differences(a: Mapping[str, str], b: Mapping[str, str]) -> str:
    rows = [
        (name, a.get(name, ""), b.get(name, ""))
        for name in sorted({*a, *b})
        if a.get(name) != b.get(name)
    ]
    return grid(("", "A", "B"), rows) if rows else SAME_PROVENANCE


def _both(first: Mapping[Setting, Summary], second: Mapping[Setting, Summary]) -> str:
    rows = []
    for setting, a in first.items():
        if b := second.get(setting):
            speeds = (a.tokens_per_s, b.tokens_per_s)
            latencies = (a.latencies.end_to_end, b.latencies.end_to_end)
            noisy = " ".join(name for name, s in (("A", a), ("B", b)) if s.noise)
            rows.append(
                [
                    *_what(setting),
                    *map(spread, speeds),
                    spread(ratio_of(speeds[1], speeds[0])),
                    *(number(wait.p50) if wait else "" for wait in latencies),
                    noisy,
                ]
            )
    numbers = ("A tokens/s", "B tokens/s", "B over A", "A end-to-end s p50", "B end-to-end s p50")
    return grid((*WHAT, *numbers, "noisy"), rows) if rows else "None."


def _alone(
    name: str, here: Mapping[Setting, Summary], there: Mapping[Setting, Summary]
) -> Iterator[str]:
    rows = [
        [*_what(setting), spread(summary.tokens_per_s)]
        for setting, summary in here.items()
        if setting not in there
    ]
    if rows:
        yield f"## Settings in {name} only"
        yield grid((*WHAT, "tokens/s"), rows)


def _what(setting: Setting) -> list[str]:
    return [str(setting.load), str(setting.system), setting.system.devices]

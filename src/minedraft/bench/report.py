"""A benchmark for people: a Markdown report, and a table for the terminal."""

from collections.abc import Iterable, Iterator, Sequence

from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

from minedraft.bench.markdown import cell, flat, grid, median, number, share, spread, three
from minedraft.bench.records import OURS, Benchmark, Devices
from minedraft.bench.summary import (
    NOISY_CORES,
    NOISY_SPREAD,
    Spread,
    Summary,
    best,
    by_load,
    compared_on,
    summarize,
)
from minedraft.costmodel.fit import MIN_MEASUREMENTS, Measurement, fit

TITLES: dict[Devices, str] = {
    "all": "The same devices for all",
    "target": "The target's devices, and one more for our drafter",
}
"""Of the two comparisons."""
NOT_RUN = "Not run."
WHAT = ("load", "system", "devices")
MS, GIB = 1e3, 2.0**-30
MOST_PASSES = 3000
"""To which a curve is fitted."""


def markdown(benchmark: Benchmark, pictures: Sequence[str] = ()) -> str:
    """The report. `pictures` are addresses of plots, to be shown at its beginning."""
    summaries = summarize(benchmark)
    bests = best(summaries)
    sections = [
        f"# {cell(benchmark.title)}",
        "Medians over the repetitions, with the lowest and the highest as (min..max). Ratios are "
        "taken within a repetition, so that a machine whose speed drifts slows both sides alike. "
        "Outputs are compared with plain vLLM's of the same repetition token by token, for ours on "
        "the target's devices if it was run there; floating-point sums in another order can turn "
        "near ties.",
        *(f"![]({picture})" for picture in pictures),
        *_what_was_run(benchmark),
        *_comparison(benchmark, "all", bests),
        *_comparison(benchmark, "target", bests),
        *_equal_drafts(benchmark, summaries),
        *_latency(benchmark, bests),
        *_bound(benchmark, summaries),
        *_engine(benchmark, bests),
        *_curve(benchmark),
        *_memory(benchmark, bests),
        *_noise(benchmark, summaries),
        *_repeat(benchmark),
    ]
    return "\n\n".join(sections) + "\n"


def what(benchmark: Benchmark, summary: Summary) -> list[str]:
    """The cells that say which setting it is, for the columns WHAT."""
    system = summary.setting.system
    return [str(summary.setting.load), str(system), benchmark.devices.get(system.devices, "")]


def _what_was_run(benchmark: Benchmark) -> Iterator[str]:
    yield "## What was run"
    runs = benchmark.runs
    if runs:
        repetitions = len({run.repetition for run in runs})
        load = sorted(run.load_before for run in runs)
        yield (
            f"{len({run.setting for run in runs})} settings, {repetitions} repetitions, "
            f"{sum(len(run.requests) for run in runs):,} requests in all. The load average before "
            f"a run was {load[0]:.1f} to {load[-1]:.1f}."
        )
    rows = sorted(flat(benchmark.provenance).items())
    if rows:
        yield grid(("", ""), rows)


def _comparison(benchmark: Benchmark, devices: Devices, bests: Iterable[Summary]) -> Iterator[str]:
    yield f"## {TITLES[devices]}"
    found = _compared(devices, bests)
    if not found:
        yield NOT_RUN
        return
    yield f"{_fairness(benchmark, devices)} Each system at its best K."
    yield _speeds(benchmark, devices, found)


def _compared(devices: Devices, summaries: Iterable[Summary]) -> list[Summary]:
    """Ours alone is no comparison with vLLM's own on fewer devices."""
    found = compared_on(devices, summaries)
    theirs = any(summary.setting.system.name not in OURS for summary in found)
    return found if theirs or devices == "all" else []


def _fairness(benchmark: Benchmark, devices: Devices) -> str:
    every, target = (benchmark.devices.get(name, "unknown") for name in ("all", "target"))
    if devices == "all":
        return (
            f"Every system has the same devices ({every}); ours divides them between target and "
            "drafter."
        )
    return (
        f"vLLM's own systems have the devices of our target alone ({target}), ours has its "
        f"drafter's besides ({every}): **here ours uses more hardware**, which is the setting in "
        "which overlapped drafting was published. Tokens/s per device takes that into account."
    )


def _speeds(benchmark: Benchmark, devices: Devices, summaries: Sequence[Summary]) -> str:
    rows = [
        [
            *what(benchmark, s),
            spread(s.tokens_per_s),
            spread(s.over_plain.get(devices)),
            "" if s.per_device is None else number(s.per_device),
            _identical(s),
            _marks(s),
        ]
        for s in summaries
    ]
    numbers = ("tokens/s", "over plain", "tokens/s per device", "output as plain vLLM's", "")
    return grid((*WHAT, *numbers), rows)


def _identical(summary: Summary) -> str:
    if summary.identical is None:
        return ""
    same, compared = summary.identical.same, summary.identical.compared
    return "yes" if same == compared else f"{same} of {compared}"


def _marks(summary: Summary) -> str:
    marks = ["noisy"] if summary.noise else []
    if summary.failed:
        marks.append(f"{summary.failed} failed")
    return ", ".join(marks)


def _equal_drafts(benchmark: Benchmark, summaries: Iterable[Summary]) -> Iterator[str]:
    yield "## At equal K"
    ordered = sorted(
        summaries, key=lambda s: (by_load(s.setting.load), s.setting.system.num_drafts)
    )
    for devices, title in TITLES.items():
        yield f"### {title}, at equal K"
        rows = _compared(devices, ordered)
        yield _speeds(benchmark, devices, rows) if rows else NOT_RUN


def _latency(benchmark: Benchmark, bests: Iterable[Summary]) -> Iterator[str]:
    yield "## Latency"
    yield (
        "Of all requests of all repetitions, each system at its best K. Inter-token latency is the "
        "gap before an output, divided by the tokens that came with it."
    )
    rows = []
    for summary in bests:
        waits = summary.latencies
        cells = [*three(waits.ttft, MS), *three(waits.inter_token, MS), *three(waits.end_to_end)]
        rows.append([*what(benchmark, summary), *cells])
    names = ("TTFT ms", "inter-token ms", "end-to-end s")
    columns = [f"{name} {p}" for name in names for p in ("p50", "p90", "p99")]
    yield grid((*WHAT, *columns), rows)


def _bound(benchmark: Benchmark, summaries: Iterable[Summary]) -> Iterator[str]:
    yield "## The free-draft bound"
    bounded = [(summary, summary.bound) for summary in summaries if summary.bound]
    if not bounded:
        yield NOT_RUN
        return
    yield (
        "The bound is the same engine with the recorded drafts replayed at no cost: more than "
        "that, hiding the drafter cannot bring."
    )
    rows = [
        [
            *what(benchmark, summary),
            spread(summary.tokens_per_s),
            spread(bound.free_tokens_per_s),
            _spread_share(bound.share),
            spread(bound.added_s, MS),
            _spread_share(bound.added_share),
        ]
        for summary, bound in bounded
    ]
    numbers = ("tokens/s", "bound tokens/s", "share of the bound", "added ms a step", "of the step")
    yield grid((*WHAT, *numbers), rows)


def _spread_share(value: Spread | None) -> str:
    if value is None:
        return ""
    return f"{share(value.median)} ({share(value.low)}..{share(value.high)})"


def _engine(benchmark: Benchmark, bests: Iterable[Summary]) -> Iterator[str]:
    yield "## In the engine"
    yield (
        "V is the target's model time of a step that only decodes, t what the drafter computes for "
        "it. Idle is the share of the run in which a device computed nothing, hidden the share of "
        "the drafter's time in which the target did not wait for it. Acceptance by position is the "
        "share of the verifications that accepted the first, second, ... draft token."
    )
    rows = []
    for summary in bests:
        measures, acceptance = summary.measures, summary.acceptance
        shares = (measures.target_idle, measures.drafter_idle, measures.hidden)
        rows.append(
            [
                *what(benchmark, summary),
                number(acceptance.tokens_per_verification) if acceptance else "",
                share(acceptance.share) if acceptance else "",
                " ".join(map(share, acceptance.by_position)) if acceptance else "",
                *(median(s, MS) for s in (measures.step_s, measures.verify_s, measures.draft_s)),
                *(share(value.median) if value else "" for value in shares),
                ", ".join(f"{mode} {steps:,}" for mode, steps in sorted(summary.choices.items())),
            ]
        )
    drafts = ("tokens per verification", "accepted", "by position")
    times = ("step ms", "V ms", "t ms", "target idle", "drafter idle", "hidden", "steps by mode")
    yield grid((*WHAT, *drafts, *times), rows)


def _curve(benchmark: Benchmark) -> Iterator[str]:
    """V fitted to every pass that was measured on the target's devices."""
    passes = [
        Measurement(*each)
        for run in benchmark.runs
        if run.setting.system.devices == "target" or run.setting.system.name in OURS
        for each in run.engine.passes
    ]
    if len(passes) < MIN_MEASUREMENTS:
        return
    passes = passes[:: len(passes) // MOST_PASSES + 1]
    fitted = fit(passes, source="fitted to this benchmark's passes")
    curve = fitted.curve
    yield "## V as a curve"
    yield (
        f"Of {len(passes):,} passes on the target's devices, prefill among them; the median error "
        f"is {share(fitted.median_error)}. V = {MS * curve.overhead_s:.3g} ms + "
        f"max({MS * curve.weights_s:.3g} ms, {MS * curve.per_token_s:.3g} ms x tokens) + "
        f"{MS * curve.per_request_s:.3g} ms x requests + "
        f"{MS * curve.per_context_token_s:.3g} ms x KV tokens. Residuals:"
    )
    heading, *rows = fitted.table()
    yield grid(heading, rows, text_columns=0)


def _memory(benchmark: Benchmark, bests: Iterable[Summary]) -> Iterator[str]:
    yield "## Peak memory"
    yield "Resident memory of each process; what processes share counts in each."
    rows = []
    for summary in bests:
        peaks = {name: GIB * peak for name, peak in sorted(summary.peak_bytes.items())}
        each = ", ".join(f"{name} {number(peak)}" for name, peak in peaks.items())
        if peaks:
            rows.append([*what(benchmark, summary), number(sum(peaks.values())), each])
    yield grid((*WHAT, "GiB", "of it"), rows) if rows else "Not measured."


def _noise(benchmark: Benchmark, summaries: Iterable[Summary]) -> Iterator[str]:
    yield "## Noise and failures"
    yield (
        f"A setting is noisy if others used more than {NOISY_CORES} cores during a run, or if its "
        f"repetitions lie more than {NOISY_SPREAD:.0%} of their median apart."
    )
    rows = []
    for summary in summaries:
        reasons = list(summary.noise)
        if summary.failed:
            reasons.append(f"{summary.failed} of {summary.requests} requests failed")
        if reasons:
            rows.append([*what(benchmark, summary), "; ".join(reasons)])
    yield grid((*WHAT, "why"), rows, text_columns=4) if rows else "None."


def _repeat(benchmark: Benchmark) -> Iterator[str]:
    yield "## How to repeat it"
    command = " ".join(str(benchmark.provenance.get("command", "")).split())
    yield f"    {command}" if command else "The command was not recorded."


def table(benchmark: Benchmark) -> Table:
    """Each system at its best K, also of a benchmark that is not finished.

    Spread is from the lowest to the highest of the repetitions, as a share of their median. The
    time for each token is the median inter-token latency.
    """
    view = Table(title=Text(benchmark.title), box=SIMPLE, pad_edge=False)
    view.add_column("load, system, devices", min_width=16)  # the numbers need the rest of 80
    ratios = ("over\nplain", "over\nplain on\ntarget's")
    for column in ("tokens\n/s", "spread", *ratios, "ms per\ntoken", "of the\nbound", ""):
        view.add_column(column, justify="right", no_wrap=True)
    for summary in best(summarize(benchmark)):
        waits, bound = summary.latencies.inter_token, summary.bound
        cells = [
            ", ".join(what(benchmark, summary)),
            number(summary.tokens_per_s.median),
            share(summary.tokens_per_s.width),
            median(summary.over_plain.get("all")),
            median(summary.over_plain.get("target")),
            number(MS * waits.p50) if waits else "",
            share(bound.share.median) if bound else "",
            _marks(summary),
        ]
        view.add_row(*map(Text, cells))
    return view

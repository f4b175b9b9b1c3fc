"""Plain vLLM, vLLM's own speculative decoding and MineDraft at the step times of pairs on GPUs.

    python benchmarks/emulated.py [--quick] [--pairs qwen3-32b-0.6b ...] [--concurrency 8 16 32 64]
        [--num-speculative-tokens 4] [--agreement 0.8] [--results FOLDER] [--report-only]

The models are emulated: a forward pass sleeps as long as a curve of benchmarks/pairs says, so this
needs no GPU, and two cores. All systems of a pair are interleaved; every repetition runs each once
at every concurrency and at the double of each. Writes benchmarks/emulated.md and, with the same
numbers, emulated.json. The runs of a pair go to the folder of results when it is done, and
`--report-only` makes the two from what is there; `minedraft bench report FOLDER/PAIR.json` has more
on one pair. All of them take 40 minutes.
"""

import argparse
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from minedraft import devices
from minedraft.bench import records
from minedraft.bench.markdown import cell, grid, median, number, spread
from minedraft.bench.offline import Offline, Plan
from minedraft.bench.provenance import provenance
from minedraft.bench.records import Benchmark, Load, Run, System
from minedraft.bench.summary import (
    Bound,
    Measures,
    Spread,
    Summary,
    by_setting,
    ratio,
    summarize,
)
from minedraft.bench.systems import Pair
from minedraft.bench.workloads import Conversation
from minedraft.config import ConfigError, check_num_speculative_tokens
from minedraft.costmodel.curve import CostModel
from minedraft.emulation.folder import write_pair
from minedraft.placement import place_on_cpu

HERE = Path(__file__).parent
PAIRS = ("qwen3-32b-0.6b", "qwen3-32b-1.7b", "qwen3-32b-4b", "llama-3.3-70b-8b", "25ms")
ADDED_ONLY = "25ms"
"""Of this pair only what a step is longer than with drafts for nothing, at the highest concurrency:
often, for that is less than what the speed of a machine varies from one run to the next."""
CONCURRENCY, QUICK_CONCURRENCY = (8, 16, 32, 64), (8, 64)
REPETITIONS, QUICK_REPETITIONS = 3, 1
TIMES_AS_OFTEN = 10
ROUNDS, QUICK_ROUNDS = 2, 1
"""Requests for each that is under way at a time."""
LENGTHS = range(64, 301)
"""Of prompts, in tokens."""
LETTERS = "abcdefghijklmnopqrstuvwxyz"
ENGINE: dict[str, Any] = {
    "enforce_eager": True,
    "block_size": 32,
    "num_gpu_blocks_override": 4096,
    "kv_cache_memory_bytes": 64 << 20,
    "max_model_len": 2048,
    "enable_prefix_caching": False,
}
DRAFTER_FLAGS = (
    "--enforce-eager --block-size 32 --num-gpu-blocks-override 4096 --max-model-len 2048 "
    "--kv-cache-memory-bytes 64M --no-enable-prefix-caching"
)
MOST_LOADED = 3
"""Engines at a time; there are no more: plain, with vLLM's own drafter, ours."""
MS, PERCENT = 1e3, 100.0


def main() -> None:
    """Runs all pairs, then writes the report."""
    options = _options()
    results = {name: options.results / f"{name}.json" for name in options.pairs}
    try:
        for name, file in results.items():
            if not options.report_only:
                _run_pair(name, options).write(file)
        reports = [summed(name, records.read(file)) for name, file in results.items()]
    except ConfigError as error:
        sys.exit(f"error: {error}")
    (options.out / "emulated.md").write_text(markdown(reports))
    compact = msgspec.json.format(msgspec.json.encode(reports), indent=1)
    (options.out / "emulated.json").write_bytes(compact + b"\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--pairs", nargs="+", default=PAIRS, metavar="NAME", help="files of benchmarks/pairs")
    add("--concurrency", type=int, nargs="+", metavar="N")
    add("--num-speculative-tokens", type=int, default=4, metavar="K")
    add("--agreement", type=float, default=0.8, metavar="P", help="of drafter and target")
    add("--output-tokens", type=int, default=128, metavar="N", help="of every answer")
    add("--repetitions", type=int, metavar="N")
    add("--quick", action="store_true", help="fewer of all of these, for a first look")
    add("--seed", type=int, default=0, help="of prompts and texts")
    add("--results", type=Path, default=HERE.parent / "build" / "emulated", metavar="FOLDER")
    add("--out", type=Path, default=HERE, metavar="FOLDER", help="for emulated.md and .json")
    add("--report-only", action="store_true", help="of the results that are there")
    options = parser.parse_args()
    quick = options.quick
    options.concurrency = options.concurrency or (QUICK_CONCURRENCY if quick else CONCURRENCY)
    options.repetitions = options.repetitions or (QUICK_REPETITIONS if quick else REPETITIONS)
    for folder in (options.results, options.out):
        folder.mkdir(parents=True, exist_ok=True)
    return options


# --- runs -----------------------------------------------------------------------------------------


def systems(name: str, num_drafts: int) -> list[System]:
    """What is compared of a pair. vLLM's own run on the target's devices, ours on one more."""
    added = [
        System("overlap", "all", num_drafts),
        System("overlap", "all", num_drafts, free=True),
    ]
    if name == ADDED_ONLY:
        return added
    return [
        System("plain", "target"),
        System("draft_model", "target", num_drafts),
        System("sequential", "all", num_drafts),
        *added,
    ]


def loads(concurrency: Sequence[int]) -> list[Load]:
    """Each concurrency and its double, ascending."""
    counts = {*concurrency, *(2 * count for count in concurrency)}
    return [Load(concurrency=count) for count in sorted(counts)]


def conversations(count: int, output_tokens: int, seed: int) -> list[Conversation]:
    """Prompts of 64 to 300 tokens: a letter each, and a last one of the chat template."""
    rng = random.Random(seed)
    return [
        Conversation(("".join(rng.choices(LETTERS, k=rng.choice(LENGTHS) - 1)),), output_tokens)
        for _ in range(count)
    ]


def _run_pair(name: str, options: argparse.Namespace) -> Benchmark:
    cost = CostModel.load(HERE / "pairs" / f"{name}.json")
    num_drafts = check_num_speculative_tokens(options.num_speculative_tokens)
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    swept, repetitions = loads(options.concurrency), options.repetitions
    if name == ADDED_ONLY:
        rounds, repetitions = QUICK_ROUNDS, TIMES_AS_OFTEN * repetitions
        swept = [Load(concurrency=max(options.concurrency))]
    most = max(load.concurrency for load in swept)
    benchmark = Benchmark(
        records.VERSION,
        f"{name}: K = {num_drafts}, agreement {options.agreement:g}, prompts of "
        f"{LENGTHS[0]} to {LENGTHS[-1]} tokens, answers of {options.output_tokens}, "
        f"{rounds} N of them, greedy",
        provenance() | {"curves": msgspec.to_builtins(cost)},
        {"all": "the target's GPUs and one for our drafter", "target": "the target's GPUs"},
        [],
    )
    with tempfile.TemporaryDirectory() as folder:
        models = write_pair(Path(folder), cost, agreement=options.agreement, seed=options.seed)
        plan = Plan(
            _pair(*models, most),
            systems(name, num_drafts),
            swept,
            conversations(rounds * most, options.output_tokens, options.seed),
            repetitions,
            options.seed,
            temperature=0.0,
            settle_s=0.0,
            most_loaded=MOST_LOADED,
            rounds=rounds,
        )
        with Offline(plan, lambda doing: print(f"{name}: {doing}", flush=True)) as bench:
            bench.load()
            bench.run(benchmark.runs.append)
    return benchmark


def _pair(target: Path, drafter: Path, most: int) -> Pair:
    return Pair(
        str(target),
        str(drafter),
        place_on_cpu(devices.available_cores()),
        ENGINE | {"max_num_seqs": most},
        drafter_args=f"{DRAFTER_FLAGS} --max-num-seqs {most}",
    )


# --- what they say --------------------------------------------------------------------------------


class Line(msgspec.Struct):
    """What one pair gave at one concurrency N."""

    concurrency: int
    tokens_per_s: dict[str, Spread]
    """By system; "overlap at twice" is overlapped with 2N requests at a time."""
    over_native: dict[str, Spread]
    """The same over vLLM's own draft model at N, within a repetition."""
    accepted: float | None
    """Tokens for each verification, the target's own among them; overlapped, as all below."""
    curve_verify_s: float
    """V and t by the curves alone, of N/2 requests halfway through their answers."""
    curve_draft_s: float
    measures: Measures
    bound: Bound | None
    identical: str
    """Requests whose output is plain vLLM's, of those that were compared, of all systems."""
    noise: list[str]
    """What `minedraft bench` would call noisy, by system."""


class Report(msgspec.Struct):
    """What is kept of one pair."""

    name: str
    title: str
    provenance: dict[str, Any]
    """What of it decides the speed of the host."""
    sources: dict[str, str]
    """Of the curves of target and drafter."""
    lines: list[Line]


AT_TWICE = "overlap at twice"
PROVENANCE = ("date", "git", "versions", "cpu", "cores", "load")


def summed(name: str, benchmark: Benchmark) -> Report:
    """What is kept of a pair's runs. They have the curves in their provenance."""
    summaries = [s for s in summarize(benchmark) if not s.setting.system.free]
    counts = sorted({summary.setting.load.concurrency for summary in summaries})
    lines = [_line(count, benchmark, summaries) for count in counts]
    known = {name: benchmark.provenance.get(name, "") for name in PROVENANCE}
    cost = _curves_of(benchmark)
    sources = {"target": cost.target.source, "drafter": cost.drafter.source}
    return Report(name, benchmark.title, known, sources, lines)


def _curves_of(benchmark: Benchmark) -> CostModel:
    return msgspec.convert(benchmark.provenance["curves"], CostModel)


def _line(count: int, benchmark: Benchmark, summaries: Sequence[Summary]) -> Line:
    def at(concurrency: int) -> dict[str, Summary]:
        return {
            s.setting.system.name: s for s in summaries if s.setting.load.concurrency == concurrency
        }

    here, runs = at(count), by_setting(benchmark)
    overlap = here["overlap"]
    shown = dict(here)
    if twice := at(2 * count):
        shown[AT_TWICE] = twice["overlap"]
    native = runs[here["draft_model"].setting] if "draft_model" in here else []
    over = {name: ratio(runs[s.setting], native) for name, s in shown.items()}
    compared = [s.identical for s in here.values() if s.identical]
    return Line(
        count,
        {name: s.tokens_per_s for name, s in shown.items()},
        {name: value for name, value in over.items() if value},
        overlap.acceptance.tokens_per_verification if overlap.acceptance else None,
        *_by_curves(_curves_of(benchmark), runs[overlap.setting]),
        overlap.measures,
        overlap.bound,
        f"{sum(a.same for a in compared)} of {sum(a.compared for a in compared)}",
        [f"{s.setting.system}: {why}" for s in here.values() for why in s.noise],
    )


def _by_curves(cost: CostModel, runs: Sequence[Run]) -> tuple[float, float]:
    """V and t of a step of an overlapped setting, of which these are the runs."""
    setting = runs[0].setting
    requests = [r for run in runs for r in run.requests]
    halfway = sum(r.prompt_tokens + r.tokens / 2 for r in requests) / len(requests)
    half = setting.load.concurrency / 2
    of_pass = (setting.system.num_drafts, half, half * halfway)
    return cost.verification_s(*of_pass), cost.drafting_s(*of_pass)


# --- the report -----------------------------------------------------------------------------------

COLUMNS = {
    "plain": "plain vLLM",
    "draft_model": "vLLM's draft model",
    "sequential": "sequential",
    "overlap": "overlapped",
    AT_TWICE: "overlapped, 2N at a time",
}
RATIOS = ("sequential", "overlap", AT_TWICE)
INTRODUCTION = """\
Made by `python benchmarks/emulated.py`. Language models with a set speed and a set agreement: a
forward pass sleeps as long as the curve of a real model on real GPUs says for its tokens, requests
and context. **No curve was measured**: each comes from shapes and data sheets, see *Curves*. So
nothing here says how fast a GPU is. It says how the systems compare if passes last that long, and
what MineDraft's own work costs.

**Real** are vLLM's engine and scheduler, Model Runner V1 on a CPU with its batch, paged KV cache
and rejection sampler, MineDraft's scheduler, protocol, sockets and drafter process, and all their
Python. Scheduling is synchronous in all systems. **Emulated** are the forward passes of target and
drafter. What a pass computes here is within its sleep if that is long enough; what the host does
between passes is not, and this machine does it with one core for the target's process and one for
the drafter's. A pass of a small drafter is shorter than the host's work for it, so t is far from
its curve, see *What MineDraft adds*: here drafting costs more than it would with a fast host.

**Devices.** Each engine stands for the target's GPUs, which are the same for all systems. MineDraft
has one GPU more, for its drafter: the setting in which overlapped drafting was published, **not
equal hardware**. What vLLM could do with that GPU is not emulated. vLLM's own speculative decoding
drafts on the target's GPUs by the same curve of *one* GPU: a simplification, it could divide its
drafter among all of them.

**Concurrency.** N requests at a time in all systems. *2N at a time* is the published setting, in
which MineDraft alone has twice the concurrency, and so twice the keys and values in memory: **not
an equal comparison either**. The equal one is in the line of 2N.

Values are medians over the repetitions (lowest..highest); ratios are taken within a repetition.
*Noisy*: systems of which others used the machine meanwhile, or whose repetitions lie apart; why is
in emulated.json."""
ADDED = """\
Overlapped. V is the model time of a step, which verifies half of the N requests, t what the drafter
computes for it, prefill included; by the curves is what the models sleep, the rest is work of the
host in the same processes. A step lasts from its begin to that of the next. The bound is the same
engine with the recorded drafts replayed at no cost, without a drafter. *Added* is what a step takes
longer than there: all that MineDraft's drafting costs and does not hide. Hidden is the share of t
in which the target did not wait for it. Where t is longer than V a step lasts as long as t, and
that is most of what is added. The last pair is of no models: V is 25 ms by its curve and t hides
behind it, so that what is left is MineDraft's own work."""


def markdown(reports: Sequence[Report]) -> str:
    """The report."""
    sections = ["# Emulated pairs", INTRODUCTION, "## Throughput in tokens/s"]
    for report in reports:
        if report.name != ADDED_ONLY:
            sections += [f"**{cell(report.title)}**", _speeds(report)]
    sections += ["## What MineDraft adds to a step", ADDED]
    for report in reports:
        title = cell(report.title) if report.name == ADDED_ONLY else report.name
        sections += [f"**{title}**", _steps(report)]
    sections += ["## Curves", *map(_curves, reports)]
    sections += ["## When and where it was run", _where(reports)]
    return "\n\n".join(sections) + "\n"


def _speeds(report: Report) -> str:
    rows = [
        [
            str(line.concurrency),
            *(spread(line.tokens_per_s.get(name)) for name in COLUMNS),
            *(spread(line.over_native.get(name)) for name in RATIOS),
            line.identical,
            str(len(line.noise) or ""),
        ]
        for line in report.lines
    ]
    ratios = (f"{COLUMNS[name]} / vLLM's" for name in RATIOS)
    columns = ("N", *COLUMNS.values(), *ratios, "outputs as plain vLLM's", "noisy")
    return grid(columns, rows, text_columns=0)


def _steps(report: Report) -> str:
    rows = []
    for line in report.lines:
        found = line.measures
        rows.append(
            [
                str(line.concurrency),
                number(line.accepted) if line.accepted else "",
                *(number(MS * s) for s in (line.curve_verify_s, line.curve_draft_s)),
                *(median(s, MS) for s in (found.verify_s, found.draft_s, found.step_s)),
                median(found.hidden, PERCENT),
                *_bound(line.bound),
            ]
        )
    times = ("V by curve ms", "t by curve ms", "V ms", "t ms", "step ms", "hidden %")
    bounds = ("bound tokens/s", "of the bound %", "added ms a step", "of the step %")
    return grid(("N", "tokens per verification", *times, *bounds), rows, text_columns=0)


def _bound(bound: Bound | None) -> list[str]:
    if bound is None:
        return [""] * 4
    added = (spread(bound.added_s, MS), spread(bound.added_share, PERCENT))
    return [spread(bound.free_tokens_per_s), spread(bound.share, PERCENT), *added]


def _curves(report: Report) -> str:
    sources = [f"- {name}: {source}." for name, source in report.sources.items()]
    return "\n".join([f"**{report.name}**", "", *sources])


def _where(reports: Sequence[Report]) -> str:
    """Of every pair, when and on what."""
    rows = [[r.name, *(_words(r.provenance[name]) for name in PROVENANCE)] for r in reports]
    return grid(("pair", *PROVENANCE), rows, text_columns=1 + len(PROVENANCE))


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {found}" for name, found in value.items())
    return ", ".join(f"{part:g}" for part in value) if isinstance(value, list) else str(value)


if __name__ == "__main__":
    main()

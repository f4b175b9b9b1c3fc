"""What a benchmark's runs say: everything that reports, plots and tables show."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from minedraft.bench.latency import Latencies, latencies
from minedraft.bench.records import OURS, Benchmark, Devices, Load, Name, Run, Setting, System
from minedraft.config import ConfigError
from minedraft.placement import parse_cores

NOISY_CORES = 0.3
"""A run is noisy if others used more cores' worth of CPU time meanwhile: with two cores, as here,
that is already a seventh of the machine."""
NOISY_SPREAD = 0.15
"""A setting is noisy if its repetitions lie further apart, as a share of their median."""
DEVICES: tuple[Devices, ...] = ("all", "target")


@dataclass(frozen=True)
class Spread:
    """A value over repetitions."""

    median: float
    low: float
    high: float

    @property
    def width(self) -> float:
        """From lowest to highest, as a share of the median."""
        return (self.high - self.low) / self.median if self.median else 0.0


@dataclass(frozen=True)
class Measures:
    """What the engine measured, over repetitions; None where it did not. See records.Engine."""

    step_s: Spread | None
    verify_s: Spread | None
    draft_s: Spread | None
    target_idle: Spread | None
    drafter_idle: Spread | None
    hidden: Spread | None


@dataclass(frozen=True)
class Acceptance:
    """Of all repetitions together."""

    tokens_per_verification: float
    """Accepted draft tokens, and the one that the target adds."""
    share: float | None
    """Accepted of those that were verified; None if none were."""
    by_position: tuple[float, ...]
    """Share of the verifications that accepted the draft token at this position."""


@dataclass(frozen=True)
class Bound:
    """A system beside itself with drafts for nothing, in the same repetitions."""

    free_tokens_per_s: Spread
    share: Spread
    """Tokens/s over the bound's."""
    added_s: Spread | None
    """What a step takes longer; None without steps measured."""
    added_share: Spread | None
    """The same as a share of the step."""


@dataclass(frozen=True)
class Agreement:
    """Requests whose output is the same, of those that were compared."""

    same: int
    compared: int


@dataclass(frozen=True)
class Summary:
    """What the repetitions of one setting say."""

    setting: Setting
    repetitions: int
    requests: int
    failed: int
    tokens_per_s: Spread
    """Output tokens of answered requests."""
    per_device: float | None
    """Median tokens/s over the number of devices; None if that is not known."""
    over_plain: Mapping[Devices, Spread]
    """Tokens/s over plain vLLM's on these devices, within a repetition."""
    latencies: Latencies
    measures: Measures
    acceptance: Acceptance | None
    """None without drafts."""
    choices: Mapping[str, int]
    """Steps by the mode that was chosen for them."""
    peak_bytes: Mapping[str, int]
    """The most in any repetition, by process."""
    bound: Bound | None
    identical: Agreement | None
    """With plain vLLM; None if it was not run or token IDs are not known."""
    noise: tuple[str, ...]
    """Why not to trust it; empty if there is no reason."""


def spread(values: Iterable[float]) -> Spread | None:
    """None of nothing."""
    found = list(values)
    return Spread(statistics.median(found), min(found), max(found)) if found else None


def tokens_per_s(run: Run) -> float:
    """Output tokens of answered requests, per second of the run."""
    return sum(request.tokens for request in run.requests if not request.failed) / run.seconds


def by_setting(benchmark: Benchmark) -> dict[Setting, list[Run]]:
    """The runs of each setting, both in the order in which they were made."""
    runs = defaultdict(list)
    for run in benchmark.runs:
        runs[run.setting].append(run)
    return dict(runs)


def ratio(
    runs: Sequence[Run], baseline: Sequence[Run], of: Callable[[Run], float] = tokens_per_s
) -> Spread | None:
    """Over a baseline within each repetition, so that a machine whose speed drifts does not count.

    Repetitions that either lacks, or in which the baseline is 0, are left out.
    """
    pairs = ((of(run), of(other)) for run, other in _paired(runs, baseline))
    return spread(value / base for value, base in pairs if base)


def agreement(runs: Sequence[Run], baseline: Sequence[Run]) -> Agreement | None:
    """By index of the request within a repetition; None if no request has token IDs in both."""
    same = [
        request.token_ids == other.token_ids
        for run, reference in _paired(runs, baseline)
        for request, other in zip(run.requests, reference.requests, strict=False)
        if request.token_ids and other.token_ids and not (request.failed or other.failed)
    ]
    return Agreement(sum(same), len(same)) if same else None


def count_devices(words: str) -> int | None:
    """How many "CPU 0-2" or "GPU 0,1" names; None if it says it otherwise."""
    try:
        return len(parse_cores(words.rpartition(" ")[2]))
    except ConfigError:
        return None


def summarize(
    benchmark: Benchmark, devices_count: Mapping[Devices, int] | None = None
) -> list[Summary]:
    """A summary for each setting: by load, then system, devices and K.

    `devices_count` says how many devices the two are; else they are counted in
    `benchmark.devices`.
    """
    if devices_count is None:
        named = {name: count_devices(words) for name, words in benchmark.devices.items()}
        devices_count = {name: count for name, count in named.items() if count}
    runs = by_setting(benchmark)
    return [_summary(setting, runs, devices_count) for setting in sorted(runs, key=_order)]


def _order(setting: Setting) -> tuple[Any, ...]:
    system = setting.system
    name = get_args(Name).index(system.name)
    return by_load(setting.load), name, system.devices, system.num_drafts, system.free


def by_load(load: Load) -> tuple[bool, int, float]:
    """To sort by: closed loops first, and more after less."""
    return not load.concurrency, load.concurrency, load.rate


def compared_on(devices: Devices, summaries: Iterable[Summary]) -> list[Summary]:
    """Those of one comparison: vLLM's own on these devices, and ours, which has all in both.

    Without the runs with drafts for nothing, which are no way to decode.
    """
    return [
        summary
        for summary in summaries
        if _is_in(summary.setting.system, devices) and not summary.setting.system.free
    ]


def best(summaries: Iterable[Summary]) -> list[Summary]:
    """Each system at its best K, for each load and devices; without drafts for nothing.

    The best has the highest median of tokens/s. In an open loop tokens/s follow the arrivals as
    long as a system keeps up, so there the best is the one with the lowest median end-to-end
    latency.
    """
    found: dict[tuple[Load, Name, Devices], Summary] = {}
    for summary in summaries:
        system, load = summary.setting.system, summary.setting.load
        key = load, system.name, system.devices
        if not system.free and (key not in found or _merit(summary) > _merit(found[key])):
            found[key] = summary
    return list(found.values())


def _merit(summary: Summary) -> float:
    latency = summary.latencies.end_to_end
    if summary.setting.load.concurrency or latency is None:
        return summary.tokens_per_s.median
    return -latency.p50


def _paired(runs: Sequence[Run], others: Sequence[Run]) -> list[tuple[Run, Run]]:
    by_repetition = {run.repetition: run for run in others}
    return [(r, by_repetition[r.repetition]) for r in runs if r.repetition in by_repetition]


def _summary(
    setting: Setting,
    all_runs: Mapping[Setting, Sequence[Run]],
    devices_count: Mapping[Devices, int],
) -> Summary:
    runs = all_runs[setting]
    requests = [request for run in runs for request in run.requests]
    speed = spread(map(tokens_per_s, runs))
    assert speed, "a setting has runs"
    count = devices_count.get(setting.system.devices)
    plain = {d: all_runs.get(_plain(setting.load, d), ()) for d in DEVICES}
    ratios = {d: ratio(runs, plain[d]) for d in DEVICES if _is_in(setting.system, d)}
    peaks: Counter[str] = Counter()
    choices: Counter[str] = Counter()
    for run in runs:
        peaks |= Counter(run.engine.peak_bytes)
        choices += Counter(run.engine.choices)
    return Summary(
        setting=setting,
        repetitions=len(runs),
        requests=len(requests),
        failed=sum(bool(request.failed) for request in requests),
        tokens_per_s=speed,
        per_device=speed.median / count if count else None,
        over_plain={devices: value for devices, value in ratios.items() if value},
        latencies=latencies(requests),
        measures=_measures(runs),
        acceptance=_acceptance(runs),
        choices=choices,
        peak_bytes=peaks,
        bound=None if setting.system.free else _bound(runs, all_runs.get(_free(setting), ())),
        identical=agreement(runs, _reference(setting, plain)),
        noise=tuple(_noise(runs, speed)),
    )


def _plain(load: Load, devices: Devices) -> Setting:
    return Setting(System("plain", devices), load)


def _free(setting: Setting) -> Setting:
    system = setting.system
    return Setting(System(system.name, system.devices, system.num_drafts, free=True), setting.load)


def _is_in(system: System, devices: Devices) -> bool:
    return system.name in OURS or system.devices == devices


def _reference(setting: Setting, plain: Mapping[Devices, Sequence[Run]]) -> Sequence[Run]:
    """Plain vLLM where the target has the same devices, or else on the others.

    With other devices floating-point sums may have another order, which can turn a near tie
    between two tokens.
    """
    system = setting.system
    if system.name == "plain":
        return ()
    same: Devices = "target" if system.name in OURS else system.devices
    return plain[same] or plain["all" if same == "target" else "target"]


def _measures(runs: Sequence[Run]) -> Measures:
    def over(name: str) -> Spread | None:
        values = (getattr(run.engine, name) for run in runs)
        return spread(value for value in values if value is not None)

    return Measures(**{name: over(name) for name in Measures.__dataclass_fields__})


def _acceptance(runs: Sequence[Run]) -> Acceptance | None:
    engines = [run.engine for run in runs if run.engine.accepted is not None]
    verifications = sum(engine.verifications or 0 for engine in engines)
    if not verifications:
        return None
    accepted = sum(engine.accepted or 0 for engine in engines)
    drafted = sum(engine.drafted or 0 for engine in engines)
    positions: Counter[int] = Counter()
    for engine in engines:
        positions.update(dict(enumerate(engine.accepted_by_position)))
    return Acceptance(
        tokens_per_verification=1 + accepted / verifications,
        share=accepted / drafted if drafted else None,
        by_position=tuple(positions[i] / verifications for i in sorted(positions)),
    )


def _bound(runs: Sequence[Run], free: Sequence[Run]) -> Bound | None:
    free_speed = spread(tokens_per_s(other) for _, other in _paired(runs, free))
    share = ratio(runs, free)
    if share is None or free_speed is None:
        return None
    steps = [(run.engine.step_s, other.engine.step_s) for run, other in _paired(runs, free)]
    both = [(step, other) for step, other in steps if step and other is not None]
    return Bound(
        free_tokens_per_s=free_speed,
        share=share,
        added_s=spread(step - other for step, other in both),
        added_share=spread((step - other) / step for step, other in both),
    )


def _noise(runs: Sequence[Run], speed: Spread) -> Iterable[str]:
    noisy = [run.others for run in runs if run.others > NOISY_CORES]
    if noisy:
        yield (
            f"others used up to {max(noisy):.1f} cores during {len(noisy)} of {len(runs)} "
            "repetitions"
        )
    if speed.width > NOISY_SPREAD:
        yield f"the repetitions lie {speed.width:.0%} of their median apart"

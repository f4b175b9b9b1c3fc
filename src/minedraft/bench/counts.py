"""Counters of an engine, as its metrics name them, before and after a run.

The same for an engine in this process and for a server's page /metrics. Plain Python, no vLLM.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from prometheus_client import Metric

DRAFTS = "vllm:spec_decode_num_drafts_total"
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
DRAFTING = frozenset({DRAFTS, DRAFTED, ACCEPTED, BY_POSITION})
"""vLLM's own, of any speculative decoding."""

Counts = dict[tuple[str, str], float]
"""Counters since the engine's start, summed over engines.

By name, and by mode or position of a draft token where a counter has these, else by "".
"""


def read(metrics: Iterable[Metric], names: Collection[str] = DRAFTING) -> Counts:
    """The counters of these names."""
    found: Counts = {}
    for metric in metrics:
        for sample in metric.samples:
            if sample.name in names:
                label = sample.labels.get("mode") or sample.labels.get("position") or ""
                key = sample.name, label
                found[key] = found.get(key, 0.0) + sample.value
    return found


def grown(before: Mapping[tuple[str, str], float], after: Counts) -> Counts:
    """What came in between."""
    return {key: value - before.get(key, 0.0) for key, value in after.items()}


def labelled(counts: Counts, name: str) -> dict[str, float]:
    """A counter by its label."""
    return {label: value for (found, label), value in counts.items() if found == name}


def count(counts: Counts, name: str) -> int | None:
    """A counter without a label, in whole; None if there is none."""
    value = counts.get((name, ""))
    return None if value is None else round(value)


def draft_s(busy_s: float | None, steps_by_mode: Mapping[str, int]) -> float | None:
    """t: so long our drafter computed, prefill included, for each step in a mode that drafts."""
    steps = sum(steps_by_mode.values()) - steps_by_mode.get("off", 0)
    return busy_s / steps if busy_s is not None and steps else None


def drafting(counts: Counts) -> dict[str, Any]:
    """The fields of records.Engine that vLLM counts with any speculative decoding."""
    positions = labelled(counts, BY_POSITION)
    return {
        "verifications": count(counts, DRAFTS),
        "drafted": count(counts, DRAFTED),
        "accepted": count(counts, ACCEPTED),
        "accepted_by_position": [round(positions[key]) for key in sorted(positions, key=int)],
    }

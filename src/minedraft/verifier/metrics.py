"""The verifier's measurements on vLLM's own /metrics page, and wherever prometheus_client shows.

A step costs nothing here: from time to time a report (stats.Stats.report) is published, counters by
what they grew since the last one. Under ``vllm serve`` the engine is another process than the page,
so PROMETHEUS_MULTIPROC_DIR has to be set for both before prometheus_client is imported.
"""

import multiprocessing
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter, Gauge, multiprocess

from minedraft.config import ENV_METRICS

LABELS = ("model_name", "engine")
"""As on vLLM's own metrics: the served name, and the data-parallel rank."""
DECISION = "minedraft:decision"


@dataclass(frozen=True)
class Family:
    """A metric: its name, what it says, and where in a report it is found.

    With ``label`` the report holds there a mapping from label values to numbers.
    """

    name: str
    text: str
    path: tuple[str, ...]
    label: str = ""

    def values(self, report: Mapping[str, Any]) -> dict[tuple[str, ...], float]:
        """The numbers in a report by label values; none where it has no number."""
        found: Any = report
        for key in self.path:
            found = found.get(key) if isinstance(found, Mapping) else None
        if found is None:
            return {}
        if self.label:
            return {(str(label),): float(value) for label, value in found.items()}
        return {(): float(found)}


COUNTERS = (
    Family("minedraft:draft_tokens_requested", "Draft tokens asked of the drafter.",
           ("drafter", "requested")),
    Family("minedraft:draft_tokens_received", "Draft tokens that came.", ("drafter", "received")),
    Family("minedraft:draft_tokens_verified", "Draft tokens that were verified.", ("drafted",)),
    Family("minedraft:draft_tokens_accepted", "Draft tokens that were accepted.", ("accepted",)),
    Family("minedraft:verifications", "Requests times decode steps.", ("verifications",)),
    Family("minedraft:verifications_without_drafts",
           "Of these, those in which a request had no drafts.", ("verified_without_drafts",)),
    Family("minedraft:late_requests",
           "Requests decoded without drafts because these did not come in time.",
           ("drafter", "late_requests")),
    Family("minedraft:dropped_answers", "Answers of the drafter that were of no use, by reason.",
           ("drafter", "dropped"), "reason"),
    Family("minedraft:disconnects", "Times that the drafter was lost.", ("drafter", "disconnects")),
    Family("minedraft:waited_seconds", "Seconds in which the target stood still for drafts.",
           ("drafter", "waited_s")),
    Family("minedraft:drafter_busy_seconds", "Seconds that the drafter computed for this engine.",
           ("drafter", "drafter_busy_s")),
    Family("minedraft:steps", "Steps of the engine, by mode.", ("steps_by_mode",), "mode"),
    Family("minedraft:steps_ahead",
           "Steps given to the target before the result of the step before was known.",
           ("steps_ahead",)),
    Family("minedraft:decode_steps", "Steps of the engine without prefill.", ("decode_steps",)),
    Family("minedraft:decode_seconds", "Seconds of the target in steps without prefill.",
           ("decode_model_s",)),
)  # fmt: skip
GAUGES = (
    Family("minedraft:num_speculative_tokens", "Draft tokens for each verification now, at most.",
           ("num_drafts",)),
    Family("minedraft:sessions", "Requests that the drafter drafts for.", ("drafter", "sessions")),
    Family("minedraft:drafter_attached", "1 if the drafter is attached.", ("drafter", "attached")),
    Family("minedraft:hidden_share",
           "Share of the drafter's busy time in which the target did not wait, since the start.",
           ("hidden_share",)),
    Family("minedraft:round_trip_seconds",
           "Seconds from asking for drafts until they come, a running mean.",
           ("drafter", "round_trip_s")),
)  # fmt: skip


def _counter(family: Family) -> Counter:
    labels = (*LABELS, family.label) if family.label else LABELS
    return Counter(family.name, family.text, labels)


def _gauge(name: str, text: str, *labels: str) -> Gauge:
    # Of an engine and its successor under the same labels the younger counts, and one that said
    # goodbye not at all.
    return Gauge(name, text, (*LABELS, *labels), multiprocess_mode="livemostrecent")


# Once for all engines of the process: a registry takes each name once.
_counters = {family: _counter(family) for family in COUNTERS}
_gauges = {family: _gauge(family.name, family.text) for family in GAUGES}
_decision = _gauge(DECISION, "1 for the mode that is in force now.", "mode")


class Metrics:
    """Publishes the reports of one engine."""

    def __init__(self, model_name: str, engine: int) -> None:
        self._labels = (model_name, str(engine))
        self._published: dict[tuple[str, ...], float] = {}
        self._modes: set[str] = set()

    def publish(self, report: Mapping[str, Any]) -> None:
        """Shows a report; what it does not have stays as it was."""
        for family, counter in _counters.items():
            for labels, value in family.values(report).items():
                key = (family.name, *labels)
                grown = value - self._published.get(key, 0.0)
                self._published[key] = value
                counter.labels(*self._labels, *labels).inc(max(0.0, grown))
        for family, gauge in _gauges.items():
            for value in family.values(report).values():
                gauge.labels(*self._labels).set(value)
        if now := report.get("decision"):
            self._modes.add(now)
            for mode in self._modes:
                _decision.labels(*self._labels, mode).set(mode == now)

    def close(self) -> None:
        """Takes the gauges away; the counters stay, they still say what was done."""
        if ENV_METRICS in os.environ:
            if multiprocessing.parent_process() is not None:  # else others may use them
                multiprocess.mark_process_dead(os.getpid())  # type: ignore[no-untyped-call]
            return
        for gauge in (*_gauges.values(), _decision):
            gauge.remove_by_labels(dict(zip(LABELS, self._labels, strict=True)))

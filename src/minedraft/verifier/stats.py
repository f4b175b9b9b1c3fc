"""What the verifier measures of its own run, in seconds and tokens."""

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from minedraft.verifier.session import Counters

logger = logging.getLogger("vllm.minedraft")


@dataclass(slots=True)
class Outcome:
    """What one step did to the requests that were decoded in it."""

    rows: int = 0
    drafted_rows: int = 0
    """Of these, with drafts."""
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0

    def verified(self, num_drafts: int, emitted: int) -> int:
        """A request had so many draft tokens verified, and so many tokens emitted.

        Returns the draft tokens that were accepted; a token of padding may have been so too.
        """
        accepted = max(0, min(emitted - 1, num_drafts))
        self.rows += 1
        self.drafted_rows += num_drafts > 0
        self.drafted += num_drafts
        self.accepted += accepted
        self.emitted += emitted
        return accepted


@dataclass(slots=True)
class Stats:
    """Sums over the steps since the start. A verification is one request in one decode step."""

    steps: int = 0
    steps_ahead: int = 0
    """Steps that the target was given before the result of the step before was known."""
    verifications: int = 0
    verified_without_drafts: int = 0
    emitted: int = 0
    """Tokens that verifications emitted."""
    drafted: int = 0
    """Draft tokens that were verified."""
    accepted: int = 0
    decode_steps: int = 0
    """Steps without any prefill; the next two are over these only."""
    decode_model_s: float = 0.0
    """Seconds from the end of schedule() to the step's result: V summed over decode steps."""
    decode_rows: int = 0
    by_rows: dict[int, list[float]] = field(default_factory=dict)
    """Decode steps by number of requests: [steps, model seconds]."""
    steps_by_mode: dict[str, int] = field(default_factory=dict)
    decision: str = ""
    """The mode of the last step, and its draft tokens for each verification at most."""
    num_drafts: int = 0

    def step(self, outcome: Outcome, mode: str, num_drafts: int, is_ahead: bool = False) -> None:
        """A step was made in this mode, with so many draft tokens for a request at most."""
        self.steps += 1
        self.steps_ahead += is_ahead
        self.steps_by_mode[mode] = self.steps_by_mode.get(mode, 0) + 1
        self.decision, self.num_drafts = mode, num_drafts
        self.verifications += outcome.rows
        self.verified_without_drafts += outcome.rows - outcome.drafted_rows
        self.emitted += outcome.emitted
        self.drafted += outcome.drafted
        self.accepted += outcome.accepted

    def decode_step(self, rows: int, seconds: float) -> None:
        """A step without prefill took so long."""
        self.decode_steps += 1
        self.decode_rows += rows
        self.decode_model_s += seconds
        entry = self.by_rows.setdefault(rows, [0, 0.0])
        entry[0] += 1
        entry[1] += seconds

    def report(self, counters: Counters) -> dict[str, Any]:
        """All sums, and the ratios that people ask for. Any thread may ask, at any time."""
        busy = counters.drafter_busy_s
        return {
            **_snapshot(self),
            "drafter": _snapshot(counters),
            "tokens_per_verification": _ratio(self.emitted, self.verifications),
            "acceptance": _ratio(self.accepted, self.drafted),
            "hidden_share": _ratio(max(0.0, busy - counters.waited_s), busy),
            "mean_verify_s": _ratio(self.decode_model_s, self.decode_steps),
        }


def _snapshot(sums: Stats | Counters) -> dict[str, Any]:
    """The fields; a dict is copied in one go, so that a step may go on changing it meanwhile."""
    values = {name.name: getattr(sums, name.name) for name in fields(sums)}
    return {k: dict(v) if isinstance(v, dict) else v for k, v in values.items()}


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def write(path: str, report: Mapping[str, Any]) -> None:
    """Writes a report where a reader never sees half of it; a disk that fails stops nothing."""
    target = Path(path)
    new = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        new.write_text(json.dumps(report, indent=1) + "\n")
        new.replace(target)
    except OSError as error:
        logger.warning("MineDraft: no measurements in %s: %s", path, error.strerror)

"""What became of the steps that the target was given: sums, the trace, and the policy's lessons.

Plain Python, no vLLM. Times are in seconds, of time.monotonic.
"""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass

from minedraft.verifier.choices import Choice, Step
from minedraft.verifier.modes import Modes
from minedraft.verifier.operations import Operations
from minedraft.verifier.session import Counters
from minedraft.verifier.stats import Outcome, Stats

PAUSE_S = 0.1
"""Between two steps: the engine was paused, or busy with what is no step."""


@dataclass(slots=True)
class Planned:
    """A step that the target was given and whose result is not known yet."""

    number: int
    choice: Choice
    drafts: Mapping[str, int]
    """The requests that are decoded in it, and the draft tokens of each, padding left out."""
    num_requests: int
    """Those that prefill included; 0 for an empty step."""
    scheduled_at: float
    is_ahead: bool
    """It was given before the result of the step before was known."""
    padded: int = 0
    """Tokens of padding in it, all together."""


class Steps:
    """The steps in flight, in their order, and the books on those that have ended."""

    def __init__(
        self, stats: Stats, modes: Modes, counters: Counters, operations: Operations
    ) -> None:
        self._stats = stats
        self._modes = modes
        self._counters = counters
        self._operations = operations
        self._in_flight: deque[Planned] = deque()
        self._next_number = 0
        self._result_at = 0.0
        self._ended_at: float | None = None
        self._waited_s = 0.0

    def oldest(self) -> Planned | None:
        """The step that the target is at work on; None if it stands still."""
        return next((step for step in self._in_flight if step.num_requests), None)

    def begin(self, now: float) -> None:
        """Another step is about to be scheduled."""
        if not self._in_flight and now - self._operations.stepped_at > PAUSE_S:
            self._ended_at = None

    def waited(self, began: float, seconds: float) -> None:
        """The target stood still for drafts."""
        self._waited_s += seconds
        self._counters.waited_s += seconds
        if trace := self._operations.trace:
            trace.waited(began, began + seconds)

    def planned(
        self, drafts: Mapping[str, int], num_requests: int, now: float, *, padded: int = 0
    ) -> Planned:
        """The step was given to the target."""
        step = Planned(
            self._next_number,
            self._modes.choice,
            drafts,
            num_requests,
            now,
            is_ahead=self.oldest() is not None,
            padded=padded,
        )
        self._next_number += 1
        self._in_flight.append(step)
        return step

    def take(self) -> Planned:
        """The step whose result has come: results come in the order of the steps."""
        return self._in_flight.popleft()

    def ended(
        self, step: Planned, emitted: Mapping[str, int], result_at: float, now: float, decoding: int
    ) -> None:
        """Books a step: tokens emitted by each request, and those that are decoding now."""
        outcome = Outcome()
        alike = Counter(
            (num_drafts, outcome.verified(num_drafts, emitted[request]))
            for request, num_drafts in step.drafts.items()
        )
        for (num_drafts, accepted), requests in alike.items():
            self._modes.policy.verified(num_drafts, accepted, requests)
        # The target began when it had ended the step before.
        began, self._result_at = max(step.scheduled_at, self._result_at), result_at
        self._stats.step(outcome, step.choice.mode, step.choice.num_drafts, step.is_ahead)
        is_prefill = outcome.rows < step.num_requests
        if not is_prefill:
            self._stats.decode_step(outcome.rows, result_at - began)
        self._counters.used = self._stats.drafted
        if trace := self._operations.trace:
            mode, ahead = step.choice.mode, step.is_ahead
            trace.verification(began, result_at, outcome.rows, outcome.drafted, mode, ahead=ahead)
        self._learn(step, outcome, now, decoding, is_prefill=is_prefill)

    def _learn(
        self, step: Planned, outcome: Outcome, now: float, decoding: int, *, is_prefill: bool
    ) -> None:
        """Tells the policy of a decode step, if it knows when that began."""
        began, waited_s = self._ended_at, self._waited_s
        self._ended_at, self._waited_s = (now if decoding else None), 0.0
        if is_prefill:
            return self._modes.interrupted()
        if began is None or step.choice != self._modes.choice:
            return None
        return self._modes.stepped(
            Step(
                seconds=now - began,
                waited_s=waited_s,
                decoding=max(decoding, outcome.rows),
                drafted=outcome.drafted_rows,
                plain=outcome.rows - outcome.drafted_rows,
                draft_tokens=outcome.drafted,
                padded=step.padded,
            )
        )

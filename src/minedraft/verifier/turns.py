"""Which running requests are verified in this step.

There are no two fixed groups. Each request remembers its last turn; a step takes the requests that
have waited longest, at most half of them in overlapped mode. So the halves alternate by themselves,
newcomers fill the smaller one, and nothing has to be moved when requests leave: after any change
two steps restore the balance. (MineDraft, arXiv 2603.18016, keeps two batches with a flag for each
request and a balance counter instead.)

Plain Python, no vLLM: driven by the scheduler and by property tests.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

WAIT_SLICE_S = 0.02
"""Longest wait at a time. Between two the engine takes in what arrived and what was aborted."""
JOIN_SLICE_S = 0.002
"""The same while the target stands still and a request may be about to join."""
BUSY_SLICE_S = 1.0
"""The same while the target is at work on another step, whose end ends the wait: the engine could
take in nothing before that."""
MIN_WAIT_S = 0.001


class Drafts(Enum):
    """What the drafter has for a request."""

    READY = "ready"
    """Drafts for its present length are here."""
    PENDING = "pending"
    """They have been asked for and are worth a wait."""
    NONE = "none"
    """There are none, and no wait will bring them in time: it is decoded without."""
    VERIFYING = "verifying"
    """The target is at work on it: what to draft for is not known before that has ended."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The decision for one step: verify some, hide the others, or wait for drafts first."""

    verify: Sequence[str]
    hide: Sequence[str]
    wait_for: Sequence[str] = ()


class Turns:
    """Decides the turns of the running requests, by request id."""

    def __init__(self, *, overlap: bool) -> None:
        self.overlap = overlap
        """Halves, or all together. May be changed between steps."""
        self._step = 0
        self._last: dict[str, int] = {}
        self._given_up: set[str] = set()

    def step(self, advanced: Sequence[str]) -> None:
        """A step has ended in which these requests advanced (decoded or ended their prefill)."""
        self._step += 1
        self._given_up.clear()
        for request in advanced:
            self._last[request] = self._step

    def forget(self, request: str) -> None:
        """The request is gone."""
        self._last.pop(request, None)

    def choose(self, states: dict[str, Drafts], *, may_wait: bool = True) -> Turn:
        """The turn for the running requests that are past their prefill.

        A request once in state NONE stays so until the next step: it was not worth a wait when this
        one began, and does not prolong it by asking now.

        O(n log n) for n requests. A request in state NONE is decoded in every step. The result
        says to wait only where requests are PENDING, so the caller's deadline, after which it
        calls a request NONE, bounds every wait. Without ``may_wait`` the step goes with what is
        ready, and the pending are hidden. So are those in state VERIFYING, who have their turn
        just now; in sequential mode all others wait for them.
        """
        late = self._given_up
        late.update(request for request, state in states.items() if state is Drafts.NONE)
        verifying = [r for r, state in states.items() if state is Drafts.VERIFYING]
        idle = [r for r, state in states.items() if state is not Drafts.VERIFYING]
        none = [r for r in idle if r in late and states[r] is not Drafts.READY]
        rotation = [r for r in idle if r not in late or states[r] is Drafts.READY]
        if verifying and not self.overlap:
            return Turn(none, rotation + verifying)
        candidates, most = self._candidates(rotation, len(rotation) + len(verifying))
        ready = [request for request in candidates if states[request] is Drafts.READY]
        if may_wait and len(ready) < min(most, len(candidates)):
            pending = [request for request in candidates if states[request] is Drafts.PENDING]
            return Turn([], [], pending)
        verified = set(ready[:most])
        hide = [request for request in rotation if request not in verified]
        return Turn(none + ready[:most], hide + verifying)

    def _candidates(self, rotation: list[str], in_rotation: int) -> tuple[list[str], int]:
        """Those who may have their turn, the longest waiting first, and how many of them."""
        if not self.overlap:
            return rotation, len(rotation)
        last = self._last
        rotation.sort(key=lambda request: last.get(request, 0))
        # Who advanced in the last step is being drafted for just now: nobody waits for him while
        # the other half is there.
        other_half = [request for request in rotation if last.get(request, 0) < self._step]
        return other_half or rotation, (in_rotation + 1) // 2


class _DraftSource(Protocol):
    """What ``take_turn`` needs of client.DrafterClient; times in seconds, of one clock."""

    def state(self, request: str, now: float) -> Drafts: ...
    def next_deadline(self, requests: Sequence[str]) -> float: ...
    def poll(self, wait_s: float = 0.0) -> bool: ...


def take_turn(
    turns: Turns,
    source: _DraftSource,
    decoding: Sequence[str],
    *,
    may_wait: bool,
    clock: Callable[[], float],
    verifying: Collection[str] = (),
    slice_s: float = WAIT_SLICE_S,
    is_over: Callable[[], bool] = lambda: False,
) -> Turn:
    """The turn for a step, after a wait for drafts where the turns want that.

    It still says whom to wait for if the slice of time for one wait was not enough, or something
    came that ends it: the caller comes again. All waits together end at the deadline of the
    source, after which the request is decoded without.
    """
    end = clock() + slice_s
    while True:
        now = clock()
        states = {
            request: Drafts.VERIFYING if request in verifying else source.state(request, now)
            for request in decoding
        }
        turn = turns.choose(states, may_wait=may_wait)
        if not turn.wait_for or now >= end or is_over():
            return turn
        left = min(source.next_deadline(turn.wait_for), end) - now
        source.poll(max(left, MIN_WAIT_S))

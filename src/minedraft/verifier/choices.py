"""What the policy chooses among, and what is measured of each choice.

Plain Python, no vLLM. Times are in seconds.
"""

from dataclasses import dataclass
from enum import StrEnum

from minedraft.verifier.estimates import Acceptance

MEMORY = 1 - 1 / 48
"""Weight of the past after one more round."""
STALE_S = 20.0
"""After so long a choice that seemed worse is probed again; doubled each time in vain."""


class Mode(StrEnum):
    """How target and drafter share the time."""

    OVERLAP = "overlap"
    SEQUENTIAL = "sequential"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class Choice:
    """A mode with its K."""

    mode: Mode
    num_drafts: int

    def __str__(self) -> str:
        return f"{self.mode}, K={self.num_drafts}" if self.num_drafts else str(self.mode)


OFF = Choice(Mode.OFF, 0)


@dataclass(frozen=True, slots=True)
class Step:
    """A decode step of the target without prefill."""

    seconds: float
    """Since the end of the step before, waiting included."""
    waited_s: float
    """Of these, for drafts."""
    decoding: int
    """Requests that were past their prefill, in this step or not."""
    drafted: int
    """Requests verified with drafts."""
    plain: float
    """Requests decoded without."""
    draft_tokens: int
    """Verified."""
    padded: int = 0
    """Tokens of padding, which cost as much as draft tokens and bring nothing."""


@dataclass(slots=True)
class Measured:
    """A choice at one load: sums over rounds, the past fading."""

    rounds: float = 0.0
    seconds: float = 0.0
    drafted: float = 0.0
    plain: float = 0.0
    draft_tokens: float = 0.0
    at: float = 0.0
    """When it was last in force."""
    stale_s: float = STALE_S
    kept: float = 1.0
    """The speed, relative to what the formula promised at that time."""

    def add(self, rounds: float, step: Step) -> None:
        """A step in which the choice was in force, and so many turns of every request."""
        self._fade(MEMORY**rounds)
        self.rounds += rounds
        self.seconds += step.seconds
        self.drafted += step.drafted
        self.plain += step.plain
        self.draft_tokens += step.draft_tokens

    def make_old(self) -> None:
        """What was measured a while ago counts as one round from now on."""
        self._fade(min(1.0, 1 / self.rounds) if self.rounds else 1.0)

    def _fade(self, keep: float) -> None:
        self.rounds *= keep
        self.seconds *= keep
        self.drafted *= keep
        self.plain *= keep
        self.draft_tokens *= keep

    def speed(self, acceptance: Acceptance) -> float:
        """Tokens a second."""
        return tokens(self, acceptance) / self.seconds

    def round_s(self) -> float:
        """Seconds of a round; 0 before the first one."""
        return self.seconds / self.rounds if self.rounds else 0.0


def tokens(verified: Step | Measured, acceptance: Acceptance) -> float:
    """Emitted by these verifications, by the running estimate of acceptance."""
    mean = verified.draft_tokens / verified.drafted if verified.drafted else 0.0
    return verified.plain + verified.drafted * acceptance.tokens(mean)

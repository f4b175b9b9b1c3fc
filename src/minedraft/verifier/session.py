"""What the verifier keeps of a session with its drafter, and how it is put into messages.

Plain Python, no vLLM.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from minedraft import protocol

TAIL = 128
"""Emitted tokens kept for each session, to see how far a late draft has come true."""


@dataclass(slots=True)
class Session:
    """What the verifier knows of one session."""

    request: str
    number: int
    length: int
    """Verified tokens."""
    path: list[int] = field(default_factory=list)
    tail: deque[int] = field(default_factory=lambda: deque(maxlen=TAIL))
    told: int = 0
    """Of these tokens, those that the drafter has been told of."""
    most_drafts: int = protocol.MAX_DRAFT_TOKENS
    num_drafts: int = 0
    asked_at: float = 0.0
    wait_until: float = 0.0
    asked_length: int = 0
    pending: bool = False
    waited_for: bool = False
    """An answer came, and the last one came in time: worth a wait."""
    reopened_at: float = float("-inf")
    retry_at: float = float("-inf")
    """If the drafter does not have it, it may be opened from then on."""


@dataclass(slots=True)
class Counters:
    """Token counts unless the name says otherwise."""

    requested: int = 0
    received: int = 0
    used: int = 0
    late_requests: int = 0
    """Requests that were decoded without drafts because these did not come in time."""
    waited_s: float = 0.0
    """Seconds in which the target stood still for drafts."""
    drafter_busy_s: float = 0.0
    disconnects: int = 0
    attached: bool = False
    sessions: int = 0
    """Requests that may be drafted, now."""
    round_trip_s: float = 0.0
    """Running estimate of the seconds from a wish to its drafts."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Draft messages and sessions dropped, by reason."""


def updates(
    close: Iterable[int], opened: Iterable[protocol.Open], extend: Iterable[protocol.Extend]
) -> Iterator[protocol.Update]:
    """One message, or several where it would be too large; closes come first, extends last."""
    entries: Iterator[tuple[str, Any, int]] = chain(
        (("close", number, 0) for number in close),
        (("open", session, len(session.tokens)) for session in opened),
        (("extend", session, len(session.tokens)) for session in extend),
    )
    part, room = protocol.Update([], [], []), protocol.MAX_OPEN_TOKENS
    for kind, entry, size in entries:
        is_full = size > room < protocol.MAX_OPEN_TOKENS
        if is_full or len(getattr(part, kind)) == protocol.MAX_ENTRIES:
            yield part
            part, room = protocol.Update([], [], []), protocol.MAX_OPEN_TOKENS
        getattr(part, kind).append(entry)
        room -= size
    yield part


def printable(text: str) -> str:
    """A peer's text in one line, so that it cannot pass for lines of our log."""
    return "".join(c if c.isprintable() else " " for c in text)


def remainder(path: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """What follows on a path after ``tokens``; nothing if they leave it."""
    if len(tokens) < len(path) and list(path[: len(tokens)]) == list(tokens):
        return list(path[len(tokens) :])
    return []

"""Sessions: what is verified, what was drafted after it, and what the next forward pass computes.

A session's tokens are the verified ones and then its draft tokens. The KV cache holds the first
``computed`` of them. An outcome of the target that contradicts the drafts cuts both back to the
last token they agree on; one that agrees leaves the drafts after it standing, so drafting simply
goes on. Every operation costs time in proportion to the new tokens, not to the context.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from minedraft.protocol import LOST_CONTEXT, LOST_KV_FULL, LOST_UNKNOWN, LOST_VOCABULARY

CATCH_UP = 16
"""So many tokens may wait for the next draft of a session and be fed together with it. More than
these are prefilled: in chunks, and after the draft rows of other sessions."""
IDLE_FACTOR = 4
"""With nobody drafting, prefill may take this many times its usual chunk in one pass."""


@dataclass(frozen=True, slots=True)
class Drafted:
    """Draft tokens for the positions from ``base_len`` on, with their log-probabilities (nats)."""

    key: Hashable
    base_len: int
    tokens: list[int]
    logprobs: list[float]


@dataclass(frozen=True, slots=True)
class Lost:
    """The session is not held (any more); ``reason`` is one of protocol.LOST_REASONS."""

    key: Hashable
    reason: str


@dataclass(slots=True, eq=False)
class Session:
    """One session, lengths in tokens."""

    key: Hashable
    number: int
    """Counts up with every session opened: the lower, the older."""
    tokens: list[int]
    """The verified tokens, then the drafts."""
    verified: int
    prompt: int
    logprobs: list[float] = field(default_factory=list)
    """Of the drafts."""
    computed: int = 0
    """Leading tokens whose keys and values are in the KV cache."""
    agreed: int = 0
    """Leading tokens that the workers know as they are here."""
    wanted: int = 0
    """Drafts wanted after the verified tokens; 0 when none are owed."""
    drafted: bool = False
    handle: Any = None
    """What the engine holds for the session, None before it holds any KV cache."""
    gone: bool = False
    """Closed or lost."""

    @property
    def todo(self) -> int:
        """Tokens that a pass should compute now: with a draft wanted all, else all but the last.

        The last one gives the draft after it, so it waits until that is wanted. Tokens after the
        prompt wait too while they are few: they ride along with the next draft.
        """
        rest = len(self.tokens) - self.computed
        if self.wanted:
            return rest
        return rest - 1 if self.computed < self.prompt - 1 or rest - 1 > CATCH_UP else 0

    @property
    def owed(self) -> int:
        """Drafts still to be made; not positive when there are enough."""
        return self.wanted - (len(self.tokens) - self.verified)

    def verify(self, tokens: Sequence[int]) -> None:
        """Append verified tokens, rolling back to where the drafts part from them."""
        kept = self.verified
        end = min(kept + len(tokens), len(self.tokens))
        for token in tokens:
            if kept == end or self.tokens[kept] != token:
                break
            kept += 1
        accepted = kept - self.verified
        self.verified += len(tokens)
        if accepted == len(tokens):
            del self.logprobs[:accepted]
            return
        del self.tokens[kept:]
        self.tokens.extend(tokens[accepted:])
        self.logprobs.clear()
        self.computed = min(self.computed, kept)
        self.agreed = min(self.agreed, kept)


@dataclass(frozen=True, slots=True)
class Row:
    """A session's part of a forward pass: at most its next ``count`` tokens."""

    session: Session
    count: int


class Sessions:
    """All sessions of an engine.

    ``release`` is called with each session that goes, whether closed or lost. ``max_rows`` and
    ``max_tokens`` bound one forward pass, ``chunk`` bounds the prefill tokens in it;
    ``max_passes`` bounds those that may follow each other at once.
    """

    def __init__(
        self,
        *,
        max_model_len: int,
        vocab_size: int,
        max_rows: int,
        max_tokens: int,
        chunk: int,
        release: Callable[[Session], None],
        max_passes: int = 1,
    ) -> None:
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._max_rows = max_rows
        self._max_tokens = max_tokens
        self._chunk = chunk
        self._max_passes = max_passes
        self._release = release
        self._opened = 0
        self._sessions: dict[Hashable, Session] = {}
        self._wishing: dict[int, Session] = {}  # by number, oldest wish first
        self._ahead: dict[int, Session] = {}  # tokens to compute though no draft is wanted
        self._answers: dict[Hashable, Drafted | Lost] = {}  # by key: the newest is what counts

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, key: Hashable, tokens: Sequence[int]) -> None:
        """Start a session with its first verified tokens; one of the same key is replaced."""
        self.close(key)
        if reason := self._refusal(tokens, len(tokens)):
            self._answers[key] = Lost(key, reason)
            return
        self._opened += 1
        session = Session(key, self._opened, list(tokens), len(tokens), len(tokens))
        self._sessions[key] = session
        self._file(session)

    def extend(self, key: Hashable, base_len: int, tokens: Sequence[int], num_drafts: int) -> None:
        """Take ``tokens`` as verified from position ``base_len`` on and want ``num_drafts`` drafts.

        Drafts are wanted after the last verified token; the newest call's number holds. Tokens
        already verified may be repeated if they agree; anything else loses the session.
        """
        session = self._sessions.get(key)
        if session is None:
            self._answers[key] = Lost(key, LOST_UNKNOWN)
            return
        self._answers.pop(key, None)
        known = session.verified - base_len
        if known < 0 or not _agree(session.tokens, base_len, tokens[:known]):
            self.lose(session, LOST_UNKNOWN)
            return
        new = tokens[known:]
        if reason := self._refusal(new, session.verified + len(new)):
            self.lose(session, reason)
            return
        session.verify(new)
        session.wanted = min(num_drafts, self._max_model_len - session.verified)
        self._file(session)

    def close(self, key: Hashable) -> None:
        """Forget a session; an unknown key is ignored."""
        self._answers.pop(key, None)
        session = self._sessions.pop(key, None)
        if session is not None:
            self._wishing.pop(session.number, None)
            self._ahead.pop(session.number, None)
            session.gone = True
            self._release(session)

    def lose(self, session: Session, reason: str) -> None:
        """Forget a session and say why."""
        self.close(session.key)
        self._answers[session.key] = Lost(session.key, reason)

    def _refusal(self, new: Sequence[int], length: int) -> str | None:
        if length == 0:
            return LOST_UNKNOWN  # there is nothing to draft after
        if length >= self._max_model_len:
            return LOST_CONTEXT  # no position is left for a draft
        if new and not 0 <= min(new) <= max(new) < self._vocab_size:
            return LOST_VOCABULARY
        return None

    def _file(self, session: Session) -> None:
        """Answer the session's wish if its drafts suffice, and list it where it belongs."""
        number, verified = session.number, session.verified
        if session.wanted and session.owed <= 0:
            drafts = session.tokens[verified : verified + session.wanted]
            logprobs = session.logprobs[: session.wanted]
            self._answers[session.key] = Drafted(session.key, verified, drafts, logprobs)
            session.wanted = 0
        if session.wanted:
            self._wishing[number] = session  # a wish renewed before its answer keeps its place
            self._ahead.pop(number, None)
            return
        self._wishing.pop(number, None)
        if session.todo:
            self._ahead[number] = session
        else:
            self._ahead.pop(number, None)

    @property
    def has_work(self) -> bool:
        """Whether a pass has something to compute or an answer waits to be taken."""
        return bool(self._answers or self._wishing or self._ahead)

    def take_answers(self) -> list[Drafted | Lost]:
        """The answers since the last call: at most one for each key, none that is out of date."""
        answers, self._answers = self._answers, {}
        return list(answers.values())

    def plan(self) -> list[Row]:
        """The rows of the next forward pass: drafts first, prefill with what is left.

        Only the oldest wish goes before all others even if it needs prefill, so that it cannot
        be starved by a full batch of drafts.
        """
        wishes = list(self._wishing.values())
        drafting = [session for session in wishes if session.todo <= CATCH_UP]
        filling = [session for session in wishes if session.todo > CATCH_UP]
        filling.extend(self._ahead.values())
        chunk = self._chunk if drafting else IDLE_FACTOR * self._chunk
        if wishes and filling[:1] == wishes[:1]:
            filling = filling[1:]
            rows, tokens, chunk = self._fill([], wishes[:1], self._max_tokens, chunk)
        else:
            rows, tokens = [], self._max_tokens
        rows, tokens, _ = self._fill(rows, drafting, tokens, tokens)
        return self._fill(rows, filling, tokens, chunk)[0]

    def _fill(
        self, rows: list[Row], sessions: Iterable[Session], tokens: int, chunk: int
    ) -> tuple[list[Row], int, int]:
        """Add a row for each session while rows, ``tokens`` and ``chunk`` last."""
        for session in sessions:
            count = min(session.todo, tokens, chunk)
            if count <= 0 or len(rows) == self._max_rows:
                break
            rows.append(Row(session, count))
            tokens -= count
            chunk -= count
        return rows, tokens, chunk

    def num_passes(self, rows: Sequence[Row]) -> int:
        """Passes that these rows of a plan may make at once: in each of them all draft.

        One if anything else waits: it should not wait longer.
        """
        if not rows or self._ahead or self._answers or len(rows) < len(self._wishing):
            return 1
        if any(row.count < row.session.todo for row in rows):
            return 1
        return min(self._max_passes, *(row.session.owed for row in rows))

    def advance(self, session: Session, count: int, draft: tuple[int, float] | None) -> None:
        """Record a pass over ``count`` tokens and, if it reached the last one, its draft.

        ``draft`` is the token and its log-probability.
        """
        session.computed += count
        if draft is not None:
            session.tokens.append(draft[0])
            session.logprobs.append(draft[1])
            session.agreed = len(session.tokens)
            session.drafted = True
        self._file(session)

    def make_room(self, asking: Session, spared: Iterable[Session]) -> bool:
        """Lose one session to free KV cache for ``asking``; False if that had to go itself.

        ``spared`` sessions stay. Those that never drafted go first, the youngest of them.
        """
        keep = {session.number for session in spared}
        holders = [
            session
            for session in self._sessions.values()
            if session.handle is not None and session.number not in keep
        ]
        victim = max([asking, *holders], key=lambda session: (not session.drafted, session.number))
        self.lose(victim, LOST_KV_FULL)
        return victim is not asking


def _agree(tokens: Sequence[int], start: int, repeated: Sequence[int]) -> bool:
    return list(tokens[start : start + len(repeated)]) == list(repeated)

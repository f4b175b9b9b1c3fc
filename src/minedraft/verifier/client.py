"""The drafter as the scheduler sees it: sessions, drafts that have come in, health.

A request that may be drafted has a session. The client tells the drafter what was verified, and
keeps for each session a *path*: draft tokens that follow the request's present tokens. What is
emitted walks the path; what is left of it is still a draft, anything else is dropped. So late
answers, and answers to an older length, are used as far as they came true, and never further.

Nothing here waits or fails because of the drafter. Plain Python, no vLLM.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from minedraft import protocol, vocabulary
from minedraft.config import MineDraftConfig
from minedraft.verifier.bell import Bell
from minedraft.verifier.session import (
    TAIL,
    Counters,
    Session,
    printable,
    remainder,
    updates,
)
from minedraft.verifier.turns import Drafts

logger = logging.getLogger("vllm.minedraft")

HELLO_INTERVAL_S = 0.5
REFUSED_INTERVAL_S = 30.0
"""Between the hellos to a drafter that refused: it may find room for one more verifier."""
REOPEN_INTERVAL_S = 1.0
STARVED_INTERVAL_S = 10.0
"""Until a session that found the drafter full is opened again, if none of ours has ended before."""
MAX_MESSAGES = 1024
"""Taken in by one poll, so that a flood does not stop the target."""
MOST_UNTOLD = TAIL // 2
SMOOTHING = 0.2
"""Weight of the newest round trip in the running estimate."""


class _Transport(Protocol):
    """What the client needs of transport.Link."""

    def send(self, frame: bytes) -> bool: ...
    def receive(self) -> bytes | None: ...
    def is_up(self) -> bool: ...
    def wait(self, seconds: float) -> bool: ...
    def wake_on(self, bell: Bell) -> None: ...
    def close(self) -> None: ...


class DrafterClient:
    """One verifier's sessions on one drafter.

    ``tokens_of`` gives all verified tokens of a request: sessions are opened anew with it when the
    drafter lost them. ``clock`` is in seconds. ``on_drafts`` is told how many sessions got how many
    draft tokens, and the seconds that took; ``on_message`` gets the drafter's messages as they are.
    """

    def __init__(
        self,
        transport: _Transport,
        config: MineDraftConfig,
        *,
        vocabulary_fingerprint: str,
        vocab_size: int,
        tokens_of: Callable[[str], Sequence[int]],
        clock: Callable[[], float],
        on_drafts: Callable[[int, int, float], None] = lambda *_: None,
        on_message: Callable[[protocol.Drafts, float], None] = lambda *_: None,
    ) -> None:
        self._transport = transport
        self._config = config
        self._hello = protocol.Hello(protocol.PROTOCOL_VERSION, vocabulary_fingerprint, vocab_size)
        self._tokens_of = tokens_of
        self._clock = clock
        self._sessions: dict[str, Session] = {}
        self._by_number: dict[int, Session] = {}
        self._next_number = 0
        self._starved: deque[str] = deque()
        self._close: list[int] = []
        self._open: dict[int, protocol.Open] = {}
        self._extend: dict[int, protocol.Extend] = {}
        self._hello_at = float("-inf")
        self._on_drafts = on_drafts
        self._on_message = on_message
        self._latency_s = 0.0
        self._is_waiting = False
        self.waited_s = 0.0
        """Seconds of all waits for messages."""
        self._resting = False
        self._refused = False
        self._refusal = ""
        self.connected = False
        self.model = ""
        """The drafter's, when one has been attached."""
        self.counters = Counters(round_trip_s=config.max_wait_s / 2)

    # --- what the scheduler tells -------------------------------------------------------------

    def open(
        self,
        request: str,
        tokens: Sequence[int],
        most_drafts: int = protocol.MAX_DRAFT_TOKENS,
    ) -> None:
        """A new request that may be drafted, with its prompt; so many draft tokens at a time."""
        self.close(request)
        session = Session(
            request,
            self._next_number,
            len(tokens),
            waited_for=self._config.wait_for_first_drafts,
            most_drafts=most_drafts,
        )
        self._next_number += 1
        self._sessions[request] = session
        self.counters.sessions = len(self._sessions)
        if not self._resting:
            self._announce(session, tokens)

    def close(self, request: str) -> None:
        """The request is gone. Its number is never used again, so what still comes is dropped."""
        session = self._sessions.pop(request, None)
        if session is None:
            return None
        self.counters.sessions = len(self._sessions)
        self._forget(session)
        while self._starved and self.connected and not self._resting:
            # Its blocks are free now: one of those that found the drafter full tries again.
            starved = self._sessions.get(self._starved.popleft())
            if starved is not None and starved.number not in self._by_number:
                return self._reopen(starved)
        return None

    def advance(self, request: str, tokens: Sequence[int], num_drafts: int) -> None:
        """These tokens were verified; so many draft tokens are wanted after them.

        O(new tokens). Without a session nothing happens.
        """
        session = self._sessions.get(request)
        if session is None:
            return
        session.length += len(tokens)
        session.tail.extend(tokens)
        session.path = remainder(session.path, tokens)
        session.num_drafts = min(num_drafts, session.most_drafts)
        if self._resting:
            return
        if session.number not in self._by_number:
            self._retry(session)
        elif not (session.pending and self._is_overtaken(session)):
            self._tell(session)

    def rest(self, resting: bool) -> None:
        """While it rests the drafter is told nothing new; then it is told all that it missed."""
        if resting == self._resting:
            return
        self._resting = resting
        if resting or not self.connected:
            return
        for session in self._sessions.values():
            session.waited_for = False
            if session.number not in self._by_number:
                self._retry(session)
            elif session.told < session.length:
                self._tell(session)

    def flush(self) -> None:
        """Sends what was told since the last flush, in one message if it fits."""
        if not (self._close or self._open or self._extend):
            return
        close, opened, extend = self._close, self._open, self._extend
        self._close, self._open, self._extend = [], {}, {}
        for update in updates(close, opened.values(), extend.values()):
            if self.connected and not self._transport.send(protocol.encode(update)):
                self._disconnected("not reachable")

    # --- what the scheduler asks --------------------------------------------------------------

    def session_length(self, request: str) -> int | None:
        """Verified tokens of the request that the client knows of; None without a session."""
        session = self._sessions.get(request)
        return None if session is None else session.length

    def state(self, request: str, now: float) -> Drafts:
        """What there is for a request, as turns.py wants to know it."""
        session = self._sessions.get(request)
        if session is None:
            return Drafts.NONE
        if session.path:
            return Drafts.READY
        if not (session.pending and session.waited_for and self.connected):
            return Drafts.NONE
        if now <= session.wait_until:
            return Drafts.PENDING
        session.waited_for = False
        self.counters.late_requests += 1
        return Drafts.NONE

    def may_draft(self, request: str) -> bool:
        """Whether the drafter has a session of the request and is, or will be, asked for more."""
        session = self._sessions.get(request)
        if session is None or not self.connected or session.number not in self._by_number:
            return False
        return session.num_drafts > 0 or not session.tail

    def drafts(self, request: str, most: int) -> list[int]:
        """The draft tokens for the request's present length: at most so many, and as were asked."""
        session = self._sessions.get(request)
        return session.path[: min(most, session.num_drafts)] if session is not None else []

    def deadline_s(self) -> float:
        """How long drafts are waited for: twice their running round trip, within the limits."""
        config = self._config
        return min(max(2 * self.counters.round_trip_s, config.min_wait_s), config.max_wait_s)

    def next_deadline(self, requests: Sequence[str]) -> float:
        """The clock time at which the first of these pending requests stops being waited for."""
        return min(self._sessions[request].wait_until for request in requests)

    # --- the connection -----------------------------------------------------------------------

    def poll(self, wait_s: float = 0.0) -> bool:
        """Takes in what has come, waiting for the first so long at most. True if anything came."""
        if self.connected and not self._transport.is_up():
            self._disconnected("not reachable")
        if not self.connected:
            self._greet()
        if wait_s > 0 and not self._wait(wait_s):
            return False
        came = False
        for _ in range(MAX_MESSAGES):
            frame = self._transport.receive()
            if frame is None:
                break
            came = True
            try:
                self._take(protocol.decode_to_verifier(frame))
            except protocol.ProtocolError as error:
                self._drop("malformed message", str(error))
        self._is_waiting = False
        self.flush()  # sessions that were opened anew are not to wait for the step's end
        return came

    def _wait(self, seconds: float) -> bool:
        started = self._clock()
        came = self._is_waiting = self._transport.wait(seconds)
        self.waited_s += self._clock() - started
        return came

    def wake_on(self, bell: Bell) -> None:
        """Also this ends a wait."""
        self._transport.wake_on(bell)

    def health(self) -> str:
        """How it stands with the drafter, in words."""
        if self.connected:
            return "attached"
        return f"refused: {self._refusal}" if self._refused else "not attached"

    def shutdown(self) -> None:
        """Closes all sessions and the connection."""
        for request in list(self._sessions):
            self.close(request)
        self.flush()
        self._transport.close()

    def _greet(self) -> None:
        if self._refused and not self._transport.is_up():
            self._refused = False  # who refused is gone: another one may come at that address
        interval = REFUSED_INTERVAL_S if self._refused else HELLO_INTERVAL_S
        now = self._clock()
        if now - self._hello_at >= interval and self._transport.send(protocol.encode(self._hello)):
            self._hello_at = now

    def _take(self, message: protocol.ToVerifier) -> None:
        match message:
            case protocol.Drafts():
                self._refused = False  # who sends this serves us, whatever was said before
                self._take_drafts(message)
            case protocol.Welcome():
                self._welcomed(message)
            case protocol.Refused():
                self._refuse(message.reason)
            case protocol.Greet():
                self._disconnected("started anew")
                self._refused = False
                self._hello_at = float("-inf")
                self._greet()

    def _welcomed(self, message: protocol.Welcome) -> None:
        reason = vocabulary.misfit(self._hello, message)
        if reason is not None:
            self._refuse(reason)
        elif not self.connected:
            logger.info("MineDraft: drafter attached: model=%s", printable(message.model))
            self.connected = self.counters.attached = True
            self.model = printable(message.model)
            self._refused, self._refusal = False, ""
            if not self._resting:
                for session in self._sessions.values():
                    self._reopen(session)

    def _refuse(self, reason: str) -> None:
        reason = printable(reason)
        if reason != self._refusal:
            logger.error("MineDraft: drafter refused, no drafts: reason=%s", reason)
        self._refused, self._refusal = True, reason
        self._disconnected("refused")

    def _disconnected(self, why: str) -> None:
        if self.connected:
            logger.warning("MineDraft: drafter gone, no drafts until it is back: reason=%s", why)
            self.counters.disconnects += 1
        self.connected = self.counters.attached = False
        self._by_number.clear()
        self._close, self._open, self._extend = [], {}, {}
        self._starved.clear()
        for session in self._sessions.values():
            session.pending = session.waited_for = False
            session.retry_at = float("-inf")

    # --- sessions -----------------------------------------------------------------------------

    def _announce(self, session: Session, tokens: Sequence[int]) -> None:
        if self.connected and len(tokens) <= protocol.MAX_OPEN_TOKENS:
            self._by_number[session.number] = session
            self._open[session.number] = protocol.Open(session.number, list(tokens))
            session.told = len(tokens)

    def _is_overtaken(self, session: Session) -> bool:
        """Whether the target has gone on without the drafts of a session that are being made.

        A new wish would take the place of that one. From a drafter that needs longer than a step
        of the target no draft would ever come: it is left to finish, and told all the rest then.
        """
        return (
            not session.waited_for
            and session.length - session.told < MOST_UNTOLD
            and self._clock() - session.asked_at < self._config.max_wait_s
        )

    def _tell(self, session: Session) -> None:
        """Says what was verified since the last time, and what is wanted after it."""
        number, length, num_drafts = session.number, session.length, session.num_drafts
        unsent = self._extend.get(number)  # one message says both
        base = session.told if unsent is None else unsent.base_len
        tokens = self._tokens_of(session.request)[base:length]
        self._extend[number] = protocol.Extend(number, base, list(tokens), num_drafts)
        session.told = length
        session.pending = num_drafts > 0
        if num_drafts:
            session.asked_at = now = self._clock()
            session.asked_length, session.wait_until = length, now + self.deadline_s()
            self.counters.requested += num_drafts

    def _forget(self, session: Session) -> None:
        """The drafter need not keep it."""
        if self._by_number.pop(session.number, None) is None:
            return
        self._extend.pop(session.number, None)
        if self._open.pop(session.number, None) is None:
            self._close.append(session.number)

    def _reopen(self, session: Session) -> None:
        """Opens a session anew, under a new number, with all tokens of its request."""
        self._forget(session)
        session.number = self._next_number
        self._next_number += 1
        # Waited for once more at most: who is opened anew all the time must not stop the target.
        first = session.reopened_at == float("-inf")
        session.waited_for = first and self._config.wait_for_first_drafts
        session.reopened_at = self._clock()
        session.retry_at = float("inf")
        self._announce(session, list(self._tokens_of(session.request))[: session.length])
        session.pending = False
        if session.num_drafts and session.number in self._by_number:
            self._tell(session)

    def _take_drafts(self, message: protocol.Drafts) -> None:
        self._on_message(message, self._clock())
        busy_s = min(max(0.0, message.busy_s), 3600.0)  # of a NaN this makes 0
        self.counters.drafter_busy_s += busy_s
        answered = [draft for draft in message.drafts if self._take_draft(draft)]
        if answered:
            self._observe(answered, busy_s)
        for draft in answered:
            session = self._by_number[draft.session]
            if session.told < session.length and not self._resting:
                self._tell(session)  # the target has gone on meanwhile
        for lost in message.lost:
            self._take_lost(lost)

    def _observe(self, answered: Sequence[protocol.Draft], busy_s: float) -> None:
        """Says how long the drafter took for these answers."""
        asked_at = min(self._by_number[draft.session].asked_at for draft in answered)
        round_trip_s = self._since(asked_at)
        if self._is_waiting:
            self._latency_s += SMOOTHING * (max(0.0, round_trip_s - busy_s) - self._latency_s)
            seconds = round_trip_s
        else:  # it lay here while the target worked
            seconds = min(round_trip_s, busy_s + self._latency_s)
        self._on_drafts(len(answered), max(len(draft.tokens) for draft in answered), seconds)

    def _take_draft(self, draft: protocol.Draft) -> bool:
        """Whether the draft is what was asked for last."""
        session = self._by_number.get(draft.session)
        if session is None:
            self._drop("unknown session")
            return False
        behind = session.length - draft.base_len
        if not 0 <= behind <= len(session.tail):
            self._drop("wrong length")
            return False
        if len(draft.tokens) != len(draft.logprobs):
            self._drop("malformed draft")
            return False
        tokens = draft.tokens
        if max(tokens, default=0) >= self._hello.vocab_size:
            # A padding row of the drafter's output layer: what comes before it is still a draft.
            self._drop("token outside the vocabulary")
            outside = (i for i, t in enumerate(tokens) if t >= self._hello.vocab_size)
            tokens = tokens[: next(outside)]
        self.counters.received += len(tokens)
        rest = tokens
        if behind:
            rest = remainder(tokens, [session.tail[index] for index in range(-behind, 0)])
        if len(rest) > len(session.path):
            session.path = rest
        is_answer = session.pending and draft.base_len == session.asked_length
        if is_answer:
            session.pending, session.waited_for = False, True
            round_trip_s = self._since(session.asked_at)
            self.counters.round_trip_s += SMOOTHING * (round_trip_s - self.counters.round_trip_s)
        if behind and not rest:
            self._drop("late")
        return is_answer

    def _take_lost(self, lost: protocol.Lost) -> None:
        session = self._by_number.get(lost.session)
        if session is None:
            return
        self._forget(session)  # a drafter that errs may still hold it
        session.pending = False
        session.retry_at = float("inf")
        reason = lost.reason if lost.reason in protocol.LOST_REASONS else "unknown reason"
        self._drop(f"session lost: {reason}")
        if reason == protocol.LOST_KV_FULL:
            self._starved.append(session.request)
            session.retry_at = self._clock() + STARVED_INTERVAL_S
        elif reason == protocol.LOST_UNKNOWN:
            session.retry_at = session.reopened_at + REOPEN_INTERVAL_S
            self._retry(session)

    def _retry(self, session: Session) -> None:
        """Opens a lost session anew if it is time."""
        if not self._resting and self.connected and self._clock() >= session.retry_at:
            self._reopen(session)

    def _since(self, asked_at: float) -> float:
        """Seconds; a drafter that stood still for minutes is not to be waited for as long again."""
        return min(self._clock() - asked_at, self._config.max_wait_s)

    def _drop(self, reason: str, detail: str = "") -> None:
        if reason not in self.counters.dropped:
            logger.debug("MineDraft: first dropped answer: %s %s", reason, detail)
        self.counters.dropped[reason] += 1

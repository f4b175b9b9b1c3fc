"""The drafter's loop: sessions in, drafts out, for several verifiers.

One thread: it takes in all messages that have come, then runs one step of the engine if there is
work. Nothing that comes in can end it: a bad frame is counted and dropped, a verifier that is gone
takes its sessions with it.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

from minedraft import protocol, vocabulary
from minedraft.drafter.sessions import Drafted, Lost

logger = logging.getLogger("vllm.minedraft")

IDLE_WAIT_S = 0.2
PROBE_INTERVAL_S = 1.0
MAX_MESSAGES = 1024
"""Taken in between two steps of the engine, so that a flood does not stop it."""
MAX_VERIFIERS = 256
MAX_SESSIONS = protocol.MAX_ENTRIES
"""For each verifier, so that what is to be said of them fits into one message."""

Key = tuple[bytes, int]
"""A session: (verifier, session number)."""


class _Engine(Protocol):
    """What the server needs of engine.DraftEngine."""

    @property
    def last_pass(self) -> Collection[Hashable]: ...
    def open(self, key: Hashable, tokens: Sequence[int]) -> None: ...
    def extend(
        self, key: Hashable, base_len: int, tokens: Sequence[int], num_drafts: int
    ) -> None: ...
    def close(self, key: Hashable) -> None: ...
    def has_work(self) -> bool: ...
    def step(self) -> list[Drafted | Lost]: ...


class _Socket(Protocol):
    """What the server needs of transport.Server."""

    def send(self, peer: bytes, frame: bytes) -> bool: ...
    def receive(self) -> tuple[bytes, bytes] | None: ...
    def wait(self, seconds: float) -> bool: ...


@dataclass(slots=True)
class Verifier:
    """A verifier that said hello."""

    sessions: set[int] = field(default_factory=set)
    busy_s: float = 0.0
    """Computed for it since the last message to it."""
    spans: deque[protocol.Span] = field(default_factory=lambda: deque(maxlen=protocol.MAX_SPANS))
    """When, not told yet."""


class DraftServer:
    """Serves one engine to the verifiers on one socket."""

    def __init__(self, engine: _Engine, socket: _Socket, welcome: protocol.Welcome) -> None:
        self._engine = engine
        self._socket = socket
        self._welcome = welcome
        self._verifiers: dict[bytes, Verifier] = {}
        self._probed_at = 0.0
        self._unanswered_at: float | None = None
        """End of the last step, if nobody was answered and work was left ever since."""
        self.dropped: Counter[str] = Counter()

    @property
    def num_sessions(self) -> int:
        """Sessions of all verifiers."""
        return sum(len(verifier.sessions) for verifier in self._verifiers.values())

    def serve_once(self) -> None:
        """Takes in what has come; one engine step if there is work, else waits a little."""
        working = self._engine.has_work()
        if not working:
            self._unanswered_at = None
            self._socket.wait(IDLE_WAIT_S)
        for _ in range(MAX_MESSAGES):
            received = self._socket.receive()
            if received is None:
                break
            self._take(*received)
        if self._engine.has_work():
            started = time.monotonic()
            results = self._engine.step()
            self._account(started, time.monotonic(), results)
            self._answer(results)
        self._probe_now_and_then()

    # --- messages in --------------------------------------------------------------------------

    def _take(self, peer: bytes, frame: bytes) -> None:
        try:
            message = protocol.decode_to_drafter(frame)
        except protocol.ProtocolError as error:
            return self._drop("malformed message", str(error))
        if isinstance(message, protocol.Hello):
            return self._greet(peer, message)
        verifier = self._verifiers.get(peer)
        if verifier is None:
            self._send(peer, protocol.Greet())
            return None
        for session in message.close:
            verifier.sessions.discard(session)
            self._engine.close((peer, session))
        full: list[protocol.Lost] = []
        for opened in message.open:
            if len(verifier.sessions) >= MAX_SESSIONS and opened.session not in verifier.sessions:
                self._drop("too many sessions")
                full.append(protocol.Lost(opened.session, protocol.LOST_KV_FULL))
                continue
            verifier.sessions.add(opened.session)
            self._engine.open((peer, opened.session), opened.tokens)
        for extend in message.extend:
            key = (peer, extend.session)
            self._engine.extend(key, extend.base_len, extend.tokens, extend.num_drafts)
        if full:
            self._send(peer, protocol.Drafts(lost=full))
        return None

    def _greet(self, peer: bytes, hello: protocol.Hello) -> None:
        # Who says hello has no sessions: what an older hello left is his no more.
        known = self._detach(peer)
        if not known:
            self._probe(list(self._verifiers))
        reason = vocabulary.misfit(hello, self._welcome)
        if len(self._verifiers) >= MAX_VERIFIERS:
            reason = f"it serves {MAX_VERIFIERS} verifiers already"
        if reason is not None:
            self._drop("refused verifier", reason)
            self._send(peer, protocol.Refused(reason))
        elif self._send(peer, self._welcome):
            self._verifiers[peer] = Verifier()
            if not known:
                count = len(self._verifiers)
                logger.info("MineDraft drafter: a verifier attached, %d in all", count)

    # --- messages out -------------------------------------------------------------------------

    def _account(self, started: float, ended: float, results: Sequence[Drafted | Lost]) -> None:
        computed = {cast(Key, key)[0] for key in self._engine.last_pass}
        busy = [verifier for peer, verifier in self._verifiers.items() if peer in computed]
        rows = sum(isinstance(result, Drafted) for result in results)
        for verifier in busy:
            verifier.busy_s += (ended - started) / len(busy)
            start = started
            if verifier.spans and verifier.spans[-1].end_s == self._unanswered_at:
                start = verifier.spans.pop().start_s  # all steps up to an answer are one span
            verifier.spans.append(protocol.Span(start, ended, rows))
        going_on = not results and self._engine.has_work()
        self._unanswered_at = ended if going_on else None

    def _answer(self, results: Iterable[Drafted | Lost]) -> None:
        answers: dict[bytes, protocol.Drafts] = {}
        for result in results:
            peer, session = cast(Key, result.key)
            verifier = self._verifiers.get(peer)
            if verifier is None:
                continue
            answer = answers.setdefault(peer, protocol.Drafts([], []))
            if isinstance(result, Lost):
                verifier.sessions.discard(session)
                answer.lost.append(protocol.Lost(session, result.reason))
            else:
                answer.drafts.append(
                    protocol.Draft(session, result.base_len, result.tokens, result.logprobs)
                )
        for peer, answer in answers.items():
            verifier = self._verifiers[peer]
            spans, sent_s = list(verifier.spans), time.monotonic()
            self._send(
                peer,
                protocol.Drafts(answer.drafts, answer.lost, verifier.busy_s, spans, sent_s),
            )
            verifier.busy_s = 0.0
            verifier.spans.clear()

    def _send(self, peer: bytes, message: protocol.ToVerifier) -> bool:
        if self._socket.send(peer, protocol.encode(message)):
            return True
        if self._detach(peer):
            logger.info("MineDraft drafter: a verifier is gone, %d left", len(self._verifiers))
        return False

    def _probe_now_and_then(self) -> None:
        """An idle verifier does not read, so it is left alone as long as it holds nothing here."""
        now = time.monotonic()
        if now - self._probed_at >= PROBE_INTERVAL_S:
            self._probed_at = now
            self._probe([peer for peer, held in self._verifiers.items() if held.sessions])

    def _probe(self, peers: Iterable[bytes]) -> None:
        """Verifiers that are gone are found by sending to them."""
        for peer in peers:
            self._send(peer, protocol.Drafts())

    def _detach(self, peer: bytes) -> bool:
        """Forgets a verifier and its sessions; False if it is none."""
        verifier = self._verifiers.pop(peer, None)
        if verifier is None:
            return False
        for session in verifier.sessions:
            self._engine.close((peer, session))
        return True

    def _drop(self, reason: str, detail: str = "") -> None:
        if reason not in self.dropped:
            logger.warning("MineDraft drafter: %s (%s); said once, counted further", reason, detail)
        self.dropped[reason] += 1

"""The drafter's loop, on an engine and a socket in memory: sessions, peers that misbehave."""

from collections import deque
from collections.abc import Hashable, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from faulty import random_frames
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from minedraft import protocol, transport
from minedraft.config import Endpoint
from minedraft.drafter import server as server_module
from minedraft.drafter.server import DraftServer
from minedraft.drafter.sessions import Drafted, Lost, Sessions
from minedraft.protocol import Draft, Drafts, Extend, Greet, Hello, Open, Refused, Update, Welcome

WELCOME = Welcome(protocol.PROTOCOL_VERSION, "drafter", "v", 50, 1000)
HELLO = Hello(protocol.PROTOCOL_VERSION, "v", 50)
MOST_TOKENS = 20
"""A longer prompt is beyond the fake engine's context."""
A, B, C = b"peer a", b"peer b", b"peer c"


class FakeEngine:
    """Drafts the numbers that follow; every step takes ``step_s`` of the clock."""

    def __init__(self, clock: "Clock") -> None:
        self.clock = clock
        self.step_s = 0.5
        self.steps = 0
        self.held: dict[Hashable, list[int]] = {}
        self.wishes: dict[Hashable, int] = {}
        self.lost: list[Lost] = []
        self.last_pass: list[Hashable] = []
        self.calls: list[tuple[str, Hashable]] = []

    def open(self, key: Hashable, tokens: Sequence[int]) -> None:
        self.close(key)
        self.calls[-1] = ("open", key)
        if len(tokens) > MOST_TOKENS:
            self.lost.append(Lost(key, protocol.LOST_CONTEXT))
        else:
            self.held[key] = list(tokens)

    def extend(self, key: Hashable, base_len: int, tokens: Sequence[int], num_drafts: int) -> None:
        self.calls.append(("extend", key))
        session = self.held.get(key)
        if session is None or base_len != len(session):
            self.lose(key, protocol.LOST_UNKNOWN)
            return
        session.extend(tokens)
        self.wishes[key] = num_drafts

    def lose(self, key: Hashable, reason: str) -> None:
        self.held.pop(key, None)
        self.wishes.pop(key, None)
        self.lost.append(Lost(key, reason))

    def close(self, key: Hashable) -> None:
        self.calls.append(("close", key))
        self.held.pop(key, None)
        self.wishes.pop(key, None)
        self.lost = [lost for lost in self.lost if lost.key != key]

    def has_work(self) -> bool:
        return bool(self.wishes or self.lost)

    def step(self) -> list[Drafted | Lost]:
        self.steps += 1
        self.clock.now += self.step_s
        self.last_pass = list(self.wishes)
        answers: list[Drafted | Lost] = [*self.lost]
        for key, count in self.wishes.items():
            length = len(self.held[key])
            answers.append(Drafted(key, length, list(range(length, length + count)), [0.0] * count))
        self.lost, self.wishes = [], {}
        return answers


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class FakeSocket:
    """Peers in memory; one that is ``gone`` is not reached."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.arrived: deque[tuple[bytes, bytes]] = deque()
        self.sent: list[tuple[bytes, protocol.ToVerifier]] = []
        self.gone: set[bytes] = set()
        self.waits: list[float] = []
        self.endless: tuple[bytes, bytes] | None = None
        """Comes again and again, after all others."""

    def send(self, peer: bytes, frame: bytes) -> bool:
        if peer in self.gone:
            return False
        self.sent.append((peer, protocol.decode_to_verifier(frame)))
        return True

    def receive(self) -> tuple[bytes, bytes] | None:
        return self.arrived.popleft() if self.arrived else self.endless

    def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        if not self.arrived:
            self.clock.now += seconds
        return bool(self.arrived)


class Bench:
    """A server, its engine and its socket."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.engine = FakeEngine(self.clock)
        self.socket = FakeSocket(self.clock)
        self.server = DraftServer(self.engine, self.socket, WELCOME)

    def serve(self, *messages: tuple[bytes, protocol.ToDrafter | bytes]) -> None:
        """These arrive, and the server runs once."""
        for peer, message in messages:
            frame = message if isinstance(message, bytes) else protocol.encode(message)
            self.socket.arrived.append((peer, frame))
        self.server.serve_once()

    def heard(self, peer: bytes) -> list[protocol.ToVerifier]:
        """What a peer got since the last call, empty probes left out, without times."""
        mine = [message for name, message in self.socket.sent if name == peer]
        self.socket.sent = [item for item in self.socket.sent if item[0] != peer]
        timeless = [
            structs.replace(m, spans=[], sent_s=0.0) if isinstance(m, Drafts) else m for m in mine
        ]
        return [message for message in timeless if message != Drafts()]

    def spans(self, peer: bytes) -> list[tuple[float, float, int]]:
        """When the engine computed for a peer, as it was told since the last ``heard``."""
        answers = [m for name, m in self.socket.sent if name == peer and isinstance(m, Drafts)]
        return [(s.start_s, s.end_s, s.rows) for answer in answers for s in answer.spans]

    def check(self) -> None:
        """The books of server and engine are the same."""
        theirs = {(peer, number) for peer, v in self.verifiers.items() for number in v.sessions}
        assert theirs == set(self.engine.held)
        assert self.server.num_sessions == len(theirs)

    @property
    def verifiers(self) -> dict[bytes, server_module.Verifier]:
        return self.server._verifiers


@pytest.fixture(autouse=True)
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    bench = Bench()
    monkeypatch.setattr(server_module, "time", bench.clock)
    return bench


def opens(*numbers: int, tokens: Sequence[int] = (1, 2)) -> Update:
    return Update(open=[Open(number, list(tokens)) for number in numbers])


def wants(number: int, base_len: int, tokens: Sequence[int] = (), num_drafts: int = 2) -> Update:
    return Update(extend=[Extend(number, base_len, list(tokens), num_drafts)])


# --- hello ----------------------------------------------------------------------------------------


def test_hello_is_answered_with_welcome_and_drafts_follow(bench: Bench) -> None:
    bench.serve((A, HELLO))
    assert bench.heard(A) == [WELCOME]
    bench.serve((A, opens(7)), (A, wants(7, 2, [3], 3)))
    assert bench.heard(A) == [Drafts([Draft(7, 3, [3, 4, 5], [0.0] * 3)], [], 0.5)]
    bench.check()


@pytest.mark.parametrize(
    ("hello", "says"),
    [
        (Hello(protocol.PROTOCOL_VERSION + 1, "v", 50), "protocol 1, this verifier 2"),
        (Hello(protocol.PROTOCOL_VERSION, "w", 50), "tokenizer is not the target's"),
        (Hello(protocol.PROTOCOL_VERSION, "", 51), "vocabularies of 51 (target) and 50"),
        (Hello(-(1 << 63), "w" * protocol.MAX_TEXT, 0), "it speaks protocol 1"),
    ],
)
def test_a_verifier_that_does_not_fit_is_refused_and_not_served(
    bench: Bench, hello: Hello, says: str
) -> None:
    bench.serve((A, hello), (A, opens(1)))
    refusal, greet = bench.heard(A)
    assert isinstance(refusal, Refused)
    assert says in refusal.reason
    assert greet == Greet()
    assert bench.server.dropped == {"refused verifier": 1}
    assert not bench.engine.held


@pytest.mark.parametrize("size", [50, 64])
def test_with_equal_tokenizers_padding_does_not_matter(bench: Bench, size: int) -> None:
    bench.serve((A, Hello(protocol.PROTOCOL_VERSION, "v", size)))
    assert bench.heard(A) == [WELCOME]


def test_who_did_not_say_hello_is_greeted_and_not_served(bench: Bench) -> None:
    bench.serve((A, opens(1)), (A, wants(1, 2)), (A, Update()))
    assert bench.heard(A) == [Greet()] * 3
    assert bench.engine.calls == []
    bench.serve((A, HELLO), (A, opens(1)))
    assert bench.heard(A) == [WELCOME]
    assert set(bench.engine.held) == {(A, 1)}


def test_a_second_hello_begins_anew(bench: Bench) -> None:
    bench.serve((A, HELLO), (A, opens(1, 2)), (B, HELLO), (B, opens(1)))
    bench.serve((A, HELLO), (A, opens(3)))
    assert set(bench.engine.held) == {(A, 3), (B, 1)}
    bench.check()
    assert bench.heard(A) == [WELCOME] * 2


def test_a_verifier_that_changes_for_the_worse_is_not_served_any_more(bench: Bench) -> None:
    bench.serve((A, HELLO), (A, opens(1)))
    bench.serve((A, Hello(protocol.PROTOCOL_VERSION, "w", 50)), (A, opens(2)))
    assert [type(message) for message in bench.heard(A)] == [Welcome, Refused, Greet]
    assert not bench.engine.held
    bench.check()


def test_too_many_verifiers_are_refused_until_one_is_gone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "MAX_VERIFIERS", 2)
    bench.serve((A, HELLO), (B, HELLO), (C, HELLO), (A, HELLO))
    assert bench.heard(C) == [Refused("it serves 2 verifiers already")]
    assert bench.heard(A) == [WELCOME] * 2, "who is attached may say hello again"
    bench.socket.gone.add(B)
    bench.serve((C, HELLO))
    assert bench.heard(C) == [WELCOME], "the place of one that is gone is free"
    assert set(bench.verifiers) == {A, C}


# --- sessions -------------------------------------------------------------------------------------


def test_closes_are_applied_before_opens(bench: Bench) -> None:
    bench.serve((A, HELLO), (A, opens(1, tokens=[1])))
    bench.engine.calls.clear()
    bench.serve((A, Update(close=[1], open=[Open(1, [5, 6])], extend=[Extend(1, 2, [7], 1)])))
    kinds = [kind for kind, key in bench.engine.calls if key == (A, 1)]
    assert kinds == ["close", "open", "extend"]
    assert bench.engine.held == {(A, 1): [5, 6, 7]}
    bench.check()


def test_sessions_of_two_verifiers_with_the_same_number_are_two(bench: Bench) -> None:
    bench.serve((A, HELLO), (B, HELLO), (A, opens(1, tokens=[1, 2])), (B, opens(1, tokens=[9])))
    bench.serve((A, wants(1, 2, [3])), (B, wants(1, 1, [8], 1)))
    (to_a,), (to_b,) = bench.heard(A)[1:], bench.heard(B)[1:]
    assert isinstance(to_a, Drafts)
    assert isinstance(to_b, Drafts)
    assert to_a.drafts == [Draft(1, 3, [3, 4], [0.0, 0.0])]
    assert to_b.drafts == [Draft(1, 2, [2], [0.0])]
    bench.serve((A, Update(close=[1])))
    assert bench.engine.held == {(B, 1): [9, 8]}
    bench.check()


def test_a_lost_session_is_said_and_forgotten(bench: Bench) -> None:
    bench.serve((A, HELLO), (A, opens(1, tokens=[1] * (MOST_TOKENS + 1))), (A, opens(2)))
    assert bench.heard(A)[1:] == [Drafts([], [protocol.Lost(1, protocol.LOST_CONTEXT)])]
    bench.check()
    bench.serve((A, wants(1, 2)), (A, wants(2, 1)))
    unknown = [protocol.Lost(1, protocol.LOST_UNKNOWN), protocol.Lost(2, protocol.LOST_UNKNOWN)]
    (answer,) = bench.heard(A)
    assert isinstance(answer, Drafts)
    assert answer.lost == unknown
    bench.check()
    assert bench.server.num_sessions == 0


def test_too_many_sessions_are_lost_and_counted(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "MAX_SESSIONS", 3)
    bench.serve((A, HELLO), (A, opens(1, 2, 3, 4, 5)), (B, HELLO), (B, opens(1)))
    assert set(bench.engine.held) == {(A, 1), (A, 2), (A, 3), (B, 1)}
    assert bench.server.dropped == {"too many sessions": 2}
    lost = [protocol.Lost(number, protocol.LOST_KV_FULL) for number in (4, 5)]
    assert bench.heard(A)[1:] == [Drafts(lost=lost)]
    bench.serve((A, Update(close=[1])), (A, opens(6)))
    assert (A, 6) in bench.engine.held
    assert bench.heard(A) == []
    bench.check()


def test_a_verifier_that_does_not_hear_of_its_losses_is_gone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "MAX_SESSIONS", 1)
    bench.serve((A, HELLO))
    bench.socket.gone.add(A)
    bench.serve((A, opens(1, 2)))
    assert not bench.verifiers
    assert not bench.engine.held


def test_a_session_of_a_full_verifier_may_be_opened_anew(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "MAX_SESSIONS", 1)
    bench.serve((A, HELLO), (A, opens(1, tokens=[1])), (A, opens(1, tokens=[5, 6])))
    assert bench.engine.held == {(A, 1): [5, 6]}
    assert not bench.server.dropped


def test_the_count_of_sessions_returns_to_zero(bench: Bench) -> None:
    bench.serve((A, HELLO), (B, HELLO), (A, opens(*range(50))), (B, opens(*range(50))))
    assert bench.server.num_sessions == 100
    bench.serve((A, Update(close=list(range(60)))), (B, Update(close=list(range(49, -1, -1)))))
    assert bench.server.num_sessions == 0
    assert not bench.engine.held


# --- peers that misbehave -------------------------------------------------------------------------


def test_malformed_frames_are_counted_and_survived(bench: Bench) -> None:
    noise = [b"", b"\xff" * 10, protocol.encode(WELCOME), protocol.encode(Update()) + b"x"]
    bench.serve((A, HELLO), *[(peer, frame) for frame in noise for peer in (A, C)], (A, opens(1)))
    assert bench.server.dropped == {"malformed message": 8}
    assert set(bench.engine.held) == {(A, 1)}
    assert bench.heard(C) == []


def test_a_verifier_that_is_gone_has_its_sessions_closed(bench: Bench) -> None:
    bench.serve((A, HELLO), (B, HELLO), (A, opens(1, 2)), (B, opens(1)))
    bench.socket.gone.add(A)
    for _ in range(20):  # nothing is owed to A: it is found by a probe
        bench.serve()
    assert set(bench.engine.held) == {(B, 1)}
    assert set(bench.verifiers) == {B}
    bench.check()


def test_a_verifier_that_is_found_gone_by_an_answer_has_its_sessions_closed(bench: Bench) -> None:
    bench.serve((A, HELLO), (B, HELLO), (A, opens(1, 2)), (B, opens(1)))
    bench.socket.gone.add(A)
    bench.serve((A, wants(1, 2)), (A, wants(2, 2)), (B, wants(1, 2)))
    assert len(bench.heard(B)) == 2, "the answer of another one is sent all the same"
    assert set(bench.engine.held) == {(B, 1)}
    bench.check()


def test_a_verifier_that_is_gone_before_its_welcome_is_not_attached(bench: Bench) -> None:
    bench.socket.gone.add(A)
    bench.serve((A, HELLO), (A, opens(1)))
    assert not bench.verifiers
    assert not bench.engine.held


def test_drafts_for_a_verifier_that_left_meanwhile_are_dropped(bench: Bench) -> None:
    bench.serve((A, HELLO), (A, opens(1)))
    bench.engine.lost.append(Lost((C, 1), protocol.LOST_KV_FULL))  # of before it was detached
    bench.serve()
    assert bench.heard(C) == []
    bench.check()


@pytest.mark.parametrize("frame", [b"\xff", protocol.encode(HELLO), protocol.encode(Update())])
def test_a_verifier_that_never_stops_talking_does_not_stop_the_engine(
    bench: Bench, frame: bytes
) -> None:
    bench.serve((A, HELLO), (A, opens(1)), (A, wants(1, 2)))
    bench.heard(A)
    receive = bench.socket.receive
    budget = 100_000

    def counted() -> tuple[bytes, bytes] | None:
        nonlocal budget
        budget -= 1
        assert budget, "the server listens for ever"
        return receive()

    bench.socket.receive = counted  # type: ignore[method-assign]
    bench.socket.endless = (C, frame)
    bench.serve((A, wants(1, 2)))
    assert len(bench.heard(A)) == 1


def test_an_idle_verifier_is_left_in_peace(bench: Bench) -> None:
    """It reads when it has requests: what is sent meanwhile would fill its queue for nothing."""
    bench.serve((A, HELLO), (A, opens(1)), (A, Update(close=[1])))
    bench.socket.sent.clear()
    while bench.clock.now < 100 + 12 * 3600:
        bench.serve()
        bench.clock.now += 30
    assert bench.socket.sent == []
    bench.serve((A, opens(2)), (A, wants(2, 2)))
    assert len(bench.heard(A)) == 1, "and is served at once when it comes back"


def test_verifiers_that_are_gone_do_not_pile_up(bench: Bench) -> None:
    for number in range(20):
        peer = b"peer %d" % number
        bench.serve((peer, HELLO))
        bench.socket.gone.add(peer)
        assert len(bench.verifiers) <= 2


# --- time -----------------------------------------------------------------------------------------


def test_without_work_it_waits_and_with_work_it_does_not(bench: Bench) -> None:
    bench.serve()
    assert bench.socket.waits == [server_module.IDLE_WAIT_S]
    assert bench.engine.steps == 0
    bench.serve((A, HELLO), (A, opens(1)), (A, wants(1, 2)))
    assert bench.engine.steps == 1
    bench.engine.lose((A, 1), protocol.LOST_KV_FULL)
    waits = len(bench.socket.waits)
    bench.serve()
    assert len(bench.socket.waits) == waits
    assert bench.engine.steps == 2


def test_busy_time_is_split_and_told_once_to_those_for_whom_it_was_spent(bench: Bench) -> None:
    bench.serve(*[(peer, HELLO) for peer in (A, B, C)], *[(p, opens(1)) for p in (A, B, C)])
    bench.engine.step_s = 3.0
    bench.serve((A, wants(1, 2)))
    bench.serve((A, wants(1, 2)), (B, wants(1, 2)))
    bench.serve((B, wants(1, 2)))
    told = {
        peer: [m.busy_s for m in bench.heard(peer) if isinstance(m, Drafts)] for peer in (A, B, C)
    }
    assert told == {A: [3.0, 1.5], B: [1.5, 3.0], C: []}, "C has a session and asked nothing"


busy = st.floats(0.001, 10.0)


@given(st.lists(st.tuples(st.sets(st.sampled_from([A, B, C])), busy), max_size=12))
def test_no_busy_second_is_lost_or_told_twice(rounds: list[tuple[set[bytes], float]]) -> None:
    bench = Bench()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_module, "time", bench.clock)
        bench.serve(*[(peer, HELLO) for peer in (A, B, C)], *[(p, opens(1)) for p in (A, B, C)])
        for asking, seconds in [*rounds, ({A, B, C}, 1.0)]:
            bench.engine.step_s = seconds
            bench.serve(*[(peer, wants(1, 2)) for peer in asking])
        told = sum(m.busy_s for _, m in bench.socket.sent if isinstance(m, Drafts))
    worked = sum(seconds for asking, seconds in rounds if asking) + 1.0
    assert told == pytest.approx(worked)


# --- anything at all ------------------------------------------------------------------------------

numbers = st.integers(0, 4)
few_tokens = st.lists(st.integers(0, 60), max_size=MOST_TOKENS + 2)
updates = st.builds(
    Update,
    st.lists(numbers, max_size=3),
    st.lists(st.builds(Open, numbers, few_tokens), max_size=3),
    st.lists(
        st.builds(Extend, numbers, st.integers(0, 30), few_tokens, st.integers(0, 5)), max_size=3
    ),
)
misfits = st.sampled_from([Hello(2, "v", 50), Hello(1, "w", 50), Hello(1, "", 9)])
frames = st.one_of(
    updates.map(protocol.encode),
    updates.map(protocol.encode),
    st.just(protocol.encode(HELLO)),
    misfits.map(protocol.encode),
    st.binary(max_size=20),
    updates.map(protocol.encode).map(lambda frame: frame[:-1]),
)
peers = st.sampled_from([A, B, C])
events = st.one_of(
    st.lists(st.tuples(peers, frames), max_size=4),
    peers,  # it leaves, or comes back
    st.integers(0, 3),  # a session that the engine loses by itself
)


@settings(max_examples=200)
@given(st.lists(events, max_size=25))
def test_whatever_comes_the_books_agree(history: list[object]) -> None:
    bench = Bench()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_module, "time", bench.clock)
        patch.setattr(server_module, "MAX_SESSIONS", 3)
        patch.setattr(server_module, "MAX_VERIFIERS", 2)
        for event in history:
            happen(bench, event)
            bench.check()
            assert len(bench.verifiers) <= 2
            assert all(len(v.sessions) <= 3 for v in bench.verifiers.values())
            check_answers(bench)
        bench.socket.gone |= {A, B, C}
        for _ in range(20):
            bench.serve()
        assert bench.server.num_sessions == 0
        assert not bench.engine.held


def happen(bench: Bench, event: object) -> None:
    match event:
        case bytes():
            bench.socket.gone ^= {event}
            bench.serve()
        case int():
            if len(bench.engine.held) > event:
                key = list(bench.engine.held)[event]
                bench.engine.lose(key, protocol.LOST_KV_FULL)
            bench.serve()
        case list():
            bench.serve(*event)


def check_answers(bench: Bench) -> None:
    """Sessions are spoken of only to those who were welcomed, and drafts are of sessions held."""
    for peer in (A, B, C):
        welcomed = peer in bench.verifiers
        for message in reversed(bench.heard(peer)):
            if isinstance(message, Drafts):
                assert welcomed, "drafts for somebody who is not attached"
                lost = {entry.session for entry in message.lost}
                for draft in message.drafts:
                    assert draft.session not in lost
                    assert draft.base_len <= len(bench.engine.held[(peer, draft.session)])


# --- spans ------------------------------------------------------------------------------------


def test_an_answer_says_when_the_engine_computed_for_it(bench: Bench) -> None:
    bench.serve((A, HELLO), (A, opens(1, 2)), (A, wants(1, 2)), (A, wants(2, 2)))
    assert bench.spans(A) == [(100.0, 100.5, 2)]
    assert [m.sent_s for _, m in bench.socket.sent if isinstance(m, Drafts) and m.drafts] == [100.5]
    bench.clock.now = 200.0
    bench.serve((A, wants(1, 2)))
    assert bench.spans(A) == [(100.0, 100.5, 2), (200.0, 200.5, 1)], "each is told once"


class SlowEngine(FakeEngine):
    """Answers after so many steps."""

    def __init__(self, clock: Clock, steps: int) -> None:
        super().__init__(clock)
        self.left = steps

    def step(self) -> list[Drafted | Lost]:
        self.left -= 1
        if self.left > 0:
            self.clock.now += self.step_s
            self.last_pass = list(self.wishes)
            return []
        return super().step()


def test_the_steps_of_one_answer_are_one_span(bench: Bench) -> None:
    bench.engine = SlowEngine(bench.clock, 4)
    bench.server = DraftServer(bench.engine, bench.socket, WELCOME)
    bench.serve((B, HELLO), (B, opens(5)))
    bench.serve((A, HELLO), (A, opens(1)), (A, wants(1, 2)))
    while bench.engine.has_work():
        bench.serve()
    assert bench.spans(A) == [(100.0, 102.0, 1)]
    assert bench.spans(B) == [], "it was not answered"
    bench.clock.now = 200.0
    bench.serve((B, wants(5, 2)))
    assert bench.spans(B) == [(200.0, 200.5, 1)], "nothing was computed for it before"


def test_what_was_computed_without_an_answer_is_told_with_the_next_one(bench: Bench) -> None:
    """As with a prompt, which is prefilled ahead."""
    engine = SessionsEngine()
    bench.server = DraftServer(engine, bench.socket, WELCOME)

    def serve_all(*messages: tuple[bytes, protocol.ToDrafter | bytes]) -> None:
        bench.serve(*messages)
        while engine.has_work():
            bench.serve()

    serve_all((A, HELLO), (B, HELLO), (A, opens(1, tokens=[1, 2, 3])), (B, opens(1, tokens=[1])))
    bench.clock.now = 200.0
    serve_all((B, wants(1, 1)))
    assert [start for start, _, _ in bench.spans(B)] == [200.0], "a prompt of one is not prefilled"
    assert bench.spans(A) == []
    bench.clock.now = 300.0
    serve_all((A, wants(1, 3)))
    assert [start for start, _, _ in bench.spans(A)] == [100.0, 300.0]


def test_a_span_ends_when_its_work_is_withdrawn(bench: Bench) -> None:
    bench.engine = SlowEngine(bench.clock, 3)
    bench.server = DraftServer(bench.engine, bench.socket, WELCOME)
    bench.serve((A, HELLO), (A, opens(1, 2)), (A, wants(1, 2)))
    bench.serve((A, Update(close=[1])))
    bench.serve()
    idle_until = bench.clock.now
    while bench.engine.left > 0:
        bench.serve((A, wants(2, 2)))
    assert bench.spans(A) == [(100.0, 100.5, 0), (idle_until, bench.clock.now, 1)]


class PrefillingEngine(FakeEngine):
    """Computes for a session of A in every step, beside what it answers."""

    def step(self) -> list[Drafted | Lost]:
        answers = super().step()
        self.last_pass.append((A, 1))
        return answers


def test_of_too_many_untold_spans_the_latest_are_kept(bench: Bench) -> None:
    bench.engine = PrefillingEngine(bench.clock)
    bench.server = DraftServer(bench.engine, bench.socket, WELCOME)
    bench.serve((A, HELLO), (A, opens(1)), (B, HELLO), (B, opens(2)))
    for _ in range(protocol.MAX_SPANS + 5):
        bench.serve((B, wants(2, 2)))
    bench.serve((A, wants(1, 2)))
    spans = bench.spans(A)
    assert len(spans) == protocol.MAX_SPANS
    assert spans == sorted(spans)
    assert spans[-1][1] == bench.clock.now


def test_ten_thousand_random_frames(bench: Bench) -> None:
    """Of three peers, one of whom is as it should be and is served all the while."""
    bench.serve((C, HELLO), (C, opens(1)))
    for number, frame in enumerate(random_frames(1, 10_000)):
        bench.serve(((A, B)[number % 2], frame))
        if number % 100 == 0:
            bench.heard(C)
            bench.serve((C, wants(1, 2)))
            assert [type(message) for message in bench.heard(C)] == [Drafts]
            bench.check()
    assert bench.server.dropped["malformed message"] > 5000
    bench.socket.gone |= {A, B, C}
    for _ in range(20):
        bench.serve()
    assert bench.server.num_sessions == 0
    assert not bench.engine.held


def test_random_frames_through_real_sockets(bench: Bench, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    endpoint = Endpoint(f"ipc://{tmp_path}/drafter")
    with (
        closing(transport.Server(endpoint)) as socket,
        closing(transport.Link(endpoint)) as hostile,
        closing(transport.Link(endpoint)) as good,
    ):
        server = DraftServer(bench.engine, socket, WELCOME)

        def says(message: protocol.ToDrafter) -> protocol.ToVerifier:
            while not good.send(protocol.encode(message)):
                pass
            while (frame := good.receive()) is None or frame == protocol.encode(Drafts()):
                server.serve_once()
            return protocol.decode_to_verifier(frame)

        assert says(HELLO) == WELCOME
        for number, frame in enumerate(random_frames(3, 600)):
            while not hostile.send(frame):
                server.serve_once()
            if number % 50 == 0:
                answer = says(Update([], [Open(number, [1, 2])], [Extend(number, 2, [], 2)]))
                assert isinstance(answer, Drafts)
                assert [draft.tokens for draft in answer.drafts] == [[2, 3]]
    assert server.dropped["malformed message"] > 200


class SessionsEngine:
    """The real books of an engine, whose model says 7 after everything."""

    def __init__(self) -> None:
        self.released = 0
        self.sessions = Sessions(
            max_model_len=30,
            vocab_size=64,
            max_rows=3,
            max_tokens=16,
            chunk=8,
            release=lambda session: self.count(),
        )
        self.last_pass: list[Hashable] = []
        self.open, self.extend, self.close = (
            self.sessions.open,
            self.sessions.extend,
            self.sessions.close,
        )

    def count(self) -> None:
        self.released += 1

    def has_work(self) -> bool:
        return self.sessions.has_work

    def step(self) -> list[Drafted | Lost]:
        rows = self.sessions.plan()
        self.last_pass = [row.session.key for row in rows]
        for session, count in [(row.session, row.count) for row in rows]:
            ends = session.computed + count == len(session.tokens)
            self.sessions.advance(session, count, (7, -1.0) if ends else None)
        return self.sessions.take_answers()


def test_random_frames_on_the_books_of_an_engine(bench: Bench) -> None:
    engine = SessionsEngine()
    server = DraftServer(engine, bench.socket, WELCOME)
    for number, frame in enumerate(random_frames(5, 10_000)):
        good: protocol.ToDrafter = HELLO
        if number % 10 > 1:
            good = Update([], [Open(number % 7, [1, 2])], [Extend(number % 7, 2, [], 2)])
        for sent in (frame, protocol.encode(good)):
            bench.socket.arrived.append(((A, B)[number % 2], sent))
        server.serve_once()
        assert len(engine.sessions) == server.num_sessions
    answers = [message for _, message in bench.socket.sent if isinstance(message, Drafts)]
    assert sum(len(answer.drafts) for answer in answers) > 100
    assert {lost.reason for answer in answers for lost in answer.lost} > {protocol.LOST_UNKNOWN}
    bench.socket.gone |= {A, B}
    for _ in range(20):
        server.serve_once()
    assert server.num_sessions == len(engine.sessions) == 0
    assert engine.released > 100
    assert not engine.has_work()

"""The verifier's side of the protocol against a drafter that misbehaves, on a simulated clock."""

import random
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from faulty import random_frames
from hypothesis import given, settings
from hypothesis import strategies as st

from minedraft import protocol, transport
from minedraft.config import Endpoint, MineDraftConfig
from minedraft.protocol import Draft, Drafts, Greet, Lost, Refused, Update, Welcome
from minedraft.verifier import client, session
from minedraft.verifier import turns as turns_module
from minedraft.verifier.client import DrafterClient
from minedraft.verifier.turns import Drafts as State
from minedraft.verifier.turns import Turn, Turns, take_turn

VOCAB = 50
WELCOME = Welcome(protocol.PROTOCOL_VERSION, "drafter", "v", VOCAB, 1000)


class FakeLink:
    """A transport in memory, with a clock that waiting moves on."""

    def __init__(self) -> None:
        self.now = 0.0
        self.up = True
        self.sent: list[protocol.ToDrafter] = []
        self.arriving: deque[tuple[float, protocol.ToVerifier | bytes]] = deque()
        self.on_send: Callable[[protocol.ToDrafter], None] = lambda message: None
        self.closed = False

    def wake_on(self, bell: object) -> None: ...

    def send(self, frame: bytes) -> bool:
        if self.up:
            message = protocol.decode_to_drafter(frame)
            self.sent.append(message)
            self.on_send(message)
        return self.up

    def receive(self) -> bytes | None:
        if not self.arriving or self.arriving[0][0] > self.now:
            return None
        message = self.arriving.popleft()[1]
        return message if isinstance(message, bytes) else protocol.encode(message)

    def is_up(self) -> bool:
        return self.up

    def wait(self, seconds: float) -> bool:
        if self.arriving and self.arriving[0][0] <= self.now + seconds:
            self.now = max(self.now, self.arriving[0][0])
            return True
        self.now += seconds
        return False

    def close(self) -> None:
        self.closed = True

    def answer(self, message: protocol.ToVerifier | bytes, delay: float = 0.0) -> None:
        self.arriving.append((self.now + delay, message))
        self.arriving = deque(sorted(self.arriving, key=lambda item: item[0]))

    def updates(self) -> list[Update]:
        return [message for message in self.sent if isinstance(message, Update)]


class Bench:
    """A client with its link and the tokens of its requests."""

    def __init__(self, config: MineDraftConfig | None = None, *, connect: bool = True) -> None:
        self.link = FakeLink()
        self.tokens: dict[str, list[int]] = {}
        self.client = DrafterClient(
            self.link,
            config or MineDraftConfig(),
            vocabulary_fingerprint="v",
            vocab_size=VOCAB,
            tokens_of=lambda request: self.tokens[request],
            clock=lambda: self.link.now,
        )
        if connect:
            self.client.poll()
            self.link.answer(WELCOME)
            self.client.poll()
            assert self.client.connected

    def open(self, request: str, tokens: list[int]) -> None:
        self.tokens[request] = list(tokens)
        self.client.open(request, tokens)
        self.client.flush()

    def advance(self, request: str, tokens: list[int], num_drafts: int = 3) -> None:
        self.tokens[request] += tokens
        self.client.advance(request, tokens, num_drafts)
        self.client.flush()

    def draft(self, session: int, base_len: int, tokens: list[int], delay: float = 0.0) -> None:
        draft = Draft(session, base_len, tokens, [0.0] * len(tokens))
        self.link.answer(Drafts([draft]), delay)
        if not delay:
            self.client.poll()

    def state(self, request: str) -> State:
        return self.client.state(request, self.link.now)


def test_says_hello_until_welcomed_and_then_opens_what_waits() -> None:
    bench = Bench(connect=False)
    bench.open("a", [1, 2])
    bench.advance("a", [3])
    assert bench.state("a") is State.NONE
    for _ in range(3):
        bench.client.poll(1.0)
    assert [type(message).__name__ for message in bench.link.sent] == ["Hello"] * 3
    bench.link.answer(WELCOME)
    bench.client.poll()
    (update,) = bench.link.updates()
    assert [opened.tokens for opened in update.open] == [[1, 2, 3]]
    assert [(e.base_len, e.tokens, e.num_drafts) for e in update.extend] == [(3, [], 3)]


def test_a_draft_for_the_present_length_is_ready_and_walked_by_what_is_emitted() -> None:
    bench = Bench()
    bench.open("a", [1, 2])
    bench.advance("a", [3])
    bench.draft(0, 3, [4, 5, 6])
    assert bench.state("a") is State.READY
    assert bench.client.drafts("a", 8) == [4, 5, 6]
    assert bench.client.drafts("a", 2) == [4, 5]
    bench.advance("a", [4, 5])
    assert bench.client.drafts("a", 8) == [6]
    bench.advance("a", [7])
    assert bench.client.drafts("a", 8) == []


@pytest.mark.parametrize(
    ("emitted", "rest"), [([4], [5, 6]), ([4, 5], [6]), ([9], []), ([4, 5, 6], []), ([4, 9], [])]
)
def test_a_late_draft_counts_as_far_as_it_came_true(emitted: list[int], rest: list[int]) -> None:
    bench = Bench()
    bench.open("a", [1, 2])
    bench.advance("a", [3])
    bench.advance("a", emitted)
    bench.draft(0, 3, [4, 5, 6])
    assert bench.client.drafts("a", 8) == rest


@pytest.mark.parametrize(
    ("draft", "reason"),
    [
        (Draft(7, 3, [4], [0.0]), "unknown session"),
        (Draft(0, 4, [4], [0.0]), "wrong length"),
        (Draft(0, 1, [4], [0.0]), "wrong length"),
        (Draft(0, 3, [4, 5], [0.0]), "malformed draft"),
    ],
)
def test_a_draft_that_cannot_be_is_dropped_and_counted(draft: Draft, reason: str) -> None:
    bench = Bench()
    bench.open("a", [1, 2])
    bench.advance("a", [3])
    bench.link.answer(Drafts([draft]))
    bench.client.poll()
    assert bench.client.drafts("a", 8) == []
    assert bench.client.counters.dropped == {reason: 1}


def test_a_draft_is_cut_before_a_token_that_the_target_does_not_have() -> None:
    bench = Bench()
    bench.open("a", [1, 2])
    bench.advance("a", [3])
    bench.draft(0, 3, [4, VOCAB - 1, VOCAB, 5])
    assert bench.client.drafts("a", 8) == [4, VOCAB - 1]
    assert bench.client.counters.dropped == {"token outside the vocabulary": 1}
    bench.advance("a", [7])
    bench.draft(0, 4, [VOCAB])
    assert bench.state("a") is State.NONE, "an answer without a token is no draft to wait for"


def test_an_id_used_again_at_once_gets_nothing_of_its_predecessor() -> None:
    bench = Bench()
    bench.open("a", [1, 2])
    bench.advance("a", [3])
    bench.client.close("a")
    bench.open("a", [1, 2])
    bench.advance("a", [3])
    bench.draft(0, 3, [4, 5])
    assert bench.client.drafts("a", 8) == []
    bench.draft(1, 3, [6])
    assert bench.client.drafts("a", 8) == [6]


def test_waits_only_for_a_session_that_answers_in_time() -> None:
    bench = Bench()
    bench.open("a", [1, 2])
    bench.advance("a", [3])
    assert bench.state("a") is State.NONE, "it never answered yet"
    bench.draft(0, 3, [9])
    bench.advance("a", [4])
    assert bench.state("a") is State.PENDING
    deadline = bench.client.next_deadline(["a"])
    bench.link.now = deadline + 0.001
    assert bench.state("a") is State.NONE
    assert bench.client.counters.late_requests == 1
    bench.advance("a", [5])
    assert bench.state("a") is State.NONE, "late once: not waited for until it answers"
    bench.draft(0, 5, [9])
    bench.advance("a", [6])
    assert bench.state("a") is State.NONE, "that is not what it was asked for"
    bench.draft(0, 4, [9])
    bench.advance("a", [7])
    assert bench.state("a") is State.PENDING


def test_a_drafter_slower_than_the_target_is_left_to_finish() -> None:
    """Else every step of the target would replace the wish, and no draft would ever come."""
    bench = Bench()
    bench.open("a", [1, 2])
    bench.advance("a", [3])
    for token in (4, 5):
        bench.link.now += 0.1
        bench.advance("a", [token])
    extends = [extend for update in bench.link.updates() for extend in update.extend]
    assert [(e.base_len, e.tokens) for e in extends] == [(2, [3])], "one wish at a time"
    bench.draft(0, 3, [4, 5, 6])
    assert bench.client.drafts("a", 8) == [6], "it came true so far"
    extends = [extend for update in bench.link.updates() for extend in update.extend]
    assert [(e.base_len, e.tokens) for e in extends[1:]] == [(3, [4, 5])], "then all the rest"
    bench.advance("a", [9])
    assert bench.state("a") is State.PENDING, "it has answered: worth a wait again"


def test_all_that_may_be_untold_is_still_known() -> None:
    assert client.MOST_UNTOLD + protocol.MAX_DRAFT_TOKENS + 1 <= session.TAIL


def test_a_wish_whose_answer_is_lost_is_made_again() -> None:
    bench = Bench()
    bench.open("a", [1, 2])
    bench.advance("a", [3])
    bench.advance("a", [4])
    bench.link.now += MineDraftConfig().max_wait_s
    bench.advance("a", [5])
    extends = [extend for update in bench.link.updates() for extend in update.extend]
    assert [(e.base_len, e.tokens) for e in extends] == [(2, [3]), (3, [4, 5])]


def test_a_drafter_that_is_gone_is_noticed_at_once_and_all_is_opened_again() -> None:
    bench = Bench()
    bench.open("a", [1, 2])
    bench.advance("a", [3])
    bench.draft(0, 3, [9])
    bench.link.up = False
    bench.advance("a", [4])
    assert not bench.client.connected
    assert bench.state("a") is State.NONE
    bench.advance("a", [5])
    bench.link.up = True
    bench.link.now += 1
    bench.client.poll()
    bench.link.answer(WELCOME)
    bench.client.poll()
    update = bench.link.updates()[-1]
    assert update.open == [protocol.Open(1, [1, 2, 3, 4, 5])]
    assert update.extend == [protocol.Extend(1, 5, [], 3)]
    bench.draft(0, 3, [4])
    assert bench.client.counters.dropped["unknown session"] == 1


def test_a_drafter_started_anew_is_greeted_again() -> None:
    bench = Bench()
    bench.open("a", [1])
    bench.link.answer(Greet())
    bench.client.poll()
    assert isinstance(bench.link.sent[-1], protocol.Hello)
    bench.link.answer(WELCOME)
    bench.client.poll()
    assert bench.link.updates()[-1].open == [protocol.Open(1, [1])]


@pytest.mark.parametrize(
    "answer",
    [
        Refused("no"),
        Welcome(protocol.PROTOCOL_VERSION + 1, "d", "v", VOCAB, 1000),
        Welcome(protocol.PROTOCOL_VERSION, "d", "w", VOCAB, 1000),
        Welcome(protocol.PROTOCOL_VERSION, "d", "", VOCAB + 1, 1000),
    ],
)
def test_a_drafter_that_does_not_fit_is_left_alone(answer: protocol.ToVerifier) -> None:
    bench = Bench(connect=False)
    bench.client.poll()
    bench.link.answer(answer)
    bench.client.poll()
    hellos = len(bench.link.sent)
    bench.open("a", [1])
    bench.client.poll(2.0)
    assert not bench.client.connected
    assert len(bench.link.sent) == hellos


def test_a_refusal_ends_a_wait() -> None:
    bench = Bench()
    bench.open("a", [1, 2])
    bench.advance("a", [3])
    bench.draft(0, 3, [9])
    bench.advance("a", [4])
    assert bench.state("a") is State.PENDING
    bench.link.answer(Refused("no"))
    bench.client.poll()
    assert bench.state("a") is State.NONE


def test_padding_of_the_vocabulary_does_not_matter_with_equal_tokenizers() -> None:
    bench = Bench(connect=False)
    bench.client.poll()
    bench.link.answer(Welcome(protocol.PROTOCOL_VERSION, "d", "v", VOCAB + 14, 1000))
    bench.client.poll()
    assert bench.client.connected


def test_a_full_drafter_gets_the_session_again_when_another_one_ends() -> None:
    bench = Bench()
    bench.open("a", [1])
    bench.open("b", [2])
    bench.link.answer(Drafts([], [Lost(0, protocol.LOST_KV_FULL)]))
    bench.client.poll()
    bench.advance("a", [5])
    assert bench.link.updates()[-1] == Update(close=[0]), "nothing more of a"
    bench.client.close("b")
    bench.client.flush()
    update = bench.link.updates()[-1]
    assert update.close == [1]
    assert update.open == [protocol.Open(2, [1, 5])]


def test_an_unknown_session_is_opened_again_but_not_in_a_loop() -> None:
    bench = Bench()
    bench.open("a", [1])
    for number in range(5):
        bench.link.answer(Drafts([], [Lost(number, protocol.LOST_UNKNOWN)]))
        bench.client.poll()
    assert sum(len(update.open) for update in bench.link.updates()) == 2


anything = st.one_of(
    st.builds(
        Drafts,
        st.lists(
            st.builds(
                Draft,
                st.integers(0, 6),
                st.integers(0, 9),
                st.lists(st.integers(0, VOCAB + 5), max_size=4),
                st.lists(st.floats(), max_size=4),
            ),
            max_size=3,
        ),
        st.lists(
            st.builds(Lost, st.integers(0, 6), st.sampled_from([*protocol.LOST_REASONS, "?"])),
            max_size=2,
        ),
        st.floats(),
    ),
    st.builds(
        Welcome, st.integers(1, 2), st.just("d"), st.sampled_from("vw"), st.just(VOCAB), st.just(9)
    ),
    st.just(WELCOME),
    st.just(Greet()),
    st.just(Refused("no")),
    st.binary(max_size=9),
    st.sampled_from("abc"),  # a request comes, or goes
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3),  # all requests advance
)


@settings(max_examples=200, deadline=None)
@given(st.booleans(), st.lists(anything, max_size=25))
def test_whatever_a_drafter_says_the_target_gets_tokens_it_can_verify(
    wait: bool, history: list[object]
) -> None:
    bench = Bench(MineDraftConfig(wait_for_first_drafts=wait))
    for event in history:
        bench.link.now += 0.3
        match event:
            case str() if event in bench.tokens:
                del bench.tokens[event]
                bench.client.close(event)
            case str():
                bench.open(event, [1, 2])
            case list():
                for request in bench.tokens:
                    bench.advance(request, event)
            case message:
                bench.link.answer(message)  # type: ignore[arg-type]
        bench.client.poll()
        for request, tokens in bench.tokens.items():
            assert bench.client.session_length(request) == len(tokens)
            assert all(0 <= token < VOCAB for token in bench.client.drafts(request, 9))
            if bench.state(request) is State.PENDING:
                assert bench.client.next_deadline([request]) >= bench.link.now
    assert 0 <= bench.client.counters.drafter_busy_s < float("inf")


@given(st.binary(max_size=300))
def test_noise_is_counted_and_survived(noise: bytes) -> None:
    bench = Bench()
    bench.link.answer(noise)
    bench.client.poll()
    bench.open("a", [1])
    bench.advance("a", [2])
    bench.draft(0, 2, [3])
    assert bench.client.drafts("a", 4) == [3]


def test_a_starved_request_is_not_forgotten_when_another_starved_one_ends() -> None:
    bench = Bench()
    for number, request in enumerate("abc"):
        bench.open(request, [number])
    starved = [Lost(1, protocol.LOST_KV_FULL), Lost(2, protocol.LOST_KV_FULL)]
    bench.link.answer(Drafts([], starved))
    bench.client.poll()
    bench.client.close("c")
    bench.client.flush()
    assert bench.link.updates()[-1].open == [protocol.Open(3, [1])]
    bench.link.answer(Drafts([], [Lost(3, protocol.LOST_KV_FULL)]))
    bench.client.poll()
    bench.client.close("a")
    bench.client.flush()
    assert bench.link.updates()[-1].open == [protocol.Open(4, [1])], "there is room for b now"


def test_a_starved_request_whose_id_came_back_keeps_its_new_session() -> None:
    bench = Bench()
    for number, request in enumerate("abc"):
        bench.open(request, [number])
    starved = [Lost(1, protocol.LOST_KV_FULL), Lost(0, protocol.LOST_KV_FULL)]
    bench.link.answer(Drafts([], starved))
    bench.client.poll()
    bench.open("a", [3])
    sent = len(bench.link.sent)
    bench.client.close("c")
    bench.client.flush()
    assert bench.link.sent[sent:] == [Update(close=[2])], "the new session of a is served already"


def test_a_frame_is_never_larger_than_the_drafter_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MAX_FRAME_BYTES", 20_000)
    monkeypatch.setattr(protocol, "MAX_OPEN_TOKENS", 2_500, raising=False)
    bench = Bench()
    sizes: list[int] = []
    send = bench.link.send

    def sized(frame: bytes) -> bool:
        sizes.append(len(frame))
        return send(frame)

    bench.link.send = sized  # type: ignore[method-assign]
    prompts = {f"r{i}": [(1 << 31) - 1] * length for i, length in enumerate([900] * 30 + [4000])}
    for request, tokens in prompts.items():
        bench.tokens[request] = tokens
        bench.client.open(request, tokens)
        bench.client.advance(request, [], 2)
    bench.client.flush()
    bench.link.answer(Greet())
    bench.client.poll()
    bench.link.answer(WELCOME)
    bench.client.poll()
    assert max(sizes) <= 20_000
    opened = [o for update in bench.link.updates() for o in update.open]
    assert len({o.session for o in opened}) == len(opened) == 60, "all twice but the longest one"
    extended = [e.session for update in bench.link.updates() for e in update.extend]
    assert extended == [o.session for o in opened], "each after its opening"
    assert bench.state("r30") is State.NONE


@pytest.mark.parametrize("message", [b"\xff", Drafts(), Greet(), WELCOME, Refused("no")])
def test_a_drafter_that_never_stops_talking_does_not_stop_the_target(
    message: protocol.ToVerifier | bytes,
) -> None:
    bench = Bench()
    frame = message if isinstance(message, bytes) else protocol.encode(message)
    budget = 100_000

    def endless() -> bytes:
        nonlocal budget
        budget -= 1
        assert budget, "the target listens for ever"
        return frame

    bench.link.receive = endless  # type: ignore[method-assign]
    bench.client.poll()


@pytest.mark.parametrize("trick", ["lost", "greet"])
def test_a_wait_for_first_drafts_ends_whatever_the_drafter_says(trick: str) -> None:
    bench = Bench(MineDraftConfig(wait_for_first_drafts=True))

    def answer(message: protocol.ToDrafter) -> None:
        """Just before the deadline it makes the client open the session anew."""
        if isinstance(message, protocol.Hello):
            bench.link.answer(WELCOME, 0.01)
            return
        assert isinstance(message, Update)
        for opened in message.open:
            lost = Drafts([], [Lost(opened.session, protocol.LOST_UNKNOWN)])
            bench.link.answer(lost if trick == "lost" else Greet(), 1.5)

    bench.link.on_send = answer
    bench.open("a", [1])
    bench.advance("a", [2])
    assert bench.state("a") is State.PENDING
    turns = Turns(overlap=True)
    started = bench.link.now
    clock = bounded_clock(bench)
    whole_turn(turns, bench, ["a"], clock=clock)
    assert bench.link.now - started <= 3 * MineDraftConfig().max_wait_s


def bounded_clock(bench: Bench) -> Callable[[], float]:
    def clock() -> float:
        assert bench.link.now < 100, "it waits for ever"
        return bench.link.now

    return clock


def whole_turn(
    turns: Turns,
    bench: Bench,
    running: list[str],
    *,
    may_wait: bool = True,
    clock: Callable[[], float] | None = None,
) -> Turn:
    """The turn after all slices of its wait, none of which is long."""
    clock = clock or (lambda: bench.link.now)
    while True:
        before = bench.link.now
        turn = take_turn(turns, bench.client, running, may_wait=may_wait, clock=clock)
        assert bench.link.now - before <= turns_module.WAIT_SLICE_S + turns_module.MIN_WAIT_S
        if not turn.wait_for:
            return turn


class World:
    """A random load on turns and client together: a scheduler, a target and a drafter of numbers.

    The target's next token is a function of the request and its length; the drafter knows it and
    errs at random, answers late, twice, out of order, or not at all.
    """

    K = 3

    def __init__(self, seed: int, *, overlap: bool) -> None:
        self.random = random.Random(seed)
        self.bench = Bench()
        self.bench.link.on_send = self.drafter
        self.turns = Turns(overlap=overlap)
        self.held: dict[int, tuple[str, list[int]]] = {}
        self.age: dict[str, int] = {}
        self.truth: dict[str, int] = {}
        self.count = 0

    def next_token(self, request: str, length: int) -> int:
        return hash((self.truth[request], length)) % VOCAB

    def drafter(self, message: protocol.ToDrafter) -> None:
        if isinstance(message, protocol.Hello):
            return self.bench.link.answer(WELCOME, 0.01)
        assert isinstance(message, Update)
        for number in message.close:
            self.held.pop(number, None)
        for opened in message.open:
            request = next(r for r, t in self.bench.tokens.items() if t[0] == opened.tokens[0])
            self.held[opened.session] = (request, list(opened.tokens))
        for extend in message.extend:
            if extend.session not in self.held:
                self.bench.link.answer(Drafts([], [Lost(extend.session, protocol.LOST_UNKNOWN)]))
                continue
            request, tokens = self.held[extend.session]
            tokens[extend.base_len :] = extend.tokens
            self.answer(extend.session, request, len(tokens), extend.num_drafts)
        return None

    def answer(self, session: int, request: str, length: int, num_drafts: int) -> None:
        fate = self.random.random()
        if not num_drafts or fate < 0.05:
            return
        if fate < 0.1:
            self.held.pop(session)
            reason = self.random.choice(protocol.LOST_REASONS)
            self.bench.link.answer(Drafts([], [Lost(session, reason)]), 0.01)
            return
        tokens = [
            self.next_token(request, length + i) if self.random.random() < 0.7 else 1
            for i in range(num_drafts)
        ]
        draft = Draft(session, length, tokens, [0.0] * num_drafts)
        for _ in range(self.random.choice((1, 1, 1, 2))):
            self.bench.link.answer(Drafts([draft]), self.random.choice((0.001, 0.02, 0.2, 3.0)))

    def arrive(self) -> None:
        request = f"r{self.random.randrange(40)}"  # ids come back
        if request in self.age:
            return
        self.count += 1
        self.truth[request] = self.count
        self.age[request] = 0
        self.bench.open(request, [1000 + self.count])
        self.bench.advance(request, [self.next_token(request, 1)], self.K)
        self.turns.step([request])

    def leave(self, request: str) -> None:
        del self.age[request]
        self.bench.client.close(request)
        self.turns.forget(request)

    def step(self) -> None:
        link = self.bench.link
        self.bench.client.poll()
        # A preempted request is not running for a while; it keeps its tokens and its session.
        running = [r for r in self.age if self.random.random() > 0.05]
        if not running:
            return
        before = link.now
        deadline = max((s.wait_until for s in self.bench.client._sessions.values()), default=0.0)
        may_wait = self.random.random() < 0.9
        turn = whole_turn(self.turns, self.bench, running, may_wait=may_wait)
        # What was asked before it began, and nothing that was asked meanwhile.
        assert link.now <= max(before, deadline) + turns_module.MIN_WAIT_S
        for request in turn.verify:
            self.verify(request)
        self.turns.step(turn.verify)
        self.bench.client.flush()
        link.now += 0.01
        for request in running:
            self.age[request] = 0 if request in turn.verify else self.age[request] + 1

    def verify(self, request: str) -> None:
        tokens = self.bench.tokens[request]
        emitted: list[int] = []
        for draft in [*self.bench.client.drafts(request, self.K), -1]:
            emitted.append(self.next_token(request, len(tokens) + len(emitted)))
            if emitted[-1] != draft:
                break
        tokens += emitted
        self.bench.client.advance(request, emitted, self.K)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_random_loads(seed: int, overlap: bool) -> None:
    """Everybody advances within bounded steps, waits end, and drafts are one's own."""
    world = World(seed, overlap=overlap)
    for _ in range(120):
        for _ in range(world.random.choice((0, 0, 1, 3))):
            world.arrive()
        if world.age and world.random.random() < 0.15:
            world.leave(world.random.choice(list(world.age)))
        world.step()
        # Two turns, and now and then a step in which the drafts are still out.
        assert all(age <= 12 for age in world.age.values()), world.age
    counters = world.bench.client.counters
    assert counters.received <= 2 * counters.requested
    live = set(world.bench.client._by_number)
    assert live <= set(world.held) | {s.number for s in world.bench.client._sessions.values()}


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32))
def test_a_perfect_drafters_drafts_are_never_somebody_elses(seed: int) -> None:
    """With a drafter that never errs, every draft that is verified is accepted."""
    world = World(seed, overlap=True)
    world.random.random = lambda: 0.5  # type: ignore[method-assign]
    rejected = []
    verify = world.verify

    def watched(request: str) -> None:
        drafts = world.bench.client.drafts(request, world.K)
        length = len(world.bench.tokens[request])
        expected = [world.next_token(request, length + i) for i in range(len(drafts))]
        if drafts != expected:
            rejected.append((request, drafts, expected))
        verify(request)

    world.verify = watched  # type: ignore[method-assign]
    for step in range(60):
        if step % 3 == 0:
            world.arrive()
        if step % 7 == 6:
            world.leave(next(iter(world.age)))
        world.step()
    assert not rejected
    assert world.bench.client.counters.received > 0


@pytest.mark.parametrize("anew", ["slowly", "by a new connection", "by a greeting", "by drafts"])
def test_a_drafter_that_refused_is_asked_again(
    anew: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client.logger, "propagate", True)
    bench = Bench()
    bench.open("a", [1])
    for _ in range(3):
        bench.link.answer(Refused("no room"))
        bench.client.poll()
    hellos = len(bench.link.sent)
    bench.client.poll(2.0)
    assert len(bench.link.sent) == hellos, "not at once"
    match anew:
        case "slowly":
            bench.link.now += client.REFUSED_INTERVAL_S
        case "by a new connection":
            bench.link.up = False
            bench.client.poll()
            bench.link.up = True
            bench.link.now += client.HELLO_INTERVAL_S
        case "by a greeting":
            bench.link.answer(Greet())
        case _:
            bench.link.answer(Drafts())
            bench.client.poll()
            bench.link.now += client.HELLO_INTERVAL_S
    bench.client.poll()
    assert isinstance(bench.link.sent[-1], protocol.Hello)
    bench.link.answer(WELCOME)
    bench.client.poll()
    assert bench.client.connected
    assert bench.link.updates()[-1].open == [protocol.Open(1, [1])]
    said = [record for record in caplog.records if "no room" in record.getMessage()]
    assert len(said) == 1, "said once"


def test_a_session_that_is_mislaid_again_and_again_is_opened_again_now_and_then() -> None:
    bench = Bench()
    bench.open("a", [1])
    for number in range(3):
        bench.link.answer(Drafts([], [Lost(number, protocol.LOST_UNKNOWN)]))
        bench.client.poll()
    bench.advance("a", [2])
    assert sum(len(update.open) for update in bench.link.updates()) == 2, "not in a loop"
    bench.link.now += client.REOPEN_INTERVAL_S
    bench.advance("a", [3])
    assert bench.link.updates()[-1].open == [protocol.Open(2, [1, 2, 3])]
    bench.draft(2, 3, [4])
    assert bench.client.drafts("a", 8) == [4]


@pytest.mark.parametrize("anew", [False, True])
def test_no_list_of_a_message_is_longer_than_is_read(
    anew: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "MAX_ENTRIES", 4)
    bench = Bench()
    for number in range(10):
        bench.tokens[str(number)] = [1, 2]
        bench.client.open(str(number), [1])
        bench.client.advance(str(number), [2], 3)
    bench.client.flush()
    opened = [o.session for update in bench.link.updates() for o in update.open]
    assert opened == list(range(10))
    if anew:
        bench.link.answer(Greet())
        bench.client.poll()
        bench.link.answer(WELCOME)
        bench.client.poll()
        opened = [o.session for update in bench.link.updates() for o in update.open]
        assert opened == list(range(20))
    extended = [e.session for update in bench.link.updates() for e in update.extend]
    assert extended == opened
    bench.client.shutdown()
    closed = [number for update in bench.link.updates() for number in update.close]
    assert closed == opened[-10:]
    for update in bench.link.updates():
        assert max(len(update.close), len(update.open), len(update.extend)) <= 4


def test_ten_thousand_random_frames() -> None:
    bench = Bench()
    for number, frame in enumerate(random_frames(2, 10_000)):
        if number % 20 == 0:
            bench.open(str(number % 3), [1, 2])
        bench.link.now += 0.01
        bench.link.answer(frame)
        bench.client.poll()
        for request in bench.tokens:
            bench.advance(request, [number % VOCAB])
            assert all(0 <= token < VOCAB for token in bench.client.drafts(request, 9))
        bench.link.sent.clear()
    assert bench.client.counters.dropped["malformed message"] > 5000
    bench.link.answer(Greet())
    bench.client.poll()
    bench.link.answer(WELCOME)
    bench.client.poll()
    assert bench.client.connected
    for request in list(bench.tokens):
        bench.client.close(request)
    left = bench.client
    assert not any((left._sessions, left._by_number, left._starved))


def test_a_drafter_that_errs_is_not_left_with_a_session_that_it_called_lost() -> None:
    bench = Bench()
    bench.open("a", [1])
    bench.link.answer(Drafts([], [Lost(0, protocol.LOST_CONTEXT)]))
    bench.client.poll()
    assert bench.link.updates()[-1] == Update(close=[0])
    sent = len(bench.link.sent)
    bench.client.close("a")
    bench.client.flush()
    assert len(bench.link.sent) == sent


def test_what_was_to_be_told_to_a_drafter_is_not_told_to_its_successor() -> None:
    """All three messages lie here when the client looks."""
    bench = Bench()
    bench.open("a", [1])
    bench.link.answer(Greet())
    for message in (WELCOME, Greet(), WELCOME):
        bench.link.answer(message)
    bench.client.poll()
    opened = [o.session for update in bench.link.updates() for o in update.open]
    assert opened == [0, 2], "not 1, of which nobody knows any more"
    bench.client.shutdown()
    assert bench.link.updates()[-1].close == [2]


def test_random_frames_through_real_sockets(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    endpoint = Endpoint(f"ipc://{tmp_path}/drafter")
    with closing(transport.Server(endpoint)) as server:
        target = DrafterClient(
            transport.Link(endpoint),
            MineDraftConfig(),
            vocabulary_fingerprint="v",
            vocab_size=VOCAB,
            tokens_of=lambda request: [1, 2],
            clock=time.monotonic,
        )
        target.open("a", [1, 2])
        target.advance("a", [], 3)

        while (hello := server.receive()) is None:
            target.poll(0.001)
        peer = hello[0]
        for frame in random_frames(4, 600):
            assert server.send(peer, frame)
            target.poll(0.001)
            while server.receive():
                pass
        while not target.connected or not target.drafts("a", 9):
            server.send(peer, protocol.encode(WELCOME))
            target.poll(0.01)
            while received := server.receive():
                message = protocol.decode_to_drafter(received[1])
                for opened in message.open if isinstance(message, Update) else ():
                    draft = Draft(opened.session, 2, [7, 8], [0.0, 0.0])
                    server.send(peer, protocol.encode(Drafts([draft])))
        assert target.drafts("a", 9) == [7, 8]
        assert target.counters.dropped["malformed message"] > 100
        target.shutdown()

"""drafter.sessions against a make-believe engine whose model hashes the whole context.

The engine keeps what vLLM would: the tokens whose keys and values are computed, position by
position, and the workers' copy of each request. A roll-back that forgets either shows at once.
"""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minedraft.drafter.sessions import CATCH_UP, Drafted, Lost, Row, Session, Sessions
from minedraft.protocol import LOST_CONTEXT, LOST_KV_FULL, LOST_UNKNOWN, LOST_VOCABULARY

VOCAB = 5
MAX_LEN = 90


def next_token(context: Sequence[int]) -> int:
    return hash(tuple(context)) % VOCAB


def continuation(context: Sequence[int], count: int) -> list[int]:
    tokens = list(context)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(context) :]


class FakeEngine:
    """Runs plans and checks them."""

    def __init__(
        self, max_rows: int = 4, max_tokens: int = 32, chunk: int = 8, max_passes: int = 1
    ) -> None:
        self.max_rows, self.max_tokens, self.max_passes = max_rows, max_tokens, max_passes
        self.released: list[Session] = []
        self.cache: dict[int, list[int]] = {}
        self.worker: dict[int, list[int]] = {}
        self.sessions = Sessions(
            max_model_len=MAX_LEN,
            vocab_size=VOCAB,
            max_rows=max_rows,
            max_tokens=max_tokens,
            chunk=chunk,
            release=self.released.append,
            max_passes=max_passes,
        )

    def step(self) -> list[Drafted | Lost]:
        plan = self.sessions.plan()
        assert len(plan) <= self.max_rows
        assert sum(row.count for row in plan) <= self.max_tokens
        assert len({row.session.number for row in plan}) == len(plan)
        num_passes = self.sessions.num_passes(plan)
        assert 1 <= num_passes <= self.max_passes
        for row in plan:
            self._compute(row)
        for _ in range(1, num_passes):
            assert self.sessions.plan() == [Row(row.session, 1) for row in plan]
            for row in plan:
                self._compute(Row(row.session, 1))
        return self.sessions.take_answers()

    def _compute(self, row: Row) -> None:
        session, start = row.session, row.session.computed
        end = start + row.count
        assert 0 < row.count <= len(session.tokens) - start
        session.handle = self
        worker = self.worker.setdefault(session.number, [])
        worker[session.agreed :] = session.tokens[session.agreed :]
        session.agreed = len(session.tokens)
        assert worker == session.tokens
        cache = self.cache.setdefault(session.number, [])
        assert cache[:start] == worker[:start]
        cache[start:] = worker[start:end]
        draft = None
        if end == len(session.tokens):
            assert session.wanted, "a draft that nobody wants"
            draft = next_token(cache), -float(len(cache))
            worker.append(draft[0])
        self.sessions.advance(session, row.count, draft)

    def drain(self, limit: int = 500) -> list[Drafted | Lost]:
        answers = []
        while self.sessions.has_work:
            answers += self.step()
            limit -= 1
            assert limit, "never finishes"
        return answers


class SessionsMachine(RuleBasedStateMachine):
    """Random traffic; every answer must be what a fresh session would have given."""

    @initialize(
        rows=st.integers(1, 4),
        tokens=st.integers(4, 32),
        chunk=st.integers(1, 8),
        passes=st.integers(1, 5),
    )
    def start(self, rows: int, tokens: int, chunk: int, passes: int) -> None:
        self.engine = FakeEngine(rows, tokens, chunk, passes)
        self.verified: dict[str, list[int]] = {}
        self.owed: dict[str, int] = {}
        self.lost: dict[str, str] = {}

    @rule(key=st.sampled_from("abcdef"), tokens=st.lists(st.integers(0, VOCAB - 1), min_size=1))
    def open(self, key: str, tokens: list[int]) -> None:
        self.engine.sessions.open(key, tokens)
        self.verified[key] = list(tokens)
        self.owed.pop(key, None)
        self.lost.pop(key, None)

    def _key(self, data: Any) -> str:
        return str(data.draw(st.sampled_from(sorted(self.verified))))

    @precondition(lambda self: self.verified)
    @rule(
        data=st.data(),
        repeated=st.integers(0, 3),
        agreeing=st.integers(0, 6),
        others=st.lists(st.integers(0, VOCAB - 1), max_size=20),
        wanted=st.integers(0, 6),
    )
    def extend(
        self, data: Any, repeated: int, agreeing: int, others: list[int], wanted: int
    ) -> None:
        key = self._key(data)
        known = self.verified[key]
        base = max(0, len(known) - repeated)
        new = continuation(known, agreeing) + others
        self.engine.sessions.extend(key, base, known[base:] + new, wanted)
        known += new
        if len(known) >= MAX_LEN:
            self._forget(key)
            self.lost[key] = LOST_CONTEXT
            return
        self.owed.pop(key, None)
        if wanted:
            self.owed[key] = min(wanted, MAX_LEN - len(known))

    @precondition(lambda self: self.verified)
    @rule(data=st.data())
    def contradict(self, data: Any) -> None:
        key = self._key(data)
        known = self.verified[key]
        self.engine.sessions.extend(key, len(known) - 1, [(known[-1] + 1) % VOCAB], 1)
        self._forget(key)
        self.lost[key] = LOST_UNKNOWN

    @precondition(lambda self: self.verified)
    @rule(data=st.data())
    def close(self, data: Any) -> None:
        key = self._key(data)
        self.engine.sessions.close(key)
        self._forget(key)

    def _forget(self, key: str) -> None:
        self.verified.pop(key)
        self.owed.pop(key, None)

    @rule(steps=st.integers(1, 4))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self._check(self.engine.step())

    def _check(self, answers: list[Drafted | Lost]) -> None:
        for answer in answers:
            key = str(answer.key)
            if isinstance(answer, Lost):
                assert answer.reason == self.lost.pop(key)
                continue
            known, count = self.verified[key], self.owed.pop(key)
            assert answer.base_len == len(known)
            assert answer.tokens == continuation(known, count)
            assert answer.logprobs == [-float(len(known) + i) for i in range(count)]

    @invariant()
    def sizes(self) -> None:
        if hasattr(self, "engine"):
            assert len(self.engine.sessions) == len(self.verified)

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self._check(self.engine.drain())
            assert not self.owed
            assert not self.lost


TestSessionsMachine = SessionsMachine.TestCase
TestSessionsMachine.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def drafted(answers: list[Drafted | Lost]) -> dict[str, Drafted]:
    assert all(isinstance(answer, Drafted) for answer in answers)
    return {str(answer.key): answer for answer in answers if isinstance(answer, Drafted)}


def test_passes_for_the_same_drafts_follow_each_other() -> None:
    engine = FakeEngine(max_passes=4)
    for key, num_drafts in (("a", 6), ("b", 3)):
        engine.sessions.open(key, [1])
        engine.sessions.extend(key, 1, [], num_drafts)
    assert list(drafted(engine.step())) == ["b"], "as many as the first that is done"
    assert list(drafted(engine.step())) == ["a"], "the other three"
    engine.sessions.extend("a", 1, engine.sessions._sessions["a"].tokens[1:], 9)
    assert [len(drafted(engine.step())) for _ in range(3)] == [0, 0, 1], "at most four at once"


@pytest.mark.parametrize("waiting", ["a prompt", "a chunk of its own prompt", "a wish"])
def test_passes_do_not_follow_each_other_while_something_waits(waiting: str) -> None:
    engine = FakeEngine(max_rows=1, chunk=8, max_passes=4)
    engine.sessions.open("a", [1] * (50 if waiting == "a chunk of its own prompt" else 1))
    engine.sessions.extend("a", len(engine.sessions._sessions["a"].tokens), [], 4)
    if waiting != "a chunk of its own prompt":
        engine.sessions.open("b", [2] * (30 if waiting == "a prompt" else 1))
    if waiting == "a wish":
        engine.sessions.extend("b", 1, [], 1)
    assert engine.sessions.num_passes(engine.sessions.plan()) == 1
    assert engine.sessions.num_passes([]) == 1


def test_prompt_is_prefilled_ahead_up_to_its_last_token() -> None:
    engine = FakeEngine(max_tokens=32, chunk=8)
    engine.sessions.open("a", [0] * 40)
    assert engine.drain() == []
    assert len(engine.cache[1]) == 39


def test_drafts_that_hold_are_kept_and_the_wish_is_answered_from_them() -> None:
    engine = FakeEngine()
    engine.sessions.open("a", [1, 2, 3])
    engine.sessions.extend("a", 3, [], 4)
    first = drafted(engine.drain())["a"].tokens
    engine.sessions.extend("a", 3, first[:2], 2)
    assert engine.sessions.plan() == []
    assert drafted(engine.step())["a"] == Drafted("a", 5, first[2:], [-5.0, -6.0])
    engine.sessions.extend("a", 5, first[2:3], 3)
    [row] = engine.sessions.plan()
    assert row.count == 1
    assert drafted(engine.drain())["a"].tokens == continuation([1, 2, 3, *first[:3]], 3)


@pytest.mark.parametrize("accepted", [0, 2, 4])
def test_catching_up_after_an_outcome_takes_one_or_two_tokens(accepted: int) -> None:
    engine = FakeEngine()
    engine.sessions.open("a", [1] * 30)
    engine.sessions.extend("a", 30, [], 4)
    tokens = drafted(engine.drain())["a"].tokens
    other = (continuation([1] * 30, accepted + 1)[-1] + 1) % VOCAB
    engine.sessions.extend("a", 30, [*tokens[:accepted], other], 4)
    [row] = engine.sessions.plan()
    assert row.count == (2 if accepted == 4 else 1)
    assert row.session.agreed == 30 + accepted  # nothing else is sent to the workers


def test_a_newer_wish_replaces_an_older_one_and_zero_cancels() -> None:
    engine = FakeEngine()
    engine.sessions.open("a", [1, 2])
    engine.sessions.extend("a", 2, [], 6)
    engine.step()
    engine.sessions.extend("a", 2, [3], 2)
    assert drafted(engine.drain())["a"].base_len == 3
    engine.sessions.extend("a", 3, [4], 2)
    engine.sessions.extend("a", 4, [], 0)
    assert engine.drain() == []


def test_answers_that_are_out_of_date_are_not_given() -> None:
    engine = FakeEngine()
    for key in "abc":
        engine.sessions.open(key, [1, 2])
        engine.sessions.extend(key, 2, [], 4)
    tokens = drafted(engine.drain())["a"].tokens
    for key in "abc":
        engine.sessions.extend(key, 2, tokens[:1], 2)  # can be answered from what is there
    engine.sessions.extend("a", 3, tokens[1:2], 0)
    engine.sessions.extend("b", 3, tokens[1:2], 1)
    engine.sessions.close("c")
    assert drafted(engine.drain()) == {"b": Drafted("b", 4, tokens[2:3], [-4.0])}


def test_plainly_decoded_tokens_wait_until_they_are_many() -> None:
    engine = FakeEngine()
    engine.sessions.open("a", [1, 2])
    engine.drain()
    for i in range(CATCH_UP + 1):
        assert not engine.sessions.has_work
        engine.sessions.extend("a", 2 + i, [0], 0)
    assert engine.sessions.has_work


def test_drafts_go_before_prefill_which_gets_a_chunk_of_what_is_left() -> None:
    engine = FakeEngine(max_rows=4, max_tokens=32, chunk=8)
    for key in "ab":
        engine.sessions.open(key, [1, 2])
        engine.sessions.extend(key, 2, [], 5)
    engine.sessions.open("ahead", [0] * 60)
    engine.sessions.open("wishing", [0] * 60)
    engine.sessions.extend("wishing", 60, [], 1)
    plan = engine.sessions.plan()
    assert [(row.session.key, row.count) for row in plan] == [("a", 2), ("b", 2), ("wishing", 8)]


def test_prefill_takes_larger_chunks_while_nobody_drafts() -> None:
    engine = FakeEngine(max_tokens=64, chunk=8)
    engine.sessions.open("a", [0] * 80)
    assert [row.count for row in engine.sessions.plan()] == [32]


def test_a_full_batch_of_drafts_does_not_starve_a_prefill() -> None:
    engine = FakeEngine(max_rows=2, max_tokens=8, chunk=4)
    engine.sessions.open("long", [0] * 60)
    engine.sessions.extend("long", 60, [], 1)
    known = {key: [i] for i, key in enumerate("abcd")}
    for key, tokens in known.items():
        engine.sessions.open(key, tokens)
        engine.sessions.extend(key, len(tokens), [], 2)
    answered: list[str] = []
    for _ in range(40):
        for key, answer in drafted(engine.step()).items():
            answered.append(key)
            if key != "long":
                known[key] += answer.tokens
                engine.sessions.extend(key, answer.base_len, answer.tokens, 2)
    assert "long" in answered
    assert {"a", "b", "c", "d"} <= set(answered)


def test_the_oldest_wish_is_served_first_and_renewing_keeps_its_place() -> None:
    engine = FakeEngine(max_rows=1)
    for key in "abc":
        engine.sessions.open(key, [1, 2])
        engine.sessions.extend(key, 2, [], 2)
    engine.sessions.extend("a", 2, [3], 2)
    assert [answer.key for answer in engine.drain()] == ["a", "b", "c"]


def test_context_limit() -> None:
    engine = FakeEngine()
    engine.sessions.open("a", [0] * (MAX_LEN - 3))
    engine.sessions.extend("a", MAX_LEN - 3, [], 8)
    tokens = drafted(engine.drain())["a"].tokens
    assert len(tokens) == 3
    engine.sessions.extend("a", MAX_LEN - 3, tokens, 8)
    engine.sessions.open("b", [0] * MAX_LEN)
    assert engine.drain() == [Lost("a", LOST_CONTEXT), Lost("b", LOST_CONTEXT)]
    assert len(engine.sessions) == 0


@pytest.mark.parametrize("bad", [VOCAB, -1])
def test_vocabulary(bad: int) -> None:
    engine = FakeEngine()
    engine.sessions.open("a", [0, bad])
    engine.sessions.open("b", [0])
    engine.sessions.extend("b", 1, [0, bad], 3)
    assert engine.drain() == [Lost("a", LOST_VOCABULARY), Lost("b", LOST_VOCABULARY)]


def test_unknown_sessions_gaps_and_empty_prompts_are_lost() -> None:
    engine = FakeEngine()
    engine.sessions.extend("nobody", 3, [1], 2)
    engine.sessions.open("gap", [1, 2])
    engine.sessions.extend("gap", 3, [1], 2)
    engine.sessions.open("empty", [])
    engine.sessions.close("none")
    assert engine.drain() == [Lost(key, LOST_UNKNOWN) for key in ("nobody", "gap", "empty")]
    assert [session.key for session in engine.released] == ["gap"]


def test_opening_a_key_again_replaces_its_session() -> None:
    engine = FakeEngine()
    engine.sessions.open("a", [1, 2])
    engine.sessions.extend("a", 2, [], 2)
    engine.sessions.open("a", [3])
    assert engine.drain() == []
    assert len(engine.sessions) == 1
    assert len(engine.released) == 1


def _holding(engine: FakeEngine, key: str, *, drafted: bool) -> Session:
    engine.sessions.open(key, [1] * 8)
    if drafted:
        engine.sessions.extend(key, 8, [], 1)
    session = next(row.session for row in engine.sessions.plan() if row.session.key == key)
    engine.drain()
    return session


def test_room_is_made_by_the_youngest_of_those_that_never_drafted() -> None:
    engine = FakeEngine()
    names = {"old": True, "idle": False, "young": True, "late": False}
    held = {key: _holding(engine, key, drafted=drafted) for key, drafted in names.items()}
    make_room = engine.sessions.make_room
    assert make_room(held["old"], spared=[])
    assert make_room(held["young"], spared=[])
    assert make_room(held["old"], spared=[held["old"]])
    assert not make_room(held["old"], spared=[])
    order = ["late", "idle", "young", "old"]
    assert engine.drain() == [Lost(key, LOST_KV_FULL) for key in order]
    assert [session.key for session in engine.released] == order
    assert all(session.gone for session in held.values())


@given(st.lists(st.integers(0, 2), max_size=12), st.lists(st.integers(0, 2), max_size=12))
def test_verify_keeps_exactly_what_agrees(drafts: list[int], outcome: list[int]) -> None:
    session = Session("a", 1, [0, 1, *drafts], 2, 2, [0.5] * len(drafts))
    session.computed = session.agreed = len(session.tokens)
    session.verify(outcome)
    agreeing = 0
    while agreeing < min(len(drafts), len(outcome)) and drafts[agreeing] == outcome[agreeing]:
        agreeing += 1
    assert session.verified == 2 + len(outcome)
    assert session.tokens[: session.verified] == [0, 1, *outcome]
    assert len(session.logprobs) == len(session.tokens) - session.verified
    if agreeing == len(outcome):
        assert session.tokens[2:] == drafts
    else:
        assert session.computed == session.agreed == 2 + agreeing

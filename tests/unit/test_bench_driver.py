"""The driver asks as the load says, and books every token at the time of the step that gave it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minedraft.bench.driver import Message, Output, arrivals, run
from minedraft.bench.records import Load
from minedraft.bench.workloads import Conversation

STEP_S = 0.5


@dataclass
class Machine:
    """An engine that gives each request a token a step, and a clock that it moves."""

    now: float = 0.0
    left: dict[int, int] = field(default_factory=dict)
    asked: dict[int, list[Message]] = field(default_factory=dict)
    most: int = 0

    def add(self, request: int, messages: Sequence[Message], output_tokens: int | None) -> int:
        self.left[request] = output_tokens or 1
        self.asked[request] = [dict(message) for message in messages]
        self.most = max(self.most, len(self.left))
        return sum(len(message["content"]) for message in messages)

    def step(self) -> list[Output]:
        assert self.left, "a step without a request"
        self.now += STEP_S
        outputs = []
        for request in list(self.left):
            self.left[request] -= 1
            ended = not self.left[request]
            if ended:
                del self.left[request]
            outputs.append(Output(request, [request], f"<{request}>", ended))
        return outputs

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += seconds


TALKS = st.lists(
    st.builds(
        Conversation,
        st.lists(st.text("ab", min_size=1), min_size=1, max_size=3).map(tuple),
        st.integers(1, 5),
    ),
    min_size=1,
    max_size=8,
)


@given(TALKS, st.integers(1, 4))
def test_a_closed_loop_has_so_many_at_a_time(talks: list[Conversation], concurrency: int) -> None:
    machine = Machine()
    seconds, requests = run(
        machine,
        talks,
        Load(concurrency=concurrency),
        seed=0,
        clock=lambda: machine.now,
        sleep=machine.sleep,
    )
    assert machine.most == min(concurrency, len(talks))
    assert len(requests) == sum(len(talk.turns) for talk in talks)
    assert seconds == max(request.times_s[-1] for request in requests)
    wanted = [talk.output_tokens for talk in talks for _ in talk.turns]
    assert [request.tokens for request in requests] == wanted
    assert [set(request.token_ids) for request in requests] == [{n} for n in range(len(requests))]


@given(TALKS, st.integers(0, 9))
def test_an_open_loop_asks_when_it_is_due(talks: list[Conversation], seed: int) -> None:
    load, machine = Load(rate=1.0), Machine()
    _, requests = run(
        machine, talks, load, seed=seed, clock=lambda: machine.now, sleep=machine.sleep
    )
    due = iter(arrivals(load, len(talks), seed))
    first = 0
    for talk in talks:
        assert requests[first].arrived_s == next(due)
        assert requests[first].times_s[0] <= requests[first].arrived_s + 2 * STEP_S
        first += len(talk.turns)


def test_a_turn_follows_the_answer_to_the_one_before() -> None:
    machine = Machine()
    talks = [Conversation(("a", "b"), 2), Conversation(("c",), 1)]
    _, requests = run(
        machine, talks, Load(concurrency=2), seed=0, clock=lambda: machine.now, sleep=machine.sleep
    )
    assert machine.asked[1] == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<0><0>"},
        {"role": "user", "content": "b"},
    ]
    assert requests[1].arrived_s == requests[0].times_s[-1]
    assert requests[1].prompt_tokens == len("a<0><0>b")


def test_arrivals_are_a_poisson_process_and_the_same_for_all() -> None:
    load = Load(rate=4.0)
    times = arrivals(load, 4000, 7)
    assert times == arrivals(load, 4000, 7) != arrivals(load, 4000, 8)
    assert times == sorted(times)
    assert times[0] == 0.0
    assert times[-1] / 3999 == pytest.approx(1 / 4, rel=0.1)

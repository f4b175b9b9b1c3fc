"""The books on the steps of the target: whose result has come, and who learns of it."""

import time
from collections import deque
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from minedraft.verifier.choices import OFF
from minedraft.verifier.modes import Modes
from minedraft.verifier.session import Counters
from minedraft.verifier.stats import Stats
from minedraft.verifier.steps import PAUSE_S, Steps


class Books:
    def __init__(self) -> None:
        self.stats = Stats()
        self.modes = Modes("auto", 4)
        self.operations = cast(Any, SimpleNamespace(trace=None, stepped_at=0.0))
        self.steps = Steps(self.stats, self.modes, Counters(), self.operations)
        self.learned: list[Any] = []
        self.modes.choose(0, attached=True)
        policy: Any = self.modes.policy
        policy.stepped = self.learned.append
        policy.interrupted = lambda: self.learned.append(None)

    def plan(
        self, now: float, drafts: dict[str, int], requests: int | None = None, **to: Any
    ) -> Any:
        self.modes.choice = OFF
        return self.steps.planned(drafts, len(drafts) if requests is None else requests, now, **to)

    def end(self, now: float, emitted: dict[str, int], decoding: int = 1) -> Any:
        step = self.steps.take()
        self.steps.ended(step, emitted, now, now, decoding)
        self.operations.stepped_at = now
        return step


@given(st.lists(st.booleans(), max_size=40))
def test_results_come_in_the_order_of_the_steps(events: list[bool]) -> None:
    books, planned = Books(), deque[Any]()
    for is_plan in events:
        if is_plan:
            step = books.plan(time.monotonic(), {"a": 1})
            assert step.is_ahead == bool(planned)
            planned.append(step)
        elif planned:
            assert books.end(time.monotonic(), {"a": 2}) is planned.popleft()
        assert books.steps.oldest() is (planned[0] if planned else None)
    numbers = [step.number for step in planned]
    assert numbers == sorted(numbers)


def test_an_empty_step_is_nothing_that_the_target_is_at_work_on() -> None:
    books = Books()
    books.plan(1.0, {}, 0)
    assert books.steps.oldest() is None
    assert not books.plan(1.0, {"a": 1}).is_ahead


def test_a_step_given_ahead_begins_when_the_one_before_has_ended() -> None:
    books = Books()
    books.plan(1.0, {"a": 1})
    books.plan(1.1, {"b": 1})
    books.end(3.0, {"a": 2})
    books.end(4.0, {"b": 1})
    assert books.stats.decode_model_s == 2.0 + 1.0
    assert books.stats.steps_ahead == 1
    assert (books.stats.drafted, books.stats.accepted, books.stats.emitted) == (2, 1, 3)


def test_the_policy_learns_of_the_time_between_two_ends_with_waits_and_padding() -> None:
    books = Books()
    books.plan(1.0, {"a": 1})
    books.end(2.0, {"a": 1})
    assert books.learned == []  # when the first began is not known
    books.steps.begin(2.0)
    books.steps.waited(2.0, 0.25)
    books.plan(2.25, {"a": 2, "b": 0}, padded=3)
    books.end(3.0, {"a": 3, "b": 1})
    (step,) = books.learned
    assert (step.seconds, step.waited_s) == (1.0, 0.25)
    assert (step.drafted, step.plain, step.draft_tokens, step.padded) == (1, 1, 2, 3)


def test_it_learns_nothing_of_prefill_and_of_pauses() -> None:
    books = Books()
    books.plan(1.0, {"a": 1})
    books.end(2.0, {"a": 1})
    books.plan(2.0, {"a": 1}, 2)
    books.end(3.0, {"a": 1, "new": 1})
    assert books.learned == [None]
    books.steps.begin(3.0 + 2 * PAUSE_S)
    books.plan(3.5, {"a": 1})
    books.end(4.0, {"a": 1})
    assert books.learned == [None]

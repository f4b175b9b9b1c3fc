"""Laws of the turns: halves alternate and balance, everybody advances, waits end."""

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from minedraft.verifier.turns import Drafts, Turns, take_turn

READY, PENDING, NONE, VERIFYING = Drafts.READY, Drafts.PENDING, Drafts.NONE, Drafts.VERIFYING
IDLE = [READY, PENDING, NONE]


def run_steps(turns: Turns, requests: list[str], steps: int) -> list[set[str]]:
    """Who is verified in each step when every draft is in time."""
    verified = []
    for _ in range(steps):
        turn = turns.choose(dict.fromkeys(requests, READY))
        assert not turn.wait_for
        assert set(turn.verify) | set(turn.hide) == set(requests)
        assert not set(turn.verify) & set(turn.hide)
        turns.step(turn.verify)
        verified.append(set(turn.verify))
    return verified


@given(st.integers(2, 40), st.data())
def test_halves_alternate_and_balance_from_any_imbalance(n: int, data: st.DataObject) -> None:
    requests = [str(i) for i in range(n)]
    turns = Turns(overlap=True)
    # Any history: some advanced long ago, some in the last step, some never.
    for _ in range(data.draw(st.integers(0, 4))):
        turns.step(data.draw(st.lists(st.sampled_from(requests), unique=True)))
    verified = run_steps(turns, requests, 8)
    # Two rounds are four steps: from then on the halves are equal, and disjoint.
    for first, second in pairwise(verified[3:]):
        assert not first & second
        assert first | second == set(requests)
        assert abs(len(first) - len(second)) <= 1


@given(st.integers(1, 30), st.integers(0, 30), st.data())
def test_balance_returns_within_two_rounds_of_any_change(
    start: int, arriving: int, data: st.DataObject
) -> None:
    requests = [f"a{i}" for i in range(start)]
    turns = Turns(overlap=True)
    run_steps(turns, requests, 4)
    leaving = data.draw(st.sets(st.sampled_from(requests), max_size=start - 1))
    for request in leaving:
        turns.forget(request)
    newcomers = [f"b{i}" for i in range(arriving)]
    requests = [r for r in requests if r not in leaving] + newcomers
    turns.step(newcomers)  # their prefill
    verified = run_steps(turns, requests, 8)
    if len(requests) > 1:
        for first, second in pairwise(verified[3:]):
            assert abs(len(first) - len(second)) <= 1
            assert first | second == set(requests)


@given(st.lists(st.sampled_from(IDLE), min_size=1, max_size=20), st.booleans())
def test_a_wait_is_only_for_the_pending_and_none_is_never_hidden(
    states: list[Drafts], overlap: bool
) -> None:
    by_request = {str(i): state for i, state in enumerate(states)}
    turn = Turns(overlap=overlap).choose(by_request)
    assert all(by_request[r] is PENDING for r in turn.wait_for)
    if not turn.wait_for:
        assert turn.verify, "a step with nothing to do"
        assert all(by_request[r] is not NONE for r in turn.hide)
        assert all(by_request[r] is not PENDING for r in turn.verify)
        assert set(turn.verify) | set(turn.hide) == set(by_request)


@given(st.lists(st.sampled_from(IDLE), min_size=1, max_size=20), st.booleans())
def test_without_waiting_the_pending_are_hidden(states: list[Drafts], overlap: bool) -> None:
    by_request = {str(i): state for i, state in enumerate(states)}
    turn = Turns(overlap=overlap).choose(by_request, may_wait=False)
    assert not turn.wait_for
    assert sorted([*turn.verify, *turn.hide]) == sorted(by_request)
    assert all(by_request[r] is not PENDING for r in turn.verify)
    if READY in states:
        assert any(by_request[r] is READY for r in turn.verify)


@given(st.integers(1, 20))
def test_sequential_verifies_all_together(n: int) -> None:
    requests = [str(i) for i in range(n)]
    turns = Turns(overlap=False)
    assert all(step == set(requests) for step in run_steps(turns, requests, 3))
    assert turns.choose(dict.fromkeys(requests, READY) | {requests[0]: PENDING}).wait_for == [
        requests[0]
    ]


def test_one_request_alone_is_ordinary_speculative_decoding() -> None:
    turns = Turns(overlap=True)
    assert run_steps(turns, ["a"], 3) == [{"a"}] * 3
    assert turns.choose({"a": PENDING}).wait_for == ["a"]


def test_nobody_waits_for_the_half_that_was_just_verified() -> None:
    turns = Turns(overlap=True)
    turns.step(["a", "b"])
    turns.step(["c", "d"])
    turn = turns.choose({"a": READY, "b": READY, "c": PENDING, "d": PENDING})
    assert turn.verify == ["a", "b"]
    assert set(turn.hide) == {"c", "d"}
    assert turns.choose({"a": READY, "b": PENDING, "c": PENDING, "d": READY}).wait_for == ["b"]


@given(st.lists(st.sampled_from(list(Drafts)), min_size=1, max_size=20), st.booleans())
def test_who_is_being_verified_is_hidden_and_nobody_waits_for_him(
    states: list[Drafts], overlap: bool
) -> None:
    by_request = {str(i): state for i, state in enumerate(states)}
    turn = Turns(overlap=overlap).choose(by_request)
    busy = {r for r, state in by_request.items() if state is VERIFYING}
    assert not busy & {*turn.verify, *turn.wait_for}
    if not turn.wait_for:
        assert sorted([*turn.verify, *turn.hide]) == sorted(by_request)
        assert busy <= set(turn.hide)
    if busy and not overlap:
        assert all(by_request[r] is NONE for r in turn.verify), "one of two halves in sequence"


@given(st.integers(1, 20), st.integers(0, 20))
def test_the_half_in_flight_counts_as_half(idle: int, in_flight: int) -> None:
    states = {f"i{i}": READY for i in range(idle)} | {f"f{i}": VERIFYING for i in range(in_flight)}
    turn = Turns(overlap=True).choose(states)
    assert len(turn.verify) == min(idle, (idle + in_flight + 1) // 2)


@given(st.integers(2, 30))
def test_two_halves_in_flight_in_turn(n: int) -> None:
    """As with asynchronous scheduling: a half is given out before the result of the other comes."""
    requests = [str(i) for i in range(n)]
    turns, in_flight = Turns(overlap=True), [set[str](), set[str]()]
    for _ in range(12):
        busy = in_flight[1]
        turn = turns.choose({r: VERIFYING if r in busy else READY for r in requests})
        in_flight = [busy, set(turn.verify)]
        assert not busy & set(turn.verify)
        turns.step(sorted(in_flight[0]))
    assert in_flight[0] | in_flight[1] == set(requests)
    assert abs(len(in_flight[0]) - len(in_flight[1])) <= 1


def test_a_wait_ends_when_something_else_is_to_be_done() -> None:
    class Source:
        waits = 0

        def state(self, request: str, now: float) -> Drafts:
            return PENDING

        def next_deadline(self, requests: Sequence[str]) -> float:
            return 1e9

        def poll(self, wait_s: float = 0.0) -> bool:
            self.waits += 1
            return False

    source = Source()
    turn = take_turn(
        Turns(overlap=True),
        source,
        ["a"],
        may_wait=True,
        clock=lambda: 0.0,
        is_over=lambda: source.waits == 3,
    )
    assert turn.wait_for == ["a"]
    assert source.waits == 3

"""The policy on simulated machines: near the best fixed choice, calm, and quick to follow."""

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import Machine, Simulation

from minedraft.verifier.choices import OFF, Choice, Mode, Step
from minedraft.verifier.estimates import Acceptance, Curve, DraftingTime
from minedraft.verifier.modes import Modes
from minedraft.verifier.policy import Policy

K = 4
WARM_UP, MEASURED = 300, 1000
"""Rounds: turns of every request."""
LUCK = 0.005
"""What is emitted is drawn by lot: so much more or less."""

VERIFY = {
    "flat": lambda rows, tokens: 0.02,
    "growing": lambda rows, tokens: 0.01 + 0.001 * tokens,
    "steep": lambda rows, tokens: 0.002 + 0.004 * tokens,
    "flat, then growing": lambda rows, tokens: max(0.02, 0.0008 * tokens),
}
DRAFT = {
    "fast": lambda sessions, k: 0.002 * k,
    "middling": lambda sessions, k: 0.004 + 0.002 * k + 0.0002 * sessions * k,
    "slow": lambda sessions, k: 0.05 * k,
}


def rounds(machine: Machine, n: int, count: int) -> float:
    """Seconds for so many rounds of the best choice."""
    choice, speed = machine.best(n, K)
    return count * n * machine.tokens(choice.num_drafts) / speed


def speed_in(simulation: Simulation, n: int, seconds: float) -> float:
    """Tokens a second."""
    tokens, began = simulation.tokens, simulation.seconds
    simulation.run(n, seconds)
    return (simulation.tokens - tokens) / (simulation.seconds - began)


@pytest.mark.parametrize("noise", [pytest.param(0.0, marks=pytest.mark.slow), 0.1])
@pytest.mark.parametrize("n", [1, 2, 5, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("acceptance", [0.02, 0.5, 0.9])
@pytest.mark.parametrize("draft", DRAFT)
@pytest.mark.parametrize("verify", VERIFY)
def test_within_three_percent_of_the_best_fixed_choice(
    verify: str, draft: str, acceptance: float, n: int, noise: float
) -> None:
    machine = Machine(VERIFY[verify], DRAFT[draft], acceptance, noise)
    simulation = Simulation(machine, K, seed=1)
    best, speed = machine.best(n, K)
    assert speed_in(simulation, n, rounds(machine, n, WARM_UP)) > 0.8 * speed
    assert speed_in(simulation, n, rounds(machine, n, MEASURED)) > (0.97 - LUCK) * speed, best
    assert simulation.policy.switches <= 8


@settings(max_examples=25, deadline=None)
@given(
    base_ms=st.floats(1, 50),
    per_token_ms=st.floats(0, 5),
    pass_ms=st.floats(0.2, 60),
    acceptance=st.floats(0, 0.98),
    n=st.integers(1, 24),
)
def test_near_the_best_on_any_machine(
    base_ms: float, per_token_ms: float, pass_ms: float, acceptance: float, n: int
) -> None:
    machine = Machine(
        lambda rows, tokens: (base_ms + per_token_ms * tokens) / 1000,
        lambda sessions, k: pass_ms * k / 1000,
        acceptance,
    )
    simulation = Simulation(machine, K)
    simulation.run(n, rounds(machine, n, WARM_UP))
    assert (
        speed_in(simulation, n, rounds(machine, n, 1000))
        > (0.97 - 3 * LUCK) * machine.best(n, K)[1]
    )


def test_calm_at_a_threshold() -> None:
    """Two choices of equal speed: looking around goes on, moving to and fro does not."""
    machine = Machine(lambda rows, tokens: 0.02, lambda sessions, k: 0.01 * k, 0.5, noise=0.05)
    # tau(1) = 1.5: sequential with K = 1 takes 1.5 times as long as no drafting.
    assert machine.speed(Choice(Mode.SEQUENTIAL, 1), 1) == pytest.approx(machine.speed(OFF, 1))
    simulation = Simulation(machine, 1)
    for _ in range(6000):
        simulation.step(1)
    assert simulation.policy.switches <= 12
    assert simulation.tokens / simulation.seconds > 0.97 * machine.speed(OFF, 1)


def test_a_load_that_ramps_up_and_down() -> None:
    """What is best differs along the way: flat while small, growing when large."""
    machine = Machine(VERIFY["flat, then growing"], DRAFT["middling"], 0.8)
    simulation = Simulation(machine, K)
    ramp = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
    best: Counter[Mode] = Counter()
    for sweep in range(4):
        reached = possible = 0.0
        for n in ramp + ramp[::-1]:
            choice, speed = machine.best(n, K)
            best[choice.mode] += 1
            tokens, began = simulation.tokens, simulation.seconds
            simulation.run(n, rounds(machine, n, 150))
            reached += simulation.tokens - tokens
            possible += speed * (simulation.seconds - began)
        if sweep:
            assert reached > 0.95 * possible, f"in sweep {sweep}"
    assert len(best) >= 2


def test_an_acceptance_that_falls_to_nothing_and_returns() -> None:
    machine = Machine(VERIFY["flat"], DRAFT["middling"], 0.8)
    simulation = Simulation(machine, K)
    simulation.run(8, 60)
    assert simulation.policy.choose(8).mode is not Mode.OFF
    machine.acceptance = 0.0
    simulation.run(8, 5)
    assert speed_in(simulation, 8, 60) > 0.97 * machine.speed(OFF, 8)
    machine.acceptance = 0.8
    simulation.run(8, 120)
    assert speed_in(simulation, 8, 60) > 0.97 * machine.best(8, K)[1]


def test_a_drafter_that_becomes_slow_and_fast_again() -> None:
    machine = Machine(VERIFY["flat"], DRAFT["fast"], 0.8)
    simulation = Simulation(machine, K)
    simulation.run(8, 60)
    machine.draft_s = DRAFT["slow"]
    simulation.run(8, 60)  # ten times as slow at once, and everything known is wrong
    assert speed_in(simulation, 8, 60) > 0.97 * machine.best(8, K)[1]
    machine.draft_s = DRAFT["fast"]
    simulation.run(8, 240)
    assert speed_in(simulation, 8, 60) > 0.97 * machine.best(8, K)[1]


def test_a_drafter_that_never_catches_up_costs_next_to_nothing() -> None:
    """Every probe finds that no session has drafts yet."""
    machine = Machine(VERIFY["flat"], DRAFT["fast"], 0.9)
    simulation = Simulation(machine, K, catch_up=10**9)
    simulation.run(8, 60)
    assert simulation.tokens / simulation.seconds > 0.99 * machine.speed(OFF, 8)


def test_probes_are_rare_where_the_best_is_known() -> None:
    machine = Machine(VERIFY["growing"], DRAFT["slow"], 0.8)
    simulation = Simulation(machine, K)
    simulation.run(8, 600)
    late = simulation.history[len(simulation.history) // 2 :]
    assert sum(choice != OFF for choice in late) < 0.02 * len(late)


def alternating(*numbers: int, steps: int) -> Iterator[int]:
    while True:
        for n in numbers:
            yield from [n] * steps


def arriving(rng: random.Random, mean: float, tokens: int) -> Iterator[int]:
    """Requests of so many steps each, as many as that at a time on average."""
    left: list[int] = []
    while True:
        if rng.random() < mean / tokens:
            left.append(tokens)
        left = [steps - 1 for steps in left if steps > 1]
        yield max(1, len(left))


LOADS = {
    "1 and 2, every 5 steps": lambda rng: alternating(1, 2, steps=5),
    "4 and 8, every 20 steps": lambda rng: alternating(4, 8, steps=20),
    "2 and 16, every 10 steps": lambda rng: alternating(2, 16, steps=10),
    "short requests": lambda rng: arriving(rng, 4, 16),
    "longer requests": lambda rng: arriving(rng, 4, 64),
}


@pytest.mark.parametrize("verify", ["flat", "growing"])
@pytest.mark.parametrize("load", LOADS)
def test_a_load_that_changes_all_the_time(load: str, verify: str) -> None:
    machine = Machine(VERIFY[verify], DRAFT["middling"], 0.8, noise=0.05)
    simulation = Simulation(machine, K)
    possible, numbers = 0.0, LOADS[load](random.Random(1))
    while simulation.seconds < 300:
        n, before = next(numbers), simulation.seconds
        simulation.step(n)
        possible += machine.best(n, K)[1] * (simulation.seconds - before)
    assert simulation.tokens > 0.87 * possible


@pytest.mark.parametrize("hiccup_s", [5.0, 600.0])
def test_a_hiccup_is_soon_forgotten(hiccup_s: float) -> None:
    """A step that took for ever says nothing of the next ones."""
    machine = Machine(VERIFY["flat"], DRAFT["fast"], 0.9)
    simulation = Simulation(machine, K)
    simulation.run(4, 60)
    machine.verify_s = lambda rows, tokens: hiccup_s
    simulation.step(4)
    machine.verify_s = VERIFY["flat"]
    assert speed_in(simulation, 4, 30) > 0.95 * machine.best(4, K)[1]


def test_a_long_wait_does_not_make_the_target_infinitely_fast() -> None:
    """A hiccup is cut, and what was waited of it as well; what the target took is left."""
    policy = Policy(1)
    policy.drafted(1, 1, 1.0)
    for _ in range(16):
        policy.stepped(Step(1.0, 0.5, 2, 0, 2, 0))
    for _ in range(10):
        policy.stepped(Step(8.0, 4.0, 1, 0, 1, 0))
    assert policy.choose(1) in (OFF, Choice(Mode.SEQUENTIAL, 1))
    policy.stepped(Step(1.0, 1.0, 1, 0, 1, 0))
    assert policy.choose(2).num_drafts <= 1


def test_requests_that_take_fewer_drafts_are_not_credited_with_more() -> None:
    """Drafting for them costs K = 1, whatever K is, and does not pay."""
    policy = Policy(K)
    tokens = seconds = 0.0
    for step in range(6000):
        choice = policy.choose(4)
        if choice == OFF:
            emitted, took = 4, 0.02
            policy.stepped(Step(took, 0.0, 4, 0, 4, 0))
        else:
            emitted, took = 8, 0.05
            for _ in range(4):
                policy.verified(1, 1)
            policy.drafted(4, 1, 0.03)
            policy.stepped(Step(took, 0.03, 4, 4, 0, 4))
        if step > 500:
            tokens, seconds = tokens + emitted, seconds + took
    assert tokens / seconds > 0.97 * 200


def test_a_probe_does_not_last_through_a_time_of_prefills() -> None:
    simulation = Simulation(Machine(VERIFY["flat"], DRAFT["slow"], 0.9), K)
    simulation.run(8, 30)
    while simulation.policy.choose(8) == OFF:
        simulation.step(8)
    for _ in range(200):
        simulation.policy.interrupted()
        if simulation.policy.choose(8) == OFF:
            return
    pytest.fail("the probe goes on")


def test_requests_that_cannot_be_drafted_for_are_decoded_without() -> None:
    policy = Policy(K)
    steps = 3000
    off = 0
    for _ in range(steps):
        off += policy.choose(4) == OFF
        policy.stepped(Step(0.02, 0.0, 4, 0, 4, 0))
    assert off > 0.9 * steps


events = st.one_of(
    st.tuples(st.just("choose"), st.integers(0, 300)),
    st.tuples(st.just("verified"), st.integers(1, 32), st.integers(0, 32)),
    st.tuples(st.just("drafted"), st.integers(0, 300), st.integers(0, 32), st.floats(1e-6, 100)),
    st.tuples(st.just("stepped"), st.integers(0, 300), st.integers(0, 300), st.floats(1e-6, 100)),
    st.tuples(st.just("interrupted")),
)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 32), st.lists(st.tuples(events, st.integers(1, 40)), max_size=60))
def test_nothing_that_happens_stops_it(
    most: int, history: list[tuple[tuple[Any, ...], int]]
) -> None:
    policy = Policy(most)
    for (name, *values), times in history:
        for _ in range(times):
            if name == "stepped":
                drafted, plain, seconds = values
                step = Step(seconds, seconds / 2, drafted + plain or 1, drafted, plain, drafted)
                policy.stepped(step)
            elif name == "verified":
                policy.verified(values[0], min(values))
            else:
                result = getattr(policy, name)(*values)
                assert result is None or 0 <= result.num_drafts <= most


# --- estimates -----------------------------------------------------------------------------------


@given(st.dictionaries(st.integers(1, 5000), st.floats(1e-4, 1.0), min_size=1, max_size=30))
def test_a_curve_stays_within_its_measurements(points: dict[int, float]) -> None:
    curve = Curve()
    for size, seconds in points.items():
        curve.add(size, seconds)
    low, high = min(points.values()), max(points.values())
    sizes: tuple[float, ...] = (min(points), 17, 333.5, max(points), 10**6)
    for where in sizes:
        if where >= min(points):
            assert low * 0.8 <= curve(where) <= high * 1.2
    smallest = curve(min(points))
    assert curve(min(points) / 2) <= smallest * 0.6 + 1e-9


def test_a_curve_is_a_line_between_two_measurements() -> None:
    curve = Curve()
    curve.add(8, 0.1)
    curve.add(32, 0.4)
    assert curve(8) == pytest.approx(0.1)
    assert curve(20) == pytest.approx(0.25)
    assert curve(32) == curve(64) == pytest.approx(0.4)
    assert curve(4) == pytest.approx(0.05)


def test_a_curve_follows_what_changes() -> None:
    curve = Curve()
    for _ in range(100):
        curve.add(8, 0.1)
    for _ in range(60):
        curve.add(8, 0.3)
    assert curve(8) == pytest.approx(0.3, rel=0.02)


def test_drafting_time_is_scaled_to_other_numbers_of_drafts() -> None:
    drafting = DraftingTime()
    drafting.add(4, 2, 0.02)
    assert drafting(4, 2) == pytest.approx(0.02)
    assert drafting(4, 4) == pytest.approx(0.04)
    drafting.add(4, 4, 0.03)
    assert drafting(4, 4) == pytest.approx(0.03)


@given(st.floats(0.05, 0.95), st.integers(0, 2**32))
@settings(max_examples=20, deadline=None)
def test_acceptance_is_found_at_every_position(share: float, seed: int) -> None:
    rng = random.Random(seed)
    acceptance = Acceptance()
    for _ in range(3000):
        accepted = 0
        while accepted < 3 and rng.random() < share:
            accepted += 1
        acceptance.add(3, accepted)
    assert acceptance.tokens(1) == pytest.approx(1 + share, abs=0.2)
    assert acceptance.tokens(0) == 1
    assert 1 <= acceptance.tokens(1) <= acceptance.tokens(2) <= acceptance.tokens(8) <= 9


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 64)), max_size=40))
@settings(deadline=None)
def test_requests_alike_are_learned_from_as_if_one_after_the_other(
    outcomes: list[tuple[int, int]],
) -> None:
    together, singly = Acceptance(), Acceptance()
    for accepted, requests in outcomes:
        together.add(4, accepted, requests)
        for _ in range(requests):
            singly.add(4, accepted)
    for num_drafts in (1, 2, 4):
        assert together.tokens(num_drafts) == pytest.approx(singly.tokens(num_drafts), rel=0.02)


# --- modes ---------------------------------------------------------------------------------------


def test_a_mode_that_was_set_stays_and_off_is_off() -> None:
    modes = Modes("overlap", 3)
    assert modes.choose(8, attached=True) == Choice(Mode.OVERLAP, 3)
    assert modes.choose(8, attached=False) == OFF
    modes.setting = "sequential"
    assert modes.choose(8, attached=True) == Choice(Mode.SEQUENTIAL, 3)
    modes.setting = "off"
    assert modes.choose(8, attached=True) == OFF


def test_nothing_is_learned_without_a_drafter() -> None:
    """Else plain decoding for want of a drafter would pass for the choice of the policy."""
    modes = Modes("auto", 3)
    for _ in range(500):
        assert modes.choose(8, attached=False) == OFF
        modes.stepped(Step(0.001, 0.0, 8, 0, 8, 0))
    for _ in range(500):
        choice = modes.choose(8, attached=True)
        modes.policy.drafted(8, 3, 0.001)
        k = choice.num_drafts
        modes.stepped(Step(0.02, 0.0, 8, 8 * (k > 0), 8 * (k == 0), 8 * k))
        for _ in range(8 * (k > 0)):
            modes.policy.verified(k, k)
    assert choice.num_drafts > 0

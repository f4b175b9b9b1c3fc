"""Simulated targets and drafters for the policy: what a choice costs, on a clock of their own."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from minedraft.verifier.choices import OFF, Choice, Mode, Step
from minedraft.verifier.policy import Policy


@dataclass
class Machine:
    """Seconds of a verification by rows and tokens, and of drafting by sessions and K."""

    verify_s: Callable[[float, float], float]
    draft_s: Callable[[float, int], float]
    acceptance: float
    noise: float = 0.0

    def tokens(self, num_drafts: int) -> float:
        """Emitted by a verification, on average."""
        return sum(self.acceptance**position for position in range(num_drafts + 1))

    def speed(self, choice: Choice, n: int) -> float:
        """Tokens a second."""
        k = choice.num_drafts
        if choice.mode is Mode.OFF:
            return n / self.verify_s(n, n)
        if choice.mode is Mode.SEQUENTIAL or n == 1:
            return n * self.tokens(k) / (self.verify_s(n, n * (k + 1)) + self.draft_s(n, k))
        half = n / 2
        return (
            half * self.tokens(k) / max(self.verify_s(half, half * (k + 1)), self.draft_s(half, k))
        )

    def best(self, n: int, most_drafts: int) -> tuple[Choice, float]:
        """The best fixed choice and its speed."""
        choices = [OFF] + [
            Choice(mode, k)
            for mode in (Mode.SEQUENTIAL, Mode.OVERLAP)
            for k in range(1, most_drafts + 1)
        ]
        return max(((c, self.speed(c, n)) for c in choices), key=lambda pair: pair[1])


class Simulation:
    """A policy at work; drafts need ``catch_up`` rounds after a time without."""

    def __init__(self, machine: Machine, most_drafts: int = 4, seed: int = 0, catch_up: int = 2):
        self.machine = machine
        self.policy = Policy(most_drafts)
        self.random = random.Random(seed)
        self.catch_up = catch_up
        self.seconds = 0.0
        self.tokens = 0.0
        self.history: list[Choice] = []
        self._behind = catch_up

    def run(self, n: int, seconds: float) -> None:
        """So many requests for so long."""
        end = self.seconds + seconds
        while self.seconds < end:
            self.step(n)

    def step(self, n: int) -> None:
        choice = self.policy.choose(n)
        self.history.append(choice)
        machine, k = self.machine, choice.num_drafts
        rows = n
        if choice.mode is Mode.OVERLAP and n > 1:
            rows = n // 2 + (n % 2) * (len(self.history) % 2)
        if choice == OFF:
            self._behind = self.catch_up
        elif self._behind > 0:
            self._behind -= 1
            k, rows = 0, n
        jitter = max(0.2, self.random.gauss(1, machine.noise))
        verify_s = jitter * machine.verify_s(rows, rows * (k + 1))
        waited = 0.0
        if k:
            draft_s = machine.draft_s(rows, k)
            overlapped = choice.mode is Mode.OVERLAP and n > 1
            waited = max(0.0, draft_s - verify_s) if overlapped else draft_s
            self.policy.drafted(rows, k, draft_s)
        for _ in range(rows):
            accepted = 0
            while accepted < k and self.random.random() < machine.acceptance:
                accepted += 1
            if k:
                self.policy.verified(k, accepted)
            self.tokens += 1 + accepted
        self.seconds += verify_s + waited
        drafted = rows if k else 0
        self.policy.stepped(Step(verify_s + waited, waited, n, drafted, rows - drafted, rows * k))

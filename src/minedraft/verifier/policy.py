"""Which mode, and how many draft tokens: from measured verification, drafting and acceptance.

Three modes can be had at any time: no drafting, ordinary (sequential) speculative decoding, and
overlapped halves. With N requests, V the time of a verification, t that of drafting, K draft tokens
and tau(K) tokens emitted on average, they give (compare inequality 2.6 of MineDraft, arXiv
2603.18016)

    off          N / V(N, 0)
    sequential   N tau(K) / (V(N, K) + t(N, K))
    overlap      N tau(K) / (2 max(V(N/2, K), t(N/2, K)))

tokens a second. Where a choice has been in force at about this N, its measured speed counts; where
not, the formula, which is hopeful (estimates.py). The policy stays with one choice, its *home*, and
now and then *probes* another for some rounds: one that promises more, or one that was not tried for
long. A round is one turn of every request. What probes lose is booked, and a probe must wait until
its loss is within a small share of all time, so looking around costs next to nothing.

Plain Python, no vLLM, no clock: time is what the steps say they took.
"""

import math
from dataclasses import dataclass, field, replace

from minedraft.verifier.choices import OFF, STALE_S, Choice, Measured, Mode, Step, tokens
from minedraft.verifier.estimates import OUTLIER, Acceptance, Curve, DraftingTime

PROBE_ROUNDS = 12
"""Measured in one probe."""
OPINION_ROUNDS = 6
"""From so many measured rounds on, what was measured counts and not the formula."""
HOME_ROUNDS = 24
"""At home between two probes, at least."""
LOOK_ROUNDS = 4
"""If there was no reason for a probe then, it is asked again after so many."""
MARGIN = 1.015
"""So many times as fast must another choice be to become home."""
LOSS_SHARE = 0.006
"""Of all time may be lost by probes: so fast what they lost is forgotten."""
LOSS_ROUNDS = 12
"""So many rounds at home may be lost before another probe must wait, and by one probe."""
SETTLE_ROUNDS = 2
"""After a change of mode the pipeline is neither here nor there for so many rounds."""
PATIENCE_ROUNDS = 64
"""Longer, for sessions to be opened and caught up after a time without drafts."""
MAX_STALE_S = 600.0
MISTRUST = 1.5
"""So many times as much, or as little, as the formula promises a choice may give."""
SHORTEST_S = 1e-6
"""No verification takes less; the formula divides by it."""
SAME_LOAD = 0.35
"""Loads are kept apart by the logarithm (base 2) of the number of requests, this far at least."""


@dataclass(slots=True)
class _Visit:
    """A time in one choice without a break."""

    choice: Choice
    settling: float = 0.0
    """Rounds before the first that was measured."""
    rounds: float = 0.0
    """Measured ones."""
    seconds: float = 0.0
    """All of it."""
    tokens: float = 0.0
    """Emitted in these seconds, by the running estimate of acceptance."""
    interruptions: int = 0
    """Steps with prefill, of which nothing is learned."""


@dataclass(slots=True)
class _Load:
    """What is known of loads of about the same number of requests."""

    size: float
    """Binary logarithm of the number."""
    home: Choice
    is_guess: bool = True
    """Home is not yet where the formula or a measurement put it."""
    home_rounds: float = 0.0
    """At home since a probe was considered."""
    measured: dict[Choice, Measured] = field(default_factory=dict)


class Policy:
    """Chooses a mode, and 1 to ``most_drafts`` draft tokens."""

    def __init__(self, most_drafts: int) -> None:
        self._choices = [OFF] + [
            Choice(mode, num_drafts)
            for mode in (Mode.SEQUENTIAL, Mode.OVERLAP)
            for num_drafts in range(1, most_drafts + 1)
        ]
        self._first = Choice(Mode.SEQUENTIAL, (most_drafts + 1) // 2)
        self._verify_s = Curve()
        self._decode_s = Curve()
        self._draft_s = DraftingTime()
        self._acceptance = Acceptance()
        self._load = _Load(0.0, OFF)
        self._loads = [self._load]
        self._visit = _Visit(OFF)
        self._decoding = 1
        self._seconds = 0.0
        self._lost_s = 0.0
        self.switches = 0
        """Times that another choice became home at a load."""

    # --- what was measured --------------------------------------------------------------------

    def verified(self, num_drafts: int, accepted: int, requests: int = 1) -> None:
        """So many draft tokens of each request were verified, and so many of these accepted."""
        self._acceptance.add(num_drafts, accepted, requests)

    def drafted(self, sessions: int, num_drafts: int, seconds: float) -> None:
        """The drafter made so many tokens for each of these sessions."""
        if sessions and num_drafts:
            self._draft_s.add(sessions, num_drafts, seconds)

    def stepped(self, step: Step) -> None:
        """The target made a step in the mode that was chosen."""
        rows = step.drafted + step.plain
        if not rows:
            return
        self._seconds += step.seconds
        visit, rounds = self._visit, rows / step.decoding
        step = self._without_outlier(step, rounds)
        self._lost_s = max(0.0, self._lost_s - LOSS_SHARE * step.seconds)
        curve = self._verify_s if step.drafted else self._decode_s
        target_s = max(step.seconds - step.waited_s, SHORTEST_S)
        curve.add(rows + step.draft_tokens + step.padded, target_s)
        visit.seconds += step.seconds
        visit.tokens += tokens(step, self._acceptance)
        if self._is_settling(step):
            visit.settling += rounds
            return
        visit.rounds += rounds
        if visit.choice == self._load.home:
            self._load.home_rounds += rounds
        measured = self._load.measured.setdefault(visit.choice, Measured())
        measured.add(rounds, step)
        measured.at = self._seconds

    def interrupted(self) -> None:
        """A step with prefill, which says nothing of a choice."""
        self._visit.interruptions += 1

    def _without_outlier(self, step: Step, rounds: float) -> Step:
        """Cut to a few times what is usual: a hiccup is soon forgotten, a change soon learned."""
        choice = self._visit.choice
        if not self._is_known(choice):
            return step
        most_s = OUTLIER * rounds * self._load.measured[choice].round_s()
        if step.seconds <= most_s:
            return step
        # Waiting keeps its share: cut alone, it could leave the target no time at all.
        share = most_s / step.seconds
        return replace(step, seconds=share * step.seconds, waited_s=share * step.waited_s)

    def _is_settling(self, step: Step) -> bool:
        """Whether the step is not yet what its choice will be like."""
        visit = self._visit
        if visit.rounds:
            return False
        caught_up = step.drafted >= 0.8 * (step.drafted + step.plain)
        patience = SETTLE_ROUNDS if caught_up or visit.choice == OFF else PATIENCE_ROUNDS
        return visit.settling < patience

    # --- the choice ---------------------------------------------------------------------------

    def choose(self, decoding: int) -> Choice:
        """The choice for the next step, with so many requests past their prefill."""
        if decoding and decoding != self._decoding:
            self._decoding = decoding
            if abs(math.log2(decoding) - self._load.size) > SAME_LOAD:
                self._enter(math.log2(decoding))
        visit, home = self._visit, self._load.home
        if visit.choice == home:
            if self._load.home_rounds >= HOME_ROUNDS:
                self._load.home_rounds -= LOOK_ROUNDS
                self._look_around()
        elif visit.rounds >= PROBE_ROUNDS or self._loss_s() > LOSS_ROUNDS * self._home_round_s():
            self._end_probe()
        elif visit.interruptions > PATIENCE_ROUNDS:
            self._leave()
            self._go(home)
        return self._visit.choice

    def _enter(self, size: float) -> None:
        """Another load. Where little is known of it, the formula chooses."""
        if self._visit.choice != self._load.home and self._visit.rounds >= OPINION_ROUNDS:
            self._end_probe()
        else:
            self._leave()
        nearest = min(self._loads, key=lambda load: abs(load.size - size))
        if abs(nearest.size - size) > SAME_LOAD:
            nearest = _Load(size, self._load.home)
            self._loads.append(nearest)
        self._load = nearest
        if not self._is_informed():
            return  # what is tried goes on until it says something
        if nearest.is_guess or not self._is_known(nearest.home):
            nearest.home = max(self._possible(), key=self._speed)
            nearest.is_guess = False
        self._go(nearest.home)

    def _is_known(self, choice: Choice) -> bool:
        """Whether the choice was measured at this load for long enough."""
        measured = self._load.measured.get(choice)
        return measured is not None and measured.rounds >= OPINION_ROUNDS

    def _is_informed(self) -> bool:
        """Whether the formula has what it needs."""
        return bool(self._draft_s and (self._decode_s or self._verify_s))

    def _look_around(self) -> None:
        """At home for long enough: is there anything better?"""
        home = self._load.home
        if not self._is_informed():
            return self._probe(self._first) if self._is_old(self._first) else None
        speeds = {choice: self._speed(choice) for choice in self._possible() if choice != home}
        here = self._speed(home)
        best = max(speeds, key=lambda choice: speeds[choice])
        if speeds[best] > MARGIN * here:
            # Then it is known, and will not promise so much again in vain.
            return self._probe(best)
        old = [choice for choice in speeds if self._is_old(choice)]
        if not (old and self._is_known(home)):
            return None
        best = max(old, key=lambda choice: speeds[choice])
        expected = min(max(0.0, here / speeds[best] - 1) * PROBE_ROUNDS, LOSS_ROUNDS)
        round_s = self._home_round_s()
        # Whatever was lost at a home that was slower: something is tried before long.
        self._lost_s = min(self._lost_s, 2 * LOSS_ROUNDS * round_s)
        if self._lost_s + expected * round_s <= LOSS_ROUNDS * round_s:
            self._probe(best)
        return None

    def _is_old(self, choice: Choice) -> bool:
        """Whether the choice was not in force for so long that it may be another one by now."""
        measured = self._load.measured.get(choice)
        return measured is None or self._seconds - measured.at > measured.stale_s

    def _probe(self, choice: Choice) -> None:
        self._leave()
        self._load.home_rounds = 0.0
        if choice in self._load.measured:
            self._load.measured[choice].make_old()
        self._go(choice)

    def _end_probe(self) -> None:
        """The probed choice becomes home, or not for a while."""
        visit, load = self._visit, self._load
        probed = load.measured.setdefault(visit.choice, Measured())
        if visit.rounds < OPINION_ROUNDS:  # it lost too much before it was settled
            probed.add(OPINION_ROUNDS, Step(visit.seconds, 0.0, 1, 0, visit.tokens, 0))
        probed.at = self._seconds
        self._leave()
        if self._speed(visit.choice) > MARGIN * self._speed(load.home):
            load.home, load.is_guess = visit.choice, False
            probed.stale_s = STALE_S
            self.switches += 1
        else:
            probed.stale_s = min(2 * probed.stale_s, MAX_STALE_S)
        self._go(load.home)

    def _leave(self) -> None:
        """Books what a probe lost, and how far the formula is to be trusted later."""
        choice = self._visit.choice
        if choice != self._load.home:
            self._lost_s += max(0.0, self._loss_s())
        if self._is_known(choice) and self._is_informed():
            measured = self._load.measured[choice]
            share = measured.speed(self._acceptance) / self._promise(choice)
            measured.kept = min(max(share, 1 / MISTRUST), MISTRUST)

    def _go(self, choice: Choice) -> None:
        if choice != self._visit.choice:
            self._visit = _Visit(choice)

    # --- what a choice gives ------------------------------------------------------------------

    def _possible(self) -> list[Choice]:
        """One request has no halves."""
        if self._decoding > 1:
            return self._choices
        return [choice for choice in self._choices if choice.mode is not Mode.OVERLAP]

    def _speed(self, choice: Choice) -> float:
        """Tokens a second at this load: measured if it was, promised by the formula if not."""
        if not self._is_known(choice):
            return self._promise(choice)
        measured = self._load.measured[choice]
        if self._seconds - measured.at > STALE_S:  # much may have changed since
            return measured.kept * self._promise(choice)
        return measured.speed(self._acceptance)

    def _promise(self, choice: Choice) -> float:
        """Tokens a second for the present number of requests, by the formula."""
        n, k = self._decoding, choice.num_drafts
        if choice.mode is Mode.OFF:
            return n / (self._decode_s or self._verify_s)(n)
        verify_s, emitted = self._verify_s or self._decode_s, n * self._acceptance.tokens(k)
        if choice.mode is Mode.OVERLAP:
            half = n / 2
            return emitted / (2 * max(verify_s(half * (k + 1)), self._draft_s(half, k)))
        return emitted / (verify_s(n * (k + 1)) + self._draft_s(n, k))

    def _home_round_s(self) -> float:
        """Seconds of a round at home."""
        measured = self._load.measured.get(self._load.home)
        return measured.round_s() if measured else 0.0

    def _loss_s(self) -> float:
        """Seconds that the present visit cost, compared with home."""
        measured = self._load.measured.get(self._load.home)
        if measured is None or measured.rounds < 1:
            return 0.0
        return self._visit.seconds - self._visit.tokens / self._speed(self._load.home)

"""Requests through an engine, as a load brings them: who arrives when, and when tokens come out.

Plain Python, no vLLM. Times are in seconds.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from minedraft.bench.records import Load, Request
from minedraft.bench.workloads import Conversation

Message = dict[str, str]


@dataclass(frozen=True)
class Output:
    """What an engine's step gave to one request: its newest tokens."""

    request: int
    token_ids: Sequence[int]
    text: str
    finished: bool


class Engine(Protocol):
    """What is measured."""

    def add(self, request: int, messages: Sequence[Message], output_tokens: int | None) -> int:
        """Takes a request; the tokens of its prompt. None: as many tokens as is usual."""

    def step(self) -> Sequence[Output]:
        """One step."""


def arrivals(load: Load, count: int, seed: int) -> list[float]:
    """Seconds from the start at which conversations come, ascending: a Poisson process.

    The same for all systems. In a closed loop they are zeros.
    """
    if load.concurrency:
        return [0.0] * count
    rng = random.Random(seed)
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += rng.expovariate(load.rate)
    return times


@dataclass
class _Talk:
    """A conversation under way."""

    conversation: Conversation
    first: int
    """The number of its first request; those of later turns follow."""
    messages: list[Message] = field(default_factory=list)
    turn: int = 0


def run(
    engine: Engine,
    conversations: Sequence[Conversation],
    load: Load,
    *,
    seed: int,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[float, list[Request]]:
    """All conversations; seconds from the first arrival to the last token, and every request.

    The next turn of a conversation comes when the one before was answered. Requests are in the
    order of the conversations and their turns, whatever order they ended in.
    """
    firsts, total = [], 0
    for conversation in conversations:
        firsts.append(total)
        total += len(conversation.turns)
    waiting = [
        (at, _Talk(c, first))
        for at, c, first in zip(
            arrivals(load, len(conversations), seed), conversations, firsts, strict=True
        )
    ]
    waiting.reverse()
    talks: dict[int, _Talk] = {}
    requests: dict[int, Request] = {}
    most = load.concurrency or len(conversations)
    started = clock()

    def ask(talk: _Talk, arrived_s: float) -> None:
        number = talk.first + talk.turn
        talk.messages.append({"role": "user", "content": talk.conversation.turns[talk.turn]})
        talks[number] = talk
        prompt_tokens = engine.add(number, talk.messages, talk.conversation.output_tokens)
        requests[number] = Request(prompt_tokens, arrived_s, [], [])

    def take(output: Output, now: float) -> None:
        request = requests[output.request]
        if output.token_ids:
            request.times_s.append(now)
            request.counts.append(len(output.token_ids))
            request.token_ids.extend(output.token_ids)
            request.text += output.text
        if output.finished:
            talk = talks.pop(output.request)
            talk.messages.append({"role": "assistant", "content": request.text})
            talk.turn += 1
            if talk.turn < len(talk.conversation.turns):
                ask(talk, now)

    while waiting or talks:
        now = clock() - started
        while waiting and len(talks) < most and waiting[-1][0] <= now:
            at, talk = waiting.pop()
            # Open loop: it arrived when it was due, however late the engine's step let it in.
            ask(talk, now if load.concurrency else at)
        if not talks:
            sleep(max(0.0, waiting[-1][0] - now))
            continue
        outputs = engine.step()
        now = clock() - started
        for output in outputs:
            take(output, now)
    end = max((r.times_s[-1] for r in requests.values() if r.times_s), default=0.0)
    return end, [requests[number] for number in sorted(requests)]

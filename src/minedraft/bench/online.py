"""Measures a running server, as `vllm serve` and `minedraft serve` are, from outside.

Requests are sent and timed by one event loop; what the engine measures itself comes from its page
/metrics, read before and after the run.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from prometheus_client.parser import text_string_to_metric_families

from minedraft.bench import counts
from minedraft.bench.driver import arrivals
from minedraft.bench.records import Engine, Load, Request
from minedraft.bench.workloads import Conversation
from minedraft.config import ConfigError
from minedraft.verifier.attendant import TICK_S

if TYPE_CHECKING:
    from minedraft.bench.server import Server

SETTLED_S = 4 * TICK_S
"""After so long what was done shows on the page of metrics."""
NOT_SENT = "not sent: the turn before failed"
ITERATIONS = "vllm:iteration_tokens_total_count"
"""Steps with output, by any engine of vLLM."""
STEPS = "minedraft:steps_total"
DECODE_STEPS = "minedraft:decode_steps_total"
DECODE_S = "minedraft:decode_seconds_total"
BUSY_S = "minedraft:drafter_busy_seconds_total"
WAITED_S = "minedraft:waited_seconds_total"
NAMES = counts.DRAFTING | {ITERATIONS, STEPS, DECODE_STEPS, DECODE_S, BUSY_S, WAITED_S}


async def run(
    base_url: str,
    model: str,
    conversations: Sequence[Conversation],
    load: Load,
    *,
    output_tokens: int,
    seed: int,
    temperature: float,
    ignore_eos: bool = True,
    api_key: str | None = None,
) -> tuple[float, list[Request]]:
    """Holds the conversations with the server: seconds from first arrival to last token, requests.

    The requests are in the order of the conversations and their turns, one for each turn, also if
    it failed. A turn is sent when the one before was answered, with this answer before it.
    In a closed loop as many conversations are held at a time as the load says; in an open loop
    each begins when it is due, whatever the server does. ``output_tokens``: of each answer, where
    its conversation says none. The seed is that of the arrivals: requests have none of their own,
    as MineDraft drafts for none that has. Raises ConfigError if there is no such server or model.
    """
    asked = {"model": model, "temperature": temperature, "ignore_eos": ignore_eos}
    async with _connected(base_url, api_key) as server:
        await server.check(model)
        client = _Client(server, asked, output_tokens, time.perf_counter())
        if load.concurrency:
            held = await _closed(client, conversations, load.concurrency)
        else:
            due = arrivals(load, len(conversations), seed)
            held = await _open(client, conversations, due)
        ended_s = client.now()
    requests = list(chain.from_iterable(held))
    ends_s = (request.times_s[-1] for request in requests if request.times_s)
    return max(ends_s, default=ended_s), requests


async def measurements(base_url: str) -> counts.Counts:
    """What the server's engines have counted so far, a second later. Raises ConfigError."""
    await asyncio.sleep(SETTLED_S)
    async with _connected(base_url, None) as server:
        page = await server.page("/metrics")
    try:
        return counts.read(text_string_to_metric_families(page.decode()), NAMES)
    except ValueError as error:
        raise ConfigError(f"{base_url}: /metrics is no page of Prometheus: {error}") from error


def engine_between(before: counts.Counts, after: counts.Counts, seconds: float) -> Engine:
    """What the engines counted in a run of so many seconds, all requests of other clients too.

    Raises ConfigError if the server was started anew meanwhile.
    """
    grown = counts.grown(before, after)
    if before.keys() - after.keys() or any(value < 0 for value in grown.values()):
        raise ConfigError("the server was started anew during the run; run it again")

    def spent(name: str) -> float | None:
        return grown.get((name, ""))

    modes = {mode: round(value) for mode, value in counts.labelled(grown, STEPS).items() if value}
    busy_s, waited_s = spent(BUSY_S), spent(WAITED_S)
    return Engine(
        steps=sum(modes.values()) if busy_s is not None else counts.count(grown, ITERATIONS),
        verify_s=_ratio(spent(DECODE_S), spent(DECODE_STEPS)),
        draft_s=counts.draft_s(busy_s, modes),
        drafter_idle=_rest(_ratio(busy_s, seconds)),
        hidden=_rest(_ratio(waited_s, busy_s)),
        choices=modes,
        **counts.drafting(grown),
    )


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _rest(share: float | None) -> float | None:
    return None if share is None else max(0.0, 1 - share)


@dataclass(frozen=True)
class _Client:
    server: "Server"
    asked: Mapping[str, Any]
    """What all requests say."""
    output_tokens: int
    start: float

    def now(self) -> float:
        """Seconds since the start of the run."""
        return time.perf_counter() - self.start

    async def hold(self, conversation: Conversation, arrived_s: float) -> list[Request]:
        """The requests of a conversation that began then."""
        requests: list[Request] = []
        messages: list[dict[str, str]] = []
        tokens = conversation.output_tokens or self.output_tokens
        failed = ""
        for turn in conversation.turns:
            request = Request(0, arrived_s, [], [], failed=failed)
            requests.append(request)
            if not failed:
                messages.append({"role": "user", "content": turn})
                body = {**self.asked, "messages": messages, "max_completion_tokens": tokens}
                await self.server.chat(body, self.start, request)
                messages.append({"role": "assistant", "content": request.text})
            failed = NOT_SENT if request.failed else ""
            arrived_s = self.now()
        return requests


async def _closed(
    client: _Client, conversations: Sequence[Conversation], concurrency: int
) -> list[list[Request]]:
    held: list[list[Request]] = [[] for _ in conversations]
    waiting = iter(enumerate(conversations))

    async def one_after_another() -> None:
        for index, conversation in waiting:
            held[index] = await client.hold(conversation, client.now())

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(one_after_another())
    return held


async def _open(
    client: _Client, conversations: Sequence[Conversation], due: Sequence[float]
) -> list[list[Request]]:
    tasks = []
    async with asyncio.TaskGroup() as group:
        for conversation, arrived_s in zip(conversations, due, strict=True):
            await asyncio.sleep(arrived_s - client.now())
            # Late is late: the time that this loop took counts as the request's.
            tasks.append(group.create_task(client.hold(conversation, arrived_s)))
    return [task.result() for task in tasks]


def _connected(base_url: str, api_key: str | None) -> AbstractAsyncContextManager["Server"]:
    try:
        from minedraft.bench.server import connected
    except ImportError as error:
        raise ConfigError(
            "to measure a server takes aiohttp, which vLLM has; get it with `pip install aiohttp`"
        ) from error
    return connected(base_url, api_key)

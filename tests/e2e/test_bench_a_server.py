"""A server as the benchmark measures it: real processes, tiny models."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from servers import DRAFTER_FLAGS, Process, serving

from minedraft.bench import online
from minedraft.bench.records import Engine, Load, Request
from minedraft.bench.workloads import Conversation

TOKENS = 24
CONVERSATIONS = [
    Conversation((f"a first question, number {i}", f"and a second one, number {i}"))
    for i in range(6)
]
TOO_LONG = Conversation(("short", "never sent"), output_tokens=10_000)


@pytest.fixture(scope="module")
def server(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    folder = tmp_path_factory.mktemp("s")
    folder.chmod(0o700)
    words = ["--mode", "overlap", "--draft-model", tiny.perturbed]
    words += ["--drafter-args", " ".join(DRAFTER_FLAGS)]
    with serving(tiny.target, folder, *words) as process:
        process.wait_healthy().wait_attached()
        yield process


async def measured(
    server: Process, conversations: list[Conversation], load: Load
) -> tuple[float, list[Request], Engine]:
    before = await online.measurements(server.url)
    options: dict[str, Any] = {"output_tokens": TOKENS, "seed": 3, "temperature": 0.0}
    seconds, requests = await online.run(server.url, "tiny", conversations, load, **options)
    after = await online.measurements(server.url)
    return seconds, requests, online.engine_between(before, after, seconds)


@pytest.mark.slow
def test_every_token_is_seen_and_the_engine_is_measured(server: Process) -> None:
    load = Load(concurrency=4)
    seconds, requests, engine = asyncio.run(measured(server, [*CONVERSATIONS, TOO_LONG], load))
    *whole, failed, unsent = requests
    assert {request.failed for request in whole} == {""}
    assert [request.tokens for request in whole] == [TOKENS] * len(whole)
    assert [len(request.token_ids) for request in whole] == [TOKENS] * len(whole)
    assert all(request.text and request.prompt_tokens > len("question") for request in whole)
    assert any(count > 1 for request in whole for count in request.counts)
    assert all(request.times_s == sorted(request.times_s) for request in whole)
    assert seconds == max(request.times_s[-1] for request in whole)
    assert failed.failed.startswith("HTTP 400: ")
    assert unsent.failed == online.NOT_SENT

    assert engine.steps
    assert engine.steps == sum(engine.choices.values())
    assert engine.choices["overlap"] > 0
    assert engine.verify_s
    assert 0 < engine.verify_s < seconds
    assert engine.draft_s
    assert engine.drafter_idle is not None
    assert engine.hidden is not None
    assert engine.drafted
    assert engine.accepted
    assert engine.drafted > engine.accepted == sum(engine.accepted_by_position)
    assert len(engine.accepted_by_position) == 4
    # Each answer's first token comes from the prefill, one more from each verification.
    assert engine.accepted <= len(whole) * (TOKENS - 1)

    # The same in an open loop: greedy answers do not depend on the load.
    load = Load(rate=20.0)
    _, again, _ = asyncio.run(measured(server, CONVERSATIONS, load))
    assert [request.token_ids for request in again] == [request.token_ids for request in whole]

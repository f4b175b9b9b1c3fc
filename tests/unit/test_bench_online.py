"""Requests to a server, against a tiny one in this process, and what its page of metrics says."""

import asyncio
import itertools
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from servers import free_port
from vllm_sources import sources

from minedraft.bench import counts, online
from minedraft.bench.driver import arrivals
from minedraft.bench.records import Engine, Load, Request
from minedraft.bench.workloads import Conversation
from minedraft.config import ConfigError
from minedraft.verifier.metrics import COUNTERS

web = pytest.importorskip("aiohttp.web")
test_utils = pytest.importorskip("aiohttp.test_utils")
from minedraft.bench import server as server_module  # noqa: E402

MODEL = "tiny"
PROMPT_TOKENS = 7
ONE_BY_ONE = Load(concurrency=1)
PATIENCE_S = 20.0


def chunk(text: str, ids: list[int], so_far: int, finish: str | None = None) -> bytes:
    """A chunk as vLLM sends it; ``so_far``: tokens of the answer, these among them."""
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish, "token_ids": ids}
    usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": so_far}
    return event({"id": "x", "choices": [choice], "usage": usage})


def event(said: Any) -> bytes:
    return b"data: " + json.dumps(said).encode() + b"\n\n"


ROLE = chunk("", [], 0)
DONE = b"data: [DONE]\n\n"
USAGE = event({"choices": [], "usage": {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": 3}})
FULL = [ROLE, chunk("ab", [1, 2], 2), chunk("c", [3], 3, "length"), USAGE, DONE]

Script = Callable[["Fake", Any, dict[str, Any]], Awaitable[Any]]


async def stream(request: Any, parts: list[bytes]) -> Any:
    """An answer in parts, each of which is on its way before the next is written."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for part in parts:
        await response.write(part)
        await asyncio.sleep(0.001)
    return response


@dataclass
class Fake:
    """A server that answers chats by a script, and remembers what it was asked."""

    script: Script
    bodies: list[dict[str, Any]] = field(default_factory=list)
    running: int = 0
    most: int = 0
    """Requests at once."""
    page: bytes = b""
    key: str = ""

    async def models(self, request: Any) -> Any:
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {"message": "who are you?"}}, status=401)
        return web.json_response({"object": "list", "data": [{"id": MODEL}]})

    async def chat(self, request: Any) -> Any:
        body = await request.json()
        self.bodies.append(body)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            return await self.script(self, request, body)
        finally:
            self.running -= 1

    async def metrics(self, request: Any) -> Any:
        return web.Response(body=self.page)


@asynccontextmanager
async def listening(fake: Fake) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_get("/v1/models", fake.models)
    app.router.add_post("/v1/chat/completions", fake.chat)
    app.router.add_get("/metrics", fake.metrics)
    async with test_utils.TestServer(app) as listener:
        yield f"http://127.0.0.1:{listener.port}"


def ended(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, PATIENCE_S))


def held(
    fake: Fake, conversations: list[Conversation], load: Load = ONE_BY_ONE, **more: Any
) -> tuple[float, list[Request]]:
    options: dict[str, Any] = {"output_tokens": 3, "seed": 1, "temperature": 0.0, **more}

    async def hold() -> tuple[float, list[Request]]:
        async with listening(fake) as url:
            return await online.run(url + "/v1", MODEL, conversations, load, **options)

    result: tuple[float, list[Request]] = ended(hold())
    return result


def talks(count: int, turns: int = 1) -> list[Conversation]:
    return [
        Conversation(tuple(f"question {i}.{turn}" for turn in range(turns))) for i in range(count)
    ]


async def full(fake: Fake, request: Any, body: dict[str, Any]) -> Any:
    return await stream(request, FULL)


# --- what is sent and kept ------------------------------------------------------------------------


def test_a_request_is_kept_chunk_by_chunk() -> None:
    seconds, (request,) = held(Fake(full), talks(1))
    assert request.failed == ""
    assert request.prompt_tokens == PROMPT_TOKENS
    assert request.counts == [2, 1]
    assert request.token_ids == [1, 2, 3]
    assert request.text == "abc"
    assert 0 <= request.arrived_s < request.times_s[0] < request.times_s[1] == seconds


def test_a_turn_follows_the_answer_to_the_one_before() -> None:
    fake = Fake(full)
    conversation = Conversation(("one", "two"), output_tokens=9)
    _, (first, second) = held(fake, [conversation], temperature=0.5)
    assert first.times_s[-1] < second.arrived_s < second.times_s[0]
    user, answer = {"role": "user", "content": "one"}, {"role": "assistant", "content": "abc"}
    assert [body.pop("messages") for body in fake.bodies] == [
        [user],
        [user, answer, {"role": "user", "content": "two"}],
    ]
    # No seed: MineDraft does not draft for a request that has one.
    assert fake.bodies == 2 * [
        {
            "model": MODEL,
            "temperature": 0.5,
            "ignore_eos": True,
            "max_completion_tokens": 9,
            **server_module.COUNTED,
        }
    ]


def test_output_tokens_hold_where_a_conversation_says_none() -> None:
    fake = Fake(full)
    held(fake, talks(1), output_tokens=77, ignore_eos=False)
    (body,) = fake.bodies
    assert body["max_completion_tokens"] == 77
    assert body["ignore_eos"] is False


def test_requests_are_in_the_order_of_the_conversations() -> None:
    async def first_is_last(fake: Fake, request: Any, body: dict[str, Any]) -> Any:
        question = body["messages"][-1]["content"]
        await asyncio.sleep(0.1 if question.startswith("question 0") else 0)
        return await stream(request, [chunk(question, [1], 1, "stop"), DONE])

    _, requests = held(Fake(first_is_last), talks(3, turns=2), Load(concurrency=3))
    assert [request.text for request in requests] == [
        turn for conversation in talks(3, turns=2) for turn in conversation.turns
    ]


@given(cuts=st.lists(st.integers(1, 40), min_size=1, max_size=8))
def test_events_are_the_same_however_their_bytes_are_cut(cuts: list[int]) -> None:
    text = b": a comment\r\n\r\ndata: one\r\n\r\nevent: x\ndata:two\n\ndata: [DONE]\n\n"

    async def parts() -> AsyncIterator[bytes]:
        rest, sizes = text, itertools.cycle(cuts)
        while rest:
            size = next(sizes)
            yield rest[:size]
            rest = rest[size:]

    async def read() -> list[bytes]:
        return [data async for _, data in server_module.events(parts())]

    assert asyncio.run(read()) == [b"one", b"two", b"[DONE]"]


# --- loads ----------------------------------------------------------------------------------------


def test_a_closed_loop_has_as_many_requests_at_once_as_it_says() -> None:
    fake = Fake(full)
    _, requests = held(fake, talks(7, turns=2), Load(concurrency=3))
    assert [request.failed for request in requests] == [""] * 14
    assert fake.most == 3


def test_in_an_open_loop_a_slow_server_delays_no_arrival() -> None:
    """It answers nobody until all are there."""
    count, load = 12, Load(rate=60.0)

    async def all_together(fake: Fake, request: Any, body: dict[str, Any]) -> Any:
        while fake.most < count:
            await asyncio.sleep(0.005)
        return await stream(request, FULL)

    seconds, requests = held(Fake(all_together), talks(count), load, seed=5)
    assert [request.arrived_s for request in requests] == arrivals(load, count, 5)
    assert {request.failed for request in requests} == {""}
    assert seconds == max(request.times_s[-1] for request in requests)


def test_a_request_that_is_sent_late_has_arrived_when_it_was_due() -> None:
    """Here the whole loop stands still, as if this machine were too slow."""

    async def stalls(fake: Fake, request: Any, body: dict[str, Any]) -> Any:
        if len(fake.bodies) == 1:
            time.sleep(0.3)
        return await stream(request, FULL)

    load = Load(rate=100.0)
    _, requests = held(Fake(stalls), talks(5), load, seed=5)
    assert [request.arrived_s for request in requests] == arrivals(load, 5, 5)
    assert all(request.times_s[0] > 0.3 for request in requests)


def test_of_nothing_comes_nothing() -> None:
    seconds, requests = held(Fake(full), [])
    assert requests == []
    assert seconds >= 0


# --- what goes wrong ------------------------------------------------------------------------------

CUT = object()
"""The connection is lost."""


def says(*parts: Any) -> Script:
    """For the first question of the first conversation; the others are answered in full."""

    async def script(fake: Fake, request: Any, body: dict[str, Any]) -> Any:
        if body["messages"][-1]["content"] != "question 0.0":
            return await stream(request, FULL)
        if parts[-1] is not CUT:
            return await stream(request, list(parts))
        if len(parts) > 1:
            response = web.StreamResponse()
            await response.prepare(request)
            for part in parts[:-1]:
                await response.write(part)
        request.transport.abort()
        return web.Response()

    return script


def refuses(status: int, **body: Any) -> Script:
    async def script(fake: Fake, request: Any, asked: dict[str, Any]) -> Any:
        if asked["messages"][-1]["content"] != "question 0.0":
            return await stream(request, FULL)
        return web.Response(status=status, **body)

    return script


UNCOUNTED = event({"choices": [{"index": 0, "delta": {"content": "a"}}]})
VLLM_ERROR = json.dumps({"error": {"message": "too\nlong", "type": "BadRequestError", "code": 400}})


@pytest.mark.parametrize(
    ("script", "reason", "tokens"),
    [
        (refuses(500, text="oh\x1b[31m\nno"), "HTTP 500: oh [31m no", 0),
        (refuses(500, body=b"\xff" * 10_000), "HTTP 500: ", 0),
        (refuses(400, text=VLLM_ERROR), "HTTP 400: too long", 0),
        (says(CUT), "Server disconnected", 0),
        (says(*FULL[:2], CUT), "", 2),
        (says(*FULL[:2]), "the stream ended early", 2),
        (says(*FULL[:-1]), "the stream ended early", 3),
        (says(*FULL[:2], DONE), "the answer ended as 'nothing'", 2),
        (says(ROLE, chunk("a", [1], 1, "abort"), DONE), "the answer ended as 'abort'", 1),
        (says(ROLE, b"data: {'a'}\n\n"), "an event is no chunk of a chat: ", 0),
        (says(ROLE, b"data: \xff\n\n"), "an event is no chunk of a chat: ", 0),
        (says(ROLE, event({"choices": 7})), "an event is no chunk of a chat: ", 0),
        (says(ROLE, b"data: " + VLLM_ERROR.encode() + b"\n\n", DONE), "too long", 0),
        (says(UNCOUNTED, DONE), "the server does not count the tokens", 0),
        (says(b"data: " + b"x" * 70_000), "an event is longer than 60000 bytes", 0),
    ],
)
def test_a_request_that_fails_says_why_in_one_line(
    script: Script, reason: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "MAX_BYTES", 60_000)
    seconds, requests = held(Fake(script), talks(2, turns=2))
    failed, unsent, *others = requests
    assert failed.failed.startswith(reason)
    assert failed.failed.isprintable()
    assert 0 < len(failed.failed) <= server_module.MAX_REASON
    assert failed.tokens == tokens
    assert (unsent.failed, unsent.tokens) == (online.NOT_SENT, 0)
    assert [request.failed for request in others] == ["", ""]
    assert seconds == others[-1].times_s[-1]


def test_a_stream_that_falls_silent_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(fake: Fake, request: Any, body: dict[str, Any]) -> Any:
        response = await stream(request, FULL[:2])
        await asyncio.sleep(1.0)
        return response

    monkeypatch.setattr(server_module, "SILENT_S", 0.1)
    _, (request,) = held(Fake(silent), talks(1))
    assert "Timeout" in request.failed
    assert request.tokens == 2


def refused(url: str, model: str = MODEL, **more: Any) -> str:
    options: dict[str, Any] = {"output_tokens": 3, "seed": 1, "temperature": 0.0, **more}
    with pytest.raises(ConfigError) as caught:
        ended(online.run(url, model, talks(1), ONE_BY_ONE, **options))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_server_that_is_not_there() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    assert refused(url).startswith(f"{url}: no server answers (Cannot connect to host")
    with pytest.raises(ConfigError, match="no server answers"):
        ended(online.measurements(url))


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://localhost", ""])
def test_an_address_that_is_none(url: str) -> None:
    assert "begins with http://" in refused(url)


def test_a_model_that_is_not_served_and_a_key_that_is_not_right() -> None:
    async def check() -> None:
        options: dict[str, Any] = {"output_tokens": 3, "seed": 1, "temperature": 0.0}
        async with listening(Fake(full, key="secret")) as url:

            async def run(model: str, key: str | None) -> Any:
                return await online.run(url, model, [], ONE_BY_ONE, api_key=key, **options)

            with pytest.raises(ConfigError, match=r"HTTP 401: who are you\?; this must be"):
                await run(MODEL, None)
            with pytest.raises(ConfigError, match="serves no model 'other'.*: tiny$"):
                await run("other", "secret")
            await run(MODEL, "secret")

    ended(check())


def test_without_aiohttp_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "minedraft.bench.server")
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    assert "pip install aiohttp" in refused("http://127.0.0.1:1")


# --- what the engine measured ---------------------------------------------------------------------

LABELS = ["model_name", "engine"]


class Page:
    """Metrics as vLLM and MineDraft publish them."""

    def __init__(self, *names: str) -> None:
        self._registry = CollectorRegistry()
        self._counters = {name: self._counter(name) for name in names}

    def _counter(self, name: str) -> Any:
        if name == online.ITERATIONS:
            return Histogram(name.removesuffix("_count"), ".", LABELS, registry=self._registry)
        more = {online.STEPS: ["mode"], counts.BY_POSITION: ["position"]}.get(name, [])
        return Counter(name, ".", [*LABELS, *more], registry=self._registry)

    def add(self, name: str, *values: float, label: str = "") -> None:
        """To the counter of as many engines."""
        for engine, value in enumerate(values):
            found = self._counters[name].labels("m", str(engine), *([label] if label else []))
            if name == online.ITERATIONS:
                for _ in range(int(value)):
                    found.observe(8)
            else:
                found.inc(value)

    def read(self) -> counts.Counts:
        async def read() -> counts.Counts:
            async with listening(Fake(full, page=generate_latest(self._registry))) as url:
                return await online.measurements(url)

        found: counts.Counts = ended(read())
        return found


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(online, "SETTLED_S", 0.0)


def test_what_was_counted_between_two_readings_over_all_engines() -> None:
    page = Page(*online.NAMES)
    for name in online.NAMES - {online.STEPS, counts.BY_POSITION}:
        page.add(name, 100, 50)
    page.add(online.STEPS, 5, label="overlap")
    page.add(counts.BY_POSITION, 9, label="0")
    before = page.read()
    page.add(online.ITERATIONS, 7, 7)
    page.add(counts.DRAFTS, 20, 10)
    page.add(counts.DRAFTED, 60, 40)
    page.add(counts.ACCEPTED, 30, 15)
    for position in range(11):
        page.add(counts.BY_POSITION, 11 - position, 1, label=str(position))
    page.add(online.STEPS, 6, 4, label="overlap")
    page.add(online.STEPS, 5, label="off")
    page.add(online.DECODE_STEPS, 5, 3)
    page.add(online.DECODE_S, 0.5, 1.5)
    page.add(online.BUSY_S, 1.5, 1.0)
    page.add(online.WAITED_S, 0.625)
    assert online.engine_between(before, page.read(), 10.0) == Engine(
        steps=15,
        verify_s=0.25,
        draft_s=0.25,
        drafter_idle=0.75,
        hidden=0.75,
        verifications=30,
        drafted=100,
        accepted=45,
        accepted_by_position=[12 - position for position in range(11)],
        choices={"overlap": 10, "off": 5},
    )


def test_vllm_without_drafts_has_steps_and_nothing_else() -> None:
    page = Page(online.ITERATIONS)
    page.add(online.ITERATIONS, 3)
    before = page.read()
    page.add(online.ITERATIONS, 4)
    assert online.engine_between(before, page.read(), 1.0) == Engine(steps=4)
    assert online.engine_between({}, {}, 1.0) == Engine()


@pytest.mark.parametrize("after", [{}, {(counts.DRAFTS, ""): 1.0}])
def test_a_server_that_was_started_anew_is_noticed(after: counts.Counts) -> None:
    with pytest.raises(ConfigError, match="started anew"):
        online.engine_between({(counts.DRAFTS, ""): 2.0}, after, 1.0)


def test_a_page_of_another_kind() -> None:
    async def read() -> None:
        async with listening(Fake(full, page=b"<html>{\xff")) as url:
            await online.measurements(url)

    with pytest.raises(ConfigError, match="no page of Prometheus"):
        ended(read())


def test_our_counters_are_those_that_we_publish() -> None:
    ours = {name for name in online.NAMES if name.startswith("minedraft:")}
    assert ours < {f"{family.name}_total" for family in COUNTERS}


@pytest.mark.parametrize("release", ["0.32.0", "0.33.0"])
def test_vllms_counters_are_those_that_it_publishes(release: str) -> None:
    files = ("v1/metrics/loggers.py", "v1/spec_decode/metrics.py")
    text = "".join((sources(release) / file).read_text() for file in files)
    names = {name for name in online.NAMES if name.startswith("vllm:")}
    stems = {name.removesuffix("_count") if "iteration" in name else name[:-6] for name in names}
    assert {stem for stem in stems if f'"{stem}"' not in text} == set()

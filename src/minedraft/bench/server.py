"""A running server that speaks OpenAI's API: its pages, and chats that are timed chunk by chunk.

What it says is bounded and typed; what does not fit ends the request, not the run.
"""

import time
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec

from minedraft.bench.records import Request
from minedraft.config import ConfigError
from minedraft.verifier.session import printable

MAX_BYTES = 1 << 24
"""Of an event or a page: more is not read."""
MAX_REASON = 200
"""Characters of why a request failed."""
CONNECT_S = 30.0
PAGE_S = 30.0
SILENT_S = 600.0
"""A stream that says nothing for so long has failed."""
KEEP_ALIVE_S = 2.0
"""Less than vLLM's 5: a connection that the server just closes must not be taken again."""
COUNTED: dict[str, Any] = {
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "return_token_ids": True,
}
"""How vLLM is asked for the number of tokens of each chunk, and for the tokens."""
FULL = ("length", "stop")
"""How an answer ends that is whole."""


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    """So far."""


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _Error(msgspec.Struct):
    message: str


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


_chunk = msgspec.json.Decoder(_Chunk).decode


class _AnswerError(Exception):
    """What came is no full answer, in words."""


class Server:
    """The server at a root URL, which ends without a slash."""

    def __init__(self, session: aiohttp.ClientSession, root: str) -> None:
        self._session = session
        self.root = root

    async def page(self, path: str) -> bytes:
        """What GET brings. Raises ConfigError."""
        url = f"{self.root}{path}"
        timeout = aiohttp.ClientTimeout(total=PAGE_S, sock_connect=CONNECT_S)
        try:
            async with self._session.get(url, timeout=timeout) as response:
                body = await _whole(response)
        except (aiohttp.ClientError, OSError, _AnswerError) as error:
            raise ConfigError(
                f"{self.root}: no server answers ({_reason(error)}); start one with "
                "`minedraft serve`, or give the address of one"
            ) from error
        if response.status != 200:
            raise ConfigError(
                f"{url}: {_refusal(response.status, body)}; this must be a server with OpenAI's "
                "API, and the API key its own"
            )
        return body

    async def check(self, model: str) -> None:
        """Raises ConfigError if the model is not served."""
        body = await self.page("/v1/models")
        try:
            served = [found.id for found in msgspec.json.decode(body, type=_Models).data]
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self.root}/v1/models is no list of models: {error}") from error
        if model not in served:
            raise ConfigError(
                f"{self.root} serves no model {model!r}; name one that it does: "
                + printable(", ".join(served))
            )

    async def chat(self, body: Mapping[str, Any], start: float, request: Request) -> None:
        """Asks for a chat completion and writes down what comes, and what fails, in ``request``.

        ``start``: of the run, by time.perf_counter.
        """
        url = f"{self.root}/v1/chat/completions"
        data = msgspec.json.encode({**body, **COUNTED})
        headers = {"Content-Type": "application/json"}
        try:
            async with self._session.post(url, data=data, headers=headers) as response:
                if response.status != 200:
                    raise _AnswerError(_refusal(response.status, await _whole(response)))
                await _listen(events(response.content.iter_any()), start, request)
        except (aiohttp.ClientError, OSError, _AnswerError) as error:
            request.failed = _reason(error)


@asynccontextmanager
async def connected(base_url: str, api_key: str | None = None) -> AsyncIterator[Server]:
    """The server there, which may not be up. ``/v1`` at the end is as well without."""
    root = base_url.rstrip("/").removesuffix("/v1")
    if not root.startswith(("http://", "https://")):
        raise ConfigError(f"{base_url}: the address of a server begins with http:// or https://")
    async with aiohttp.ClientSession(
        # As many connections as there are requests: who waits is for the server to say.
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENT_S),
        headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
    ) as session:
        yield Server(session, root)


async def _listen(
    stream: AsyncIterator[tuple[float, bytes]], start: float, request: Request
) -> None:
    """Reads a stream to its end. Raises _AnswerError if the answer is not whole."""
    counted, finish, is_done = 0, "", False
    async for came_at, event in stream:
        if event == b"[DONE]":
            is_done = True
            continue
        try:
            chunk = _chunk(event)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise _AnswerError(f"an event is no chunk of a chat: {error}") from error
        if chunk.error:
            raise _AnswerError(chunk.error.message)
        if chunk.usage is None:
            raise _AnswerError("the server does not count the tokens of each chunk, as vLLM does")
        request.prompt_tokens = chunk.usage.prompt_tokens
        if (new := chunk.usage.completion_tokens - counted) > 0:
            request.times_s.append(came_at - start)
            request.counts.append(new)
            counted += new
        for choice in chunk.choices:
            request.text += choice.delta.content or ""
            request.token_ids += choice.token_ids or ()
            finish = choice.finish_reason or finish
    if not is_done:
        raise _AnswerError("the stream ended early")
    if finish not in FULL:
        raise _AnswerError(f"the answer ended as {finish or 'nothing'!r}")


async def events(parts: AsyncIterable[bytes]) -> AsyncIterator[tuple[float, bytes]]:
    """The data of server-sent events, of one line each, and when they came (time.perf_counter).

    ``parts``: the bytes as they come, cut anywhere.
    """
    rest = b""
    async for part in parts:
        came_at = time.perf_counter()
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield came_at, line[5:].strip()
        if len(rest) > MAX_BYTES:
            raise _AnswerError(f"an event is longer than {MAX_BYTES} bytes")


async def _whole(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for part in response.content.iter_any():
        body += part
        if len(body) > MAX_BYTES:
            raise _AnswerError(f"a page is longer than {MAX_BYTES} bytes")
    return bytes(body)


def _refusal(status: int, body: bytes) -> str:
    """A status that is no success and what the server says of it, which may be OpenAI's error."""
    try:
        error = _chunk(body).error
    except (msgspec.MsgspecError, UnicodeDecodeError):
        error = None
    text = error.message if error else body.decode(errors="replace")
    return _line(f"HTTP {status}: {text}")


def _reason(error: Exception) -> str:
    """An exception in one line, with its class where it says nothing."""
    return _line(str(error)) or type(error).__name__


def _line(text: str) -> str:
    return " ".join(printable(text).split())[:MAX_REASON]

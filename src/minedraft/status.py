"""``GET /minedraft/status`` on vLLM's HTTP server: is a drafter attached?

``minedraft serve`` adds it; to plain `vllm serve` give ``--middleware
minedraft.status.StatusMiddleware``, and a folder in the environment variable MINEDRAFT_CONTROL.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

import msgspec

from minedraft.config import ENV_CONTROL, ConfigError
from minedraft.control import Command, Status, ask

PATH = "/minedraft/status"
TIMEOUT_S = 2.0

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]


class Report(msgspec.Struct, frozen=True):
    """The body of the answer."""

    attached: bool
    """A drafter, on every engine."""
    engines: list[Status] = []
    error: str = ""
    """Why the engines cannot be asked."""


class StatusMiddleware:
    """ASGI middleware that answers one path: 200 if drafts can come, 503 if not."""

    def __init__(self, app: Application) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answers the request, or hands it on."""
        if scope["type"] != "http" or not _is_ours(scope):
            return await self._app(scope, receive, send)
        report = await asyncio.to_thread(_report)
        body = msgspec.json.encode(report)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"cache-control", b"no-store"),
        ]
        status = 200 if report.attached else 503
        await send({"type": "http.response.start", "status": status, "headers": headers})
        is_head = scope["method"] == "HEAD"
        await send({"type": "http.response.body", "body": b"" if is_head else body})
        return None


def _is_ours(scope: Message) -> bool:
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    return path == PATH and scope["method"] in {"GET", "HEAD"}


def _report() -> Report:
    folder = os.environ.get(ENV_CONTROL)
    if not folder:
        return Report(attached=False, error=f"{ENV_CONTROL} is not set for this server")
    try:
        engines = ask(Path(folder), Command(), TIMEOUT_S)
    except ConfigError as error:
        return Report(attached=False, error=str(error))
    attached = bool(engines) and all(engine.drafter == "attached" for engine in engines)
    return Report(attached, engines)

"""The status page: one path of ours, everything else is handed on."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from minedraft import status
from minedraft.config import ENV_CONTROL
from minedraft.control import Command, ControlSocket, Status
from minedraft.status import StatusMiddleware


async def behind(scope: Any, receive: Any, send: Any) -> None:
    """The application behind the middleware."""
    await send({"type": "http.response.start", "status": 299, "headers": []})


def ask(path: str = "/minedraft/status", method: str = "GET", **more: Any) -> tuple[int, bytes]:
    """The status and the body of an answer."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "path": path, "method": method, **more}
    asyncio.run(StatusMiddleware(behind)(scope, None, send))  # type: ignore[arg-type]
    body = b"".join(message.get("body", b"") for message in sent)
    headers = dict(sent[0]["headers"])
    if b"content-length" in headers and method == "GET":
        assert int(headers[b"content-length"]) == len(body)
    return sent[0]["status"], body


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Status]:
    """What the engines say, to be filled in."""
    said: list[Status] = []

    def answer(folder: Path, command: Command, timeout_s: float) -> list[Status]:
        assert (folder, command) == (tmp_path, Command())
        assert timeout_s == status.TIMEOUT_S
        return said

    monkeypatch.setenv(ENV_CONTROL, str(tmp_path))
    monkeypatch.setattr(status, "ask", answer)
    return said


ATTACHED = Status(7, mode="overlap", drafter="attached")


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ([], 503),
        ([ATTACHED], 200),
        ([ATTACHED, ATTACHED], 200),
        ([ATTACHED, Status(8, drafter="not attached")], 503),
        ([Status(8, drafter="refused: another vocabulary")], 503),
        ([ATTACHED, Status(8, error="no answer within 2 s")], 503),
    ],
)
def test_it_is_well_if_every_engine_has_a_drafter(
    engines: list[Status], said: list[Status], code: int
) -> None:
    engines += said
    found, body = ask()
    assert found == code
    report = json.loads(body)
    assert report["attached"] == (code == 200)
    assert [engine["drafter"] for engine in report["engines"]] == [s.drafter for s in said]
    assert ask(method="HEAD") == (code, b"")


@pytest.mark.parametrize("path", ["/health", "/minedraft", "/minedraft/status/", "/v1/models"])
def test_other_paths_are_handed_on(engines: list[Status], path: str) -> None:
    assert ask(path)[0] == 299


def test_other_methods_and_protocols_are_handed_on(engines: list[Status]) -> None:
    assert ask(method="POST")[0] == 299
    assert ask(type="websocket")[0] == 299


def test_a_root_path_does_not_count(engines: list[Status]) -> None:
    engines.append(ATTACHED)
    assert ask("/proxy/minedraft/status", root_path="/proxy")[0] == 200


def test_without_a_folder_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV_CONTROL, raising=False)
    code, body = ask()
    assert code == 503
    assert json.loads(body)["error"] == "MINEDRAFT_CONTROL is not set for this server"


def test_a_folder_of_others_is_not_looked_into(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tmp_path.chmod(0o755)
    monkeypatch.setenv(ENV_CONTROL, str(tmp_path))
    code, body = ask()
    assert code == 503
    assert "chmod 700" in json.loads(body)["error"]


def test_a_real_engine_is_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("c")
    monkeypatch.setenv(ENV_CONTROL, str(folder))
    monkeypatch.setattr(status, "TIMEOUT_S", 10.0)
    control = ControlSocket(folder, lambda command: ATTACHED)

    async def serve() -> tuple[int, bytes]:
        answer = asyncio.create_task(asyncio.to_thread(ask))
        while not answer.done():
            control.serve(0.01)
            await asyncio.sleep(0.01)
        return answer.result()

    try:
        code, body = asyncio.run(serve())
    finally:
        control.close()
    assert code == 200
    assert json.loads(body)["engines"][0]["pid"] == 7

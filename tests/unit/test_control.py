"""The control socket: what engines answer, and who cannot disturb them."""

import json
import os
import re
import socket
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minedraft import control, devices
from minedraft.cli import main
from minedraft.config import ConfigError
from minedraft.control import Command, ControlSocket, Status, ask


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "control"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture(autouse=True)
def no_preload(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command is not started anew under another OpenMP."""
    monkeypatch.setattr(devices, "openmp_preload", dict)


def echo(command: Command) -> Status:
    return Status(os.getpid(), mode=command.mode or "", trace=command.trace or "")


@contextmanager
def answering(folder: Path, answer: Callable[[Command], Status] = echo) -> Iterator[ControlSocket]:
    """An engine's end that is served by a thread."""
    end = ControlSocket(folder, answer)
    stop = threading.Event()

    def loop() -> None:
        while not stop.is_set():
            end.serve(0.02)

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield end
    finally:
        stop.set()
        thread.join()
        end.close()


def connected(end: ControlSocket) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(5)
    client.connect(str(end.path))
    return client


def dead_pid() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def left_behind(folder: Path, pid: int) -> Path:
    path = folder / f"engine-{pid}.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    return path


def test_every_engine_of_the_folder_answers(folder: Path) -> None:
    with answering(folder), answering(folder):
        statuses = ask(folder, Command(mode="off", trace="/t.json"))
        assert statuses == [Status(os.getpid(), mode="off", trace="/t.json")] * 2
        assert ask(folder, Command()) == [Status(os.getpid())] * 2
    assert list(folder.iterdir()) == [], "an engine that ends removes its socket"
    assert ask(folder, Command()) == []


def test_the_folder_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    end = ControlSocket(tmp_path / "new" / "control", echo)
    assert stat.S_IMODE((tmp_path / "new" / "control").stat().st_mode) == 0o700
    end.close()


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o701, 0o770])
def test_a_folder_that_others_may_enter_is_refused(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    for use in (lambda: ControlSocket(folder, echo), lambda: ask(folder, Command())):
        with pytest.raises(ConfigError, match="only you may enter"):
            use()


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch(mode=0o600)
    with pytest.raises(ConfigError, match="control folder .*file"):
        ask(file, Command())
    with pytest.raises(ConfigError, match="No such file"):
        ask(tmp_path / "nothing", Command())
    with pytest.raises(ConfigError, match="MINEDRAFT_CONTROL"):
        ControlSocket(file, echo)
    with pytest.raises(ConfigError, match="too long"):
        ControlSocket(tmp_path / ("x" * 100), echo)


def test_a_folder_of_another_user_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(ConfigError, match="folder of yours"):
        ask(folder, Command())


def test_sockets_of_the_dead_are_removed_and_others_stay(folder: Path) -> None:
    dead, living = left_behind(folder, dead_pid()), left_behind(folder, os.getppid())
    (folder / "engine-x.sock").touch()
    with answering(folder):
        assert ask(folder, Command()) == [Status(os.getpid())]
    assert not dead.exists()
    assert living.exists(), "an engine that starts or ends just now"


def test_a_socket_left_by_a_process_of_the_same_number_is_replaced(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_serial", iter([0]))
    left_behind(folder, os.getpid())
    with answering(folder):
        assert ask(folder, Command()) == [Status(os.getpid())]


def test_an_engine_that_does_not_answer_is_named(folder: Path) -> None:
    end = ControlSocket(folder, echo)  # nobody serves it
    try:
        with answering(folder):
            silent, well = sorted(ask(folder, Command(), timeout_s=0.3), key=lambda s: not s.error)
    finally:
        end.close()
    assert silent == Status(os.getpid(), error="no answer within 0.3 s")
    assert well == Status(os.getpid())


@pytest.mark.parametrize("answer", [b"", b"{}\n", b"\xff\n", b"x" * 2 * control.MAX_BYTES])
def test_an_answer_that_is_none_is_said(folder: Path, answer: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / f"engine-{os.getpid()}.sock"))
        listener.listen()

        def serve() -> None:
            client, _ = listener.accept()
            with client:
                client.recv(1000)
                with suppress(OSError):  # it need not be read to the end
                    client.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        (status,) = ask(folder, Command())
        thread.join()
    assert status.pid == os.getpid()
    assert "no status in its answer" in status.error


@pytest.mark.parametrize(
    "line",
    [b"", b"{", b"[]", b"1", b'{"mode": "fast"}', b'{"mode": 1}', b'{"other": 1}', b"\xff",
     b'{"' + b"x" * 10_000 + b'": 1}', b"[" * 10_000],
)  # fmt: skip
def test_what_is_no_command_is_refused_with_the_reason(folder: Path, line: bytes) -> None:
    told: list[Command] = []

    def answer(command: Command) -> Status:
        told.append(command)
        return Status(os.getpid())

    with answering(folder, answer) as end, connected(end) as client:
        client.sendall(line + b"\n")
        status = json.loads(client.makefile("rb").readline())
    assert "not a command of this version" in status["error"]
    assert len(status["error"]) <= control.MAX_ERROR
    assert told == [Command()], "nothing but a status was asked for"


def test_clients_that_misbehave_hinder_nobody(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "CLIENT_S", 0.2)
    with answering(folder) as end:
        silent = connected(end)
        half = connected(end)
        half.sendall(b'{"mode":')
        gone = connected(end)
        gone.sendall(b"{}\n")
        gone.close()
        endless = connected(end)
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            endless.sendall(b"x" * 10 * control.MAX_BYTES)
        started = time.monotonic()
        assert ask(folder, Command()) == [Status(os.getpid())]
        assert time.monotonic() - started < 0.2, "it did not wait for the others"
        assert silent.recv(1) == half.recv(1) == b"", "hung up on after a while"
        for client in (silent, half, endless):
            client.close()
        assert not end._clients


def test_too_many_clients_are_hung_up_on(folder: Path) -> None:
    with answering(folder) as end:
        clients = [connected(end) for _ in range(control.MAX_CLIENTS)]
        deadline = time.monotonic() + 5
        while len(end._clients) < control.MAX_CLIENTS and time.monotonic() < deadline:
            time.sleep(0.01)
        with connected(end) as late:
            assert late.recv(1) == b""
        clients[0].sendall(b"{}\n")
        assert json.loads(clients[0].recv(1000))["pid"] == os.getpid()
        for client in clients:
            client.close()


def test_an_answer_that_fails_is_the_servers_matter_and_the_client_is_hung_up_on(
    folder: Path,
) -> None:
    def fail(command: Command) -> Status:
        raise RuntimeError

    end = ControlSocket(folder, fail)
    with connected(end) as client:
        client.sendall(b"{}\n")
        end.serve(0)  # the client comes in
        with pytest.raises(RuntimeError):
            end.serve(0.5)
        assert client.recv(1) == b""
    end.close()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.binary(max_size=50), max_size=5))
def test_a_command_in_any_pieces_is_one_command(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes]
) -> None:
    folder = tmp_path_factory.mktemp("c")
    end = ControlSocket(folder, echo)
    with connected(end) as client:
        said = b""
        end.serve(0)
        for piece in (*pieces, b"\n"):
            if b"\n" in said:
                break
            client.sendall(piece)
            said += piece
            end.serve(0)
        assert json.loads(client.recv(control.MAX_BYTES))["pid"] == os.getpid()
    end.close()


def test_the_only_running_serve_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    with pytest.raises(ConfigError, match=r"no running `minedraft serve` .* MINEDRAFT_CONTROL"):
        control.default_folder()
    folders = []
    for name in ("a", "b", "dead", "open"):
        folder = tmp_path / f"minedraft-{name}" / "control"
        folder.mkdir(mode=0o700, parents=True)
        folders.append(folder)
    left_behind(folders[0], os.getpid())
    left_behind(folders[2], dead_pid())
    left_behind(folders[3], os.getpid())
    folders[3].chmod(0o755)
    assert control.default_folder() == folders[0]
    left_behind(folders[1], os.getpid())
    with pytest.raises(ConfigError, match="several are running.*-a/control, .*-b/control$"):
        control.default_folder()


# --- the command ------------------------------------------------------------------------------


def test_the_command_tells_the_engines_and_shows_them(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Command] = []

    def answer(command: Command) -> Status:
        told.append(command)
        return Status(os.getpid(), mode="off", decision="off", sessions=4)

    monkeypatch.chdir(folder)
    words = ["control", str(folder)]
    with answering(folder, answer):
        assert main(words) == 0
        shown = capsys.readouterr().out
        assert main([*words, "--mode", "off", "--trace", "t.json", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert main([*words, "--no-trace"]) == 0
    assert [line.split()[1::2] for line in shown.splitlines() if "decision" in line] == [
        ["decision", "off"]
    ]
    assert "drafter model" not in shown, "nothing is known of it"
    assert found == [
        msgspec.to_builtins(Status(os.getpid(), mode="off", decision="off", sessions=4))
    ]
    assert told == [Command(), Command("off", str(folder / "t.json")), Command(trace="")]


def test_the_command_fails_if_an_engine_refuses(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(folder, lambda _: Status(os.getpid(), error="it cannot be")):
        assert main(["control", str(folder), "--mode", "auto"]) == 1
    assert "it cannot be" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["{folder}"], "no engine listens in .*control; is the server up"),
        (["{folder}/none"], "No such file"),
        (["{folder}", "--other"], "control does not know --other"),
    ],
)
def test_what_the_user_can_mend_is_one_line(
    folder: Path, words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["control", *(word.format(folder=folder) for word in words)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(reason, line)

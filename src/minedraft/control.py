"""A running verifier, seen and changed from outside.

Each engine listens on a Unix socket in a folder that only its user may enter. Whoever connects
writes one line of JSON, a `Command`, reads one line, a `Status`, and is hung up on.
"""

import itertools
import os
import selectors
import socket
import stat
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from minedraft.config import ENV_CONTROL, ConfigError, Mode

MAX_BYTES = 64 << 10
"""Of a command or a status."""
MAX_ERROR = 500
MAX_CLIENTS = 16
CLIENT_S = 2.0
"""A client that has not said its command by then is hung up on."""
ANSWER_S = 5.0
MAX_PATH = 107
"""Bytes in the path of a Unix socket."""

_serial = itertools.count()


class Command(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an engine is to do; without any field it is asked for its status only."""

    mode: Mode | None = None
    trace: str | None = None
    """Absolute path of a trace to start; empty to stop it."""


class Status(msgspec.Struct, frozen=True):
    """What an engine says of itself, after it did what it was told."""

    pid: int
    name: str = ""
    """The target, and its data-parallel rank if there are several."""
    mode: str = ""
    """As set."""
    decision: str = ""
    """What is done now, as in ``overlap, K=3``."""
    drafter: str = ""
    """``attached``, ``not attached`` or ``refused: why``."""
    drafter_model: str = ""
    sessions: int = 0
    running: int = 0
    """Requests."""
    trace: str = ""
    """Path of the trace that is being written."""
    error: str = ""
    """Why the command was refused, or why there is no answer."""


class ControlSocket:
    """The engine's end. Never waits for a client: one that is slow or broken is hung up on."""

    def __init__(self, folder: Path, answer: Callable[[Command], Status]) -> None:
        self._answer = answer
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{ENV_CONTROL}: {folder}: {error.strerror}") from error
        check_folder(folder)
        serial = next(_serial)  # a program may hold several engines
        extra = f"-{serial}" if serial else ""
        self.path = folder / f"engine-{os.getpid()}{extra}.sock"
        self._clients: dict[socket.socket, tuple[float, bytearray]] = {}
        """When each must have said its command, and what it said."""
        self._listener = _listen(self.path)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)

    def serve(self, seconds: float) -> None:
        """Answers what comes within so many seconds."""
        until = time.monotonic() + seconds
        left = seconds
        while left >= 0:
            for key, _ in self._selector.select(left):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._read(key.fileobj)  # type: ignore[arg-type]
            now = time.monotonic()
            for client in [c for c, (deadline, _) in self._clients.items() if deadline < now]:
                self._hang_up(client)
            left = until - now

    def close(self) -> None:
        """Hangs up on all and removes the socket."""
        self.path.unlink(missing_ok=True)
        for client in list(self._clients):
            self._hang_up(client)
        self._selector.close()
        self._listener.close()

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError:
            return time.sleep(0.01)  # out of files, most likely: not in a tight loop
        if len(self._clients) >= MAX_CLIENTS:
            return client.close()
        client.setblocking(False)
        self._clients[client] = time.monotonic() + CLIENT_S, bytearray()
        self._selector.register(client, selectors.EVENT_READ)
        return None

    def _read(self, client: socket.socket) -> None:
        said = self._clients[client][1]
        done = True
        try:
            came = client.recv(MAX_BYTES)
            said += came
            if b"\n" in came:
                # Smaller than the socket's buffer: it goes out at once, or the client is broken.
                client.send(msgspec.json.encode(self._reply(said)) + b"\n")
            else:
                done = not came or len(said) >= MAX_BYTES
        except OSError:
            pass
        finally:
            if done:
                self._hang_up(client)

    def _reply(self, said: bytearray) -> Status:
        line = said.partition(b"\n")[0]
        try:
            return self._answer(msgspec.json.decode(line, type=Command))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            refused = f"not a command of this version: {error}"[:MAX_ERROR]
            return msgspec.structs.replace(self._answer(Command()), error=refused)

    def _hang_up(self, client: socket.socket) -> None:
        del self._clients[client]
        self._selector.unregister(client)
        client.close()


def _listen(path: Path) -> socket.socket:
    if len(os.fsencode(path)) > MAX_PATH:
        raise ConfigError(f"{ENV_CONTROL}: {path} is too long for a socket; take a shorter folder")
    listener = socket.socket(socket.AF_UNIX)
    listener.setblocking(False)
    try:
        path.unlink(missing_ok=True)  # of a dead process that had our number
        listener.bind(str(path))
        listener.listen(MAX_CLIENTS)
    except OSError as error:
        listener.close()
        raise ConfigError(f"{ENV_CONTROL}: {path}: {error.strerror}") from error
    return listener


def check_folder(folder: Path) -> None:
    """Raises ConfigError unless the folder is there and only its owner, us, may enter it."""
    try:
        found = folder.stat()
    except OSError as error:
        raise ConfigError(f"control folder {folder}: {error.strerror}") from error
    private = found.st_uid == os.getuid() and not stat.S_IMODE(found.st_mode) & 0o077
    if not (private and stat.S_ISDIR(found.st_mode)):
        raise ConfigError(
            f"control folder {folder}: it must be a folder of yours that only you may enter "
            f"(chmod 700 {folder}, or name a new one)"
        )


def default_folder() -> Path:
    """The control folder of the only `minedraft serve` that this user runs. Raises ConfigError."""
    folders = []
    for folder in sorted(Path(tempfile.gettempdir()).glob("minedraft-*/control")):
        try:
            check_folder(folder)
        except ConfigError:
            continue  # another user's
        if any(_is_alive(_pid(path)) for path in _sockets(folder)):
            folders.append(folder)
    if len(folders) == 1:
        return folders[0]
    if not folders:
        raise ConfigError(
            "no running `minedraft serve` of yours is found; name its control folder, "
            f"which is what {ENV_CONTROL} is set to there"
        )
    raise ConfigError(f"several are running, name one of {', '.join(map(str, folders))}")


def ask(folder: Path, command: Command, timeout_s: float = ANSWER_S) -> list[Status]:
    """What each engine in the folder says to the command.

    One that lives and does not answer in time is in the list too, with ``error``. Sockets of dead
    processes are removed. Raises ConfigError if the folder is not ours alone.
    """
    check_folder(folder)
    sockets = _sockets(folder)
    if not sockets:
        return []
    with ThreadPoolExecutor(len(sockets)) as pool:
        said = pool.map(lambda path: _ask_one(path, command, timeout_s), sockets)
        return [status for status in said if status is not None]


def _ask_one(path: Path, command: Command, timeout_s: float) -> Status | None:
    try:
        with socket.socket(socket.AF_UNIX) as end:
            end.settimeout(timeout_s)
            end.connect(str(path))
            end.sendall(msgspec.json.encode(command) + b"\n")
            line = end.makefile("rb").readline(MAX_BYTES)
        return msgspec.json.decode(line, type=Status)
    except (ConnectionRefusedError, FileNotFoundError):
        if not _is_alive(_pid(path)):
            path.unlink(missing_ok=True)
        return None
    except TimeoutError:
        return Status(_pid(path), error=f"no answer within {timeout_s:g} s")
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        return Status(_pid(path), error=f"no status in its answer: {error}")


def _sockets(folder: Path) -> list[Path]:
    found = [path for path in folder.glob("engine-*.sock") if path.stem.split("-")[1].isdecimal()]
    return sorted(found, key=lambda path: (_pid(path), path.name))


def _pid(path: Path) -> int:
    return int(path.stem.split("-")[1])


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True

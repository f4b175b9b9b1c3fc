"""A drafter as a child process of its verifier."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from minedraft import lifeline, protocol, vocabulary
from minedraft.config import Endpoint
from minedraft.transport import Link

READY_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 5.0
_POLL_S = 0.1


class DrafterError(RuntimeError):
    """The drafter did not start, or does not serve this target; one line says why."""

    def __init__(self, text: str) -> None:
        super().__init__(" ".join(line.strip() for line in text.splitlines()))


class NoDrafterError(DrafterError):
    """Nobody answers at the drafter's address."""


class DrafterProcess:
    """Runs ``minedraft drafter`` on a socket in a private folder until ``stop``.

    ``folder`` is one of the caller's, who removes it; without, the process has its own.
    """

    def __init__(
        self,
        model: str,
        flags: Sequence[str],
        environment: dict[str, str],
        folder: Path | None = None,
    ) -> None:
        # mkdtemp makes a folder of mode 0700.
        self._own = None if folder else tempfile.TemporaryDirectory(prefix="minedraft-")
        self._folder = folder or Path(self._own.name if self._own else "")
        self.endpoint = Endpoint(f"ipc://{self._folder}/drafter")
        self._log = self._folder / "drafter.log"
        # -P: a folder named vllm where the command was given is not what is meant.
        self._command = [sys.executable, "-P", "-m", "minedraft", "drafter", model]
        self._command += ["--listen", self.endpoint.address, *flags]
        self._environment = environment | lifeline.family(self._folder)
        self._process = self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        # It may be gone meanwhile: temporary folders are cleaned by others too.
        self._folder.mkdir(mode=0o700, exist_ok=True)
        with self._log.open("wb") as log:
            return subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self._environment},
                # Ctrl-C in a terminal is for us: we end the drafter when we no longer need it.
                process_group=0,
            )

    def start_anew(self) -> None:
        """Starts a process that has ended again, on the same address."""
        self._process = self._start()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def wait_ready(self, hello: protocol.Hello) -> protocol.Welcome:
        """Waits until it serves. Raises DrafterError if it ends or refuses."""
        return greet(self.endpoint, hello, READY_TIMEOUT_S, self._check_alive)

    def _check_alive(self) -> None:
        if self._process.poll() is not None:
            raise DrafterError(f"the drafter did not start: {self.last_words()}")

    def wait(self) -> int:
        """Waits until the process ends; its exit code, negative if a signal ended it."""
        return self._process.wait()

    def last_words(self) -> str:
        """What the ended process said at last."""
        try:
            lines = self._log.read_text(errors="replace").strip().splitlines()
        except OSError:
            lines = []
        # Libraries have something to say at the very end too.
        ours = [line for line in lines if line.startswith("minedraft: ")]
        return [f"exit code {self._process.returncode}", *lines, *ours][-1].strip()

    def stop(self) -> None:
        """Ends the process, politely first."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._own is not None:
            self._own.cleanup()


def greet(
    endpoint: Endpoint,
    hello: protocol.Hello,
    timeout_s: float,
    check_alive: Callable[[], None] = lambda: None,
) -> protocol.Welcome:
    """Says hello until a drafter answers that fits.

    Raises NoDrafterError if none answers, DrafterError if it does not fit, and what
    ``check_alive`` raises.
    """
    link = Link(endpoint)
    try:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            check_alive()
            link.send(protocol.encode(hello))
            link.wait(_POLL_S)
            while (frame := link.receive()) is not None:
                message = protocol.decode_to_verifier(frame)
                if isinstance(message, protocol.Welcome):
                    return _fitting(message, hello)
                if isinstance(message, protocol.Refused):
                    raise DrafterError(f"the drafter refuses this target: {message.reason}")
            time.sleep(_POLL_S)
    except protocol.ProtocolError as error:
        raise DrafterError(f"what answers at {endpoint.address} is no drafter: {error}") from error
    finally:
        link.close()
    raise NoDrafterError(
        f"no drafter answers at {endpoint.address} within {timeout_s:.0f} s; is `minedraft "
        "drafter` running there, with the same key file?"
    )


def _fitting(welcome: protocol.Welcome, hello: protocol.Hello) -> protocol.Welcome:
    reason = vocabulary.misfit(hello, welcome, "the drafter")
    if reason is not None:
        raise DrafterError(reason)
    return welcome

"""A drafter as a child process of its verifier."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from minedraft import lifeline, protocol
from minedraft.config import Endpoint
from minedraft.transport import Link

READY_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 5.0
_POLL_S = 0.1


class DrafterError(RuntimeError):
    """The drafter did not start, or does not serve this target; one line says why."""

    def __init__(self, text: str) -> None:
        super().__init__(" ".join(line.strip() for line in text.splitlines()))


class DrafterProcess:
    """Runs ``minedraft drafter`` on a socket in a private folder until ``stop``."""

    def __init__(self, model: str, flags: Sequence[str], environment: dict[str, str]) -> None:
        # mkdtemp makes a folder of mode 0700.
        self._folder = tempfile.TemporaryDirectory(prefix="minedraft-")
        self.endpoint = Endpoint(f"ipc://{self._folder.name}/drafter")
        self._log = Path(self._folder.name) / "drafter.log"
        # -P: a folder named vllm where the command was given is not what is meant.
        command = [sys.executable, "-P", "-m", "minedraft", "drafter", model]
        command += ["--listen", self.endpoint.address, *flags]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment, **self._lifeline()},
            )

    def _lifeline(self) -> dict[str, str]:
        return {
            lifeline.ENV_PARENT: str(os.getpid()),
            lifeline.ENV_FOLDER: self._folder.name,
        }

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def wait_ready(self, hello: protocol.Hello) -> protocol.Welcome:
        """Waits until it serves. Raises DrafterError if it ends or refuses."""
        return greet(self.endpoint, hello, READY_TIMEOUT_S, self._check_alive)

    def _check_alive(self) -> None:
        if self._process.poll() is not None:
            raise DrafterError(f"the drafter did not start: {self._last_words()}")

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
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
        self._folder.cleanup()


def greet(
    endpoint: Endpoint,
    hello: protocol.Hello,
    timeout_s: float,
    check_alive: Callable[[], None] = lambda: None,
) -> protocol.Welcome:
    """Says hello until a drafter answers. Raises DrafterError if it refuses or none does."""
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
                    return message
                if isinstance(message, protocol.Refused):
                    raise DrafterError(f"the drafter refuses this target: {message.reason}")
            time.sleep(_POLL_S)
    except protocol.ProtocolError as error:
        raise DrafterError(f"what answers at {endpoint.address} is no drafter: {error}") from error
    finally:
        link.close()
    raise DrafterError(
        f"no drafter answers at {endpoint.address} within {timeout_s:.0f} s; is `minedraft "
        "drafter` running there, with the same key file?"
    )

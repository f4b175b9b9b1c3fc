"""The verifier as it is seen and changed from outside, by attendant.py's thread.

Plain Python, no vLLM.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from minedraft import config, protocol
from minedraft.control import Status
from minedraft.verifier.client import DrafterClient
from minedraft.verifier.modes import Modes
from minedraft.verifier.stats import Stats
from minedraft.verifier.trace import Trace

logger = logging.getLogger("vllm.minedraft")

IDLE_S = 0.2
"""The engine talks to its drafter in every step. After so long without one it is idle."""


class Operations:
    """What attendant.Subject asks for. ``lock`` is held by whoever uses the client.

    ``number`` of the engine among several, ``running`` counts its requests.
    """

    def __init__(
        self,
        client: DrafterClient,
        modes: Modes,
        stats: Stats,
        *,
        name: str,
        number: int,
        running: Callable[[], int],
        shared_clock: bool,
    ) -> None:
        self.lock = threading.RLock()
        self.trace: Trace | None = None
        self.stepped_at = float("-inf")
        """When the engine last spoke with the drafter itself."""
        self._client = client
        self._modes = modes
        self._stats = stats
        self._name = name
        self._number = number
        self._running = running
        self._shared_clock = shared_clock

    def report(self) -> dict[str, Any]:
        """Everything that was measured."""
        return self._stats.report(self._client.counters)

    def status(self) -> Status:
        """The state in words."""
        trace = self.trace
        return Status(
            os.getpid(),
            name=self._name,
            mode=self._modes.setting,
            decision=str(self._modes.choice),
            drafter=self._client.health(),
            drafter_model=self._client.model,
            sessions=self._client.counters.sessions,
            running=self._running(),
            trace=trace.path if trace else "",
        )

    def idle_poll(self) -> None:
        """Greets the drafter and hears it while no step does."""
        if time.monotonic() - self.stepped_at < IDLE_S or not self.lock.acquire(blocking=False):
            return
        try:
            self._client.poll()
        finally:
            self.lock.release()

    def set_mode(self, mode: config.Mode) -> None:
        """From the next step on."""
        logger.info("MineDraft: mode set: engine=%d mode=%s", self._number, mode)
        self._modes.setting = mode

    def set_trace(self, path: str) -> None:
        """Starts a trace, or stops it if ``path`` is empty. Raises ConfigError."""
        new = (
            Trace(config.path_of_engine(path, self._number), shared_clock=self._shared_clock)
            if path
            else None
        )
        old, self.trace = self.trace, new
        if new is not None and new.path:
            logger.info("MineDraft: trace begun: file=%s", new.path)
        if old is not None:
            old.close()

    def flush_trace(self) -> None:
        """Writes what the trace has gathered."""
        if (trace := self.trace) is not None:
            trace.flush()

    def heard(self, message: protocol.Drafts, received_s: float) -> None:
        """The drafter says when it computed."""
        if (trace := self.trace) is not None and message.spans:
            dropped = trace.drafting(message.spans, message.sent_s, received_s)
            if dropped:
                self._client.counters.dropped["impossible span"] += dropped

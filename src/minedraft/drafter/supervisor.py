"""Keeps a drafter alive beside its verifier."""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from minedraft import protocol
from minedraft.drafter.child import DrafterError, DrafterProcess

logger = logging.getLogger("vllm.minedraft")

FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 30.0
STEADY_S = 60.0
"""Who lived so long did not die of its start."""
MAX_LAST_WORDS = 200


def next_delay(delay_s: float, lived_s: float) -> float:
    """Seconds until the next start after a life of ``lived_s``, before which it was ``delay_s``."""
    return FIRST_DELAY_S if lived_s >= STEADY_S else min(2 * delay_s, LONGEST_DELAY_S)


def _as_drafter_error(error: Exception) -> DrafterError:
    if isinstance(error, DrafterError):
        return error
    return DrafterError(f"the drafter did not start: {type(error).__name__}: {error}")


class Supervisor:
    """A thread that starts a drafter anew whenever it ends, once it was ready for the first time.

    One that never gets ready has been told something that cannot be: then ``failed`` is called, in
    this thread, with what it said, and that is all.
    """

    def __init__(
        self,
        drafter: DrafterProcess,
        hello: protocol.Hello,
        failed: Callable[[DrafterError], None],
    ) -> None:
        self._drafter = drafter
        self._hello = hello
        self._failed = failed
        self._stopping = threading.Event()
        self._starting = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="minedraft-drafter", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the drafter, for good."""
        with self._starting:
            self._stopping.set()
        self._drafter.stop()
        self._thread.join()

    def _run(self) -> None:
        started = time.monotonic()
        try:
            welcome = self._drafter.wait_ready(self._hello)
        except Exception as error:
            if not self._stopping.is_set():
                self._failed(_as_drafter_error(error))
            return
        logger.info("MineDraft: the drafter is ready: %s", welcome.model)
        delay_s = FIRST_DELAY_S / 2  # doubled before it is used
        while True:
            code = self._drafter.wait()
            delay_s = next_delay(delay_s, time.monotonic() - started)
            if self._stopping.is_set():
                return
            logger.warning(
                "MineDraft: the drafter ended with exit code %d (%s); it is started anew in %g s",
                code,
                self._drafter.last_words()[:MAX_LAST_WORDS],
                delay_s,
            )
            self._stopping.wait(delay_s)
            with self._starting:
                if self._stopping.is_set():
                    return
                started = time.monotonic()
                # No memory for a process: wait() returns at once, and the next try comes later.
                with suppress(OSError):
                    self._drafter.start_anew()

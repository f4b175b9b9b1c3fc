"""One thread beside the engine's: it publishes metrics, answers `minedraft control`, and lets the
verifier talk to its drafter while the engine sleeps.

The engine's own thread sits in a step or sleeps until a request comes, so neither could be done
there in time. Whatever goes wrong here is said once and stops nothing.
"""

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from minedraft.config import ConfigError, Mode
from minedraft.control import Command, ControlSocket, Status

logger = logging.getLogger("vllm.minedraft")

TICK_S = 0.25


class Subject(Protocol):
    """The scheduler as the attendant sees it. All is called in the attendant's thread."""

    def report(self) -> Mapping[str, Any]:
        """What metrics.py publishes; see stats.Stats.report."""
        ...

    def status(self) -> Status:
        """What is shown to who asks."""
        ...

    def idle_poll(self) -> None:
        """Talks to the drafter if the engine is idle."""
        ...

    def flush_trace(self) -> None:
        """Writes what the trace has gathered, if there is one."""
        ...

    def set_mode(self, mode: Mode) -> None:
        """From the next step on. Raises ConfigError if it cannot be."""
        ...

    def set_trace(self, path: str) -> None:
        """Starts a trace in this file, or stops it if empty. Raises ConfigError."""
        ...


class Publisher(Protocol):
    """Where reports go: metrics.Metrics."""

    def publish(self, report: Mapping[str, Any]) -> None:
        """Shows what has changed since the last report."""
        ...

    def close(self) -> None:
        """The subject is gone: leaves nothing that says it lives."""
        ...


class Attendant:
    """Attends a subject until ``stop``, or until the subject or the interpreter is gone.

    ``folder`` is that of the control socket, if there is to be one. Raises ConfigError if it
    cannot be used.
    """

    def __init__(
        self,
        subject: Subject,
        publisher: Publisher,
        folder: str | None = None,
        tick_s: float = TICK_S,
    ) -> None:
        self._subject = weakref.ref(subject)
        self._publisher = publisher
        self._tick_s = tick_s
        self._control = ControlSocket(Path(folder), self._answer) if folder else None
        self._said: set[tuple[str, type[Exception]]] = set()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="minedraft-attendant", daemon=True)
        # Also at the interpreter's exit: a thread that still runs then may crash in teardown.
        self._finalizer = weakref.finalize(subject, self._end)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, after a tick at most, and publishes for the last time."""
        if self._finalizer.detach() is not None:
            self._end()

    def _end(self) -> None:
        self._stopping.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=4 * self._tick_s + 1)
        if (subject := self._subject()) is not None:
            self._survive("metrics", lambda: self._publish_report(subject))
        self._survive("metrics", self._publisher.close)

    def _run(self) -> None:
        try:
            while not self._stopping.is_set() and self._tick():
                self._wait()
        finally:
            if self._control is not None:
                self._control.close()

    def _tick(self) -> bool:
        """False if there is nobody to attend any more."""
        subject = self._subject()
        if subject is None:
            return False
        self._survive("metrics", lambda: self._publish_report(subject))
        self._survive("drafter", subject.idle_poll)
        self._survive("trace", subject.flush_trace)
        return True

    def _publish_report(self, subject: Subject) -> None:
        self._publisher.publish(subject.report())

    def _wait(self) -> None:
        until = time.monotonic() + self._tick_s
        if (control := self._control) is not None:
            self._survive("control", lambda: control.serve(self._tick_s))
        self._stopping.wait(until - time.monotonic())

    def _survive(self, what: str, do: Callable[[], None]) -> None:
        try:
            do()
        except Exception as error:
            kind = (what, type(error))
            if kind not in self._said:
                self._said.add(kind)
                logger.exception("MineDraft: %s failed; said once, tried on", what)

    def _answer(self, command: Command) -> Status:
        subject = self._subject()
        if subject is None:
            return Status(os.getpid(), error="the engine is shutting down")
        refused = ""
        try:
            if command.mode is not None:
                subject.set_mode(command.mode)
            if command.trace is not None:
                subject.set_trace(command.trace)
        except ConfigError as error:
            refused = str(error)
        status = subject.status()
        return msgspec.structs.replace(status, error=refused) if refused else status

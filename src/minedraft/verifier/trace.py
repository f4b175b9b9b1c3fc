"""A trace of verifying and drafting on one clock, as Perfetto and chrome://tracing open it.

The file is the JSON array of Chrome's trace format, an event on each line; it can be opened also
if the process died before it wrote the end. Who records an event only puts it into a bounded list;
`flush`, called by a thread that may wait for a disk, writes it.
"""

import fcntl
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, BinaryIO

import msgspec

from minedraft.config import ConfigError
from minedraft.protocol import Span

logger = logging.getLogger("vllm.minedraft")

MAX_EVENTS = 1 << 16
"""Between two flushes; more are counted only."""
MAX_BYTES = 512 << 20
"""A larger file is hard to open: the trace ends there."""
MAX_AGE_S = 3600.0
"""Spans that began longer ago when they were sent, and messages that took longer, are none."""
ROUNDING_S = 1e-6
DRIFT = 1e-4
"""Two clocks may part by so much, relative to the time that passes."""
TARGET, DRAFTER = "target", "drafter"
VERIFY, WAIT, DRAFT = "verify", "wait for drafts", "draft"


class Lane:
    """One thread of the trace, whose spans do not overlap."""

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self._end_us = 0

    def span(
        self, name: str, start_s: float, end_s: float, args: dict[str, Any]
    ) -> dict[str, Any] | None:
        """An event, cut where the one before it goes on; None if nothing is left of it."""
        start_us = max(int(start_s * 1e6), self._end_us)
        end_us = int(end_s * 1e6)
        if end_us <= start_us:
            return None
        self._end_us = end_us
        event = {"name": name, "ph": "X", "ts": start_us, "dur": end_us - start_us}
        return {**event, "pid": self.number, "tid": self.number, "args": args}

    def names(self) -> list[dict[str, Any]]:
        """The events that name it."""
        to = {"ph": "M", "pid": self.number, "tid": self.number, "args": {"name": self.name}}
        return [{"name": "process_name", **to}, {"name": "thread_name", **to}]


class ClockOffset:
    """Seconds by which our clock is ahead of the drafter's, as far as messages tell.

    A message takes some time, so each shows an upper bound; the smallest is the best.
    """

    def __init__(self) -> None:
        self._offset_s = math.inf
        self._sent_s = -math.inf
        self._received_s = 0.0

    def seen(self, sent_s: float, received_s: float) -> float:
        """The estimate after a message, sent by the drafter's clock and received by ours."""
        if sent_s < self._sent_s:
            self._offset_s = math.inf  # another drafter, on another clock
        drifted = self._offset_s + DRIFT * (received_s - self._received_s)
        self._offset_s = min(drifted, received_s - sent_s)
        self._sent_s, self._received_s = sent_s, received_s
        return self._offset_s


class Trace:
    """Writes to a new file until it is closed or fails; ``path`` is empty then.

    Times are in seconds: the verifier's by time.monotonic, the drafter's by its own clock, which
    is the same on the same host (``shared_clock``). Raises ConfigError if there can be no file.
    """

    def __init__(self, path: str, *, shared_clock: bool) -> None:
        if not os.path.isabs(path):
            raise ConfigError(f"trace {path}: give an absolute path")
        self.path = path
        self._target, self._drafter = Lane(TARGET, 1), Lane(DRAFTER, 2)
        self._offset = None if shared_clock else ClockOffset()
        self._origin_s = time.monotonic()
        self._events: deque[dict[str, Any]] = deque()
        self._lost = 0
        self._written = 0
        self._lock = threading.Lock()  # for the file
        self._file = _open(path)
        first, *others = self._target.names() + self._drafter.names()
        self._write(b"[\n" + msgspec.json.encode(first))
        self._events.extend(others)

    # --- what happened ------------------------------------------------------------------------

    def verification(
        self,
        start_s: float,
        end_s: float,
        rows: int,
        drafts: int,
        mode: str,
        *,
        ahead: bool = False,
    ) -> None:
        """A step of the target: requests in it, and draft tokens verified.

        ``ahead`` if it was given to the target before the result of the step before was known.
        """
        args = {"rows": rows, "draft_tokens": drafts, "mode": mode, "ahead": ahead}
        self._add(self._target, VERIFY, start_s, end_s, args)

    def waited(self, start_s: float, end_s: float) -> None:
        """The target stood still for drafts."""
        self._add(self._target, WAIT, start_s, end_s, {})

    def drafting(self, spans: Sequence[Span], sent_s: float, received_s: float) -> int:
        """What the drafter says it computed, in a message; the number of spans that cannot be."""
        if not spans:
            return 0
        offset = self._offset.seen(sent_s, received_s) if self._offset else 0.0
        if not received_s - MAX_AGE_S <= sent_s + offset <= received_s + ROUNDING_S:
            return len(spans)
        dropped = 0
        for span in spans:
            if sent_s - MAX_AGE_S <= span.start_s <= span.end_s <= sent_s:
                start_s, end_s = span.start_s + offset, span.end_s + offset
                self._add(self._drafter, DRAFT, start_s, end_s, {"rows": span.rows})
            else:
                dropped += 1
        return dropped

    def _add(
        self, lane: Lane, name: str, start_s: float, end_s: float, args: dict[str, Any]
    ) -> None:
        event = lane.span(name, start_s - self._origin_s, end_s - self._origin_s, args)
        if event is None or not self.path:
            return
        if len(self._events) < MAX_EVENTS:
            self._events.append(event)
        else:
            self._lost += 1

    # --- the file -----------------------------------------------------------------------------

    def flush(self) -> None:
        """Writes what has happened since the last time."""
        with self._lock:
            if not self.path:
                return
            lines = [msgspec.json.encode(self._events.popleft()) for _ in range(len(self._events))]
            if self._lost:
                lines.append(msgspec.json.encode(self._loss()))
            self._write(b"".join(b",\n" + line for line in lines))
            if self._written > MAX_BYTES:
                self._stop(f"it has reached {MAX_BYTES >> 20} MiB")

    def _loss(self) -> dict[str, Any]:
        lost, self._lost = self._lost, 0
        now_us = int((time.monotonic() - self._origin_s) * 1e6)
        event = {"name": f"{lost} events lost", "ph": "i", "s": "g", "ts": now_us}
        return {**event, "pid": self._target.number, "tid": self._target.number}

    def close(self) -> None:
        """Writes the rest and the end."""
        self.flush()
        with self._lock:
            if self.path:
                self._end()

    def _write(self, text: bytes) -> None:
        try:
            self._file.write(text)
            self._file.flush()
            self._written += len(text)
        except OSError as error:
            self._stop(error.strerror)

    def _stop(self, why: str | None) -> None:
        logger.warning("MineDraft: trace ended: file=%s reason=%s", self.path, why)
        self._end()

    def _end(self) -> None:
        self.path = ""
        self._events.clear()
        try:
            with self._file:
                self._file.write(b"\n]\n")
        except OSError:
            pass  # it was said, or is of no consequence: the format needs no end


def _open(path: str) -> BinaryIO:
    """The file, empty, and ours alone. Raises ConfigError."""
    try:
        # Of a pipe without a reader this makes an error, not a wait.
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o666)
        file = os.fdopen(number, "ab")
    except OSError as error:
        raise ConfigError(f"trace {path}: {error.strerror}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.truncate(0)
    except OSError as error:
        file.close()
        busy = isinstance(error, BlockingIOError)
        why = "a trace is being written to it already" if busy else error.strerror
        raise ConfigError(f"trace {path}: {why}") from error
    return file

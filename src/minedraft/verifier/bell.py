"""How the worker tells the scheduler that a step has ended, before the engine asks for its result.

With asynchronous scheduling the scheduler waits for drafts while the target is at work, and has to
stop when that work ends: until it returns nobody takes the result. Only the worker knows. The step
carries an address and a number, which the worker sends back: one datagram on a Unix socket in a
folder of ours alone. A ring that is lost, such as from a worker on another host, costs only time.

Plain Python, no vLLM.
"""

import logging
import os
import queue
import shutil
import socket
import struct
import tempfile
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from minedraft.lifeline import ENV_FOLDER

logger = logging.getLogger("vllm.minedraft")

_NUMBER = struct.Struct("<Q")


class Ring(NamedTuple):
    """What a step carries: ring there, with this number, when it has ended."""

    address: str
    number: int


class Bell:
    """The scheduler's end. Raises OSError where there can be no such socket."""

    def __init__(self) -> None:
        # Of mode 0700. In the folder of the process that we end with, if that has one: it goes with
        # it even if we are killed.
        folder = tempfile.mkdtemp(prefix="minedraft-", dir=os.environ.get(ENV_FOLDER))
        self._finalizer = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.address = str(Path(folder, "bell"))
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(self.address)
        self._last = -1

    def fileno(self) -> int:
        """Readable when it rings."""
        return self._socket.fileno()

    def last(self) -> int:
        """The number of the newest step that has ended; -1 before the first."""
        while True:
            try:
                message = self._socket.recv(_NUMBER.size + 1)
            except BlockingIOError:
                return self._last
            if len(message) == _NUMBER.size:
                self._last = max(self._last, _NUMBER.unpack(message)[0])

    def close(self) -> None:
        """Removes the socket."""
        self._socket.close()
        self._finalizer()


class Ringer:
    """The worker's end: a thread that rings when a step's result is there.

    ``prepare`` is called first in that thread.
    """

    def __init__(self, prepare: Callable[[], None] = lambda: None) -> None:
        self._prepare = prepare
        self._steps: queue.SimpleQueue[tuple[Ring, Callable[[], None]]] = queue.SimpleQueue()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._failed = False
        threading.Thread(target=self._run, name="minedraft-ringer", daemon=True).start()

    def ring_after(self, wait: Callable[[], None], ring: Ring) -> None:
        """Rings when ``wait`` returns; at once, after the rings before it."""
        self._steps.put((ring, wait))

    def _run(self) -> None:
        self._prepare()
        while True:
            ring, wait = self._steps.get()
            try:
                wait()
                self._socket.sendto(_NUMBER.pack(ring.number), ring.address)
            except Exception as error:  # an error of the device's is the engine's to report
                if not self._failed:
                    self._failed = True
                    logger.warning("MineDraft: steps end unheard, drafts may be late: %s", error)

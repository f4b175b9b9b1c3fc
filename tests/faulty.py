"""Faults on a seeded random schedule: spoilt answers, frames that are none, a killed drafter."""

import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from heapq import heappop, heappush
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import msgspec

from minedraft import protocol
from minedraft.devices import environment
from minedraft.protocol import Draft, Drafts, Greet, Hello, Lost, Refused, Update, Welcome

Spoilt = list[tuple[float, bytes]]
"""What becomes of a frame: (delay in seconds, frame), none or several of them."""
LATE_S = 0.4
"""Answers are delayed so long at most."""


class Socket(Protocol):
    """transport.Server, as far as it is used here."""

    def send(self, peer: bytes, frame: bytes) -> bool: ...
    def receive(self) -> tuple[bytes, bytes] | None: ...
    def wait(self, seconds: float) -> bool: ...
    def close(self) -> None: ...


# --- what can happen to an answer -----------------------------------------------------------------


def _changed(frame: bytes, change: Callable[[Draft], Draft]) -> Spoilt:
    """The frame with every draft in it changed; what holds no drafts stays as it is."""
    message = protocol.decode_to_verifier(frame)
    if not isinstance(message, Drafts):
        return [(0.0, frame)]
    drafts = [change(draft) for draft in message.drafts]
    return [(0.0, protocol.encode(msgspec.structs.replace(message, drafts=drafts)))]


def _replace(**fields: Callable[[Draft], Any]) -> Callable[[Draft], Draft]:
    """A change of these fields of a draft."""

    def change(draft: Draft) -> Draft:
        return msgspec.structs.replace(draft, **{n: value(draft) for n, value in fields.items()})

    return change


def _swapped(rng: random.Random, frame: bytes) -> Spoilt:
    """The sessions of an answer with one another's drafts."""
    message = protocol.decode_to_verifier(frame)
    if not isinstance(message, Drafts):
        return [(0.0, frame)]
    names = [draft.session for draft in message.drafts]
    rng.shuffle(names)
    swapped = iter(names)
    return _changed(frame, _replace(session=lambda draft: next(swapped)))


def _tokens(rng: random.Random, end: int) -> Callable[[Draft], list[int]]:
    return lambda draft: [rng.randrange(end) for _ in draft.tokens]


def _lost(rng: random.Random, frame: bytes, *reasons: str) -> Spoilt:
    """Says of the sessions that are drafted for that they are lost."""
    message = protocol.decode_to_verifier(frame)
    if not isinstance(message, Drafts):
        return [(0.0, frame)]
    lost = [Lost(draft.session, rng.choice(reasons)) for draft in message.drafts]
    return [(0.0, protocol.encode(Drafts([], lost)))]


def _another_version(frame: bytes) -> Spoilt:
    version = protocol.PROTOCOL_VERSION + 1
    return [(0.0, protocol.encode(Welcome(version, "later", "v", 64, 512))), (0.0, frame)]


def _cut(rng: random.Random, frame: bytes) -> Spoilt:
    return [(0.0, frame[: rng.randrange(len(frame))])]


FAULTS: dict[str, Callable[[random.Random, bytes], Spoilt]] = {
    "delay": lambda rng, frame: [(rng.uniform(0, LATE_S), frame)],
    "drop": lambda rng, frame: [],
    "duplicate": lambda rng, frame: [(0.0, frame), (rng.uniform(0, LATE_S), frame)],
    "reorder": lambda rng, frame: [(rng.choice((0.0, 0.02, 0.05)), frame)],
    "cut": _cut,
    "noise": lambda rng, frame: [(0.0, rng.randbytes(1 << 20)), (0.0, flipped(rng, frame))],
    "wrong sessions": _swapped,
    "unknown sessions": lambda rng, frame: _changed(
        frame, _replace(session=lambda draft: draft.session + 1000)
    ),
    "wrong lengths": lambda rng, frame: _changed(
        frame, _replace(base_len=lambda draft: max(0, draft.base_len + rng.randint(-3, 3)))
    ),
    "outside the vocabulary": lambda rng, frame: _changed(frame, _replace(tokens=_tokens(rng, 99))),
    "wrong tokens": lambda rng, frame: _changed(frame, _replace(tokens=_tokens(rng, 64))),
    "uneven lists": lambda rng, frame: _changed(
        frame, _replace(logprobs=lambda draft: [0.0] * rng.randrange(5))
    ),
    "too many tokens": lambda rng, frame: _changed(
        frame, _replace(tokens=lambda draft: [3] * 32, logprobs=lambda draft: [0.0] * 32)
    ),
    "nothing drafted": lambda rng, frame: _changed(
        frame, _replace(tokens=lambda draft: [], logprobs=lambda draft: [])
    ),
    "sessions mislaid": lambda rng, frame: _lost(rng, frame, protocol.LOST_UNKNOWN),
    "sessions lost": lambda rng, frame: _lost(rng, frame, *protocol.LOST_REASONS, "?"),
    "another version": lambda rng, frame: _another_version(frame),
    "greeting": lambda rng, frame: [(0.0, protocol.encode(Greet())), (0.0, frame)],
    "refusal": lambda rng, frame: [(0.0, frame), (0.0, protocol.encode(Refused("out of order")))],
}


class FaultySocket:
    """Between a drafter and its socket: spoils so large a part of its answers, while ``on``."""

    def __init__(self, socket: Socket, seed: int, kinds: Sequence[str], rate: float) -> None:
        self._socket = socket
        self._rng = random.Random(seed)
        self._kinds = kinds
        self._rate = rate
        self._late: list[tuple[float, int, bytes, bytes]] = []
        self._numbers = count()
        self.on = True
        self.spoilt = 0

    def send(self, peer: bytes, frame: bytes) -> bool:
        self._send_late()
        if not self.on or self._rng.random() >= self._rate:
            return self._socket.send(peer, frame)
        self.spoilt += 1
        for delay, sent in FAULTS[self._rng.choice(self._kinds)](self._rng, frame):
            due = time.monotonic() + delay
            heappush(self._late, (due, next(self._numbers), peer, sent))
        self._send_late()
        return True

    def _send_late(self) -> None:
        while self._late and self._late[0][0] <= time.monotonic():
            _, _, peer, frame = heappop(self._late)
            self._socket.send(peer, frame)

    def receive(self) -> tuple[bytes, bytes] | None:
        self._send_late()
        return self._socket.receive()

    def wait(self, seconds: float) -> bool:
        if self._late:
            seconds = min(seconds, max(0.0, self._late[0][0] - time.monotonic()))
        came = self._socket.wait(seconds)
        self._send_late()
        return came

    def close(self) -> None:
        self._socket.close()


# --- frames that are none -------------------------------------------------------------------------


def flipped(rng: random.Random, frame: bytes) -> bytes:
    """The frame with one to three bits the other way."""
    changed = bytearray(frame)
    for _ in range(rng.randint(1, 3)):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _message(rng: random.Random) -> protocol.ToDrafter | protocol.ToVerifier:
    """A message of either side about few sessions, so that it is about real ones too."""
    session, length = rng.randrange(6), rng.randrange(40)
    tokens = [rng.randrange(80) for _ in range(rng.randrange(8))]
    version = rng.choice((protocol.PROTOCOL_VERSION, rng.randrange(5)))
    lost = Lost(session, rng.choice([*protocol.LOST_REASONS, "?"]))
    messages: list[protocol.ToDrafter | protocol.ToVerifier] = [
        Hello(version, rng.choice("vw"), rng.choice((50, 64))),
        Update([session], [protocol.Open(session + 1, tokens)]),
        Update([], [protocol.Open(session, tokens)]),
        Update(extend=[protocol.Extend(session, length, tokens, rng.randrange(9))]),
        Welcome(version, "d", rng.choice("vw"), rng.choice((50, 64)), 1000),
        Refused("no"),
        Greet(),
        Drafts([Draft(session, length, tokens, [0.0] * rng.choice((len(tokens), 2)))], [lost]),
        Drafts([], [], rng.choice((-1.0, 1e300, 0.5))),
    ]
    return rng.choice(messages)


def random_frames(seed: int, number: int) -> Iterator[bytes]:
    """Frames of either side, whole, cut short, too long, with flipped bits, and noise."""
    rng = random.Random(seed)
    for index in range(number):
        frame = protocol.encode(_message(rng))
        kinds: list[Callable[[bytes], bytes]] = [
            lambda frame: frame,
            lambda frame: frame[: rng.randrange(len(frame))],
            lambda frame: frame + rng.randbytes(rng.randint(1, 9)),
            lambda frame: flipped(rng, frame),
            lambda frame: rng.randbytes(rng.randrange(200)),
        ]
        yield rng.choice(kinds)(frame) if index % 1000 else rng.randbytes(1 << 20)


# --- a drafter that is killed ---------------------------------------------------------------------


def _serve(model: Path, address: str, ready: Connection) -> None:
    import torch
    from drafters import Reference, TransformersEngine, serving
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.disable_progress_bar()
    with serving(TransformersEngine(Reference(model)), model, address) as server:
        ready.send("ready")
        while ready.poll(None):  # ends with the process that started this one
            ready.recv()
            ready.send(server.num_sessions)


class LightDrafter:
    """A drafter in a process of its own that starts in a moment and may be treated badly."""

    def __init__(self, model: Path, address: str) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["drafters"])
        self._arguments = model, address
        with environment({"PYTHONPATH": os.pathsep.join(sys.path)}):
            self.start()

    def start(self) -> None:
        """From when it serves."""
        ours, theirs = self._context.Pipe()
        self._process = self._context.Process(target=_serve, args=(*self._arguments, theirs))
        self._process.daemon = True
        self._process.start()
        theirs.close()
        self._pipe = ours
        assert self._pipe.poll(60)
        assert self._pipe.recv() == "ready"

    def close(self) -> None:
        self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self._process.pid, signal.SIGCONT)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def num_sessions(self) -> int:
        self._pipe.send("sessions")
        assert self._pipe.poll(30)
        return int(self._pipe.recv())

"""How messages travel: ZMQ over ``ipc://`` on one host, over ``tcp://`` with CURVE between hosts.

An ipc socket lies in a folder of mode 0700: who may enter the folder may speak. TCP always needs
keys, loopback too. One key file serves both sides: it holds one secret, from which each side
derives the server's and the client's key pair, so whoever has the file may speak and nobody else.

A host that is gone without a word is noticed by TCP's keepalive, which kernels answer: no thread
of ours, and a peer that is busy for minutes is not taken for dead. ZMQ's own heartbeats would do
the same, but libzmq 4.3.5 aborts the process when one is due on a broken connection of which not
all has been read yet.
"""

import hashlib
import os
import secrets
import socket
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import zmq
import zmq.auth.base
import zmq.utils.z85 as z85
from zmq.auth.thread import ThreadAuthenticator

from minedraft.config import ConfigError, Endpoint
from minedraft.protocol import MAX_FRAME_BYTES

KEEPALIVE_S = 2
DEAD_AFTER_S = 8
RECONNECT_MS = 100
RENEW_S = 10.0
"""After so many seconds without a connection the socket is made anew."""
MAX_UNREAD_MESSAGES = 256
"""From one peer, which may make each as large as a frame can be; then its kernel's buffer fills,
and what it cannot send it knows to be unsent. One message each second or step of a model."""
MAX_UNSENT_ANSWERS = 256
"""To one verifier."""
MAX_UNSENT_UPDATES = 4096
"""A verifier's burst of new requests waits here while the drafter computes."""
ZAP_DOMAIN = b"minedraft"
MAX_IPC_PATH = 100
CURVE_OVERHEAD_BYTES = 64
"""More than what encryption adds to a frame, which ZMQ counts."""


def check_address(address: str) -> str:
    """``address`` if it is one that we can use. Raises ConfigError."""
    scheme, separator, rest = address.partition("://")
    known = scheme == "tcp" or (scheme == "ipc" and rest.startswith("/"))
    if not (known and separator and rest and address.isprintable()):
        raise ConfigError(
            f"drafter address {address!r}: write ipc:///folder/name or tcp://host:port"
        )
    if scheme == "ipc" and len(os.fsencode(rest)) > MAX_IPC_PATH:
        raise ConfigError(
            f"drafter address {address!r}: the path is longer than {MAX_IPC_PATH} bytes, "
            "which is more than a Unix socket can have; take a shorter folder"
        )
    host, _, port = rest.rpartition(":")
    if scheme == "tcp" and not (host and _is_port(port)):
        raise ConfigError(f"drafter address {address!r}: write tcp://host:port")
    return address


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 5 and 0 < int(text) < 65536


def _check_private_folder(address: str, *, make: bool) -> None:
    """Raises ConfigError if others may enter the folder of an ipc socket.

    One that is not there is made, or else is nothing to complain of.
    """
    folder = Path(address.removeprefix("ipc://")).parent
    try:
        if make:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"drafter address {address!r}: {folder}: {error.strerror}") from error
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(
            f"drafter address {address!r}: others may enter {folder}; an ipc socket needs a folder "
            f"of its own that only you may enter (chmod 700 {folder}, or name a new one)"
        )


def _check_left_behind(address: str) -> None:
    """ZMQ would delete any file that is there, the socket of a running drafter too."""
    path = Path(address.removeprefix("ipc://"))
    if not path.exists():
        return
    if not path.is_socket():
        raise ConfigError(f"cannot listen on {address}: there is a file, which is no socket")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return
        except OSError:
            pass
    raise ConfigError(f"cannot listen on {address}: it is in use, by another drafter perhaps")


def create_key_file(path: Path) -> None:
    """A new secret, readable by its owner only. An existing file stays as it is."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    except OSError as error:
        raise ConfigError(f"key file {path}: {error.strerror}") from error
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32) + "\n")


def _key_pairs(path: str) -> dict[str, tuple[bytes, bytes]]:
    """(public, secret) of server and client in Z85, derived from the secret in a key file."""
    try:
        file = Path(path)
        if stat.S_IMODE(file.stat().st_mode) & 0o077:
            raise ConfigError(f"key file {path}: others may read it; chmod 600 {path}")
        secret = bytes.fromhex(file.read_text().strip())
    except OSError as error:
        raise ConfigError(f"key file {path}: {error.strerror}") from error
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        secret = b""
    if len(secret) != 32:
        raise ConfigError(f"key file {path}: not made by `minedraft drafter --key-file`")
    pairs = {}
    for side in ("server", "client"):
        key = z85.encode(hashlib.blake2b(secret, digest_size=32, person=side.encode()).digest())
        pairs[side] = (zmq.curve_public(key), key)
    return pairs


def _endpoint_keys(endpoint: Endpoint) -> dict[str, tuple[bytes, bytes]] | None:
    check_address(endpoint.address)
    if endpoint.address.startswith("ipc://"):
        if endpoint.key_file:
            raise ConfigError(
                f"drafter address {endpoint.address}: an ipc socket uses no key, its folder keeps "
                "others out; leave --key-file out"
            )
        return None
    if not endpoint.key_file:
        raise ConfigError(
            f"drafter address {endpoint.address}: TCP needs a key; give --key-file FILE on both "
            "sides (`minedraft drafter` makes the file if there is none; copy it to the verifier)"
        )
    return _key_pairs(endpoint.key_file)


def _common_options(end: zmq.Socket[bytes], address: str, most_unsent: int) -> None:
    end.setsockopt(zmq.LINGER, 200)
    end.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES + CURVE_OVERHEAD_BYTES)
    end.setsockopt(zmq.SNDHWM, most_unsent)
    end.setsockopt(zmq.RCVHWM, MAX_UNREAD_MESSAGES)
    end.setsockopt(zmq.TCP_KEEPALIVE, 1)
    end.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_S)
    end.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_S)
    end.setsockopt(zmq.TCP_KEEPALIVE_CNT, DEAD_AFTER_S // KEEPALIVE_S)
    end.setsockopt(zmq.TCP_MAXRT, 1000 * DEAD_AFTER_S)
    end.setsockopt(zmq.IPV6, "[" in address)


class _Bell(Protocol):
    """Something that can be waited for."""

    def fileno(self) -> int: ...


class Link:
    """The verifier's end: one connection to one drafter, made again for ever when it breaks."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._address = endpoint.address
        self._keys = _endpoint_keys(endpoint)
        if self._keys is None:
            _check_private_folder(endpoint.address, make=False)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._failing_since: float | None = None
        self._bell: _Bell | None = None
        try:
            self._socket = self._connect()
        except zmq.ZMQError as error:
            self._context.term()
            raise ConfigError(f"drafter address {self._address}: {error.strerror}") from error

    def _connect(self) -> zmq.Socket[bytes]:
        end = self._context.socket(zmq.DEALER)
        _common_options(end, self._address, MAX_UNSENT_UPDATES)
        # Queue for a living connection only: what a dead drafter missed is said anew, not replayed.
        end.setsockopt(zmq.IMMEDIATE, 1)
        end.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        if self._keys:
            end.curve_serverkey = self._keys["server"][0]
            end.curve_publickey, end.curve_secretkey = self._keys["client"]
        try:
            end.connect(self._address)
        except zmq.ZMQError:
            end.close()
            raise
        return end

    def send(self, frame: bytes) -> bool:
        """False if there is no connection or its queue is full; never waits."""
        try:
            self._socket.send(frame, zmq.DONTWAIT)
        except zmq.Again:
            self._renew()
            return False
        self._failing_since = None
        return True

    def _renew(self) -> None:
        """ZMQ reconnects by itself, but not after an answer that was no ZMQ, or no drafter's."""
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since = now
        elif now - self._failing_since > RENEW_S:
            self._failing_since = now
            with suppress(zmq.ZMQError):  # a name that is not found just now, no file left to open
                renewed = self._connect()
                self._socket.close(linger=0)
                self._socket = renewed

    def receive(self) -> bytes | None:
        """The next frame, None if there is none; never waits. Of several parts the last counts."""
        if not self._events() & zmq.POLLIN:
            return None
        try:
            return self._socket.recv_multipart(zmq.DONTWAIT)[-1]
        except zmq.Again:  # gone since it was announced
            return None

    def is_up(self) -> bool:
        """Whether there is a connection that takes a frame; never waits."""
        return bool(self._events() & zmq.POLLOUT)

    def _events(self) -> int:
        """What could be done now. Asked in every step: a poll, or an error, would take longer."""
        return int(self._socket.getsockopt(zmq.EVENTS))

    def wake_on(self, bell: _Bell) -> None:
        """Also this ends a wait."""
        self._bell = bell

    def wait(self, seconds: float) -> bool:
        """Whether a frame is there, after ``seconds`` at most, or when the bell rings."""
        milliseconds = max(0, int(seconds * 1000))
        if self._bell is None:
            return bool(self._socket.poll(milliseconds))
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._bell, zmq.POLLIN)
        return self._socket in dict(poller.poll(milliseconds))

    def close(self) -> None:
        """Closes the connection; what was sent last gets 0.2 s to leave."""
        self._socket.close()
        self._context.term()


class Server:
    """The drafter's end: many verifiers."""

    def __init__(self, endpoint: Endpoint) -> None:
        keys = _endpoint_keys(endpoint)
        if keys is None:
            _check_private_folder(endpoint.address, make=True)
            _check_left_behind(endpoint.address)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator = self._authenticate(keys["client"][0]) if keys else None
        self._socket = self._context.socket(zmq.ROUTER)
        _common_options(self._socket, endpoint.address, MAX_UNSENT_ANSWERS)
        # A verifier that is gone is an error that we can see, not a message dropped in silence.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if keys:
            # Without a domain, and not enforced, ZMQ admits everybody when nobody answers it.
            self._socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
            self._socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
            self._socket.curve_server = True
            self._socket.curve_publickey, self._socket.curve_secretkey = keys["server"]
        try:
            self._socket.bind(endpoint.address)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"cannot listen on {endpoint.address}: {error.strerror}") from error

    def _authenticate(self, client: bytes) -> ThreadAuthenticator:
        authenticator = ThreadAuthenticator(self._context)
        authenticator.start()

        class OneKey:
            def callback(self, domain: str, key: bytes) -> bool:  # noqa: ARG002
                return secrets.compare_digest(key, client)

        authenticator.configure_curve_callback(ZAP_DOMAIN.decode(), OneKey())
        return authenticator

    def send(self, peer: bytes, frame: bytes) -> bool:
        """False if the verifier is gone or does not read; never waits."""
        try:
            self._socket.send_multipart([peer, frame], zmq.DONTWAIT)
        except zmq.ZMQError:
            return False
        return True

    def receive(self) -> tuple[bytes, bytes] | None:
        """The next (peer, frame), None if there is none; never waits."""
        try:
            parts = self._socket.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            return None
        return parts[0], parts[-1] if len(parts) > 1 else b""

    def wait(self, seconds: float) -> bool:
        """Whether a frame is there, after ``seconds`` at most."""
        return bool(self._socket.poll(max(0, int(seconds * 1000))))

    def close(self) -> None:
        """Closes the socket and ends the authenticator."""
        self._socket.close()
        if self._authenticator is not None:
            if not self._authenticator.is_alive():
                # stop() would wait for ever to tell its thread.
                self._authenticator.pipe = None  # type: ignore[assignment]
            self._authenticator.stop()
        self._context.term()

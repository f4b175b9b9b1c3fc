"""How messages travel: ZMQ over ``ipc://`` on one host, over ``tcp://`` with CURVE between hosts.

An ipc socket lies in a folder of mode 0700: who may enter the folder may speak. TCP always needs
keys, loopback too. One key file serves both sides: it holds one secret, from which each side
derives the server's and the client's key pair, so whoever has the file may speak and nobody else.

Heartbeats are ZMTP's own, answered by ZMQ's I/O threads: no thread of ours, and a peer that is
busy for minutes is not taken for dead.
"""

import hashlib
import os
import secrets
import stat
from pathlib import Path

import zmq
import zmq.auth.base
import zmq.utils.z85 as z85
from zmq.auth.thread import ThreadAuthenticator

from minedraft.config import ConfigError, Endpoint
from minedraft.protocol import MAX_FRAME_BYTES

HEARTBEAT_MS = 1000
HEARTBEAT_TIMEOUT_MS = 4000
RECONNECT_MS = 100
MAX_QUEUED_MESSAGES = 4096
MAX_IPC_PATH = 100


def check_address(address: str) -> str:
    """``address`` if it is one that we can use. Raises ConfigError."""
    scheme, separator, rest = address.partition("://")
    if not separator or scheme not in ("ipc", "tcp") or not rest:
        raise ConfigError(
            f"drafter address {address!r}: write ipc:///folder/name or tcp://host:port"
        )
    if scheme == "ipc" and len(rest) > MAX_IPC_PATH:
        raise ConfigError(
            f"drafter address {address!r}: the path is longer than {MAX_IPC_PATH} characters, "
            "which is more than a Unix socket can have; take a shorter folder"
        )
    host, _, port = rest.rpartition(":")
    if scheme == "tcp" and not (host and port.isdecimal() and 0 < int(port) < 65536):
        raise ConfigError(f"drafter address {address!r}: write tcp://host:port")
    return address


def _check_private_folder(address: str) -> None:
    folder = Path(address.removeprefix("ipc://")).absolute().parent
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(
            f"drafter address {address!r}: others may enter {folder}; an ipc socket needs a folder "
            f"of its own that only you may enter (chmod 700 {folder}, or name a new one)"
        )


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
        return None
    if not endpoint.key_file:
        raise ConfigError(
            f"drafter address {endpoint.address}: TCP needs a key; give --key-file FILE on both "
            "sides (`minedraft drafter` makes the file if there is none; copy it to the verifier)"
        )
    return _key_pairs(endpoint.key_file)


def _common_options(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.LINGER, 200)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.SNDHWM, MAX_QUEUED_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_MESSAGES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)


class Link:
    """The verifier's end: one connection to one drafter, made again for ever when it breaks."""

    def __init__(self, endpoint: Endpoint) -> None:
        keys = _endpoint_keys(endpoint)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        _common_options(self._socket)
        # Queue for a living connection only: what a dead drafter missed is said anew, not replayed.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        if keys:
            self._socket.curve_serverkey = keys["server"][0]
            self._socket.curve_publickey, self._socket.curve_secretkey = keys["client"]
        self._socket.connect(endpoint.address)

    def send(self, frame: bytes) -> bool:
        """False if there is no connection or its queue is full; never waits."""
        try:
            self._socket.send(frame, zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True

    def receive(self) -> bytes | None:
        """The next frame, None if there is none; never waits. Stray multipart frames are cut."""
        try:
            return self._socket.recv_multipart(zmq.DONTWAIT)[-1]
        except zmq.Again:
            return None

    def wait(self, seconds: float) -> bool:
        """Whether a frame is there, after ``seconds`` at most."""
        return bool(self._socket.poll(max(0, int(seconds * 1000))))

    def close(self) -> None:
        """Closes the connection; what was sent last gets 0.2 s to leave."""
        self._socket.close()
        self._context.term()


class Server:
    """The drafter's end: many verifiers."""

    def __init__(self, endpoint: Endpoint) -> None:
        keys = _endpoint_keys(endpoint)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator = self._authenticate(keys["client"][0]) if keys else None
        self._socket = self._context.socket(zmq.ROUTER)
        _common_options(self._socket)
        # A verifier that is gone is an error that we can see, not a message dropped in silence.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if keys:
            self._socket.curve_server = True
            self._socket.curve_publickey, self._socket.curve_secretkey = keys["server"]
        else:
            _check_private_folder(endpoint.address)
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

        authenticator.configure_curve_callback(credentials_provider=OneKey())
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
            self._authenticator.stop()
        self._context.term()

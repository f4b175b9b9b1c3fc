"""Real sockets: who may speak is heard, who may not is not, and nobody stops the others."""

import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from threading import Thread

import pytest
import zmq
from hypothesis import example, given
from hypothesis import strategies as st

from minedraft import transport
from minedraft.config import ConfigError, Endpoint
from minedraft.protocol import MAX_FRAME_BYTES
from minedraft.transport import Link, Server, check_address, create_key_file

PATIENCE_S = 10.0
"""For what takes milliseconds on a machine that has nothing else to do."""
QUIET_S = 0.5
"""In which nothing must come."""
Folder = Path


@pytest.fixture
def folder() -> Iterator[Folder]:
    """A private folder with a path short enough for a Unix socket."""
    with tempfile.TemporaryDirectory(prefix="md-") as name:
        yield Path(name)


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def make_endpoint(scheme: str, folder: Folder, key: str = "key") -> Endpoint:
    if scheme == "ipc":
        return Endpoint(f"ipc://{folder}/drafter")
    folder.mkdir(mode=0o700, exist_ok=True)
    create_key_file(folder / key)
    return Endpoint(f"tcp://127.0.0.1:{free_port()}", str(folder / key))


@pytest.fixture(params=["ipc", "tcp"])
def endpoint(request: pytest.FixtureRequest, folder: Folder) -> Endpoint:
    return make_endpoint(request.param, folder)


@pytest.fixture
def tcp(folder: Folder) -> Endpoint:
    return make_endpoint("tcp", folder)


def until(condition: Callable[[], bool], seconds: float = PATIENCE_S) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)


def receive(end: Link | Server) -> list[bytes]:
    """The next frame, with the peer before it at a server, after a wait."""
    until(lambda: end.wait(0.05))
    received = end.receive()
    assert received is not None
    return [received] if isinstance(received, bytes) else list(received)


def connect(link: Link, server: Server) -> bytes:
    """Waits until the link's frames arrive; the name under which the server knows it."""
    mark = os.urandom(8)
    heard: list[bytes] = []

    def arrived() -> bool:
        if not heard:
            link.send(b"hello" + mark)
        server.wait(0.02)
        while (received := server.receive()) is not None:
            assert len(received[1]) <= MAX_FRAME_BYTES
            if received[1] == b"hello" + mark:
                heard.append(received[0])
        return bool(heard)

    until(arrived)
    assert link.send(b"last" + mark)
    while receive(server)[1] != b"last" + mark:
        pass
    return heard[0]


def is_deaf(server: Server, send: Callable[[], object]) -> bool:
    """Whether the server hears nothing for a while, however often something is sent."""
    end = time.monotonic() + QUIET_S
    while time.monotonic() < end:
        send()
        if server.wait(0.02):
            return False
    return True


def one_line(raised: pytest.ExceptionInfo[ConfigError]) -> str:
    text = str(raised.value)
    assert "\n" not in text
    return text


# --- frames travel --------------------------------------------------------------------------------


def test_frames_come_whole_and_in_order(endpoint: Endpoint) -> None:
    frames = [b"", b"\0", os.urandom(1000), os.urandom(1 << 20), b"last"]
    with closing(Server(endpoint)) as server, closing(Link(endpoint)) as link:
        peer = connect(link, server)
        for frame in frames:
            assert link.send(frame)
        assert [receive(server) for _ in frames] == [[peer, frame] for frame in frames]
        for frame in frames:
            assert server.send(peer, frame)
        assert [receive(link) for _ in frames] == [[frame] for frame in frames]


def test_verifiers_get_their_own_answers(endpoint: Endpoint) -> None:
    with (
        closing(Server(endpoint)) as server,
        closing(Link(endpoint)) as first,
        closing(Link(endpoint)) as second,
    ):
        peers = connect(first, server), connect(second, server)
        assert peers[0] != peers[1]
        for turn in range(20):
            for peer in peers if turn % 2 else reversed(peers):
                assert server.send(peer, peer + bytes([turn]))
        for link, peer in zip((first, second), peers, strict=True):
            assert [receive(link) for _ in range(20)] == [[peer + bytes([i])] for i in range(20)]
            assert link.receive() is None


def test_nothing_to_receive_is_none_after_the_wait(endpoint: Endpoint) -> None:
    with closing(Server(endpoint)) as server, closing(Link(endpoint)) as link:
        for end in (server, link):
            started = time.monotonic()
            assert not end.wait(0.05)
            assert 0.04 <= time.monotonic() - started < 1.0
            assert end.receive() is None


def test_an_ipv6_address_serves(folder: Folder) -> None:
    try:
        socket.socket(socket.AF_INET6).bind(("::1", 0))
    except OSError:
        pytest.skip("no IPv6 here")
    create_key_file(folder / "key")
    endpoint = Endpoint(f"tcp://[::1]:{free_port()}", str(folder / "key"))
    with closing(Server(endpoint)) as server, closing(Link(endpoint)) as link:
        assert connect(link, server)


# --- connections break ----------------------------------------------------------------------------


def test_without_a_drafter_nothing_is_sent_and_nothing_is_queued(endpoint: Endpoint) -> None:
    with closing(Link(endpoint)) as link:
        for _ in range(50):
            assert not link.send(b"early")
        time.sleep(2 * transport.RECONNECT_MS / 1000)
        assert not link.send(b"early")
        with closing(Server(endpoint)) as server:
            until(lambda: link.send(b"now"))
            assert receive(server)[1] == b"now"
            assert not server.wait(0.1)


def test_a_verifier_that_is_gone_is_an_error_and_the_others_are_served(endpoint: Endpoint) -> None:
    with closing(Server(endpoint)) as server, closing(Link(endpoint)) as stays:
        leaves = Link(endpoint)
        peers = connect(leaves, server), connect(stays, server)
        leaves.close()
        until(lambda: not server.send(peers[0], b"are you there"))
        assert not server.send(b"never seen", b"are you there")
        assert server.send(peers[1], b"still served")
        assert receive(stays) == [b"still served"]


def test_a_drafter_that_is_gone_is_noticed_and_found_again(endpoint: Endpoint) -> None:
    with closing(Link(endpoint)) as link:
        assert not link.is_up()
        with closing(Server(endpoint)) as server:
            before = connect(link, server)
            assert link.is_up()
        until(lambda: not link.send(b"are you there"))
        assert not link.is_up()
        with closing(Server(endpoint)) as server:
            assert connect(link, server) != before, "a restarted drafter knows nobody"


def test_a_verifier_that_does_not_read_is_given_up_and_the_others_are_served(
    endpoint: Endpoint,
) -> None:
    with (
        closing(Server(endpoint)) as server,
        closing(Link(endpoint)) as deaf,
        closing(Link(endpoint)) as reads,
    ):
        peers = connect(deaf, server), connect(reads, server)
        sent = 0
        while server.send(peers[0], bytes(1000)):
            sent += 1
            assert sent < 100 * transport.MAX_UNSENT_ANSWERS, "the queue has no end"
        assert server.send(peers[1], b"served")
        assert receive(reads) == [b"served"]


def test_a_burst_of_new_requests_waits_for_a_drafter_that_computes(endpoint: Endpoint) -> None:
    with closing(Server(endpoint)) as server, closing(Link(endpoint)) as link:
        connect(link, server)
        burst = [b"%d" % n + bytes(300) for n in range(transport.MAX_UNSENT_UPDATES - 100)]
        for frame in burst:
            assert link.send(frame)
        for frame in burst:
            assert receive(server)[1] == frame


@pytest.mark.parametrize("deaf", ["server", "link"])
def test_what_a_peer_leaves_unread_is_bounded(endpoint: Endpoint, deaf: str) -> None:
    """The queue of who does not read, not only that of who sends."""
    large, most = bytes(1 << 16), transport.MAX_UNREAD_MESSAGES
    with closing(Server(endpoint)) as server, closing(Link(endpoint)) as link:
        peer = connect(link, server)
        # The kernel's buffers take some too, and the sender's own queue is not what is tested.
        unsent = transport.MAX_UNSENT_UPDATES if deaf == "server" else transport.MAX_UNSENT_ANSWERS
        sent = 0
        while link.send(large) if deaf == "server" else server.send(peer, large):
            sent += 1
            if not sent % 100:
                time.sleep(0.01)
        assert sent <= unsent + most + 400
        if deaf == "server":
            assert not link.is_up(), "the verifier knows"


def test_closing_does_not_wait_for_those_who_do_not_read(endpoint: Endpoint) -> None:
    server, link = Server(endpoint), Link(endpoint)
    peer = connect(link, server)
    while server.send(peer, bytes(1000)):
        pass
    while link.send(bytes(1000)):
        pass
    for end in (link, server):
        started = time.monotonic()
        end.close()
        assert time.monotonic() - started < 2.0


PEER_DIES_UNREAD = """
import sys, time
from minedraft.transport import Endpoint, Link, Server

address, key_file, survivor = sys.argv[1:]
server, link = Server(Endpoint(address, key_file)), Link(Endpoint(address, key_file))
while not link.send(b"hello"): time.sleep(0.01)
while not server.wait(1): pass
peer, _ = server.receive()
if survivor == "server":
    while link.send(bytes(1000)): pass
    link.close()
else:
    while server.send(peer, bytes(1000)): pass
    server.close()
time.sleep(1.5)
print("survived")
"""


def test_a_peer_that_ends_with_much_unread_does_not_take_us_along(folder: Folder) -> None:
    """libzmq's heartbeats abort the process here: "Assertion failed: !_io_error"."""
    runs = []
    for scheme in ("ipc", "tcp"):
        for survivor in ("server", "link"):
            endpoint = make_endpoint(scheme, folder / f"{scheme}-{survivor}")
            command = [sys.executable, "-c", PEER_DIES_UNREAD, endpoint.address]
            command += [endpoint.key_file or "", survivor]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
            runs.append(subprocess.Popen(command, stdout=subprocess.PIPE, env=environment))
    for run in runs:
        assert run.communicate(timeout=60)[0] == b"survived\n"


def test_a_host_that_is_gone_is_noticed_by_keepalive(tcp: Endpoint) -> None:
    port = f":{int(tcp.address.rpartition(':')[2]):04X}"
    with closing(Server(tcp)) as server, closing(Link(tcp)) as link:
        connect(link, server)
        time.sleep(0.2)  # until all is acknowledged: a retransmission has its own timer
        rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        connected = [row for row in rows if row[3] == "01" and port in row[1] + row[2]]
        timers = [row[5].partition(":")[0] for row in connected]
        assert timers == ["02", "02"], "no keepalive timer at both ends"


# --- what should not be sent ----------------------------------------------------------------------


def test_an_oversized_frame_of_a_verifier_harms_only_itself(endpoint: Endpoint) -> None:
    with (
        closing(Server(endpoint)) as server,
        closing(Link(endpoint)) as wrong,
        closing(Link(endpoint)) as right,
    ):
        connect(wrong, server)
        peer = connect(right, server)
        wrong.send(bytes(2 * MAX_FRAME_BYTES))
        connect(wrong, server)  # which reads all that has come: hello, not the large frame
        assert right.send(b"x" * 1000)
        assert receive(server) == [peer, b"x" * 1000]
        assert server.send(peer, b"served")
        assert receive(right) == [b"served"]


def test_the_largest_frame_travels(endpoint: Endpoint) -> None:
    with closing(Server(endpoint)) as server, closing(Link(endpoint)) as link:
        connect(link, server)
        assert link.send(bytes(MAX_FRAME_BYTES))
        assert receive(server)[1] == bytes(MAX_FRAME_BYTES)


def test_an_oversized_frame_of_a_drafter_is_survived(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "RENEW_S", 0.3)
    with closing(Server(endpoint)) as server, closing(Link(endpoint)) as link:
        peer = connect(link, server)
        server.send(peer, bytes(2 * MAX_FRAME_BYTES))
        until(lambda: not server.send(peer, b""))
        connect(link, server)
        while (frame := link.receive()) is not None:
            assert not frame


def test_a_drafter_is_found_where_something_else_answered_before(
    tcp: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "RENEW_S", 0.3)
    with closing(Link(tcp)) as link:
        with web_server(tcp) as answered:
            until(lambda: link.send(b"") or bool(answered))
            time.sleep(0.1)
            assert not link.send(b"")
        with closing(Server(tcp)) as server:
            connect(link, server)


def test_a_name_that_is_not_found_for_a_while_stops_nothing(
    tcp: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "RENEW_S", 0.0)
    with closing(Link(tcp)) as link:
        monkeypatch.setattr(link, "_address", "tcp://no such host:5555")
        for _ in range(3):
            assert not link.send(b"")
        monkeypatch.undo()
        with closing(Server(tcp)) as server:
            connect(link, server)


@contextmanager
def web_server(endpoint: Endpoint) -> Iterator[list[bool]]:
    """What answers on the port is no drafter; the list grows with every answer."""
    answered: list[bool] = []
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", int(endpoint.address.rpartition(":")[2])))
    listener.listen()

    def serve() -> None:
        while True:
            try:
                connection = listener.accept()[0]
            except OSError:
                return
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10)
                answered.append(True)

    thread = Thread(target=serve, daemon=True)
    thread.start()
    yield answered
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


def raw_connection(endpoint: Endpoint) -> socket.socket:
    scheme, _, rest = endpoint.address.partition("://")
    if scheme == "ipc":
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(rest)
    else:
        host, _, port = rest.rpartition(":")
        connection = socket.create_connection((host, int(port)))
    return connection


def test_noise_on_the_socket_does_not_stop_the_server(endpoint: Endpoint) -> None:
    zmtp = b"\xff" + bytes(8) + b"\x7f\x03\x01"
    null, curve = b"NULL" + bytes(48), b"CURVE" + bytes(47)
    noises = [b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(100), os.urandom(1 << 16), zmtp]
    noises += [zmtp + null + os.urandom(500), zmtp + curve + os.urandom(500)]
    with closing(Server(endpoint)) as server, closing(Link(endpoint)) as link:
        peer = connect(link, server)
        connections = []
        for noise in noises * 3:
            connection = raw_connection(endpoint)
            connections.append(connection)
            try:
                connection.sendall(noise)
            except OSError:
                continue  # closed in our face: fine
        for connection in connections[::2]:
            connection.close()
        if endpoint.key_file:
            assert is_deaf(server, lambda: None), "noise was heard as a frame"
        # Without keys ZMQ takes it for an ancient version of its protocol, and hears frames.
        while server.wait(QUIET_S):
            assert server.receive() is not None
        assert link.send(b"x")
        assert receive(server) == [peer, b"x"]
        with closing(Link(endpoint)) as another:
            connect(another, server)
        for connection in connections:
            connection.close()


def test_a_drafter_answers_through_a_storm_of_raw_bytes(endpoint: Endpoint) -> None:
    rng = random.Random(1)
    storm = [rng.randbytes(rng.randrange(1 << 12)) for _ in range(300)] + [rng.randbytes(1 << 20)]
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01"
    for index in range(0, len(storm), 3):
        storm[index] = greeting + storm[index]
    ended: list[bool] = []

    def blow() -> None:
        for noise in storm:
            with closing(raw_connection(endpoint)) as connection:
                connection.settimeout(1.0)
                with suppress(OSError):  # closed in our face, or not read: fine
                    connection.sendall(noise)
            time.sleep(0.002)
        ended.append(True)

    with closing(Server(endpoint)) as server, closing(Link(endpoint)) as link:
        peer = connect(link, server)
        thread = Thread(target=blow)
        thread.start()
        turns = 0
        while not ended:
            turns += 1
            started = time.monotonic()
            assert link.send(b"%d" % turns)
            while receive(server) != [peer, b"%d" % turns]:
                pass  # without keys, noise may be heard as frames
            assert server.send(peer, b"answer %d" % turns)
            assert receive(link) == [b"answer %d" % turns]
            assert time.monotonic() - started < PATIENCE_S / 2
        thread.join()
        assert turns > 10


def test_of_a_stray_multipart_message_the_last_part_is_taken(folder: Folder) -> None:
    endpoint = make_endpoint("ipc", folder)
    with (
        closing(Server(endpoint)) as server,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as dealer,
    ):
        dealer.linger = 0
        dealer.connect(endpoint.address)
        dealer.send_multipart([b"envelope", b"", b"body"])
        assert receive(server)[1] == b"body"


# --- who may speak --------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [Link, Server])
def test_tcp_needs_a_key(end: Callable[[Endpoint], Link | Server]) -> None:
    for key_file in (None, ""):
        with pytest.raises(ConfigError, match="TCP needs a key; give --key-file") as raised:
            end(Endpoint(f"tcp://127.0.0.1:{free_port()}", key_file))
        one_line(raised)


def test_another_key_is_neither_heard_nor_answered(tcp: Endpoint, folder: Folder) -> None:
    create_key_file(folder / "other")
    with (
        closing(Server(tcp)) as server,
        closing(Link(Endpoint(tcp.address, str(folder / "other")))) as stranger,
        closing(Link(tcp)) as friend,
    ):
        assert is_deaf(server, lambda: stranger.send(b"let me in"))
        assert not stranger.send(b"let me in")
        assert stranger.receive() is None
        connect(friend, server)


@pytest.mark.parametrize("knows_the_server", [False, True])
def test_a_client_without_our_key_pair_is_not_heard(tcp: Endpoint, knows_the_server: bool) -> None:
    assert tcp.key_file
    with closing(Server(tcp)) as server, zmq.Context() as context:
        with context.socket(zmq.DEALER) as stranger:
            stranger.linger = 0
            if knows_the_server:
                stranger.curve_serverkey = transport._key_pairs(tcp.key_file)["server"][0]
                stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
            stranger.connect(tcp.address)
            stranger.send(b"let me in")
            assert is_deaf(server, lambda: None)
        with closing(Link(tcp)) as friend:
            connect(friend, server)


@pytest.mark.parametrize("gone", ["thread", "socket too"])
def test_when_nobody_checks_keys_nobody_is_admitted(
    tcp: Endpoint, folder: Folder, gone: str
) -> None:
    assert tcp.key_file
    create_key_file(folder / "other")
    with closing(Server(tcp)) as server, closing(Link(tcp)) as friend, zmq.Context() as context:
        peer = connect(friend, server)
        authenticator = server._authenticator
        assert authenticator is not None
        authenticator.pipe.send(b"TERMINATE")
        authenticator.thread.join()
        if gone == "socket too":
            authenticator.zap_socket.close()
        with (
            closing(Link(Endpoint(tcp.address, str(folder / "other")))) as stranger,
            context.socket(zmq.DEALER) as half_known,
            closing(Link(tcp)) as late_friend,
        ):
            half_known.linger = 0
            half_known.curve_serverkey = transport._key_pairs(tcp.key_file)["server"][0]
            half_known.curve_publickey, half_known.curve_secretkey = zmq.curve_keypair()
            half_known.connect(tcp.address)
            half_known.send(b"let me in")
            assert is_deaf(server, lambda: [stranger.send(b"and me"), late_friend.send(b"me")])
        assert server.send(peer, b"who is in stays")
        assert receive(friend) == [b"who is in stays"]
        started = time.monotonic()
    assert time.monotonic() - started < 2.0, "closing waits for a thread that is gone"


def test_a_key_file_is_ones_own_and_stays(folder: Folder) -> None:
    before = os.umask(0)
    try:
        create_key_file(folder / "a")
        create_key_file(folder / "b")
    finally:
        os.umask(before)
    assert (folder / "a").stat().st_mode & 0o777 == 0o600
    secret = (folder / "a").read_text()
    assert len(bytes.fromhex(secret)) == 32
    assert secret != (folder / "b").read_text()
    create_key_file(folder / "a")
    assert (folder / "a").read_text() == secret
    with pytest.raises(ConfigError, match="key file .*/no/key: No such file") as raised:
        create_key_file(folder / "no" / "key")
    one_line(raised)


def test_key_pairs_differ_by_side_and_by_secret(folder: Folder) -> None:
    create_key_file(folder / "a")
    create_key_file(folder / "b")
    a, b = (transport._key_pairs(str(folder / name)) for name in "ab")
    keys = [key for pairs in (a, b) for pair in pairs.values() for key in pair]
    assert len(set(keys)) == 8
    assert a == transport._key_pairs(str(folder / "a")), "both sides derive the same"


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o602, 0o610])
def test_a_key_file_that_others_may_touch_is_refused(tcp: Endpoint, mode: int) -> None:
    assert tcp.key_file
    Path(tcp.key_file).chmod(mode)
    for end in (Link, Server):
        with pytest.raises(ConfigError, match="others may read it; chmod 600") as raised:
            end(tcp)
        one_line(raised)


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe", b"secret", b"ab" * 31, b"ab" * 33, b"-----BEGIN KEY-----\nab\n"]
)
def test_what_is_no_key_file_is_refused(tcp: Endpoint, content: bytes) -> None:
    assert tcp.key_file
    Path(tcp.key_file).write_bytes(content)
    with pytest.raises(ConfigError, match="not made by `minedraft drafter --key-file`") as raised:
        Link(tcp)
    one_line(raised)


def test_a_key_file_that_cannot_be_read_is_refused(tcp: Endpoint, folder: Folder) -> None:
    for path, why in ((folder / "none", "No such file"), (folder, "Is a directory")):
        with pytest.raises(ConfigError, match=f"key file {path}: {why}") as raised:
            Server(Endpoint(tcp.address, str(path)))
        one_line(raised)


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o710, 0o701, 0o707])
def test_an_ipc_folder_that_others_may_enter_is_refused(folder: Folder, mode: int) -> None:
    folder.chmod(mode)
    for end in (Server, Link):
        with pytest.raises(ConfigError, match=f"others may enter {folder}.*chmod 700") as raised:
            end(Endpoint(f"ipc://{folder}/drafter"))
        one_line(raised)
    assert not (folder / "drafter").exists()


@pytest.mark.parametrize("end", [Server, Link])
def test_an_ipc_folder_of_another_user_is_refused(
    folder: Folder, end: Callable[[Endpoint], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    us = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: us + 1)
    with pytest.raises(ConfigError, match=f"others may enter {folder}") as raised:
        end(Endpoint(f"ipc://{folder}/drafter"))
    one_line(raised)


def test_a_verifier_may_come_before_the_folder_of_its_drafter(folder: Folder) -> None:
    endpoint = Endpoint(f"ipc://{folder}/later/drafter")
    with closing(Link(endpoint)) as link:
        assert not (folder / "later").exists()
        with closing(Server(endpoint)) as server:
            connect(link, server)


def test_an_ipc_folder_is_made_for_its_owner_only(folder: Folder) -> None:
    endpoint = Endpoint(f"ipc://{folder}/a/b/drafter")
    with closing(Server(endpoint)) as server, closing(Link(endpoint)) as link:
        assert (folder / "a" / "b").stat().st_mode & 0o777 == 0o700
        connect(link, server)


# --- addresses ------------------------------------------------------------------------------------


GOOD_ADDRESSES = ["ipc:///tmp/a/b", "tcp://127.0.0.1:1", "tcp://[::1]:65535", "tcp://*:5555"]
BAD_ADDRESSES = [
    "",
    "ipc://",
    "tcp://",
    "/tmp/a",
    "127.0.0.1:5555",
    "http://a:1",
    "inproc://a",
    "ipc:/tmp/a",
    "tcp://host",
    "tcp://host:",
    "tcp://:5555",
    "tcp://host:0",
    "tcp://host:65536",
    "tcp://host:-1",
    "tcp://host:5x",
    "tcp://host:" + "9" * 5000,
    "ipc://@abstract",
    "ipc://*",
    "ipc://relative/path",
    "ipc:///tmp/" + "x" * 100,
    "ipc:///tmp/" + "é" * 60,
    "ipc:///tmp/a\0b",
]


@pytest.mark.parametrize("address", GOOD_ADDRESSES)
def test_addresses_that_can_be_used(address: str) -> None:
    assert check_address(address) == address


@pytest.mark.parametrize("address", BAD_ADDRESSES, ids=lambda address: address[:30])
def test_addresses_that_cannot_be_used(address: str, folder: Folder) -> None:
    create_key_file(folder / "key")
    for use in (check_address, lambda a: Link(Endpoint(a, str(folder / "key")))):
        with pytest.raises(ConfigError, match="drafter address") as raised:
            use(address)
        one_line(raised)


@given(st.text(max_size=20), st.sampled_from(["ipc:///", "tcp://", "tcp://h:", ""]))
@example("a\nb", "ipc:///")
@example("\u0663", "tcp://h:")
def test_an_address_is_taken_as_it_is_or_refused_in_one_line(text: str, scheme: str) -> None:
    address = scheme + text
    try:
        assert check_address(address) == address
    except ConfigError as error:
        assert "\n" not in str(error)  # noqa: PT017
    else:
        assert address.startswith(("ipc:///", "tcp://"))
        assert "\0" not in address


@given(st.integers(-10, 70_000))
def test_ports(port: int) -> None:
    if 0 < port < 65536:
        assert check_address(f"tcp://host:{port}")
    else:
        with pytest.raises(ConfigError):
            check_address(f"tcp://host:{port}")


@pytest.mark.parametrize("address", ["tcp://*:5555", "tcp://no such host:5555"])
def test_a_host_that_cannot_be_reached_is_refused_in_one_line(address: str, folder: Folder) -> None:
    create_key_file(folder / "key")
    with pytest.raises(ConfigError, match="drafter address") as raised:
        Link(Endpoint(address, str(folder / "key")))
    one_line(raised)


def test_an_address_that_is_taken_is_refused_and_its_owner_goes_on(endpoint: Endpoint) -> None:
    with closing(Server(endpoint)) as server, closing(Link(endpoint)) as link:
        with pytest.raises(ConfigError, match="cannot listen on .*in use") as raised:
            Server(endpoint)
        one_line(raised)
        connect(link, server)
        with closing(Link(endpoint)) as newcomer:
            connect(newcomer, server)


def test_a_socket_file_that_was_left_behind_is_no_obstacle(folder: Folder) -> None:
    endpoint = make_endpoint("ipc", folder)
    with closing(socket.socket(socket.AF_UNIX)) as dead:
        dead.bind(str(folder / "drafter"))
    assert (folder / "drafter").exists()
    with closing(Server(endpoint)) as server, closing(Link(endpoint)) as link:
        connect(link, server)


def test_a_file_that_is_no_socket_is_not_replaced(folder: Folder) -> None:
    (folder / "drafter").write_text("precious")
    with pytest.raises(ConfigError, match="cannot listen on .*no socket") as raised:
        Server(Endpoint(f"ipc://{folder}/drafter"))
    one_line(raised)
    assert (folder / "drafter").read_text() == "precious"


@pytest.mark.parametrize("name", ["file/drafter", "file/below/drafter"])
def test_a_folder_that_cannot_be_is_refused_in_one_line(folder: Folder, name: str) -> None:
    (folder / "file").touch()
    for end in (Server, Link):
        with pytest.raises(ConfigError, match="drafter address") as raised:
            end(Endpoint(f"ipc://{folder}/{name}"))
        one_line(raised)


def test_a_server_that_was_refused_leaves_nothing_open(folder: Folder) -> None:
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    folder.chmod(0o755)
    before = open_files()
    for _ in range(5):
        with pytest.raises(ConfigError):
            Server(Endpoint(f"ipc://{folder}/drafter"))
    assert open_files() <= before

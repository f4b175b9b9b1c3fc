"""A drafter as a child process: it says why it did not start, and leaves nothing behind."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path

import pytest
from servers import HELLO, WELCOME, answering

from minedraft import protocol
from minedraft.config import Endpoint
from minedraft.drafter import child
from minedraft.drafter.child import DrafterError, DrafterProcess, NoDrafterError, greet
from minedraft.protocol import Drafts, Greet, Refused, Welcome
from minedraft.transport import Server


@pytest.fixture
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Endpoint:
    folder = tmp_path_factory.mktemp("s")
    folder.chmod(0o700)
    return Endpoint(f"ipc://{folder}/d")


def one_line(raised: pytest.ExceptionInfo[DrafterError]) -> str:
    text = str(raised.value)
    assert "\n" not in text
    return text


# --- greeting -------------------------------------------------------------------------------------


def test_hello_is_said_until_welcome_comes(endpoint: Endpoint) -> None:
    with answering(endpoint, Greet(), Drafts(), WELCOME) as heard:
        assert greet(endpoint, HELLO, 10.0) == WELCOME
    assert len(heard) >= 3
    assert set(heard) == {protocol.encode(HELLO)}


def test_a_drafter_that_comes_later_is_found(endpoint: Endpoint) -> None:
    found: list[Welcome] = []
    thread = threading.Thread(target=lambda: found.append(greet(endpoint, HELLO, 20.0)))
    thread.start()
    time.sleep(0.3)
    with answering(endpoint, WELCOME):
        thread.join()
    assert found == [WELCOME]


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (Refused("it is\nfull"), "the drafter refuses this target: it is full"),
        (b"\xc1", "what answers at .* is no drafter: MessagePack data is malformed"),
        (protocol.encode(HELLO), "what answers at .* is no drafter: Invalid value 'hello'"),
    ],
    ids=["refused", "noise", "verifier"],
)
def test_what_is_no_drafter_for_us_is_an_error(
    endpoint: Endpoint, answer: protocol.ToVerifier | bytes, says: str
) -> None:
    with answering(endpoint, answer), pytest.raises(DrafterError, match=says) as raised:
        greet(endpoint, HELLO, 10.0)
    one_line(raised)


@pytest.mark.parametrize("answers", [None, Drafts()])
def test_without_a_welcome_it_gives_up_in_time(
    endpoint: Endpoint, answers: protocol.ToVerifier | None
) -> None:
    started = time.monotonic()
    says = "no drafter answers at ipc://.* within 1 s"
    with (
        answering(endpoint, answers) if answers else nullcontext(),
        pytest.raises(NoDrafterError, match=says) as raised,
    ):
        greet(endpoint, HELLO, 0.6)
    one_line(raised)
    assert time.monotonic() - started < 3.0


def test_a_drafter_that_died_is_not_waited_for(endpoint: Endpoint) -> None:
    def dead() -> None:
        raise DrafterError("it died")

    started = time.monotonic()
    with pytest.raises(DrafterError, match="it died"):
        greet(endpoint, HELLO, 60.0, dead)
    assert time.monotonic() - started < 3.0


# --- the process ----------------------------------------------------------------------------------


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made."""
    path = tmp_path / "tmp"
    path.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(path))
    return path


@pytest.fixture
def interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes this code run in place of the drafter's."""

    def install(code: str) -> None:
        path = tmp_path / "python"
        path.write_text(f"#!{sys.executable}\nimport os, signal, sys, time\n{code}\n")
        path.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(path))

    return install


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_it_listens_in_a_folder_of_its_own(
    folders: Path, interpreter: Callable[[str], None]
) -> None:
    interpreter("print(sys.argv[1:], os.environ['MD'], flush=True); time.sleep(60)")
    drafter = DrafterProcess("model", ["--cores", "0"], {"MD": "x"})
    try:
        (folder,) = folders.iterdir()
        assert folder.stat().st_mode & 0o777 == 0o700
        assert drafter.endpoint == Endpoint(f"ipc://{folder}/drafter")
        with closing(Server(drafter.endpoint)):
            assert is_running(drafter.pid)
        command = ["-P", "-m", "minedraft", "drafter", "model", "--listen"]
        command += [drafter.endpoint.address, "--cores", "0"]
        until(lambda: (folder / "drafter.log").read_text() == f"{command} x\n")
    finally:
        drafter.stop()
    assert not is_running(drafter.pid)
    assert list(folders.iterdir()) == []


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("print('one'); print(' two '); print(); sys.exit(3)", "did not start: two"),
        ("print('minedraft: why'); print('[rank0] bye')", "did not start: minedraft: why$"),
        ("sys.exit(3)", "did not start: exit code 3"),
        ("os.kill(os.getpid(), 9)", "did not start: exit code -9"),
        (r"sys.stdout.buffer.write(b'\xff\n')", "did not start: \N{REPLACEMENT CHARACTER}"),
    ],
)
def test_a_drafter_that_ends_says_its_last_words(
    folders: Path, interpreter: Callable[[str], None], code: str, says: str
) -> None:
    interpreter(code)
    drafter = DrafterProcess("model", [], {})
    with pytest.raises(DrafterError, match=says) as raised:
        drafter.wait_ready(HELLO)
    one_line(raised)
    drafter.stop()
    assert list(folders.iterdir()) == []


def test_a_drafter_that_does_not_listen_to_reason_is_killed(
    folders: Path, interpreter: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "STOP_TIMEOUT_S", 0.3)
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    interpreter(f"{ignore}; print('ready', flush=True); time.sleep(60)")
    drafter = DrafterProcess("model", [], {})
    until(lambda: any(path.read_text() for path in folders.rglob("drafter.log")))
    drafter.stop()
    assert not is_running(drafter.pid)
    assert list(folders.iterdir()) == []
    drafter.stop()  # which may come twice: from an error and from the end of the program


def test_the_real_command_says_what_is_wrong_in_one_line(folders: Path) -> None:
    drafter = DrafterProcess("model", ["--cores", "x"], {"PYTHONPATH": os.pathsep.join(sys.path)})
    with pytest.raises(DrafterError, match="cores 'x': write numbers and ranges") as raised:
        drafter.wait_ready(HELLO)
    one_line(raised)
    drafter.stop()


@pytest.mark.parametrize("in_folder", [True, False])
def test_modules_where_the_command_is_given_are_not_taken(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_folder: bool
) -> None:
    """Who works on vLLM has a folder ``vllm`` there, without its compiled parts."""
    (tmp_path / "argparse.py").write_text("raise SystemExit('shadowed')")
    paths = [path for path in sys.path if path]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.chdir(tmp_path)
    if in_folder:
        drafter = DrafterProcess("model", ["--cores", "x"], {})
        with pytest.raises(DrafterError, match="cores 'x'"):
            drafter.wait_ready(HELLO)
        drafter.stop()
        return
    code = "import sys; from minedraft.cli import main; sys.exit(main(sys.argv[1:]))"
    command = ["drafter", "model", "--listen", "ipc:///none/d", "--cores", "x"]
    run = subprocess.run(
        [sys.executable, "-P", "-c", code, *command], capture_output=True, text=True, check=False
    )
    assert run.returncode == 2
    assert run.stderr.strip() == "minedraft: cores 'x': write numbers and ranges, as in 0-3,8"


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (Welcome(protocol.PROTOCOL_VERSION, "drafter", "w", 50, 1000), "not the target's"),
        (Welcome(protocol.PROTOCOL_VERSION + 1, "drafter", "v", 50, 1000), "speaks protocol"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused(
    endpoint: Endpoint, answer: Welcome, says: str
) -> None:
    with answering(endpoint, answer), pytest.raises(DrafterError, match=says) as raised:
        greet(endpoint, HELLO, 10.0)
    assert not isinstance(raised.value, NoDrafterError)
    one_line(raised)

"""A drafter that dies is started anew; one that never gets ready is a failure, said once."""

import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from servers import HELLO, WELCOME

from minedraft import protocol
from minedraft.config import Endpoint
from minedraft.drafter import supervisor
from minedraft.drafter.child import DrafterError
from minedraft.drafter.supervisor import (
    FIRST_DELAY_S,
    LONGEST_DELAY_S,
    STEADY_S,
    Supervisor,
    next_delay,
)


@given(st.lists(st.floats(0, 2 * STEADY_S), max_size=20))
def test_delays_double_up_to_a_limit_until_a_life_was_long(lives: list[float]) -> None:
    delay = FIRST_DELAY_S / 2
    short_lives = 0
    for lived in lives:
        delay = next_delay(delay, lived)
        short_lives = 0 if lived >= STEADY_S else short_lives + 1
        assert FIRST_DELAY_S <= delay <= LONGEST_DELAY_S
        if lived >= STEADY_S:
            assert delay == FIRST_DELAY_S
    if short_lives == len(lives) > 0:
        assert delay == min(FIRST_DELAY_S * 2 ** (len(lives) - 1), LONGEST_DELAY_S)


class FakeDrafter:
    """A drafter process whose lives are told by the test."""

    def __init__(self, ready: Any = WELCOME) -> None:
        self.endpoint = Endpoint("ipc:///none/d")
        self.ready = ready
        self.starts = 0
        self.no_memory = 0
        self.died = threading.Event()
        self.started = threading.Condition()

    def wait_ready(self, hello: protocol.Hello) -> protocol.Welcome:
        assert hello == HELLO
        if isinstance(self.ready, threading.Event):
            self.died.wait()
            raise DrafterError("it ended before it was ready")
        if isinstance(self.ready, Exception):
            raise self.ready
        assert isinstance(self.ready, protocol.Welcome)
        return self.ready

    def wait(self) -> int:
        self.died.wait()
        return -int(signal.SIGKILL)

    def last_words(self) -> str:
        return "some last words"

    def start_anew(self) -> None:
        with self.started:
            self.starts += 1
            self.started.notify()
            if self.no_memory:
                self.no_memory -= 1
                raise OSError("out of memory")
            self.died.clear()

    def wait_starts(self, number: int) -> None:
        with self.started:
            assert self.started.wait_for(lambda: self.starts >= number, 10.0)

    def stop(self) -> None:
        self.died.set()


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(supervisor, "FIRST_DELAY_S", 0.02)
    yield
    assert not [t for t in threading.enumerate() if t.name == "minedraft-drafter"]


def supervised(drafter: FakeDrafter, failures: list[DrafterError]) -> Supervisor:
    return Supervisor(drafter, HELLO, failures.append)  # type: ignore[arg-type]


@pytest.mark.usefixtures("fast")
def test_a_drafter_that_dies_is_started_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(supervisor.logger, "warning", lambda text, *a: lines.append(text % a))
    drafter, failures = FakeDrafter(), list[DrafterError]()
    watched = supervised(drafter, failures)
    for number in (1, 2, 3):
        drafter.died.set()
        drafter.wait_starts(number)
    watched.stop()
    assert drafter.starts == 3
    assert failures == []
    assert [line.partition("; ")[2] for line in lines] == [
        f"it is started anew in {delay:g} s" for delay in (0.02, 0.04, 0.08)
    ]
    assert "exit code -9 (some last words)" in lines[0]


@pytest.mark.usefixtures("fast")
def test_a_start_that_fails_is_tried_again() -> None:
    drafter, failures = FakeDrafter(), list[DrafterError]()
    drafter.no_memory = 2
    watched = supervised(drafter, failures)
    drafter.died.set()
    drafter.wait_starts(3)
    watched.stop()
    assert failures == []


@pytest.mark.usefixtures("fast")
def test_a_drafter_that_never_gets_ready_is_a_failure() -> None:
    error = DrafterError("wrong flag")
    failures: list[DrafterError] = []
    drafter = FakeDrafter(error)
    watched = supervised(drafter, failures)
    drafter.died.set()
    watched.stop()
    assert failures == [error]
    assert drafter.starts == 0


@pytest.mark.usefixtures("fast")
def test_a_drafter_that_is_stopped_is_no_failure_and_stays_so() -> None:
    failures: list[DrafterError] = []
    ready, starting = FakeDrafter(), FakeDrafter(threading.Event())
    for drafter in (ready, starting):
        supervised(drafter, failures).stop()
        assert drafter.starts == 0
    assert failures == []


@pytest.mark.usefixtures("fast")
def test_stopping_does_not_wait_for_the_next_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FIRST_DELAY_S", 60.0)
    monkeypatch.setattr(supervisor, "LONGEST_DELAY_S", 60.0)
    said = threading.Event()
    monkeypatch.setattr(supervisor.logger, "warning", lambda *a: said.set())
    drafter = FakeDrafter()
    watched = supervised(drafter, [])
    drafter.died.set()
    assert said.wait(10.0)
    watched.stop()
    assert drafter.starts == 0


def test_the_folder_of_the_process_is_the_callers(tmp_path: Path) -> None:
    """The real process, in a folder that it does not own; it is started again on its address."""
    from minedraft.drafter.child import DrafterProcess

    tmp_path.chmod(0o700)
    drafter = DrafterProcess("model", ["--cores", "x"], {}, tmp_path)
    assert drafter.endpoint == Endpoint(f"ipc://{tmp_path}/drafter")
    for _ in range(2):
        assert drafter.wait() != 0
        log = (tmp_path / "drafter.log").read_text()
        assert drafter.last_words() == log.strip().splitlines()[-1]
        (tmp_path / "drafter.log").write_text("old\n")
        drafter.start_anew()
    drafter.stop()
    assert tmp_path.exists()


def test_a_folder_that_was_cleaned_away_is_made_again(tmp_path: Path) -> None:
    from minedraft.drafter.child import DrafterProcess

    folder = tmp_path / "minedraft-x"
    folder.mkdir(mode=0o700)
    drafter = DrafterProcess("model", ["--cores", "x"], {}, folder)
    assert drafter.wait() == 2
    shutil.rmtree(folder)
    assert drafter.last_words() == "exit code 2"
    drafter.start_anew()
    assert drafter.wait() == 2
    assert "cores 'x'" in drafter.last_words()
    assert folder.stat().st_mode & 0o777 == 0o700
    drafter.stop()


@pytest.mark.usefixtures("fast")
def test_what_nobody_foresaw_is_a_failure_too() -> None:
    failures: list[DrafterError] = []
    drafter = FakeDrafter(OSError("too many open files"))
    watched = supervised(drafter, failures)
    watched._thread.join(10.0)
    watched.stop()
    assert [str(failure) for failure in failures] == [
        "the drafter did not start: OSError: too many open files"
    ]

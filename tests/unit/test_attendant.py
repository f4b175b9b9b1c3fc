"""The attendant beside the engine: what it does, what it survives, and when it ends."""

import gc
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from minedraft.config import ConfigError, Mode
from minedraft.control import Command, Status, ask
from minedraft.verifier.attendant import Attendant

TICK_S = 0.02


class Scheduler:
    """A subject that counts what is asked of it, and fails where it is told to."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.fail: dict[str, Exception] = {}
        self.mode: Mode = "auto"
        self.trace = ""
        self.threads: set[str] = set()

    def _was_asked(self, what: str) -> None:
        self.asked.append(what)
        self.threads.add(threading.current_thread().name)
        if what in self.fail:
            raise self.fail[what]

    def report(self) -> Mapping[str, Any]:
        self._was_asked("report")
        return {"number": self.asked.count("report")}

    def status(self) -> Status:
        self._was_asked("status")
        return Status(os.getpid(), mode=self.mode, trace=self.trace)

    def idle_poll(self) -> None:
        self._was_asked("idle_poll")

    def flush_trace(self) -> None:
        self._was_asked("flush_trace")

    def set_mode(self, mode: Mode) -> None:
        self._was_asked("set_mode")
        self.mode = mode

    def set_trace(self, path: str) -> None:
        self._was_asked("set_trace")
        self.trace = path


class Page:
    """Where reports are published."""

    def __init__(self) -> None:
        self.reports: list[Mapping[str, Any]] = []
        self.closed = 0

    def publish(self, report: Mapping[str, Any]) -> None:
        self.reports.append(report)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def page() -> Page:
    return Page()


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler()


@pytest.fixture
def folder(tmp_path: Path) -> str:
    path = tmp_path / "control"
    path.mkdir(mode=0o700)
    return str(path)


@pytest.fixture
def attendant(scheduler: Scheduler, page: Page, folder: str) -> Iterator[Attendant]:
    attendant = Attendant(scheduler, page, folder, TICK_S)
    yield attendant
    attendant.stop()


def comes(true: Callable[[], object], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.005)
    return bool(true())


def attendants() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "minedraft-attendant"]


def test_it_publishes_polls_and_flushes_in_its_own_thread(
    attendant: Attendant, scheduler: Scheduler, page: Page
) -> None:
    assert comes(lambda: len(page.reports) >= 3)
    assert {"report", "idle_poll", "flush_trace"} <= set(scheduler.asked)
    assert scheduler.threads == {"minedraft-attendant"}
    assert page.reports[:3] == [{"number": 1}, {"number": 2}, {"number": 3}]


def test_it_does_so_once_in_a_tick(scheduler: Scheduler, page: Page, folder: str) -> None:
    for control in (None, folder):
        page.reports.clear()
        attendant = Attendant(scheduler, page, control, 0.1)
        time.sleep(0.55)
        attendant.stop()
        assert 2 <= len(page.reports) <= 7


def test_stop_publishes_the_last_report_and_ends_all(
    scheduler: Scheduler, page: Page, folder: str
) -> None:
    attendant = Attendant(scheduler, page, folder, TICK_S)
    comes(lambda: page.reports)
    attendant.stop()
    assert page.reports[-1]["number"] == scheduler.asked.count("report")
    assert not attendants()
    assert not list(Path(folder).iterdir())
    asked = list(scheduler.asked)
    attendant.stop()
    assert (scheduler.asked, page.closed) == (asked, 1), "a second time does nothing"


@pytest.mark.parametrize("what", ["report", "idle_poll", "flush_trace"])
def test_what_fails_is_said_once_for_each_kind_and_survived(
    attendant: Attendant, scheduler: Scheduler, page: Page, what: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    with caplog.at_level(logging.ERROR, "vllm.minedraft"):
        for error in (RuntimeError("one"), RuntimeError("two"), KeyError("three")):
            scheduler.fail[what] = error
            count = scheduler.asked.count(what)
            assert comes(lambda count=count: scheduler.asked.count(what) > count + 3)  # type: ignore[misc]
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [
        RuntimeError,
        KeyError,
    ]
    scheduler.fail.clear()
    count = len(page.reports)
    assert comes(lambda: len(page.reports) > count)


def test_commands_reach_the_subject(
    attendant: Attendant, scheduler: Scheduler, folder: str
) -> None:
    assert ask(Path(folder), Command()) == [Status(os.getpid(), mode="auto")]
    assert not {"set_mode", "set_trace"} & set(scheduler.asked)
    command = Command(mode="sequential", trace="/t.json")
    assert ask(Path(folder), command) == [Status(os.getpid(), mode="sequential", trace="/t.json")]
    assert ask(Path(folder), Command(trace="")) == [Status(os.getpid(), mode="sequential")]


@pytest.mark.parametrize("what", ["set_mode", "set_trace"])
def test_a_refusal_is_in_the_status(
    attendant: Attendant, scheduler: Scheduler, folder: str, what: str
) -> None:
    scheduler.fail[what] = ConfigError("no such thing")
    (status,) = ask(Path(folder), Command(mode="off", trace="/t.json"))
    assert status.error == "no such thing"
    assert (status.mode, status.trace) == ("off" if what == "set_trace" else "auto", "")


def test_a_subject_that_fails_to_answer_is_survived(
    attendant: Attendant, scheduler: Scheduler, folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler.fail["status"] = RuntimeError("broken")
    (status,) = ask(Path(folder), Command())
    assert "no status in its answer" in status.error
    scheduler.fail.clear()
    assert ask(Path(folder), Command()) == [Status(os.getpid(), mode="auto")]


def test_it_does_not_keep_the_subject_alive(page: Page, folder: str) -> None:
    scheduler = Scheduler()
    attendant = Attendant(scheduler, page, folder, TICK_S)
    scheduler.attendant = attendant  # type: ignore[attr-defined]
    assert comes(lambda: page.reports)
    del scheduler, attendant
    gc.collect()
    assert comes(lambda: not attendants())
    assert page.closed == 1
    assert not list(Path(folder).iterdir())


def test_a_folder_that_others_may_enter_is_refused_before_a_thread_starts(
    scheduler: Scheduler, page: Page, folder: str
) -> None:
    Path(folder).chmod(0o755)
    with pytest.raises(ConfigError):
        Attendant(scheduler, page, folder)
    assert not attendants()


PROGRAM = """
import sys
sys.path.insert(0, {tests!r})
from test_attendant import Page, Scheduler
from minedraft.verifier.attendant import Attendant
scheduler = Scheduler()
attendant = Attendant(scheduler, Page(), {folder!r})
{end}
"""


@pytest.mark.parametrize("end", ["", "sys.exit(0)", "1 / 0"])
def test_the_interpreters_exit_ends_it(folder: str, end: str) -> None:
    program = PROGRAM.format(tests=str(Path(__file__).parent), folder=folder, end=end)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == (1 if "/" in end else 0), done.stderr
    assert done.stderr.count("Traceback") == ("/" in end)
    assert not list(Path(folder).iterdir()), "its socket is gone"

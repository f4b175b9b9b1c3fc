"""Nothing outlives its parent: real processes, of which one is killed."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from minedraft import lifeline

WITHIN_S = 4.0
"""Half a second, on a machine that has nothing else to do."""

STARTS_CHILD = """
import os, subprocess, sys, time
from minedraft import lifeline
code, pipe = sys.argv[1:]
environment = {**os.environ, lifeline.ENV_PARENT: str(os.getpid())}
subprocess.Popen([sys.executable, "-c", code, pipe], pass_fds=[int(pipe)], env=environment)
time.sleep(60)
"""
STARTS_PROCESS = """
import multiprocessing, os, sys, time
from minedraft import lifeline

def child(pipe, late):
    if late:
        os.write(pipe, b"ready")
        time.sleep(1)
    lifeline.exit_with_parent_process()
    if not late:
        os.write(pipe, b"ready")
    time.sleep(60)

if __name__ == "__main__":
    lifeline.exit_with_parent_process()  # which must do nothing here
    arguments = [int(sys.argv[2]), sys.argv[1] == "late"]
    multiprocessing.get_context("fork").Process(target=child, args=arguments).start()
    time.sleep(60)
"""
FROM_ENVIRONMENT = """
import os, sys, time
from minedraft.lifeline import exit_with_parent
exit_with_parent()
os.write(int(sys.argv[1]), b"ready")
time.sleep(60)
"""
AS_ARGUMENT = FROM_ENVIRONMENT.replace("exit_with_parent()", "exit_with_parent(os.getppid())")
PRESENT_PARENT = FROM_ENVIRONMENT.replace(
    "exit_with_parent()", "del os.environ['MINEDRAFT_PARENT_PID']; exit_with_parent()"
)
IGNORES_SIGNALS = FROM_ENVIRONMENT.replace(
    "time.sleep(60)",
    "import signal; [signal.signal(s, signal.SIG_IGN) for s in (1, 2, 15)]; time.sleep(60)",
)
STARTS_LATE = """
import os, sys, time
os.write(int(sys.argv[1]), b"ready")
time.sleep(1)
from minedraft.lifeline import exit_with_parent
exit_with_parent()
time.sleep(60)
"""


@contextmanager
def parent_of(
    child: str, parent: str = STARTS_CHILD
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A parent whose child is ready, and a pipe that ends when the last of the two has ended."""
    ours, theirs = os.pipe()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", parent, child, str(theirs)], pass_fds=[theirs], env=environment
    )
    os.close(theirs)
    try:
        assert os.read(ours, 5) == b"ready"
        yield process, ours
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def seconds_until_the_end(pipe: int, most: float) -> float:
    """Until the pipe ends; ``most`` if it does not within that time."""
    started = time.monotonic()
    readable, _, _ = select.select([pipe], [], [], most)
    if not readable:
        return most
    assert os.read(pipe, 1) == b""
    return time.monotonic() - started


@pytest.mark.parametrize(
    ("child", "how"),
    [
        (FROM_ENVIRONMENT, signal.SIGKILL),
        (AS_ARGUMENT, signal.SIGKILL),
        (PRESENT_PARENT, signal.SIGTERM),
        (IGNORES_SIGNALS, signal.SIGKILL),
    ],
    ids=["environment", "argument", "present", "stubborn"],
)
def test_a_child_ends_with_its_parent(child: str, how: signal.Signals) -> None:
    with parent_of(child) as (parent, pipe):
        parent.send_signal(how)
        assert seconds_until_the_end(pipe, 10.0) < WITHIN_S


def test_a_child_of_multiprocessing_ends_with_its_parent() -> None:
    with parent_of("", STARTS_PROCESS) as (parent, pipe):
        parent.kill()
        assert seconds_until_the_end(pipe, 10.0) < WITHIN_S


def test_a_child_of_multiprocessing_whose_parent_was_gone_before_it_looked_ends_too() -> None:
    with parent_of("late", STARTS_PROCESS) as (parent, pipe):
        parent.kill()
        assert seconds_until_the_end(pipe, 10.0) < 1.0 + WITHIN_S


def test_a_child_lives_as_long_as_its_parent() -> None:
    with parent_of(FROM_ENVIRONMENT) as (_, pipe):
        most = 3 * lifeline.POLL_S
        assert seconds_until_the_end(pipe, most) == most


def test_a_child_whose_parent_was_gone_before_it_looked_ends_too() -> None:
    with parent_of(STARTS_LATE) as (parent, pipe):
        parent.kill()
        assert seconds_until_the_end(pipe, 10.0) < 1.0 + WITHIN_S


STARTS_DRAFTER = """
import sys, time
from minedraft.drafter.child import DrafterProcess
sys.executable, pipe = sys.argv[1:]
import subprocess
popen = subprocess.Popen
subprocess.Popen = lambda *a, **k: popen(*a, **k, pass_fds=[int(pipe)])
drafter = DrafterProcess("model", [], {"PIPE": pipe})
time.sleep(60)
"""
DRAFTER = """#!{python}
import os, sys, time
from minedraft.lifeline import exit_with_parent
exit_with_parent()
os.write(int(os.environ["PIPE"]), b"ready")
time.sleep(60)
"""


def test_a_drafter_that_outlived_its_verifier_takes_its_folder_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interpreter = tmp_path / "python"
    interpreter.write_text(DRAFTER.format(python=sys.executable))
    interpreter.chmod(0o700)
    folders = tmp_path / "tmp"
    folders.mkdir()
    monkeypatch.setenv("TMPDIR", str(folders))
    with parent_of(str(interpreter), STARTS_DRAFTER) as (parent, pipe):
        assert [path.name[:10] for path in folders.iterdir()] == ["minedraft-"]
        parent.kill()
        assert seconds_until_the_end(pipe, 10.0) < WITHIN_S
        assert list(folders.iterdir()) == []


HAS_CHILDREN = """
import multiprocessing, os, subprocess, sys, time
from multiprocessing.reduction import DupFd
from pathlib import Path
from minedraft import lifeline

def watched(duplicate):
    import setproctitle
    pipe = duplicate.detach()
    setproctitle.setproctitle("watched")
    lifeline.exit_with_parent_process()
    os.write(pipe, b"r")
    time.sleep(60)

if __name__ == "__main__":
    folder, pipe = sys.argv[1], int(sys.argv[2])
    os.environ.update(lifeline.family(Path(folder)))
    os.set_inheritable(pipe, True)
    unwatched = "import os, setproctitle, sys, time; setproctitle.setproctitle('other');"
    unwatched += "os.write(int(sys.argv[1]), b'r'); time.sleep(60)"
    for _ in range(3):
        subprocess.Popen([sys.executable, "-c", unwatched, str(pipe)], close_fds=False)
    for _ in range(2):
        context = multiprocessing.get_context("spawn")
        context.Process(target=watched, args=[DupFd(pipe)]).start()
    time.sleep(60)
"""


def test_one_watcher_ends_the_whole_family(tmp_path: Path) -> None:
    """Those that know nothing of us too, and that changed their titles."""
    script, folder = tmp_path / "head.py", tmp_path / "folder"
    script.write_text(HAS_CHILDREN)
    folder.mkdir()
    (folder / "file").touch()
    ours, theirs = os.pipe()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    head = subprocess.Popen(
        [sys.executable, script, folder, str(theirs)], pass_fds=[theirs], env=environment
    )
    os.close(theirs)
    try:
        for _ in range(5):
            assert os.read(ours, 1) == b"r"
        head.kill()
        assert seconds_until_the_end(ours, 10.0) < WITHIN_S
        assert not folder.exists()
    finally:
        head.kill()
        head.wait()
        os.close(ours)

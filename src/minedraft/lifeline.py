"""No process outlives its parent, not even when the parent is killed with SIGKILL.

A process whose children are not all ours, as vLLM's API servers are not, puts a folder of its own
into their environment. The first of our processes to notice its end ends all that carry it.
"""

import multiprocessing
import os
import shutil
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

ENV_PARENT = "MINEDRAFT_PARENT_PID"
ENV_FOLDER = "MINEDRAFT_PARENT_FOLDER"
"""A temporary folder of the parent named in MINEDRAFT_PARENT_PID."""
POLL_S = 0.5


def last_words(said: str, code: int) -> str:
    """The last line of what an ended process said, or the code with which it ended."""
    return (said.strip().splitlines() or [f"exit code {code}"])[-1].strip()


def family(folder: Path) -> dict[str, str]:
    """The variables for all processes that are to end with this one, whose folder that is."""
    # Else setproctitle, with which vLLM names its processes, writes over what is looked for.
    keep_environment = {"SPT_NOENV": "1"}
    return {ENV_PARENT: str(os.getpid()), ENV_FOLDER: str(folder), **keep_environment}


def exit_with_parent(parent: int | None = None) -> None:
    """Ends this process at once when its parent is gone, half a second after at most.

    ``parent`` is the expected parent's process id; by default the one in MINEDRAFT_PARENT_PID,
    else the present parent. With the one in MINEDRAFT_PARENT_PID its folder goes, and its other
    children. A death signal of the kernel (PR_SET_PDEATHSIG) would not do: it comes when the
    *thread* ends that started the process.
    """
    _watch(parent or int(os.environ.get(ENV_PARENT) or os.getppid()), is_gone=False)


def exit_with_parent_process() -> None:
    """The same for a process of multiprocessing; does nothing in a program's first process."""
    present = os.getppid()
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    if parent.is_alive():
        _watch(present, is_gone=False)
    elif parent.pid is not None:
        _watch(parent.pid, is_gone=True)


def _watch(parent: int, *, is_gone: bool) -> None:
    is_head = os.environ.get(ENV_PARENT) == str(parent)
    folder = os.environ.get(ENV_FOLDER) if is_head else None

    def watch() -> None:
        while os.getppid() == parent and not is_gone:
            time.sleep(POLL_S)
        if folder:
            _end_family(Path(folder))
        os._exit(1)

    threading.Thread(target=watch, name="minedraft-lifeline", daemon=True).start()


def _end_family(folder: Path) -> None:
    """Kills all processes that were started with this folder, and removes it."""
    try:
        (folder / "ended").mkdir()
    except OSError:
        return  # another of them does it
    mark = f"{ENV_FOLDER}={folder}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            variables = (process / "environ").read_bytes().split(b"\0")
            if mark in variables and int(process.name) != os.getpid():
                os.kill(int(process.name), signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)

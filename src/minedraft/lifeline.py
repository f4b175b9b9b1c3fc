"""No process outlives its parent, not even when the parent is killed with SIGKILL."""

import multiprocessing
import os
import shutil
import threading
import time

ENV_PARENT = "MINEDRAFT_PARENT_PID"
ENV_FOLDER = "MINEDRAFT_PARENT_FOLDER"
"""A temporary folder of the parent named in MINEDRAFT_PARENT_PID."""
POLL_S = 0.5


def exit_with_parent(parent: int | None = None) -> None:
    """Ends this process at once when its parent is gone, half a second after at most.

    ``parent`` is the expected parent's process id; by default the one in MINEDRAFT_PARENT_PID,
    whose folder is removed then, else the present parent. A death signal of the kernel
    (PR_SET_PDEATHSIG) would not do: it comes when the *thread* ends that started the process.
    """
    folder = None
    if parent is None:
        parent = int(os.environ.get(ENV_PARENT) or os.getppid())
        folder = os.environ.get(ENV_FOLDER)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_S)
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="minedraft-lifeline", daemon=True).start()


def exit_with_parent_process() -> None:
    """The same for a process of multiprocessing; does nothing in a program's first process."""
    present = os.getppid()
    parent = multiprocessing.parent_process()
    if parent is not None:
        exit_with_parent(present if parent.is_alive() else -1)

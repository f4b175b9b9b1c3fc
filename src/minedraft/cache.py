"""Folders that are made once and kept: complete or absent, whoever is killed while making them."""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_root() -> Path:
    """The folder that everything cached lives in (it may not exist yet)."""
    if own := os.environ.get("MINEDRAFT_CACHE"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(shared).expanduser() / "minedraft"


def make_once(
    folder: Path,
    build: Callable[[Path], None],
    on_wait: Callable[[], None] = lambda: None,
) -> Path:
    """Return `folder`, after `build` has filled it if it did not exist.

    `build` gets an empty folder beside `folder`, which takes its name when `build` returns. Of
    several processes that ask at once, one builds; the others call `on_wait`, wait, and use what
    it made. The lock goes with its process, so nobody waits for one that was killed.
    """
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(f".{folder.name}.lock"), on_wait):
        if not folder.is_dir():
            unfinished = folder.with_name(f".{folder.name}.unfinished")
            # There is one only if an earlier builder was killed: the lock is ours.
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            try:
                build(unfinished)
                unfinished.rename(folder)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    return folder


@contextmanager
def _locked(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield

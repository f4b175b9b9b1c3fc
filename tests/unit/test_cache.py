import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from minedraft.cache import cache_root, make_once


def _build_slowly(folder: Path) -> None:
    (folder / "half").touch()
    time.sleep(0.5)
    (folder / "whole").write_text(str(os.getpid()))


def _die_half_way(folder: Path) -> None:
    (folder / "half").touch()
    os.kill(os.getpid(), signal.SIGKILL)


def _never(folder: Path) -> None:
    pytest.fail("what is there must not be built again")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"MINEDRAFT_CACHE": "/own", "XDG_CACHE_HOME": "/xdg", "HOME": "/home/me"}, "/own"),
        ({"XDG_CACHE_HOME": "/xdg", "HOME": "/home/me"}, "/xdg/minedraft"),
        ({"XDG_CACHE_HOME": "", "HOME": "/home/me"}, "/home/me/.cache/minedraft"),
        ({"MINEDRAFT_CACHE": "~/mine", "HOME": "/home/me"}, "/home/me/mine"),
    ],
)
def test_cache_root_is_the_first_place_that_is_set(
    environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MINEDRAFT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache_root() == Path(expected)


def test_builds_once(tmp_path: Path) -> None:
    folder = make_once(tmp_path / "a" / "b", lambda new: (new / "file").touch())
    assert make_once(folder, _never) == folder
    assert [file.name for file in folder.iterdir()] == ["file"]


def test_a_failed_build_leaves_nothing_and_can_be_tried_again(tmp_path: Path) -> None:
    folder = tmp_path / "made"

    def fail(new: Path) -> None:
        (new / "half").touch()
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        make_once(folder, fail)
    assert not folder.exists()
    make_once(folder, lambda new: (new / "whole").touch())
    assert [file.name for file in folder.iterdir()] == ["whole"]


def test_what_a_killed_build_left_is_not_used(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    process = multiprocessing.get_context("fork").Process(
        target=make_once, args=(folder, _die_half_way)
    )
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not folder.exists()
    make_once(folder, lambda new: (new / "whole").touch())
    assert [file.name for file in folder.iterdir()] == ["whole"]


def test_processes_at_once_build_once_and_see_only_the_whole(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    with multiprocessing.get_context("fork").Pool(3) as pool:
        results = [pool.apply_async(make_once, (folder, _build_slowly)) for _ in range(3)]
        builders = {(result.get(30) / "whole").read_text() for result in results}
    assert len(builders) == 1


def test_who_waits_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    process = multiprocessing.get_context("fork").Process(
        target=make_once, args=(folder, _build_slowly)
    )
    process.start()
    while not list(tmp_path.glob("*/half")):
        time.sleep(0.01)
    waited: list[bool] = []
    make_once(folder, _never, on_wait=lambda: waited.append(True))
    process.join()
    assert waited == [True]

"""The bell rings after a step, with its number; a ring that is lost or strange harms nothing."""

import os
import select
import socket
import stat
import threading
from pathlib import Path

import pytest

from minedraft.lifeline import ENV_FOLDER
from minedraft.verifier import bell as bell_module
from minedraft.verifier.bell import Bell, Ring, Ringer


def rings(bell: Bell, seconds: float = 10.0) -> bool:
    return bool(select.select([bell], [], [], seconds)[0])


def test_it_rings_when_the_step_has_ended_and_not_before() -> None:
    bell, ended = Bell(), threading.Event()

    def end() -> None:
        ended.wait()

    Ringer().ring_after(end, Ring(bell.address, 7))
    assert not rings(bell, 0.05)
    assert bell.last() == -1
    ended.set()
    assert rings(bell)
    assert bell.last() == 7
    assert not rings(bell, 0)
    bell.close()


def test_the_newest_step_counts() -> None:
    bell, prepared = Bell(), []
    ringer = Ringer(lambda: prepared.append(threading.current_thread().name))
    done = threading.Event()
    for number in (3, 4, 5):
        ringer.ring_after(lambda: None, Ring(bell.address, number))
    ringer.ring_after(done.set, Ring(bell.address, 2))
    assert done.wait(10)
    assert rings(bell)
    while bell.last() < 5:
        assert rings(bell)
    assert bell.last() == 5
    assert prepared == ["minedraft-ringer"]
    bell.close()


def test_it_hears_every_ring_if_it_is_asked_once_a_step() -> None:
    """A socket holds a few only."""
    bell, ringer = Bell(), Ringer()
    for number in range(40):
        ringer.ring_after(lambda: None, Ring(bell.address, number))
        assert rings(bell)
        assert bell.last() == number
    assert not ringer._failed
    bell.close()


def test_it_lies_in_the_folder_of_the_process_that_we_end_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(ENV_FOLDER, str(tmp_path))
    bell = Bell()
    assert Path(bell.address).is_relative_to(tmp_path)
    bell.close()


def test_only_we_can_ring_and_nothing_is_left() -> None:
    bell = Bell()
    folder = Path(bell.address).parent
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    bell.close()
    assert not folder.exists()


@pytest.mark.parametrize("noise", [b"", b"x", b"x" * 9, b"x" * 1000])
def test_what_is_no_number_is_no_ring(noise: bytes) -> None:
    bell = Bell()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.sendto(noise, bell.address)
    assert bell.last() == -1
    bell.close()


def test_a_bell_that_is_not_there_and_a_step_that_failed_are_said_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(bell_module.logger, "warning", lambda text, *args: said.append(text % args))
    bell, ringer = Bell(), Ringer()

    def fail() -> None:
        raise RuntimeError("device lost")

    ringer.ring_after(lambda: None, Ring("/nowhere/bell", 1))
    ringer.ring_after(fail, Ring(bell.address, 2))
    ringer.ring_after(lambda: None, Ring(bell.address, 3))
    assert rings(bell)
    assert bell.last() == 3
    assert len(said) == 1
    assert "steps end unheard" in said[0]
    bell.close()

"""The real ``minedraft drafter``, killed, stopped and started again under a load in an engine."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import vllm
from drafters import Reference
from engines import ENGINE
from loads import RESUME_S, SLACK_S, Engines, Running, Watch, idle, until

import minedraft

START_S = 240.0
STOPPED_S = 1.5


class Drafter:
    """A drafter as a user starts it."""

    def __init__(self, model: Path, address: str, log: Path) -> None:
        self._log = log
        words = ["drafter", model, "--listen", address, "--dtype", "float32", "--block-size", "32"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "minedraft", *map(str, words)],
            env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"},
            stderr=subprocess.STDOUT,
            stdout=log.open("wb"),
        )

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self._log.read_text()[-2000:]
        return b"ready on" in self._log.read_bytes()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def stopped(drafter: Drafter) -> Iterator[None]:
    drafter.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        drafter.process.send_signal(signal.SIGCONT)


@pytest.mark.slow
def test_a_drafter_stopped_killed_and_started_again(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"ipc://{tmp_path}/drafter"
    with closing(Drafter(tiny.perfect, address, tmp_path / "first.log")) as first:
        plain = vllm.LLM(str(tiny.target), **ENGINE)
        until(first.is_ready, idle, START_S)
        waits = {"min_wait_s": 0.05, "max_wait_s": 1.0}
        drafted = minedraft.LLM(
            str(tiny.target), drafter=address, mode="overlap", **(ENGINE | waits)
        )
        engines = Engines(plain, drafted, address, tiny.perfect, Reference(tiny.perfect))
        watch = Watch(engines, monkeypatch)
        with closing(Running(engines)) as running:
            step_until_drafted(engines, running, watch)
            with stopped(first):
                end = time.monotonic() + STOPPED_S
                while time.monotonic() < end:
                    step(engines, running)
                finished = running.finished
            assert finished > 0
            step_until_drafted(engines, running, watch)
            first.process.kill()
            with closing(Drafter(tiny.perfect, address, tmp_path / "second.log")) as second:
                finished = running.finished
                while not second.is_ready():
                    step(engines, running)
                assert running.finished > finished + 20, "decoding went on without a drafter"
                step_until_drafted(engines, running, watch)
                while len(running):
                    running.step()
    assert watch.excess_s <= SLACK_S


def step(engines: Engines, running: Running) -> None:
    """With six requests at a time."""
    load = engines.load
    while len(running) < 6:
        index = running.added % len(load.prompts)
        request = load.prompts[index], load.params[index], load.expected[index]
        running.add(str(running.added), *request)
    running.step()


def step_until_drafted(engines: Engines, running: Running, watch: Watch) -> None:
    began = time.monotonic()
    while watch.last_drafted_at() <= began:
        step(engines, running)
        assert time.monotonic() - began < RESUME_S

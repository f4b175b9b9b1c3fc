"""Whatever becomes of the drafter and its answers, requests end as in plain vLLM, and in time."""

import random
import threading
import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import drafters
import psutil
import pytest
import vllm
from drafters import Reference, TransformersEngine, serving
from engines import ENGINE, run
from faulty import FAULTS, FaultySocket, LightDrafter
from loads import PATIENCE_S, RESUME_S, SLACK_S, Engines, Running, Watch, greedy, idle, texts, until

import minedraft
from minedraft import protocol
from minedraft.config import Endpoint
from minedraft.drafter.server import DraftServer
from minedraft.drafter.sessions import Lost
from minedraft.transport import Server

WAIT = {"min_wait_s": 0.05, "max_wait_s": 1.0}
NUM_DRAFTS = 4
LASTING = [9, 14, 33, 7, 21]
"""The prompt of a request that is there from before a fault until after it."""
FOR_GOOD = ("sessions lost", "everything")
"""A session of which the drafter says that it cannot be drafted for is not asked for again."""


@pytest.fixture(scope="module")
def engines(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    reference = Reference(tiny.perfect)
    address = f"ipc://{tmp_path_factory.mktemp('drafter')}/drafter"
    with serving(TransformersEngine(reference), tiny.target, address):
        drafted = minedraft.LLM(
            str(tiny.target),
            drafter=address,
            mode="overlap",
            num_speculative_tokens=NUM_DRAFTS,
            **(ENGINE | WAIT),
        )
    plain = vllm.LLM(str(tiny.target), **ENGINE)
    return Engines(plain, drafted, address, tiny.perfect, reference)


# --- spoilt answers -------------------------------------------------------------------------------


@dataclass
class Spoiling:
    """A drafter in a thread and the socket that spoils its answers."""

    server: DraftServer
    socket: FaultySocket


@contextmanager
def spoiling(
    engines: Engines, kinds: Sequence[str], rate: float, patch: pytest.MonkeyPatch
) -> Iterator[Spoiling]:
    sockets: list[FaultySocket] = []

    def spoilt(endpoint: Endpoint) -> FaultySocket:
        sockets.append(FaultySocket(Server(endpoint), 1, kinds, rate))
        sockets[-1].on = False
        return sockets[-1]

    patch.setattr(drafters, "Server", spoilt)
    engine = TransformersEngine(engines.reference)
    with serving(engine, engines.model, engines.address) as server:
        yield Spoiling(server, sockets[0])


@pytest.fixture(scope="module")
def lasting(engines: Engines) -> list[int]:
    """What plain vLLM says to the prompt of that name."""
    return texts(run(engines.plain, [LASTING], greedy(450)))[0]


@pytest.mark.parametrize("kind", [*FAULTS, "everything"])
def test_spoilt_answers(
    engines: Engines, lasting: list[int], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, kinds = engines.load, list(FAULTS) if kind == "everything" else [kind]
    with (
        spoiling(engines, kinds, 0.4, monkeypatch) as drafter,
        closing(Running(engines)) as running,
    ):
        watch = Watch(engines, monkeypatch)
        running.add("lasting", LASTING, greedy(450), lasting)
        until(lambda: bool(watch.drafted_at), running.step)
        drafter.socket.on = True
        for index, request in enumerate(zip(load.prompts, load.params, load.expected, strict=True)):
            running.add(str(index), *request)
            running.step()
        while len(running) > 1:
            running.step()
        assert running.finished == len(load.prompts)
        assert "lasting" in running
        assert drafter.socket.spoilt > 0
        assert watch.excess_s <= SLACK_S

        drafter.socket.on = False
        ended = time.monotonic()
        if kind in FOR_GOOD:
            running.abort("lasting")
        while watch.drafted_at.get(running.ids["lasting"], 0.0) <= ended:
            if "lasting" not in running:
                running.add("lasting", LASTING, greedy(450), lasting)
            running.step()
            assert time.monotonic() - ended < RESUME_S
        running.close()
        until(lambda: drafter.server.num_sessions == 0, idle)
    assert not engines.client._sessions


class SmallEngine(TransformersEngine):
    """Has room for two sessions."""

    def open(self, key: Hashable, tokens: Sequence[int]) -> None:
        if len(self.sessions) < 2:
            super().open(key, tokens)
        else:
            self.lost.append(Lost(key, protocol.LOST_KV_FULL))


def test_a_drafter_whose_kv_cache_is_full(
    engines: Engines, lasting: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    load, engine = engines.load, SmallEngine(engines.reference)
    with (
        serving(engine, engines.model, engines.address) as server,
        closing(Running(engines)) as running,
    ):
        watch = Watch(engines, monkeypatch)
        running.add("first", LASTING, greedy(450), lasting)
        until(lambda: bool(watch.drafted_at), running.step)
        running.abort("first")
        for index, request in enumerate(zip(load.prompts, load.params, load.expected, strict=True)):
            running.add(str(index), *request)
        running.add("lasting", LASTING, greedy(450), lasting)
        while len(running) > 1:
            running.step()
        assert engines.client.counters.dropped[f"session lost: {protocol.LOST_KV_FULL}"]
        until(lambda: running.ids["lasting"] in watch.drafted_at, running.step)
        running.close()
        until(lambda: server.num_sessions == 0, idle)
    assert len(watch.drafted_at) > 4, "nobody got the place of one that ended"
    assert watch.excess_s <= SLACK_S
    assert not engine.sessions
    assert not engines.client._sessions


# --- a drafter that is killed and stopped ---------------------------------------------------------


class Killer(threading.Thread):
    """Kills and stops a drafter at random moments and lets it come back."""

    def __init__(self, drafter: LightDrafter, watch: Watch, number: int, seed: int) -> None:
        super().__init__(daemon=True)
        self._drafter, self._watch, self._number = drafter, watch, number
        self._rng = random.Random(seed)
        self.resumed_after: list[float] = []
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            for index in range(self._number):
                self._once(stop=index % 4 == 3)
        except BaseException as error:
            self.failure = error

    def _once(self, *, stop: bool) -> None:
        time.sleep(self._rng.uniform(0.0, 0.4))
        away_s = self._rng.choice((0.0, self._rng.uniform(0.0, 0.6)))
        if stop:
            with self._drafter.stopped():
                time.sleep(away_s)
        else:
            self._drafter.kill()
            time.sleep(away_s)
            self._drafter.start()
        returned = time.monotonic()
        while (drafted := self._watch.last_drafted_at()) <= returned:
            if time.monotonic() > returned + PATIENCE_S:
                raise AssertionError("no drafts any more")
            time.sleep(0.005)
        self.resumed_after.append(drafted - returned)


def kill(engines: Engines, patch: pytest.MonkeyPatch, number: int, seed: int) -> None:
    load = engines.load
    with (
        closing(LightDrafter(engines.model, engines.address)) as drafter,
        closing(Running(engines)) as running,
    ):
        watch = Watch(engines, patch)
        killer = Killer(drafter, watch, number, seed)
        killer.start()
        while killer.is_alive() or len(running):
            if killer.is_alive() and len(running) < 8:
                index = running.added % len(load.prompts)
                request = load.prompts[index], load.params[index], load.expected[index]
                running.add(str(running.added), *request)
            running.step()
        assert killer.failure is None
        assert running.finished == running.added
        assert len(killer.resumed_after) == number
        slow = [seconds for seconds in killer.resumed_after if seconds > RESUME_S]
        assert len(slow) <= number // 8, "more than a busy machine excuses"
        assert watch.excess_s <= SLACK_S
        until(lambda: drafter.num_sessions() == 0, idle)
        assert not engines.client._sessions


def test_a_drafter_killed_at_random_moments(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill(engines, monkeypatch, 8, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 6))
def test_a_drafter_killed_a_hundred_times(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    kill(engines, monkeypatch, 25, seed)


# --- many small requests --------------------------------------------------------------------------


def small_requests(engines: Engines, drafter: LightDrafter, number: int, seed: int) -> list[float]:
    """Requests that come and go at random; MiB of this process and the drafter's, each quarter."""
    rng, sizes = random.Random(seed), []
    prompts = [[rng.randrange(3, 64) for _ in range(rng.randint(1, 6))] for _ in range(40)]
    expected = texts(run(engines.plain, prompts, greedy(6)))
    processes = [psutil.Process(), psutil.Process(drafter.pid)]
    with closing(Running(engines)) as running:
        for index in range(number):
            which, length = rng.randrange(len(prompts)), rng.randint(1, 6)
            running.add(str(index), prompts[which], greedy(length), expected[which][:length])
            if rng.random() < 0.1 and len(running):
                running.abort(rng.choice(running.names))
            if rng.random() < 0.6 or len(running) > 12:
                running.step()
            if index % (number // 4) == number // 4 - 1:
                sizes.append(sum(process.memory_info().rss for process in processes) / 2**20)
        while len(running):
            running.step()
        assert running.finished > 0.8 * number
    return sizes


def test_two_thousand_small_requests_leave_nothing_behind(engines: Engines, tiny: Any) -> None:
    scheduler, client = engines.scheduler, engines.client
    with closing(LightDrafter(tiny.perturbed, engines.address)) as drafter:
        until(lambda: client.connected, idle)
        drafted = scheduler._stats.drafted
        small_requests(engines, drafter, 1000, seed=1)  # until caches and pools have their size
        first, *_, last = small_requests(engines, drafter, 2000, seed=2)
        assert scheduler._stats.drafted > drafted + 1000
        assert last - first < 10
        until(lambda: drafter.num_sessions() == 0, idle)
    for left in (scheduler.requests, scheduler._turns._last, client._sessions, client._by_number):
        assert not left
    assert not client._starved

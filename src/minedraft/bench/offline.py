"""All systems under all loads, interleaved: every repetition runs every setting once.

So a machine whose speed drifts slows all of them alike, and what is compared is compared within a
repetition.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import NamedTuple

from minedraft.bench.messages import Result, Task
from minedraft.bench.pool import EngineProcess, Pool
from minedraft.bench.provenance import Neighbours
from minedraft.bench.records import Load, Run, Setting, System
from minedraft.bench.systems import EngineJob, Pair, engine_job
from minedraft.bench.workloads import Conversation

WARM_UP_TOKENS = 8
WARM_UP_REQUESTS = 2


@dataclass(frozen=True)
class Plan:
    """What is to be run."""

    pair: Pair
    systems: Sequence[System]
    loads: Sequence[Load]
    conversations: Sequence[Conversation]
    repetitions: int
    seed: int
    temperature: float
    settle_s: float
    """Seconds for which `auto` runs each load before it is measured: it learns as it goes."""
    most_loaded: int
    """Engines that there is room for."""
    rounds: int = 0
    """In a closed loop so many conversations for each that is under way at a time; 0: all."""


class _Place(NamedTuple):
    """A setting and the engine that runs it."""

    job: EngineJob
    setting: Setting


def places(plan: Plan) -> list[_Place]:
    """Every setting, those of one engine one after the other; a bound after what it replays."""
    most = max(system.num_drafts for system in plan.systems)
    found = [
        _Place(engine_job(system, plan.pair, most), Setting(system, load))
        for system, load in product(plan.systems, plan.loads)
    ]
    jobs = list(dict.fromkeys(place.job.key for place in found))
    return sorted(found, key=lambda place: (jobs.index(place.job.key), place.setting.system.free))


class Offline:
    """Runs a plan. Say ``with``: engines are processes."""

    def __init__(self, plan: Plan, say: Callable[[str], None]) -> None:
        """``say`` is told what is being done."""
        self._plan = plan
        self._say = say
        self._places = places(plan)
        self._pool = Pool(plan.most_loaded, self._warm_up)
        self._neighbours = Neighbours([os.getpid()])

    def __enter__(self) -> "Offline":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.close()

    def load(self) -> None:
        """Starts the engines."""
        self._say("loading engines")
        self._pool.load(place.job for place in self._places)

    def run(self, on_run: Callable[[Run], None]) -> None:
        """All repetitions; ``on_run`` gets each run when it has ended."""
        for repetition in range(self._plan.repetitions):
            for number, place in enumerate(self._places):
                engine = self._pool.get(place.job)
                self._say(
                    f"repetition {repetition + 1} of {self._plan.repetitions}, run {number + 1} of "
                    f"{len(self._places)}: {place.setting.system}, {place.setting.load}"
                )
                before = os.getloadavg()[0]
                self._neighbours.share_since()
                result = engine.run(self._task(place.setting))
                others = self._neighbours.share_since()
                on_run(_record(place.setting, repetition, result, before, others))

    def trace(self, setting: Setting, file: Path) -> None:
        """One more run of a setting of ours, traced into a file."""
        place = next(place for place in self._places if place.setting == setting)
        self._pool.get(place.job).run(self._task(setting, trace=str(file.absolute())))

    def _task(self, setting: Setting, trace: str = "") -> Task:
        plan = self._plan
        count = plan.rounds * setting.load.concurrency or len(plan.conversations)
        return Task(
            setting.system,
            setting.load,
            list(plan.conversations[:count]),
            plan.seed,
            plan.temperature,
            trace,
        )

    def _warm_up(self, job: EngineJob, engine: EngineProcess) -> None:
        """First runs are slower; and `auto` has to learn what this machine is like."""
        plan = self._plan
        mine = [place.setting for place in self._places if place.job.key == job.key]
        few = [
            Conversation(conversation.turns[:1], WARM_UP_TOKENS)
            for conversation in plan.conversations[:WARM_UP_REQUESTS]
        ]
        load = Load(concurrency=WARM_UP_REQUESTS)
        engine.run(Task(mine[0].system, load, few, plan.seed, plan.temperature))
        for setting in mine:
            if setting.system.name == "auto":
                self._say(f"auto settles: {setting.load}")
                seconds = 0.0
                while seconds < plan.settle_s:
                    seconds += max(engine.run(self._task(setting)).seconds, 0.1)


def _record(
    setting: Setting, repetition: int, result: Result, load_before: float, others: float
) -> Run:
    return Run(
        setting, repetition, result.seconds, result.requests, result.engine, load_before, others
    )

"""What the benchmark and an engine's process say to each other, a line of JSON each."""

import msgspec

from minedraft.bench.records import Engine, Load, Request, System
from minedraft.bench.workloads import Conversation

READY = "ready"
"""What the engine says first."""


class Task(msgspec.Struct, frozen=True):
    """One run."""

    system: System
    load: Load
    conversations: list[Conversation]
    seed: int
    temperature: float = 0.0
    trace: str = ""
    """A file that gets a trace of it, in a run of ours."""


class Result(msgspec.Struct):
    """What came of it."""

    seconds: float
    requests: list[Request]
    engine: Engine

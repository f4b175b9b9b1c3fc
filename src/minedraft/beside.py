"""What ``LLM`` and ``minedraft serve`` share: a drafter beside a target, and where both run."""

import argparse
import dataclasses
import logging
import math
import shlex
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from minedraft import devices, protocol, vocabulary
from minedraft.config import ADDITIONAL_CONFIG_KEY, ConfigError
from minedraft.drafter.child import DrafterError, DrafterProcess
from minedraft.engine_options import one_line, parse_flags
from minedraft.placement import Placement, format_cores, parse_cores, place_on_cpu, place_on_gpu
from minedraft.tokenizers import tokenizer_fingerprint

logger = logging.getLogger("vllm.minedraft")

UNUSED_WHEN_OFF = (
    "draft_model",
    "drafter",
    "key_file",
    "drafter_args",
    "drafter_cores",
    "drafter_gpu",
    "stats",
)
"""Options that mean nothing without drafts."""


@dataclass(frozen=True)
class DrafterOptions:
    """Which drafter, and where it and the target run: the flags of these names.

    Raises ConfigError if they contradict each other.
    """

    draft_model: str | None
    drafter: str | None = None
    key_file: str | None = None
    drafter_args: str = ""
    drafter_cores: str | None = None
    target_cores: str | None = None
    drafter_gpu: str | None = None

    @classmethod
    def of(cls, flags: argparse.Namespace, **others: Any) -> Self:
        """From a command's flags, and ``others`` instead of or beside these."""
        names = [field.name for field in dataclasses.fields(cls)]
        given = {name: getattr(flags, name) for name in names if hasattr(flags, name)}
        return cls(**given | others)

    def __post_init__(self) -> None:
        if (self.draft_model is None) == (self.drafter is None):
            raise ConfigError("give a draft model or the address of a drafter: one of the two")
        if self.drafter is None and self.key_file is not None:
            raise ConfigError("a key file is for a drafter that runs elsewhere; leave it out")
        if self.drafter is not None and (
            self.drafter_args or self.drafter_cores or self.drafter_gpu
        ):
            raise ConfigError(
                "the options of a drafter that runs elsewhere are given there: leave out "
                "drafter_args, drafter_cores and drafter_gpu"
            )


def merged(options: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """The user's engine options and ours; one that both set is an error, not a silent choice."""
    for name in ours:
        if name != "additional_config" and options.get(name):
            raise ConfigError(
                f"{name} is set by MineDraft; leave it out, or use mode='off' for stock vLLM"
            )
    additional = dict(options.get("additional_config") or {})
    if ADDITIONAL_CONFIG_KEY in additional:
        raise ConfigError(
            f"additional_config[{ADDITIONAL_CONFIG_KEY!r}] is set by MineDraft: give its options "
            "by their own names"
        )
    return {**options, **ours, "additional_config": additional | ours["additional_config"]}


def say_unused(given: Mapping[str, Any]) -> None:
    """Logs which of the given options mode ``off`` leaves unused, so that one flag switches."""
    if unused := [name for name in UNUSED_WHEN_OFF if given.get(name)]:
        logger.info("MineDraft: off, so this is stock vLLM; unused: %s", ", ".join(unused))


def vllm_config(model: str, options: Mapping[str, Any]) -> Any:
    """vLLM's whole configuration of a target; reads no weights."""
    known = {field.name for field in dataclasses.fields(EngineArgs)}
    given = {name: value for name, value in options.items() if name in known}
    return EngineArgs(model=model, **given).create_engine_config()


def hello(model_config: Any) -> protocol.Hello:
    """What a verifier of this target says of itself."""
    return protocol.Hello(
        protocol.PROTOCOL_VERSION,
        tokenizer_fingerprint(model_config),
        model_config.get_vocab_size(),
    )


def check_draft_model(
    target: protocol.Hello, wish: DrafterOptions, options: Mapping[str, Any]
) -> None:
    """Raises before any weights are read if this drafter cannot draft for the target.

    ConfigError: there is no such model; DrafterError: its tokens are not the target's.
    """
    model = str(wish.draft_model)
    flags = parse_flags(_drafter_flags(wish, options), program="minedraft drafter")
    try:
        model_config = EngineArgs(model, **flags).create_model_config()
    except (ValueError, OSError) as error:
        raise ConfigError(f"{model}: {one_line(error)}") from error
    reason = vocabulary.disagreement(
        target.vocabulary,
        target.vocab_size,
        tokenizer_fingerprint(model_config),
        model_config.get_vocab_size(),
    )
    if reason is not None:
        raise DrafterError(reason)


def place(wish: DrafterOptions, options: Mapping[str, Any]) -> Placement:
    """Where the target and a drafter of its own run. Raises ConfigError."""
    if wish.drafter is not None:
        return target_only(wish.target_cores)
    if current_platform.is_cpu():
        if wish.drafter_gpu is not None:
            raise ConfigError("--drafter-gpu: this vLLM runs on CPU; give --drafter-cores")
        return place_on_cpu(
            devices.available_cores(),
            target_cores=wish.target_cores,
            drafter_cores=wish.drafter_cores,
        )
    if wish.target_cores is not None or wish.drafter_cores is not None:
        raise ConfigError("--target-cores and --drafter-cores are for vLLM on CPU")
    return place_on_gpu(
        devices.visible_gpus(), target_gpus=num_ranks(options), drafter_gpu=wish.drafter_gpu
    )


def target_only(target_cores: str | None) -> Placement:
    """Where a target without a drafter of its own runs. Raises ConfigError."""
    return Placement(parse_cores(target_cores) if target_cores else ())


def drafter_process(
    wish: DrafterOptions,
    placement: Placement,
    options: Mapping[str, Any],
    folder: Path | None = None,
) -> DrafterProcess:
    """The drafter as a child process, started; for ``folder`` see DrafterProcess."""
    flags = _drafter_flags(wish, options)
    if placement.drafter_cores:
        flags += ["--cores", format_cores(placement.drafter_cores)]
        variables = devices.cpu_environment(placement.drafter_cores)
    else:
        variables = {"CUDA_VISIBLE_DEVICES": placement.drafter_gpu or ""}
    return DrafterProcess(str(wish.draft_model), flags, variables, folder)


def _drafter_flags(wish: DrafterOptions, options: Mapping[str, Any]) -> list[str]:
    """What holds for the target holds for its drafter, unless it is said otherwise."""
    shared = [name for name in ("trust_remote_code", "enforce_eager") if options.get(name)]
    return [f"--{name.replace('_', '-')}" for name in shared] + shlex.split(wish.drafter_args)


def num_ranks(options: Mapping[str, Any]) -> int:
    """Workers of the target on this machine."""
    engines = options.get("data_parallel_size_local") or options.get("data_parallel_size") or 1
    sizes = ("tensor_parallel_size", "pipeline_parallel_size")
    return math.prod([engines, *(options.get(size) or 1 for size in sizes)])


def target_device(
    placement: Placement, options: Mapping[str, Any], *, own_process: bool
) -> AbstractContextManager[None]:
    """While the target's engine starts; ``own_process`` as devices.target_on_cpu has it."""
    if not placement.target_cores:
        return nullcontext()
    if not own_process:
        torch.set_num_threads(len(placement.target_cores))
    return devices.target_on_cpu(placement, own_process=own_process, ranks=num_ranks(options))

"""``minedraft.LLM``: vLLM's offline ``LLM`` with a drafter beside it."""

import dataclasses
import os
import shlex
import weakref
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm import envs
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger
from vllm.platforms import current_platform

from minedraft import devices, protocol, vocabulary
from minedraft.config import (
    ADDITIONAL_CONFIG_KEY,
    ENV_STATS,
    ConfigError,
    Endpoint,
    MineDraftConfig,
)
from minedraft.drafter.child import DrafterError, DrafterProcess, greet
from minedraft.engine_options import with_cpu_defaults
from minedraft.placement import Placement, format_cores, parse_cores, place_on_cpu, place_on_gpu
from minedraft.tokenizers import tokenizer_fingerprint
from minedraft.verifier import contract, refusals
from minedraft.verifier.plugin import class_options

logger = init_logger("vllm.minedraft")

CONNECT_TIMEOUT_S = 30.0


class LLM(vllm.LLM):  # type: ignore[misc]
    """Like ``vllm.LLM``, with drafts from a drafter that works while the target verifies.

    Args:
        model: the target.
        draft_model: the drafter, started as a child process on a device of its own.
        drafter: instead of it, the address of a running ``minedraft drafter``.
        key_file: its key file, for a tcp:// address.
        mode: ``overlap``, ``sequential``, or ``off``: stock vLLM, the drafter's options unused.
        num_speculative_tokens: draft tokens for each verification, at most (K).
        drafter_args: vLLM engine flags for the child, as on a command line.
        drafter_cores: CPU cores for the child, as in ``0-3,8``.
        target_cores: CPU cores for the target.
        drafter_gpu: an entry of CUDA_VISIBLE_DEVICES for the child.
        stats: file that gets the verifier's measurements whenever all requests are done.
        **options: the other options of MineDraftConfig, and those of ``vllm.LLM``.

    Raises:
        ConfigError: an option that cannot be.
        DrafterError: the drafter did not start, or does not fit the target.

    """

    def __init__(
        self,
        model: str,
        *,
        draft_model: str | None = None,
        drafter: str | None = None,
        key_file: str | None = None,
        mode: str = "overlap",
        num_speculative_tokens: int = 4,
        drafter_args: str = "",
        drafter_cores: str | None = None,
        target_cores: str | None = None,
        drafter_gpu: str | None = None,
        stats: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        ours = {name: options.pop(name) for name in CONFIG_FIELDS if name in options}
        options = with_cpu_defaults(options)
        placement = Placement(parse_cores(target_cores) if target_cores else ())
        if mode == "off":
            with _target_device(placement):
                super().__init__(model, **options)
            return
        contract.ensure()
        config = MineDraftConfig.parse({"mode": mode, **ours})
        options = _merged(options, class_options(config, num_speculative_tokens))
        if (draft_model is None) == (drafter is None):
            raise ConfigError("give a draft model or the address of a drafter: one of the two")
        if drafter is None and key_file is not None:
            raise ConfigError("a key file is for a drafter that runs elsewhere; leave it out")
        if drafter is not None and (drafter_args or drafter_cores or drafter_gpu):
            raise ConfigError(
                "the options of a drafter that runs elsewhere are given there: leave out "
                "drafter_args, drafter_cores and drafter_gpu"
            )
        refusals.check_target(_vllm_config(model, options))
        child = None
        if draft_model is not None:
            placement = _place(options, target_cores, drafter_cores, drafter_gpu)
            child = _start_drafter(draft_model, placement, options, drafter_args)
        endpoint = child.endpoint if child else Endpoint(str(drafter), key_file)
        variables = endpoint.environment()
        if stats is not None:
            variables[ENV_STATS] = str(Path(stats).absolute())
        try:
            with _target_device(placement), devices.environment(variables):
                super().__init__(model, **options)
            welcome = _check_drafter(self.llm_engine.model_config, endpoint, child)
        except BaseException:
            if child is not None:
                child.stop()
            raise
        if child is not None:
            weakref.finalize(self, child.stop)
        logger.info("MineDraft: %s of %s; %s", mode, welcome.model, placement)


CONFIG_FIELDS = frozenset(MineDraftConfig.__struct_fields__) - {"mode"}
"""The options of MineDraftConfig that ``LLM`` takes as keywords; mode is one of its own."""


def _vllm_config(model: str, options: dict[str, Any]) -> Any:
    known = {field.name for field in dataclasses.fields(EngineArgs)}
    given = {name: value for name, value in options.items() if name in known}
    return EngineArgs(model=model, **given).create_engine_config()


def _merged(options: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """The user's engine options and ours; one that both set is an error, not a silent choice."""
    additional = dict(options.pop("additional_config", None) or {})
    for name in ours:
        if options.get(name):
            raise ConfigError(
                f"{name} is set by MineDraft; leave it out, or use mode='off' for stock vLLM"
            )
    if ADDITIONAL_CONFIG_KEY in additional:
        raise ConfigError(
            f"additional_config[{ADDITIONAL_CONFIG_KEY!r}] is set by MineDraft: give its options "
            "by their own names"
        )
    return {**options, **ours, "additional_config": additional | ours["additional_config"]}


def _place(
    options: dict[str, Any],
    target_cores: str | None,
    drafter_cores: str | None,
    drafter_gpu: str | None,
) -> Placement:
    if current_platform.is_cpu():
        if drafter_gpu is not None:
            raise ConfigError("--drafter-gpu: this vLLM runs on CPU; give --drafter-cores")
        return place_on_cpu(
            devices.available_cores(), target_cores=target_cores, drafter_cores=drafter_cores
        )
    if target_cores is not None or drafter_cores is not None:
        raise ConfigError("--target-cores and --drafter-cores are for vLLM on CPU")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    target_gpus = options.get("tensor_parallel_size") or 1
    return place_on_gpu(gpus, target_gpus=target_gpus, drafter_gpu=drafter_gpu)


def _start_drafter(
    model: str, placement: Placement, options: dict[str, Any], drafter_args: str
) -> DrafterProcess:
    flags = [f"--{name}" for name in ("trust_remote_code", "enforce_eager") if options.get(name)]
    flags = [flag.replace("_", "-") for flag in flags] + shlex.split(drafter_args)
    if placement.drafter_cores:
        flags += ["--cores", format_cores(placement.drafter_cores)]
        return DrafterProcess(model, flags, devices.cpu_environment(placement.drafter_cores))
    return DrafterProcess(model, flags, {"CUDA_VISIBLE_DEVICES": placement.drafter_gpu or ""})


def _target_device(placement: Placement) -> AbstractContextManager[None]:
    """While the target's engine starts."""
    if not placement.target_cores:
        return nullcontext()
    own_process = envs.VLLM_ENABLE_V1_MULTIPROCESSING
    if not own_process:
        torch.set_num_threads(len(placement.target_cores))
    return devices.target_on_cpu(placement, own_process=own_process)


def _check_drafter(
    model_config: Any, endpoint: Endpoint, child: DrafterProcess | None
) -> protocol.Welcome:
    """Waits for the drafter, and refuses one whose tokens are not the target's."""
    hello = protocol.Hello(
        protocol.PROTOCOL_VERSION,
        tokenizer_fingerprint(model_config),
        model_config.get_vocab_size(),
    )
    welcome = child.wait_ready(hello) if child else greet(endpoint, hello, CONNECT_TIMEOUT_S)
    reason = vocabulary.disagreement(
        hello.vocabulary, hello.vocab_size, welcome.vocabulary, welcome.vocab_size
    )
    if reason is not None:
        raise DrafterError(reason)
    return welcome

"""``minedraft.LLM``: vLLM's offline ``LLM`` with a drafter beside it."""

import os
import weakref
from pathlib import Path
from typing import Any

import vllm
from vllm import envs
from vllm.logger import init_logger

from minedraft import beside, devices
from minedraft.config import DEFAULT_NUM_SPECULATIVE_TOKENS, ENV_STATS, Endpoint, MineDraftConfig
from minedraft.drafter.child import DrafterProcess, greet
from minedraft.engine_options import with_cpu_defaults
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
        mode: ``auto``, ``overlap``, ``sequential``, or ``off``: stock vLLM, the drafter's options
            and ``stats`` unused.
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
        mode: str = "auto",
        num_speculative_tokens: int = DEFAULT_NUM_SPECULATIVE_TOKENS,
        drafter_args: str = "",
        drafter_cores: str | None = None,
        target_cores: str | None = None,
        drafter_gpu: str | None = None,
        stats: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        ours = {name: options.pop(name) for name in CONFIG_FIELDS if name in options}
        options = with_cpu_defaults(options)
        own_process = envs.VLLM_ENABLE_V1_MULTIPROCESSING
        wish: dict[str, Any] = {
            "draft_model": draft_model,
            "drafter": drafter,
            "key_file": key_file,
            "drafter_args": drafter_args,
            "drafter_cores": drafter_cores,
            "target_cores": target_cores,
            "drafter_gpu": drafter_gpu,
        }
        if mode == "off":
            beside.say_unused({**wish, "stats": stats})
            placement = beside.target_only(target_cores)
            with beside.target_device(placement, options, own_process=own_process):
                super().__init__(model, **options)
            return
        contract.ensure()
        config = MineDraftConfig.parse({"mode": mode, **ours})
        options = beside.merged(options, class_options(config, num_speculative_tokens))
        wanted = beside.DrafterOptions(**wish)
        target = beside.vllm_config(model, options)
        refusals.check_target(target)
        placement = beside.place(wanted, options)
        hello = beside.hello(target.model_config)
        child = None
        if draft_model is not None:
            beside.check_draft_model(hello, wanted, options)
            child = beside.drafter_process(wanted, placement, options)
        endpoint = child.endpoint if child else Endpoint(str(drafter), key_file)
        variables = endpoint.environment()
        if stats is not None:
            variables[ENV_STATS] = str(Path(stats).absolute())
        try:
            with (
                beside.target_device(placement, options, own_process=own_process),
                devices.environment(variables),
            ):
                super().__init__(model, **options)
            welcome = (
                child.wait_ready(hello) if child else greet(endpoint, hello, CONNECT_TIMEOUT_S)
            )
        except BaseException:
            if child is not None:
                child.stop()
            raise
        if child is not None:
            weakref.finalize(self, _end, self.llm_engine.engine_core, child)
        logger.info("MineDraft: %s of %s; %s", mode, welcome.model, placement)


def _end(engine_core: Any, child: DrafterProcess) -> None:
    """The engine first: it takes leave of its drafter, and writes what it measured."""
    try:
        engine_core.shutdown()
    finally:
        child.stop()


CONFIG_FIELDS = frozenset(MineDraftConfig.__struct_fields__) - {"mode"}
"""The options of MineDraftConfig that ``LLM`` takes as keywords; mode is one of its own."""

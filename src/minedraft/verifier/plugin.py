"""How MineDraft gets into vLLM: by class options, without a patch.

``register`` is the entry point of ``vllm.general_plugins``, loaded in every vLLM process,
baselines too. It only adds a name to vLLM's list of models, that of the emulated ones: a vLLM that
is not told to use our classes is stock vLLM.
"""

from typing import Any

from minedraft.config import MineDraftConfig, check_num_speculative_tokens
from minedraft.emulation import ARCHITECTURE, MODEL_CLASS
from minedraft.verifier.padding import graph_schedule

SCHEDULER_CLS = "minedraft.verifier.scheduler.MineDraftScheduler"
WORKER_CLS = "minedraft.verifier.worker.TargetWorker"
NO_DRAFTS = "minedraft.verifier.proposer.NoDrafts"


def register() -> None:
    """Tells vLLM where emulated models are; nothing is imported before one is loaded."""
    from vllm import ModelRegistry

    ModelRegistry.register_model(ARCHITECTURE, MODEL_CLASS)


def class_options(config: MineDraftConfig, num_speculative_tokens: int) -> dict[str, Any]:
    """The engine options that make stock vLLM a verifier. Raises ConfigError."""
    num_drafts = check_num_speculative_tokens(num_speculative_tokens)
    return {
        "scheduler_cls": SCHEDULER_CLS,
        "worker_cls": WORKER_CLS,
        "speculative_config": speculative_config(num_drafts),
        "additional_config": config.additional_config(),
    }


def speculative_config(num_drafts: int) -> dict[str, Any]:
    """The method of speculative decoding whose drafter is replaced by ours.

    It decides which model runner vLLM takes, and whether it schedules asynchronously: on Model
    Runner V2 "ngram_gpu" leaves both as they would be without us, "custom_class" is for V1.
    """
    if v2_is_default():
        return {
            "method": "ngram_gpu",
            "num_speculative_tokens": num_drafts,
            "num_speculative_tokens_per_batch_size": graph_schedule(num_drafts),
        }
    return {"method": "custom_class", "model": NO_DRAFTS, "num_speculative_tokens": num_drafts}


def v2_is_default() -> bool:
    """Whether vLLM takes Model Runner V2 where nothing speaks against it."""
    from vllm.envs import VLLM_USE_V2_MODEL_RUNNER  # takes seconds
    from vllm.triton_utils import HAS_TRITON

    wanted: bool | None = VLLM_USE_V2_MODEL_RUNNER
    return bool(HAS_TRITON) if wanted is None else wanted

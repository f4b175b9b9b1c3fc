"""How MineDraft gets into vLLM: by class options, without a patch.

``register`` is the entry point of ``vllm.general_plugins``, loaded in every vLLM process,
baselines too. It changes nothing: a vLLM that is not told to use our classes is stock vLLM.
"""

from typing import Any

from minedraft.config import MineDraftConfig, check_num_speculative_tokens

SCHEDULER_CLS = "minedraft.verifier.scheduler.MineDraftScheduler"
WORKER_CLS = "minedraft.verifier.worker.TargetWorker"
NO_DRAFTS = "minedraft.verifier.proposer.NoDrafts"


def register() -> None:
    """Registers nothing: ``vllm`` names us in its list of plugins, and that is all."""


def class_options(config: MineDraftConfig, num_speculative_tokens: int) -> dict[str, Any]:
    """The engine options that make stock vLLM a verifier. Raises ConfigError."""
    return {
        "scheduler_cls": SCHEDULER_CLS,
        "worker_cls": WORKER_CLS,
        "speculative_config": {
            "method": "custom_class",
            "model": NO_DRAFTS,
            "num_speculative_tokens": check_num_speculative_tokens(num_speculative_tokens),
        },
        "additional_config": config.additional_config(),
        "async_scheduling": False,
    }

"""Which model runner and which scheduling a configuration got from vLLM, and why, in words."""

from typing import Any

from vllm import envs
from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON


def describe(vllm_config: Any) -> str:
    """Runner and scheduling of a target."""
    return f"{runner(vllm_config)}, {_scheduling(vllm_config)}"


def runner(vllm_config: Any) -> str:
    """The model runner; why, where it is not simply vLLM's default."""
    wanted = envs.VLLM_USE_V2_MODEL_RUNNER
    is_v2 = vllm_config.use_v2_model_runner
    name = f"Model Runner V{2 if is_v2 else 1}"
    if wanted is not None:
        return f"{name} (VLLM_USE_V2_MODEL_RUNNER={wanted:d})"
    if is_v2:
        return name
    return f"{name} ({'vLLM says why in its log' if HAS_TRITON else 'no Triton that works here'})"


def _scheduling(vllm_config: Any) -> str:
    if vllm_config.scheduler_config.async_scheduling:
        return "asynchronous scheduling"
    if not vllm_config.use_v2_model_runner:
        why = "Model Runner V1 takes drafts in no other way"
    elif current_platform.is_cpu():
        why = "vLLM schedules so on CPU"
    else:
        # vLLM does not keep which of them it was.
        why = "--no-async-scheduling, or the executor takes no other"
    return f"synchronous scheduling ({why})"

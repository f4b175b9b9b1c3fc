"""What MineDraft cannot serve, said when the engine starts, with the reason and the way out."""

from collections.abc import Callable
from typing import Any

from minedraft.config import ConfigError
from minedraft.verifier.padding import graph_schedule
from minedraft.verifier.plugin import NO_DRAFTS, SCHEDULER_CLS, WORKER_CLS

_Rule = tuple[Callable[[Any], bool], str]


def _has_a_method_of_ours(c: Any) -> bool:
    spec = c.speculative_config
    if spec is None or c.parallel_config.worker_cls != WORKER_CLS:
        return False
    return spec.method == "ngram_gpu" or (spec.method, spec.model) == ("custom_class", NO_DRAFTS)


def _has_a_schedule_of_its_own(c: Any) -> bool:
    spec = c.speculative_config
    schedule = spec.num_speculative_tokens_per_batch_size
    return bool(schedule) and schedule != graph_schedule(spec.num_speculative_tokens)


_RULES: list[_Rule] = [
    (
        lambda c: not _has_a_method_of_ours(c),
        f"the scheduler {SCHEDULER_CLS} needs worker_cls '{WORKER_CLS}' and a speculative_config "
        f"with method 'ngram_gpu', or 'custom_class' and model '{NO_DRAFTS}' for Model Runner V1; "
        "`minedraft serve` and `minedraft generate` set it for you",
    ),
    (
        lambda c: c.watermark_config is not None,
        "watermarks need draft tokens of a watermarking drafter; remove --watermark-config, or "
        "serve without MineDraft (--mode off)",
    ),
    (
        lambda c: c.model_config.enable_trace_replay,
        "vLLM samples a step with draft tokens by other code, which replays no trace; remove "
        "--enable-trace-replay, or serve without MineDraft (--mode off)",
    ),
    (
        lambda c: bool(c.model_config.logits_processors),
        "custom logits processors were not tried with drafts; remove --logits-processors, or "
        "serve without MineDraft (--mode off)",
    ),
    (
        lambda c: c.model_config.return_sampling_mask or c.aux_output_config.enabled,
        "what is returned beside tokens was not tried with drafts; remove --return-sampling-mask "
        "and --enable-return-routed-experts, or serve without MineDraft (--mode off)",
    ),
    (
        lambda c: c.use_v2_model_runner != (c.speculative_config.method == "ngram_gpu"),
        "vLLM takes another model runner for this configuration than the drafts were meant for; "
        "set VLLM_USE_V2_MODEL_RUNNER to 0 or 1 to choose one, or serve without MineDraft "
        "(--mode off)",
    ),
    (
        lambda c: c.speculative_config.rejection_sample_method != "standard",
        "only rejection_sample_method 'standard' keeps the target's output; leave the others out "
        "of the speculative_config",
    ),
    (
        _has_a_schedule_of_its_own,
        "the number of draft tokens is MineDraft's to choose; leave "
        "num_speculative_tokens_per_batch_size out of the speculative_config",
    ),
    (
        lambda c: c.parallel_config.pipeline_parallel_size > 1,
        "pipeline parallelism does not work with overlapped drafting: a stage would wait for "
        "drafts; use --tensor-parallel-size instead",
    ),
    (
        lambda c: c.model_config.is_hybrid or c.model_config.is_attention_free,
        "hybrid and Mamba targets keep a recurrent state that is lost when a request skips a "
        "step; serve this target without MineDraft (--mode off)",
    ),
    (
        lambda c: (
            c.model_config.is_encoder_decoder
            or c.model_config.is_diffusion
            or c.model_config.runner_type == "pooling"
        ),
        "only decoder-only text generation can be drafted for; serve this target without "
        "MineDraft (--mode off)",
    ),
    (
        lambda c: c.kv_transfer_config is not None,
        "KV connectors read token ids that MineDraft does not re-send every step; remove "
        "--kv-transfer-config and --kv-offloading-size, or serve without MineDraft (--mode off)",
    ),
    (
        lambda c: c.ec_transfer_config is not None,
        "encoder cache connectors are not supported; remove --ec-transfer-config, or serve "
        "without MineDraft (--mode off)",
    ),
    (
        lambda c: (
            c.parallel_config.decode_context_parallel_size > 1
            or c.parallel_config.prefill_context_parallel_size > 1
        ),
        "context parallelism is not supported; use --tensor-parallel-size alone",
    ),
    (
        # A reasoning parser alone leaves these strings empty.
        lambda c: c.reasoning_config is not None and bool(c.reasoning_config.reasoning_start_str),
        "vLLM enforces a thinking_token_budget wrongly with any speculative decoding; remove "
        "--reasoning-config (--reasoning-parser may stay), or serve without MineDraft (--mode off)",
    ),
    (
        lambda c: bool(c.scheduler_config.async_scheduling) and not c.use_v2_model_runner,
        "asynchronous scheduling needs Model Runner V2; add --no-async-scheduling",
    ),
    (
        lambda c: c.parallel_config.enable_fault_tolerance,
        "vLLM then drops the steps in flight and goes on, which MineDraft does not foresee; "
        "remove --enable-fault-tolerance, or serve without MineDraft (--mode off)",
    ),
    (
        lambda c: (
            c.parallel_config.enable_elastic_ep
            or (c.parallel_config.data_parallel_size > 1 and c.model_config.is_moe)
        ),
        "data-parallel ranks of a mixture of experts step together, and waiting for drafts would "
        "stall them all; use --tensor-parallel-size instead",
    ),
]


def check_target(vllm_config: Any) -> None:
    """Raises ConfigError if the target, as configured, cannot be served with drafts."""
    for applies, reason in _RULES:
        if applies(vllm_config):
            raise ConfigError(f"MineDraft: {reason}")

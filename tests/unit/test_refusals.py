"""What cannot be served is refused when the engine starts, in one line that says the way out."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny import MAMBA
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import registry

from minedraft.config import ConfigError, MineDraftConfig
from minedraft.verifier import refusals
from minedraft.verifier.padding import graph_schedule
from minedraft.verifier.plugin import NO_DRAFTS, WORKER_CLS, class_options
from minedraft.verifier.refusals import check_target

WAYS_OUT = re.compile(r"--mode off|use |add |set |remove |leave |sets it for you")

GOOD: dict[str, Any] = {
    "speculative_config.method": "custom_class",
    "speculative_config.model": NO_DRAFTS,
    "speculative_config.num_speculative_tokens": 3,
    "speculative_config.rejection_sample_method": "standard",
    "speculative_config.num_speculative_tokens_per_batch_size": None,
    "parallel_config.worker_cls": WORKER_CLS,
    "parallel_config.pipeline_parallel_size": 1,
    "parallel_config.decode_context_parallel_size": 1,
    "parallel_config.prefill_context_parallel_size": 1,
    "parallel_config.enable_elastic_ep": False,
    "parallel_config.enable_fault_tolerance": False,
    "parallel_config.data_parallel_size": 1,
    "model_config.is_hybrid": False,
    "model_config.is_attention_free": False,
    "model_config.is_encoder_decoder": False,
    "model_config.is_diffusion": False,
    "model_config.is_moe": False,
    "model_config.runner_type": "generate",
    "model_config.enable_trace_replay": False,
    "model_config.logits_processors": None,
    "model_config.return_sampling_mask": False,
    "aux_output_config.enabled": False,
    "scheduler_config.async_scheduling": False,
    "kv_transfer_config": None,
    "ec_transfer_config": None,
    "reasoning_config": None,
    "watermark_config": None,
    "use_v2_model_runner": False,
}
GOOD_ON_V2: dict[str, Any] = {
    "speculative_config.method": "ngram_gpu",
    "speculative_config.model": "ngram_gpu",
    "speculative_config.num_speculative_tokens_per_batch_size": graph_schedule(3),
    "scheduler_config.async_scheduling": True,
    "use_v2_model_runner": True,
}


def config_with(changes: dict[str, Any]) -> SimpleNamespace:
    """The configuration of a target that can be served, but for these attributes."""
    config = SimpleNamespace()
    for path, value in (GOOD | changes).items():
        *outer, name = path.split(".")
        part = config
        for step in outer:
            if not hasattr(part, step):
                setattr(part, step, SimpleNamespace())
            part = getattr(part, step)
        setattr(part, name, value)
    if changes.get("speculative_config", 0) is None:
        config.speculative_config = None
    return config


def refusal(config: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        check_target(config)
    text = str(raised.value)
    assert text.startswith("MineDraft: ")
    assert "\n" not in text
    assert WAYS_OUT.search(text), f"no way out: {text}"
    return text


V1_AFTER_ALL = {"use_v2_model_runner": False, "scheduler_config.async_scheduling": False}
CASES: list[tuple[dict[str, Any], str]] = [
    ({"speculative_config": None}, "needs worker_cls .* and a speculative_config"),
    ({"speculative_config.method": "ngram"}, "with method 'ngram_gpu', or 'custom_class'"),
    ({"speculative_config.model": "my.Proposer"}, f"model '{NO_DRAFTS}'"),
    ({"parallel_config.worker_cls": "my.Worker"}, f"worker_cls '{WORKER_CLS}'"),
    ({"watermark_config": SimpleNamespace()}, "remove --watermark-config"),
    ({"model_config.enable_trace_replay": True}, "remove --enable-trace-replay"),
    ({"model_config.logits_processors": ["my.Processor"]}, "remove --logits-processors"),
    ({"model_config.return_sampling_mask": True}, "remove --return-sampling-mask"),
    ({"aux_output_config.enabled": True}, "and --enable-return-routed-experts"),
    ({"use_v2_model_runner": True}, "set VLLM_USE_V2_MODEL_RUNNER to 0 or 1"),
    (GOOD_ON_V2 | V1_AFTER_ALL, "set VLLM_USE_V2_MODEL_RUNNER to 0 or 1"),
    (
        {"speculative_config.rejection_sample_method": "synthetic"},
        "only rejection_sample_method 'standard'",
    ),
    (
        {"speculative_config.num_speculative_tokens_per_batch_size": [(1, 4, 3)]},
        "leave num_speculative_tokens_per_batch_size out",
    ),
    ({"parallel_config.pipeline_parallel_size": 2}, "use --tensor-parallel-size instead"),
    ({"model_config.is_hybrid": True}, "hybrid and Mamba targets .*--mode off"),
    ({"model_config.is_attention_free": True}, "hybrid and Mamba targets .*--mode off"),
    ({"model_config.is_encoder_decoder": True}, "only decoder-only text generation"),
    ({"model_config.runner_type": "pooling"}, "only decoder-only text generation"),
    ({"model_config.is_diffusion": True}, "only decoder-only text generation"),
    ({"kv_transfer_config": SimpleNamespace()}, "remove --kv-transfer-config"),
    ({"ec_transfer_config": SimpleNamespace()}, "remove --ec-transfer-config"),
    ({"parallel_config.decode_context_parallel_size": 2}, "context parallelism"),
    ({"parallel_config.prefill_context_parallel_size": 2}, "context parallelism"),
    (
        {"reasoning_config": SimpleNamespace(reasoning_start_str="<think>")},
        "thinking_token_budget .* remove --reasoning-config",
    ),
    ({"scheduler_config.async_scheduling": True}, "add --no-async-scheduling"),
    (
        {"parallel_config.data_parallel_size": 2, "model_config.is_moe": True},
        "data-parallel ranks .* use --tensor-parallel-size instead",
    ),
    ({"parallel_config.enable_fault_tolerance": True}, "remove --enable-fault-tolerance"),
    ({"parallel_config.enable_elastic_ep": True}, "data-parallel ranks of a mixture of experts"),
]


def test_a_usual_target_is_served() -> None:
    check_target(config_with({}))
    check_target(config_with({"parallel_config.data_parallel_size": 2}))
    check_target(config_with({"model_config.is_moe": True}))
    check_target(config_with({"scheduler_config.async_scheduling": None}))
    check_target(config_with(GOOD_ON_V2))
    check_target(config_with(GOOD_ON_V2 | {"scheduler_config.async_scheduling": False}))
    parser_only = SimpleNamespace(reasoning_start_str="")
    check_target(config_with({"reasoning_config": parser_only}))


@pytest.mark.parametrize(("changes", "says"), CASES, ids=lambda value: str(value)[:50])
def test_each_rule_refuses_alone(changes: dict[str, Any], says: str) -> None:
    config = config_with(changes)
    assert re.search(says, refusal(config))
    if config.speculative_config is not None:  # which the rules after the first one read
        assert sum(applies(config) for applies, _ in refusals._RULES) == 1


def test_every_rule_is_shown_here() -> None:
    shown = set()
    for changes, _ in CASES:
        config = config_with(changes)
        shown.add(next(i for i, (applies, _) in enumerate(refusals._RULES) if applies(config)))
    assert shown == set(range(len(refusals._RULES)))


# --- configurations that vLLM itself makes --------------------------------------------------------

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 64,
    "max_position_embeddings": 512,
}
MIXTRAL = LLAMA | {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
}
WHISPER: dict[str, Any] = {
    "model_type": "whisper",
    "architectures": ["WhisperForConditionalGeneration"],
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "vocab_size": 64,
    "max_source_positions": 100,
    "max_target_positions": 100,
}
JAMBA: dict[str, Any] = {
    "model_type": "jamba",
    "architectures": ["JambaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "num_experts": 2,
    "attn_layer_offset": 1,
    "attn_layer_period": 2,
    "expert_layer_offset": 1,
    "expert_layer_period": 2,
}


@pytest.fixture(autouse=True)
def inspects_models_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM starts a process for each architecture that it has not seen yet, which takes seconds."""
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda inspect: inspect())


def vllm_config(folder: Path, model: dict[str, Any], **changes: Any) -> VllmConfig:
    """The configuration that vLLM makes for a model of which only the config.json is there."""
    (folder / "config.json").write_text(json.dumps(model))
    options = class_options(MineDraftConfig(), 3) | changes
    args = EngineArgs(str(folder), skip_tokenizer_init=True, **options)
    return args.create_engine_config()


def test_vllm_serves_a_usual_target(tmp_path: Path) -> None:
    config = vllm_config(tmp_path, LLAMA)
    check_target(config)
    for path, value in GOOD.items():
        found: Any = config
        for step in path.split("."):
            found = getattr(found, step)
        assert found == value, f"vLLM means something else by {path}"


@pytest.mark.parametrize(
    ("model", "changes", "says"),
    [
        (LLAMA, {"pipeline_parallel_size": 2}, "pipeline parallelism"),
        (
            LLAMA,
            {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
            "KV connectors",
        ),
        (LLAMA, {"kv_offloading_size": 1.0}, "--kv-offloading-size"),
        (
            LLAMA,
            {"ec_transfer_config": {"ec_connector": "ECExampleConnector", "ec_role": "ec_both"}},
            "encoder cache connectors",
        ),
        (MIXTRAL, {"data_parallel_size": 2}, "data-parallel ranks of a mixture of experts"),
        (WHISPER, {}, "only decoder-only text generation"),
        (JAMBA, {}, "hybrid and Mamba targets"),
        (MAMBA, {}, "hybrid and Mamba targets"),
        (LLAMA, {"runner": "pooling"}, "only decoder-only text generation"),
        (LLAMA, {"speculative_config": None}, "speculative_config with method"),
        (
            LLAMA,
            {
                "speculative_config": {
                    "method": "ngram",
                    "num_speculative_tokens": 3,
                    "prompt_lookup_max": 3,
                }
            },
            "speculative_config with method",
        ),
    ],
    ids=[
        "pipeline",
        "connector",
        "offloading",
        "encoder-cache",
        "mixtral",
        "whisper",
        "jamba",
        "mamba",
        "pooling",
        "plain",
        "ngram",
    ],
)
def test_vllms_own_configurations_are_refused(
    tmp_path: Path, model: dict[str, Any], changes: dict[str, Any], says: str
) -> None:
    assert says in refusal(vllm_config(tmp_path, model, **changes))


@pytest.mark.parametrize(
    "option", ["enable_return_routed_experts", "return_sampling_mask", "enable_trace_replay"]
)
def test_what_needs_another_runner_is_refused_by_vllm(tmp_path: Path, option: str) -> None:
    with pytest.raises(ValueError, match="requires Model Runner V2"):
        vllm_config(tmp_path, LLAMA, **{option: True})

"""Targets of other kinds, and options that take an engine of their own: output as without drafts.

Each test has engines of its own: one that ends takes vLLM's process groups with it.
What is marked runner_v2_slow is so on Model Runner V2 too, with both kinds of scheduling.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines import ENGINE, bench
from features import RANK, Ask, adapter, answers, compare, greedy, prompts_of
from safetensors.torch import load_file, save_file
from tiny import make_model, make_tokenizer
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
    WhisperFeatureExtractor,
)
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

import minedraft
from minedraft.config import ConfigError

V2 = pytest.mark.runner_v2_slow
NUM_DRAFTS = 4


@dataclass(frozen=True)
class Models:
    """What ``bench`` asks for: a target, and what drafts for it."""

    target: Path
    perfect: Path
    perturbed: Path
    unrelated: Path

    @classmethod
    def of(cls, target: Path, tiny: Any) -> "Models":
        return cls(target, tiny.target, tiny.perturbed, tiny.unrelated)


def check(models: Any, folder: Path, asks: list[Ask] | None = None, **options: Any) -> Any:
    """Compares the outputs with these engine options; how many drafts were accepted."""
    with bench(models, folder, **options) as engines:
        engines.draft_with("perfect", NUM_DRAFTS)
        asks = asks or [Ask(prompt, greedy()) for prompt in prompts_of(1, 10)]
        compare(engines, asks)
        return engines.stats.accepted


def changed(tiny: Any, folder: Path, **config: Any) -> Path:
    """The tiny target with another configuration of the same weights."""
    folder.mkdir()
    for file in tiny.target.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    written = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(written))
    return folder


def randomise(model: Any) -> None:
    """Weights that make single tokens matter, as tiny.py has it."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, 1.0 if "embed_tokens" in name else 0.25)


def seeded(folder: Path, config: Any) -> Path:
    """A model of this configuration with seeded weights and the tiny models' tokenizer."""
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomise(model)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


@V2
def test_a_sliding_window(tiny: Any, tmp_path: Path, scheduling: dict[str, Any]) -> None:
    """Drafts of a model that sees everything are right until the window moves."""
    target = changed(
        tiny,
        tmp_path / "target",
        architectures=["MistralForCausalLM"],
        model_type="mistral",
        sliding_window=32,
    )
    asks = [Ask(prompt, greedy(max_tokens=60)) for prompt in prompts_of(1, 10, 200)]
    assert check(Models.of(target, tiny), tmp_path, asks, **scheduling) > 0


@V2
@pytest.mark.slow
def test_a_mixture_of_experts(tiny: Any, tmp_path: Path, scheduling: dict[str, Any]) -> None:
    config = MixtralConfig(
        **COMMON, num_key_value_heads=2, head_dim=32, num_local_experts=4, num_experts_per_tok=2
    )
    check(Models.of(seeded(tmp_path / "target", config), tiny), tmp_path, **scheduling)


@V2
def test_weights_of_eight_bits(tiny: Any, tmp_path: Path, scheduling: dict[str, Any]) -> None:
    """A checkpoint of compressed-tensors: int8 weights by channel, activations by token."""
    scheme = {"num_bits": 8, "type": "int", "symmetric": True}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": scheme | {"strategy": "channel", "dynamic": False},
                "input_activations": scheme | {"strategy": "token", "dynamic": True},
            }
        },
    }
    target = changed(tiny, tmp_path / "target", quantization_config=quantization)
    weights = load_file(target / "model.safetensors")
    for name in [name for name in weights if "_proj" in name]:
        scale = weights[name].abs().amax(1, keepdim=True) / 127
        weights[name] = (weights[name] / scale).round().to(torch.int8)
        weights[f"{name}_scale"] = scale
    save_file(weights, target / "model.safetensors")
    assert check(Models.of(target, tiny), tmp_path, **scheduling) > 0


@V2
@pytest.mark.slow
def test_other_options_of_the_scheduler(
    tiny: Any, tmp_path: Path, scheduling: dict[str, Any]
) -> None:
    asks = [Ask(prompt, greedy()) for prompt in prompts_of(2, 10)]
    options = {
        "enable_prefix_caching": False,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": 512,
        "disable_log_stats": True,
        "stream_interval": 3,
        "max_num_seqs": 3,
    }
    assert check(tiny, tmp_path, asks, **options, **scheduling) > 0


@V2
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["processed_logprobs"])
def test_what_logprobs_mean(
    tiny: Any, tmp_path: Path, mode: str, scheduling: dict[str, Any]
) -> None:
    params = greedy(logprobs=2, repetition_penalty=1.3)
    asks = [Ask(prompt, params) for prompt in prompts_of(3, 6)]
    with bench(tiny, tmp_path, logprobs_mode=mode, **scheduling) as engines:
        engines.draft_with("perfect", NUM_DRAFTS)
        plain, drafted = compare(engines, asks)
    for one, other in zip(plain, drafted, strict=True):
        for left, right in zip(one.outputs[0].logprobs, other.outputs[0].logprobs, strict=True):
            assert left.keys() == right.keys()
            for token in left:
                assert left[token].logprob == pytest.approx(right[token].logprob, abs=1e-3)


@V2
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["outlines"])
def test_other_backends_of_structured_outputs(
    tiny: Any, tmp_path: Path, backend: str, scheduling: dict[str, Any]
) -> None:
    shape = StructuredOutputsParams(regex="[a-f]{3}-[0-9]{4}(-[a-z]{1,9})?")
    params = [greedy(structured_outputs=shape, ignore_eos=False, max_tokens=40), greedy()]
    asks = [Ask(prompt, params[i % 2]) for i, prompt in enumerate(prompts_of(4, 8))]
    check(tiny, tmp_path, asks, structured_outputs_config={"backend": backend}, **scheduling)


AUDIO = ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
VOCABULARY = 128


def hearing(folder: Path) -> list[int]:
    """Writes a seeded Qwen2-Audio that also knows the tiny models' characters; the ids of AUDIO."""
    tokenizer = make_tokenizer(96)
    tokenizer.add_special_tokens({"additional_special_tokens": list(AUDIO)})
    ids: list[int] = tokenizer.convert_tokens_to_ids(list(AUDIO))
    processor = Qwen2AudioProcessor(WhisperFeatureExtractor(feature_size=128), tokenizer)
    processor.save_pretrained(folder)
    ears = {
        "d_model": 64,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 64,
        "encoder_layers": 1,
        "num_mel_bins": 128,
    }
    text = COMMON | {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": VOCABULARY,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
    }
    torch.manual_seed(6)
    config = Qwen2AudioConfig(audio_config=ears, text_config=text, audio_token_index=ids[0])
    model = Qwen2AudioForConditionalGeneration._from_config(config, dtype=torch.float32)
    randomise(model)
    model.save_pretrained(folder)
    # Transformers writes names that vLLM does not read.
    weights = load_file(folder / "model.safetensors")
    nested, flat = "language_model.model.model.", "language_model.model."
    renamed = {name.replace(nested, flat): weight for name, weight in weights.items()}
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    return ids


def sound(seed: int) -> tuple[Any, int]:
    """A second of noise, and its samples a second."""
    return np.random.default_rng(seed).normal(0, 0.3, 16000).astype(np.float32), 16000


@V2
def test_sounds_among_texts(tmp_path: Path, scheduling: dict[str, Any]) -> None:
    """Requests with media are not drafted for, the others are."""
    target = tmp_path / "target"
    audio, begin, end = hearing(target)
    drafter = make_model(tmp_path / "small", seed=1, vocab_size=VOCABULARY)
    prompts = prompts_of(5, 6)
    heard = [
        {
            "prompt_token_ids": [*prompt, begin, audio, end, 9],
            "multi_modal_data": {"audio": [sound(i)]},
        }
        for i, prompt in enumerate(prompts)
    ]
    options = {"max_model_len": 1024, "max_num_batched_tokens": 1024, **scheduling}
    with bench(Models(target, drafter, drafter, drafter), tmp_path, **options) as engines:
        engines.draft_with("perfect", NUM_DRAFTS)
        first = [
            Ask(heard[0] | {"multi_modal_data": {"audio": [sound(i)]}}, greedy()) for i in (0, 1)
        ]
        one, other = answers(engines.drafted, first)
        assert engines.stats.drafted == 0
        assert one.outputs[0].token_ids != other.outputs[0].token_ids, "it does not listen"
        compare(
            engines, [Ask(p, greedy()) for pair in zip(prompts, heard, strict=True) for p in pair]
        )


def test_more_adapters_than_fit_into_a_step(tiny: Any, tmp_path: Path) -> None:
    """Whose turn it is not keeps its adapter in place."""
    adapters = [adapter(tmp_path / str(number), number) for number in (1, 2, 3)]
    asks = [
        Ask(prompt, greedy(), {"lora_request": adapters[i % 3]})
        for i, prompt in enumerate(prompts_of(6, 12))
    ]
    options = {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK}
    check(tiny, tmp_path, asks, max_num_batched_tokens=160, **options)


class AnyProcessor(AdapterLogitsProcessor):  # type: ignore[misc]
    """A custom logits processor."""

    def is_argmax_invariant(self) -> bool:
        return True

    def new_req_logits_processor(self, params: Any) -> None:
        return None


def test_custom_logits_processors_are_refused(tiny: Any, tmp_path: Path) -> None:
    """On Model Runner V1 by vLLM too, with any speculative decoding."""
    with pytest.raises(ConfigError, match="remove --logits-processors"):
        minedraft.LLM(
            str(tiny.target),
            drafter=f"ipc://{tmp_path}/nobody",
            logits_processors=[AnyProcessor],
            **ENGINE,
        )

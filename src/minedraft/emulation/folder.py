"""Folders of emulated models, as vLLM loads them: without weights, with a tokenizer."""

import json
from pathlib import Path
from typing import Any

import msgspec
from safetensors.numpy import save_file

from minedraft.config import ConfigError
from minedraft.costmodel.curve import CostModel
from minedraft.emulation import ARCHITECTURE
from minedraft.emulation.settings import KEY, Emulation
from minedraft.emulation.tokenizer import make_tokenizer

HEAD_DIM = 32
"""Of the one attention head: the smallest that vLLM's CPU attention takes."""
VOCAB_SIZES = range(128, (1 << 14) + 1)


def write(
    folder: Path, emulation: Emulation, *, vocab_size: int = 1024, max_model_len: int = 32768
) -> Path:
    """Write a model to ``folder`` and return that. Raises ConfigError."""
    if vocab_size not in VOCAB_SIZES:
        raise ConfigError(
            f"a vocabulary of {vocab_size} tokens: give {VOCAB_SIZES.start} to {VOCAB_SIZES[-1]}"
        )
    emulation = Emulation.parse(msgspec.to_builtins(emulation), str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", _config(emulation, vocab_size, max_model_len))
    _write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2})
    # vLLM wants a checkpoint, or a flag that says there is none.
    save_file({}, folder / "model.safetensors", metadata={"format": "pt"})
    make_tokenizer(vocab_size).save_pretrained(folder)
    return folder


def write_pair(
    folder: Path,
    cost: CostModel,
    *,
    agreement: float | tuple[float, ...],
    seed: int = 0,
    top_probability: float = 0.9,
    vocab_size: int = 1024,
    max_model_len: int = 32768,
) -> tuple[Path, Path]:
    """Write a target and its drafter to ``folder``/target and /drafter, and return these.

    The fields of ``Emulation`` say what ``agreement``, the drafter's, and the others are. Raises
    ConfigError.
    """
    target = Emulation(curve=cost.target, seed=seed, top_probability=top_probability)
    drafter = msgspec.structs.replace(target, curve=cost.drafter, agreement=agreement)
    sizes = {"vocab_size": vocab_size, "max_model_len": max_model_len}
    return write(folder / "target", target, **sizes), write(folder / "drafter", drafter, **sizes)


def _config(emulation: Emulation, vocab_size: int, max_model_len: int) -> dict[str, Any]:
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",  # whose configuration vLLM and Transformers read; it keeps the rest
        "dtype": "float32",
        "vocab_size": vocab_size,
        "hidden_size": HEAD_DIM,
        "intermediate_size": HEAD_DIM,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "max_position_embeddings": max_model_len,
        "bos_token_id": 1,
        "eos_token_id": 2,
        KEY: msgspec.to_builtins(emulation),
    }


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")

"""Tiny Llama models for tests: seeded, real checkpoints on disk, with a tokenizer of characters.

Their greedy continuation depends on the whole context and does not settle in a short loop at
once, so that a draft which saw a wrong token somewhere differs from one that did not.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from minedraft.emulation import tokenizer

CHARACTERS = 'abcdefghijklmnopqrstuvwxyz0123456789{}[]":,.-_ \nABCDEFGHIJKLM'
"""The 61 characters that the tokenizer knows; with the three special tokens 64 ids."""
ALSO_EOS = 20
"""A character that ends a text too, unlike </s> one that greedy decoding emits."""
HEAD_DIM = 32
"""Not hidden / heads: the smallest head that vLLM's CPU attention takes."""
PERTURBATION = 0.03
"""Noise, relative to each weight's deviation, that leaves about 70 % of the top tokens the same."""

_EMBEDDING_STD = 1.0
_WEIGHT_STD = 0.25
"""An order of magnitude above the usual 0.02: attention is peaked, so single tokens matter."""
_FAMILIES: dict[str, tuple[type[Any], type[Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
}
MAMBA: dict[str, Any] = {
    "architectures": ["MambaForCausalLM"],
    "model_type": "mamba",
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "state_size": 8,
    "intermediate_size": 128,
    "layer_norm_epsilon": 1e-5,
    "time_step_rank": 4,
    "conv_kernel": 4,
}
"""The configuration of a model that cannot take tokens back."""


def make_tokenizer(vocab_size: int = 64) -> PreTrainedTokenizerFast:
    """A tokenizer of one token per character, of other characters past those above."""
    return tokenizer.make_tokenizer(vocab_size, CHARACTERS)


def _randomise(model: PreTrainedModel, generator: torch.Generator, weight_std: float) -> None:
    for name, weight in model.named_parameters():
        if weight.dim() < 2:
            continue  # norms stay at one
        std = _EMBEDDING_STD if "embed_tokens" in name else weight_std
        weight.normal_(0.0, std, generator=generator)
        if "lm_head" in name:
            weight[:3] = 0.0  # logit 0: the special tokens are never the greedy ones


def _perturb(model: PreTrainedModel, noise: float, generator: torch.Generator) -> None:
    for weight in model.parameters():
        if weight.dim() < 2:
            continue
        shift = torch.empty_like(weight).normal_(generator=generator)
        weight.add_(shift * (noise * weight.std()))


def make_model(
    directory: Path,
    *,
    seed: int,
    vocab_size: int = 64,
    layers: int = 2,
    base: Path | None = None,
    noise: float = 0.0,
    family: str = "llama",
    max_position_embeddings: int = 2048,
    weight_std: float = _WEIGHT_STD,
    **config: Any,
) -> Path:
    """Write a float32 model with its tokenizer to ``directory`` and return that.

    With ``base`` the weights are those of the model there (built with the same sizes), each
    shifted by Gaussian noise of ``noise`` times its own deviation. ``family`` is llama or mistral
    (with ``sliding_window``); ``config`` goes to its configuration.
    """
    logging.disable_progress_bar()
    config_class, model_class = _FAMILIES[family]
    generator = torch.Generator().manual_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": max_position_embeddings,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": torch.float32,
    }
    if base is None:
        model = model_class(config_class(**(settings | config)))
    else:
        model = model_class.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        if base is None:
            _randomise(model, generator, weight_std)
        else:
            _perturb(model, noise, generator)
    model.generation_config.eos_token_id = [2, ALSO_EOS]
    model.save_pretrained(directory)
    make_tokenizer(model.config.vocab_size).save_pretrained(directory)
    return directory

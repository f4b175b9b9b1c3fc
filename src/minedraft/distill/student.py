"""The student: which weights learn, and a head that computes no more than the loss looks at."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from minedraft.config import ConfigError
from minedraft.distill.answers import IntArray
from minedraft.distill.checkpoint import saving
from minedraft.distill.recipe import Recipe

LORA_ALPHA = 2.0
"""Over the rank."""


class LossHead(nn.Module):  # type: ignore[misc]
    """The output layer at the positions asked for, and for tokens that the loss tells apart."""

    def __init__(self, head: nn.Linear, tokens: torch.Tensor | None) -> None:
        """``tokens``: rows of the head that are kept; None: all, and they may learn."""
        super().__init__()
        if tokens is None:
            self.weight, self.bias = head.weight, head.bias
        else:
            self.register_buffer("weight", head.weight.detach()[tokens].clone(), persistent=False)
            bias = None if head.bias is None else head.bias.detach()[tokens].clone()
            self.register_buffer("bias", bias, persistent=False)
        self.positions: torch.Tensor | None = None
        """bool [rows, tokens]; all if there is none."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [n, v], or [rows, tokens, v]."""
        wanted = hidden if self.positions is None else hidden[self.positions]
        return nn.functional.linear(wanted, self.weight, self.bias)


class Student:
    """A language model that learns, on the loss's vocabulary."""

    def __init__(
        self, folder: Path, recipe: Recipe, tokens: IntArray | None, vocab_size: int = 0
    ) -> None:
        """The model in ``folder``.

        ``tokens``: those that the loss tells apart, ascending; None, or where embeddings learn:
        all. ``vocab_size`` is the target's, whose output layer may have more rows. Raises
        ConfigError.
        """
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._head = self._model.get_output_embeddings()
        if not isinstance(self._head, nn.Linear):
            raise ConfigError(f"{folder}: a model without an output layer of its own cannot learn")
        size = self._head.weight.shape[0]
        all_tokens = recipe.train_embeddings or tokens is None
        kept = torch.arange(size) if all_tokens else torch.from_numpy(tokens).long()
        kept = kept[kept < size]
        self.columns = torch.full((max(size, vocab_size),), -1, dtype=torch.long)
        """Where a token is in the logits; -1: nowhere."""
        self.columns[kept] = torch.arange(len(kept))
        self.head = LossHead(self._head, None if all_tokens else kept)
        self._model.set_output_embeddings(self.head)
        self._choose(recipe)

    def _choose(self, recipe: Recipe) -> None:
        """Which weights learn."""
        self._model.config.use_cache = False
        if recipe.lora_rank:
            from peft import LoraConfig, get_peft_model

            alpha = int(LORA_ALPHA * recipe.lora_rank)
            config = LoraConfig(
                r=recipe.lora_rank, lora_alpha=alpha, target_modules="all-linear", bias="none"
            )
            self.module: Any = get_peft_model(self._model, config)
            return
        self.module = self._model
        if not recipe.train_embeddings:
            self._model.get_input_embeddings().weight.requires_grad_(False)
            for weight in self.head.parameters():
                weight.requires_grad_(False)

    def parameters(self) -> list[nn.Parameter]:
        """Those that learn."""
        return [weight for weight in self.module.parameters() if weight.requires_grad]

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        """Writes weights and configuration as an ordinary checkpoint; adapters are merged in.

        Raises OSError.
        """
        # First: whoever merges looks whether input and output share their weights.
        self._model.set_output_embeddings(self._head)
        model = self.module.merge_and_unload() if self.module is not self._model else self._model
        model.config.use_cache = True
        with saving():
            model.to(dtype).save_pretrained(folder)

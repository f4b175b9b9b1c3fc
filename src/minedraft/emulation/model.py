"""The emulated model as vLLM loads it. It has a KV cache and costs time, and knows its text."""

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import maybe_prefix

from minedraft.config import ConfigError
from minedraft.emulation.law import NUM_SPECIAL
from minedraft.emulation.settings import KEY, Emulation

_DIGIT = 256
"""A token is written as two numbers below this, which every dtype holds exactly."""
_NEVER = -100.0
"""The logit of tokens that are not to come; finite, for those who print log-probabilities."""


class EmulatedForCausalLM(nn.Module):  # type: ignore[misc]
    """A model without weights, whose forward pass lasts as long as its curve says.

    Hidden states name a token: the input's at first, after the forward pass the next one.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        model, compilation = vllm_config.model_config, vllm_config.compilation_config
        if compilation.cudagraph_mode != CUDAGraphMode.NONE:
            raise ConfigError(f"{model.model}: CUDA graphs do not wait, give --enforce-eager")
        config = model.hf_config
        emulation = Emulation.parse(getattr(config, KEY, None), model.model)
        self._curve = emulation.curve
        self._law = emulation.law(config.vocab_size)
        self._gap = emulation.logit_gap(config.vocab_size)
        self._vocab_size = config.vocab_size
        self._hidden_size = config.hidden_size
        self._dtype = model.dtype
        self.attn = Attention(
            num_heads=1,
            head_size=config.hidden_size,
            scale=config.hidden_size**-0.5,
            cache_config=vllm_config.cache_config,
            prefix=maybe_prefix(prefix, "layers.0.attn"),
        )

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Hidden states [tokens, hidden size] that name these tokens."""
        hidden = torch.zeros(
            len(input_ids), self._hidden_size, dtype=self._dtype, device=input_ids.device
        )
        hidden[:, 0] = input_ids % _DIGIT
        hidden[:, 1] = input_ids // _DIGIT
        return hidden

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, **_: Any) -> torch.Tensor:
        """Hidden states [tokens, hidden size] that name the tokens after these."""
        began = time.perf_counter()
        hidden = self.embed_input_ids(input_ids)
        self.attn(hidden, hidden, hidden)  # for its KV cache and its needs; the text is the law's
        tokens = self._law.next_tokens(positions.cpu().numpy(), input_ids.cpu().numpy())
        following = self.embed_input_ids(torch.from_numpy(tokens).to(input_ids.device))
        time.sleep(max(0.0, began + self._seconds() - time.perf_counter()))
        return following

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """float32 [tokens, vocabulary]."""
        digits = hidden_states[:, :2].long()
        tokens = digits[:, :1] + _DIGIT * digits[:, 1:]
        logits = torch.zeros(len(tokens), self._vocab_size, device=hidden_states.device)
        logits[:, :NUM_SPECIAL] = _NEVER
        return logits.scatter_(1, tokens, self._gap)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Names of the weights that were taken: there are none."""
        return {name for name, _ in weights}

    def _seconds(self) -> float:
        """What the pass costs by the curve; nothing where vLLM only tries the model."""
        context = get_forward_context()
        if not context.attn_metadata:
            return 0.0
        metadata = context.attn_metadata[self.attn.layer_name]
        lengths = metadata.seq_lens
        return self._curve.seconds(metadata.num_actual_tokens, len(lengths), int(lengths.sum()))

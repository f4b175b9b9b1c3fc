"""The tokenizer of a vLLM model, for either side's fingerprint."""

from typing import Any

from vllm.tokenizers import cached_tokenizer_from_config

from minedraft import vocabulary


def tokenizer_fingerprint(model_config: Any) -> str:
    """The fingerprint of a vLLM model's tokenizer; empty if it runs without one."""
    if model_config.skip_tokenizer_init:
        return ""
    return vocabulary.fingerprint(cached_tokenizer_from_config(model_config).get_vocab())

"""The proposer that proposes nothing: drafts come through the scheduler.

vLLM's speculative decoding needs some proposer in its workers. ``method="custom_class"`` takes any
class with ``propose``; this one leaves the drafts of the scheduler alone and costs nothing.
"""

from typing import Any


class NoDrafts:
    """For ``speculative_config.method = "custom_class"``."""

    def __init__(self, vllm_config: Any) -> None:
        del vllm_config

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """There is no model. vLLM's CPU runner calls this unconditionally."""

    def propose(self, *args: Any, **kwargs: Any) -> list[list[int]]:  # noqa: ARG002
        """No drafts for nobody."""
        return []

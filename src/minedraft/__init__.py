"""MineDraft: overlapped speculative decoding for stock vLLM."""

from typing import TYPE_CHECKING, Any

from minedraft.config import MineDraftConfig

if TYPE_CHECKING:
    from minedraft.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "MineDraftConfig", "__version__"]


def __getattr__(name: str) -> Any:
    """``LLM`` imports vLLM, which takes seconds: only who uses it pays."""
    if name == "LLM":
        from minedraft.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

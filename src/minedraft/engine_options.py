"""vLLM engine options: from our command lines, and our defaults for them."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser

CPU_KV_CACHE_BYTES = 2 << 30
"""KV cache of an engine on CPU by default; vLLM's own default is nearly all memory for one."""


def parse_flags(flags: Sequence[str], *, program: str) -> dict[str, Any]:
    """The engine options that these flags set, by name; ends the program if one is unknown."""
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog=program, add_help=False))
    values = vars(parser.parse_args(list(flags)))
    return {name: value for name, value in values.items() if value != parser.get_default(name)}


def one_line(error: Exception) -> str:
    """What vLLM says is wrong with a model or an option, without its pages of context."""
    if isinstance(error, ValidationError):
        return "; ".join(str(part["msg"]) for part in error.errors())
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def with_cpu_defaults(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, on CPU with a KV cache that leaves room for a second engine."""
    if not current_platform.is_cpu() or os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
        return dict(options)
    return {"kv_cache_memory_bytes": CPU_KV_CACHE_BYTES, **options}

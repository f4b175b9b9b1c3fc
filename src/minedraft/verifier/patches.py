"""Repairs of stock vLLM without which the output would be wrong, or a server would not end.

A patch is an object: it probes the stock function first, replaces it only if the probe shows the
fault, and logs what it replaced. It is applied in our workers and in `minedraft serve` only.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import zmq
from vllm.logger import init_logger
from vllm.utils.network_utils import zmq_socket_ctx
from vllm.v1.engine import utils as engine_utils
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

logger = init_logger("vllm.minedraft")


@dataclass(frozen=True)
class Patch:
    """Replaces ``module.name``, which every caller looks up there, if ``is_faulty`` finds it so."""

    module: ModuleType
    name: str
    replacement: Callable[..., Any]
    is_faulty: Callable[[Callable[..., Any]], bool]
    fault: str

    def apply(self) -> bool:
        """True if the stock function was faulty and is replaced now."""
        stock = getattr(self.module, self.name)
        if stock is self.replacement or not self.is_faulty(stock):
            return False
        setattr(self.module, self.name, self.replacement)
        logger.info("MineDraft: replaced %s.%s: %s", self.module.__name__, self.name, self.fault)
        return True


def _expand_batch_to_tokens(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """Repeats each request's value [requests] for each of its draft tokens [num_tokens]."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    expanded = torch.repeat_interleave(x, counts, output_size=num_tokens)
    return torch.where(expanded == replace_from, replace_to, expanded).to(x.dtype)


def _loses_floats(expand: Callable[..., torch.Tensor]) -> bool:
    # The fault leaves memory as it was found, which may look right by chance: two answers cannot.
    ends = torch.tensor([2, 3], dtype=torch.int32)
    return any(
        expand(torch.tensor([value, 0.0]), ends, 3, 0, 1).tolist() != [value, value, 1.0]
        for value in (0.25, 0.75)
    )


EXPAND_ON_CPU = Patch(
    module=rejection_sampler,
    name="expand_batch_to_tokens",
    replacement=_expand_batch_to_tokens,
    is_faulty=_loses_floats,
    fault="vLLM's CPU kernel writes temperature, top-k and top-p of draft tokens into a copy that "
    "it drops, so sampled requests with drafts would follow another law",
)
"""Seen in 0.32.0 (utils/cpu_triton_utils.py, _expand_kernel_impl); on GPUs a Triton kernel runs."""


def _top_k_top_p_of_some(
    logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None, **options: Any
) -> torch.Tensor:
    """vLLM's own masks on float [draft tokens, vocabulary], if there are any draft tokens."""
    return apply_top_k_top_p(logits, k, p, **options) if len(logits) else logits


def _fails_on_nothing(mask: Callable[..., torch.Tensor]) -> bool:
    try:
        mask(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int32), None)
    except RuntimeError:
        return True
    return False


TOP_K_OF_NOTHING_ON_CPU = Patch(
    module=rejection_sampler,
    name="apply_top_k_top_p",
    replacement=_top_k_top_p_of_some,
    is_faulty=_fails_on_nothing,
    fault="without Triton it fails in a step with a top-k request and no drafts at all, such as "
    "any first prefill",
)
"""Seen in 0.32.0 (sample/ops/topk_topp_sampler.py, apply_top_k_only)."""


@contextmanager
def _interruptible_socket(
    path: str, socket_type: Any, bind: bool | None = None
) -> Iterator["zmq.Socket[bytes]"]:
    """vLLM's own socket, out of which an interruption comes."""
    interruption = None
    with zmq_socket_ctx(path, socket_type, bind) as socket:
        try:
            yield socket
        except KeyboardInterrupt as error:
            interruption = error
            raise
    if interruption is not None:
        raise interruption


def _swallows_interruptions(open_socket: Callable[..., Any]) -> bool:
    try:
        with open_socket("inproc://minedraft-probe", zmq.PAIR, bind=True):
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        return False
    return True


INTERRUPTION_OF_A_START = Patch(
    module=engine_utils,
    name="zmq_socket_ctx",
    replacement=_interruptible_socket,
    is_faulty=_swallows_interruptions,
    fault="it swallows the SIGTERM or SIGINT that comes while the engines start, and the server "
    "would wait for them for ever",
)
"""Seen in 0.32.0 and 0.33.0 (utils/network_utils.py)."""


def apply_on_cpu() -> None:
    """All patches for vLLM on CPU."""
    EXPAND_ON_CPU.apply()
    TOP_K_OF_NOTHING_ON_CPU.apply()

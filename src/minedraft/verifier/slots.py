"""Model Runner V2 takes the drafts of the scheduler.

V2 keeps what it knows of a request in a slot, its drafts too: it verifies those that its own
speculator left in the slot, as many as the scheduler says. Here the speculator leaves none, and the
drafts that the scheduler put into a step are written into the slots before the step.
"""

from typing import Any

import torch
from vllm.v1.worker.gpu.spec_decode.ngram.speculator import NgramGPUSpeculator


class NoSpeculator(NgramGPUSpeculator):  # type: ignore[misc]
    """Proposes nothing, in place of the speculator of the method that we are configured as.

    It has no logits either: a draft is verified as a certain one, which is exact for any draft at
    any temperature.
    """

    def propose(self, input_batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ARG002
        """What is there, [requests, K]: it is written over before it is verified."""
        return self.drafts[: input_batch.num_reqs]


def install(runner: Any) -> None:
    """Puts the speculator that proposes nothing in place of vLLM's own."""
    runner.speculator = NoSpeculator(runner.vllm_config, runner.device, runner.req_states)


def fill(runner: Any, scheduler_output: Any) -> None:
    """Writes the drafts of the step into the slots of their requests. O(draft tokens)."""
    drafts = scheduler_output.scheduled_spec_decode_tokens
    if not drafts:
        return
    slots = runner.req_states.draft_tokens
    rows = [[*tokens, *[0] * (slots.shape[1] - len(tokens))] for tokens in drafts.values()]
    where = [runner.req_states.req_id_to_index[request_id] for request_id in drafts]
    slots[_on_device(where, slots)] = _on_device(rows, slots)


def _on_device(numbers: Any, like: torch.Tensor) -> torch.Tensor:
    """Copied without waiting for the device to end its present step."""
    pinned = torch.tensor(numbers, dtype=torch.int64, pin_memory=like.is_cuda)
    return pinned.to(like.device, non_blocking=True)

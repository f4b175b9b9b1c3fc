"""What a step of the drafter is to its workers: vLLM's description of a pass, and more."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.v1.core.sched.output import SchedulerOutput


class RowPatch(NamedTuple):
    """From position ``start`` on, the request's tokens are ``tokens`` and no more."""

    req_id: str
    start: int
    """Not before the end of the prompt that the request was sent with."""
    tokens: list[int]
    """At least one."""
    computed: int
    """Leading tokens whose keys and values hold."""


@dataclass
class DraftStep(SchedulerOutput):  # type: ignore[misc]
    """A forward pass of the drafter, and those that follow it at once.

    In these every request goes on by the one token that it sampled in the pass before.
    """

    patches: list[RowPatch] = field(default_factory=list)
    num_passes: int = 1


def passes(step: DraftStep) -> Iterator[SchedulerOutput]:
    """Each pass of the step as vLLM's workers know it, the step itself first."""
    yield step
    for index in range(1, step.num_passes):
        yield _following(step, index)


def _following(step: DraftStep, index: int) -> SchedulerOutput:
    known = [(new.req_id, new.num_computed_tokens) for new in step.scheduled_new_reqs]
    cached = step.scheduled_cached_reqs
    known.extend(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    following = SchedulerOutput.make_empty()
    following.num_scheduled_tokens = dict.fromkeys(step.num_scheduled_tokens, 1)
    following.total_num_scheduled_tokens = len(known)
    rows = following.scheduled_cached_reqs
    for req_id, num_computed in known:
        rows.req_ids.append(req_id)
        rows.new_block_ids.append(None)
        rows.num_computed_tokens.append(
            num_computed + step.num_scheduled_tokens[req_id] + index - 1
        )
    return following

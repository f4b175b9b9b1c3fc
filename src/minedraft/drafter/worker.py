"""The drafter's workers: vLLM's own, which also take back tokens.

The model runner appends every token it samples to its own copy of a request. When the target
decides otherwise, the engine sends the tokens that replace the rejected ones with the next step.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput

from minedraft import rows

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker

QUALIFIED_NAME = f"{__name__}.DraftWorker"


class RowPatch(NamedTuple):
    """From position ``start`` on, the request's tokens are ``tokens`` and no more."""

    req_id: str
    start: int
    """Not before the end of the prompt that the request was sent with."""
    tokens: list[int]


@dataclass
class DraftStep(SchedulerOutput):  # type: ignore[misc]
    """One forward pass of the drafter."""

    patches: list[RowPatch] = field(default_factory=list)


class DraftWorker(Worker):  # type: ignore[misc]
    """A worker that brings its requests up to date before each forward pass."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """Run one forward pass; the runner samples in ``sample_tokens`` after it."""
        rows.install(self.model_runner, scheduler_output)
        if isinstance(scheduler_output, DraftStep):
            for patch in scheduler_output.patches:
                overwrite(self.model_runner, patch)
        return super().execute_model(scheduler_output)


def overwrite(runner: Any, patch: RowPatch) -> None:
    """Apply ``patch`` to the runner's copies of the request: its state and, if any, its row."""
    req_id, start, tokens = patch
    state = runner.requests[req_id]
    del state.output_token_ids[start - state.num_prompt_tokens :]
    state.output_token_ids.extend(tokens)
    batch = runner.input_batch
    row = batch.req_id_to_index.get(req_id)
    if row is None:
        return  # the row will be written from the state
    end = start + len(tokens)
    batch.token_ids_cpu[row, start:end] = tokens
    batch.is_token_ids[row, start:end] = True
    batch.num_tokens_no_spec[row] = end

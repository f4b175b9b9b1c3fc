"""Taking back tokens in vLLM's Model Runner V1, which keeps each request twice.

A request has a state, and while it is in the batch a row, which is written from the state when it
joins.
"""

from typing import Any

from minedraft import rows
from minedraft.drafter.steps import DraftStep, RowPatch


def prepare(runner: Any, step: DraftStep) -> None:
    """Bring the runner's requests up to date before it runs ``step``."""
    rows.install(runner, step)
    for patch in step.patches:
        _overwrite(runner, patch)


def wait_for(output: Any) -> Any:
    """The ModelRunnerOutput of a pass, given what ``sample_tokens`` returned: that it is."""
    return output


def _overwrite(runner: Any, patch: RowPatch) -> None:
    state = runner.requests[patch.req_id]
    del state.output_token_ids[patch.start - state.num_prompt_tokens :]
    state.output_token_ids.extend(patch.tokens)
    batch = runner.input_batch
    row = batch.req_id_to_index.get(patch.req_id)
    if row is None:
        return  # the row will be written from the state
    end = patch.start + len(patch.tokens)
    batch.token_ids_cpu[row, patch.start : end] = patch.tokens
    batch.is_token_ids[row, patch.start : end] = True
    batch.num_tokens_no_spec[row] = end

"""Taking back tokens in vLLM's Model Runner V2, which keeps each request in a slot on the device.

The runner feeds a slot's tokens below ``prefill_len`` from its list, after that the one it sampled
last. What replaces rejected tokens is therefore more of a prompt: written into the list, with
``prefill_len`` behind it.
"""

from typing import Any

from minedraft.drafter.steps import DraftStep


def prepare(runner: Any, step: DraftStep) -> None:
    """Bring the runner's requests up to date before it runs ``step``."""
    if not step.patches:
        return
    states = runner.req_states
    lengths, computed = states.total_len, states.num_computed_tokens
    for patch in step.patches:
        slot = states.req_id_to_index[patch.req_id]
        end = patch.start + len(patch.tokens)
        states.all_token_ids.stage_write(slot, patch.start, patch.tokens)
        states.prefill_len.np[slot] = end
        lengths.stage_write_elem(slot, end)
        computed.stage_write_elem(slot, patch.computed)
    states.apply_staged_writes()  # the runner does so for new requests only


def wait_for(output: Any) -> Any:
    """The ModelRunnerOutput of a pass, given what ``sample_tokens`` returned while it runs."""
    return output.get_output()

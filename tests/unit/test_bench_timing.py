"""What a worker computes is booked to its steps, and what its drafter computes apart from it."""

from types import SimpleNamespace
from typing import Any

import pytest

from minedraft.bench.timing import Timer


class Worker:
    """A target that takes 3 s for a step and 1 s to sample; its drafter 2 s within that."""

    def __init__(self, drafts: bool) -> None:
        self.now = 0.0
        self.drafts = drafts
        self.model_runner = SimpleNamespace(propose_draft_token_ids=self.propose)
        if not drafts:
            del self.model_runner.propose_draft_token_ids

    def propose(self) -> str:
        self.now += 2
        return "drafts"

    def execute_model(self, scheduler_output: Any) -> None:
        self.now += 3

    def sample_tokens(self, grammar: Any) -> str:
        if self.drafts:
            assert self.model_runner.propose_draft_token_ids() == "drafts"
        self.now += 1
        return "tokens"


def output(*tokens: int, new: bool = False) -> Any:
    """The first request is new, or all are known, with 10 tokens of KV each."""
    return SimpleNamespace(
        num_scheduled_tokens=dict(enumerate(tokens)),
        scheduled_new_reqs=[SimpleNamespace(num_computed_tokens=0)] if new else [],
        scheduled_cached_reqs=SimpleNamespace(num_computed_tokens=[10] * (len(tokens) - new)),
    )


@pytest.mark.parametrize("drafts", [True, False])
def test_steps_are_booked(drafts: bool) -> None:
    worker: Any = Worker(drafts)
    timer = Timer(worker, 2, lambda: worker.now)
    for step in (output(9, 1, new=True), output(3, 3), output(), output(1, 3), output(4, 3)):
        worker.execute_model(step)
        if step.num_scheduled_tokens:
            assert worker.sample_tokens(None) == "tokens"
        worker.now += 10  # the scheduler
    times = timer.take()
    assert times.steps == 4
    assert times.decode_steps == 2  # not the new request, nor the four tokens
    assert times.model_s == 4 * (3 + 1)
    assert times.draft_s == 4 * 2 * drafts
    assert times.decode_model_s == 2 * (3 + 1)
    assert times.decode_draft_s == 2 * 2 * drafts
    # Between the begins of a decode step and the next: one with the empty step between them.
    assert times.step_s == pytest.approx(14 + 2 * drafts + 13 / 2)
    assert times.passes == [(10, 2, 20, 4), (6, 2, 26, 4), (4, 2, 24, 4), (7, 2, 27, 4)]
    assert timer.take().steps == 0

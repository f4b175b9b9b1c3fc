"""Padding changes no token, and is not counted as drafted."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import interpreter
import pytest
from engines import Bench, bench, run, scheduler_of
from features import greedy, prompts_of
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

pytestmark = pytest.mark.runner_v2
K = 8  # of what engines.py configures: there are graphs for 0, 4 and 8


@pytest.fixture(scope="module")
def padded(
    tiny: Any, tmp_path_factory: pytest.TempPathFactory, scheduling: dict[str, Any]
) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("drafter")
    with bench(tiny, folder, pad_drafts="always", **scheduling) as engines:
        yield engines


class Step(NamedTuple):
    drafts: dict[str, int]  # draft tokens of each request, padding included
    uncounted: int  # of them, those that vLLM is told not to count as drafted
    prefilling: bool  # whether it follows on a chunk of a prefill, which is never padded

    def may_be_padded(self, width: int) -> bool:
        """Whether draft tokens of this width for all do not more than double the step's tokens."""
        drafted = sum(self.drafts.values()) - self.uncounted
        return not self.prefilling and len(self.drafts) * width <= len(self.drafts) + 2 * drafted


@pytest.fixture
def given(padded: Bench, monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """The steps with draft tokens."""
    steps: list[Step] = []
    scheduler = scheduler_of(padded.drafted)
    schedule = scheduler.schedule

    def watched(throttle: bool = False) -> Any:
        prefilling = any(request.is_prefill_chunk for request in scheduler.running)
        output = schedule(throttle)
        drafts = output.scheduled_spec_decode_tokens
        if drafts:
            assert all(token >= 0 for tokens in drafts.values() for token in tokens)
            each = {r: len(drafts.get(r, ())) for r in output.num_scheduled_tokens}
            uncounted = sum((output.num_invalid_spec_tokens or {}).values())
            steps.append(Step(each, uncounted, prefilling))
        return output

    monkeypatch.setattr(scheduler, "schedule", watched)
    return steps


def test_steps_become_uniform_and_no_token_changes(padded: Bench, given: list[Step]) -> None:
    # On V1 there would be graphs for all K only, and padding does not more than double a step.
    padded.draft_with("perturbed", 3 if interpreter.is_wanted() else 5)
    prompts = prompts_of(41, 5, 40)
    before = padded.stats.drafted
    outputs = run(padded.drafted, prompts, greedy(max_tokens=24))
    plain = run(padded.plain, prompts, greedy(max_tokens=24))
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in plain]
    width = 4 if interpreter.is_wanted() else K
    paddable = [step for step in given if step.may_be_padded(width)]
    assert all({*step.drafts.values()} == {width} for step in paddable)
    assert not any(step.uncounted for step in given if step not in paddable)
    assert len(paddable) > 0.7 * len(given)
    drafted = padded.stats.drafted - before
    uncounted = sum(step.uncounted for step in given)
    assert drafted > 0 < uncounted
    assert drafted + uncounted == sum(sum(step.drafts.values()) for step in given)


def test_who_has_no_room_or_a_grammar_is_not_padded(padded: Bench, given: list[Step]) -> None:
    padded.draft_with("perfect", 3)
    choice = StructuredOutputsParams(regex="[a-z]{6}")
    asked = [
        SamplingParams(temperature=0, max_tokens=12, structured_outputs=choice),
        SamplingParams(temperature=1, seed=7, max_tokens=12),
        SamplingParams(temperature=0, max_tokens=12, min_tokens=6),
    ]
    for params in asked:
        given.clear()
        prompts = prompts_of(42, 2, 20)
        outputs = run(padded.drafted, prompts, params)
        plain = run(padded.plain, prompts, params)
        texts = [output.outputs[0].token_ids for output in outputs]
        assert texts == [output.outputs[0].token_ids for output in plain]
        if params.structured_outputs or params.seed:
            assert all(num <= 3 for step in given for num in step.drafts.values())

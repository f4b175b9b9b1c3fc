"""Padding changes no token, and is not counted as drafted."""

from collections.abc import Iterator
from typing import Any

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


@pytest.fixture
def uncounted() -> list[int]:
    """Draft tokens in each step that vLLM is told not to count as drafted."""
    return []


@pytest.fixture
def given(
    padded: Bench, uncounted: list[int], monkeypatch: pytest.MonkeyPatch
) -> list[dict[str, int]]:
    """Draft tokens of each request in each step, padding included."""
    steps: list[dict[str, int]] = []
    scheduler = scheduler_of(padded.drafted)
    schedule = scheduler.schedule

    def watched(throttle: bool = False) -> Any:
        output = schedule(throttle)
        drafts = output.scheduled_spec_decode_tokens
        if drafts:
            assert all(token >= 0 for tokens in drafts.values() for token in tokens)
            steps.append({r: len(drafts.get(r, ())) for r in output.num_scheduled_tokens})
            uncounted.append(sum((output.num_invalid_spec_tokens or {}).values()))
        return output

    monkeypatch.setattr(scheduler, "schedule", watched)
    return steps


def test_steps_become_uniform_and_no_token_changes(
    padded: Bench, given: list[dict[str, int]], uncounted: list[int]
) -> None:
    # On V1 there would be graphs for all K only, and padding does not more than double a step.
    padded.draft_with("perturbed", 3 if interpreter.is_wanted() else 5)
    prompts = prompts_of(41, 5, 40)
    before = padded.stats.drafted
    outputs = run(padded.drafted, prompts, greedy(max_tokens=24))
    plain = run(padded.plain, prompts, greedy(max_tokens=24))
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in plain]
    uniform = [step for step in given if len({*step.values()}) == 1]
    width = 4 if interpreter.is_wanted() else K
    assert all({*step.values()} == {width} for step in uniform)
    assert len(uniform) > 0.7 * len(given)
    drafted = padded.stats.drafted - before
    assert drafted > 0 < sum(uncounted)
    assert drafted + sum(uncounted) == sum(sum(step.values()) for step in given)


def test_who_has_no_room_or_a_grammar_is_not_padded(
    padded: Bench, given: list[dict[str, int]]
) -> None:
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
            assert all(num <= 3 for step in given for num in step.values())

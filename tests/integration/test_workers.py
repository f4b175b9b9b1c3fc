"""Asynchronous scheduling with the target's worker in a process of its own, as on a GPU.

The engine's core stays in this process, where a test can watch its scheduler.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import interpreter
import pytest
from drafters import Reference
from engines import Bench, Prompt, bench, has_v2, run, scheduler_of
from features import greedy, prompts_of

pytestmark = [
    pytest.mark.runner_v2,
    pytest.mark.skipif(
        not interpreter.is_wanted(), reason="Model Runner V1 is scheduled synchronously"
    ),
]
LENGTH = 24


@pytest.fixture(scope="module")
def apart(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """An engine whose worker is apart. There is no need for ``plain``: see ``expected``."""
    folder = tmp_path_factory.mktemp("drafter")
    options: dict[str, Any] = {"distributed_executor_backend": "mp", "async_scheduling": True}
    with bench(tiny, folder, **options) as engines:
        yield engines


def expected(target: Reference, prompt: Prompt) -> list[int]:
    """What the target says greedily, by Transformers."""
    tokens = list(prompt)
    for _ in range(LENGTH):
        tokens.append(target.best(tokens)[0])
    return tokens[len(prompt) :]


def test_the_worker_has_the_runner_and_the_core_a_queue_of_two(apart: Bench) -> None:
    assert apart.drafted.collective_rpc(has_v2) == [True]
    assert apart.drafted.llm_engine.engine_core.engine_core.batch_queue_size == 2


def test_the_tokens_are_the_targets(apart: Bench) -> None:
    apart.draft_with("perturbed", 4)
    prompts = prompts_of(31, 6, 60)
    before = apart.stats.drafted
    outputs = run(apart.drafted, prompts, greedy(max_tokens=LENGTH), [0, 0, 0, 3, 4, 9])
    assert apart.stats.drafted > before
    found = [list(output.outputs[0].token_ids) for output in outputs]
    assert found == [expected(apart.target, prompt) for prompt in prompts]


def watch(scheduler: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What happens, in its order: drafts for a request, steps given out, and their results."""
    happened: list[tuple[str, Any]] = []
    schedule, update = scheduler.schedule, scheduler.update_from_output
    client = scheduler._client
    take_draft = client._take_draft

    def watched_schedule(throttle: bool = False) -> Any:
        output = schedule(throttle)
        if output.num_scheduled_tokens:
            happened.append(("given", output))
        return output

    def watched_update(output: Any, result: Any) -> Any:
        if output.num_scheduled_tokens:
            happened.append(("result", output))
        return update(output, result)

    def watched_draft(draft: Any) -> bool:
        happened.append(("drafts", client._by_number[draft.session].request))
        answered: bool = take_draft(draft)
        return answered

    monkeypatch.setattr(scheduler, "schedule", watched_schedule)
    monkeypatch.setattr(scheduler, "update_from_output", watched_update)
    monkeypatch.setattr(client, "_take_draft", watched_draft)
    return happened


def given_too_late(happened: list[tuple[str, Any]]) -> list[set[str]]:
    """The steps whose drafts had all come before the result of the step before, and that were
    given out only after it; by their requests."""
    waiting: set[str] = set()  # have drafts
    late = []
    in_time: set[str] | None = None  # had drafts when the last result was taken, and none was given
    in_flight = 0
    for what, it in happened:
        if what == "drafts":
            waiting.add(it)
        elif what == "result":
            in_flight -= 1
            in_time = waiting.copy() if not in_flight else None
        else:
            in_flight += 1
            drafted = {r for r, tokens in it.scheduled_spec_decode_tokens.items() if tokens}
            if in_time is not None and drafted and drafted <= in_time:
                late.append(drafted)
            waiting -= set(it.num_scheduled_tokens)
            in_time = None
    return late


def test_a_half_is_given_out_before_the_result_of_the_other_comes(
    apart: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On every step in which its drafts are in time."""
    apart.draft_with("perfect", 3)
    scheduler = scheduler_of(apart.drafted)
    happened = watch(scheduler, monkeypatch)
    scheduler._operations.set_trace(str(tmp_path / "trace.json"))
    prompts = prompts_of(32, 6, 60)
    outputs = run(apart.drafted, prompts, greedy(max_tokens=48))
    scheduler._operations.set_trace("")
    found = [list(output.outputs[0].token_ids[:LENGTH]) for output in outputs]
    assert found == [expected(apart.target, prompt) for prompt in prompts]

    assert given_too_late(happened) == []
    in_flight, ahead = 0, []
    for what, _ in happened:
        if what == "given":
            ahead.append(in_flight > 0)
        in_flight += (what == "given") - (what == "result")
    events = json.loads((tmp_path / "trace.json").read_text())
    verified = [event for event in events if event["name"] == "verify"]
    assert [event["args"]["ahead"] for event in verified] == ahead
    drafted = [event["args"]["ahead"] for event in verified if event["args"]["draft_tokens"]]
    assert len(drafted) > 15
    assert sum(drafted) > 0.7 * len(drafted), "the drafter is quicker than the interpreter"

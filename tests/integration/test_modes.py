"""Modes that change in mid-run, and what single requests ask: always the same tokens."""

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
from drafters import TransformersEngine
from engines import Bench, bench, run, scheduler_of
from features import greedy, prompts_of
from vllm import SamplingParams

from minedraft.verifier import turns
from minedraft.verifier.choices import Mode

SETTINGS = ("auto", "overlap", "sequential", "off")


@pytest.fixture(scope="module")
def both(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with bench(tiny, tmp_path_factory.mktemp("drafter")) as engines:
        yield engines


@pytest.fixture(autouse=True)
def overlapped(both: Bench) -> Iterator[None]:
    yield
    scheduler_of(both.drafted)._modes.setting = "overlap"


def tokens_of(outputs: list[Any]) -> list[list[int]]:
    return [list(completion.token_ids) for o in outputs for completion in o.outputs]


class Watch:
    """What each step of a scheduler verified: draft tokens by request."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, llm: Any) -> None:
        self.most: dict[str, int] = {}
        scheduler = scheduler_of(llm)
        schedule = scheduler.schedule

        def watched(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            for request, drafts in output.scheduled_spec_decode_tokens.items():
                name = request.split("-")[0]
                self.most[name] = max(self.most.get(name, 0), len(drafts))
            return output

        monkeypatch.setattr(scheduler, "schedule", watched)


@pytest.mark.parametrize("drafter", ["perfect", "perturbed"])
def test_modes_that_change_all_the_time(
    both: Bench, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    both.draft_with(drafter, 4)
    scheduler = scheduler_of(both.drafted)
    rng = random.Random(3)
    schedule = scheduler.schedule
    steps: dict[str, int] = {}

    def changing(*args: Any, **kwargs: Any) -> Any:
        if rng.random() < 0.2:
            scheduler._modes.setting = rng.choice(SETTINGS)
        output = schedule(*args, **kwargs)
        if output.scheduled_spec_decode_tokens:
            mode = scheduler._modes.choice.mode
            steps[mode] = steps.get(mode, 0) + 1
        return output

    monkeypatch.setattr(scheduler, "schedule", changing)
    prompts = prompts_of(11, 12)
    arrivals = [rng.randint(0, 20) for _ in prompts]
    plain = run(both.plain, prompts, greedy(max_tokens=60), arrivals)
    drafted = run(both.drafted, prompts, greedy(max_tokens=60), arrivals)
    assert tokens_of(drafted) == tokens_of(plain)
    assert steps[Mode.OVERLAP]
    assert steps[Mode.SEQUENTIAL]
    assert Mode.OFF not in steps


def test_after_a_time_without_drafts_sessions_are_caught_up(both: Bench) -> None:
    """Requests that came while nothing was drafted get drafts afterwards, and the right ones."""
    both.draft_with("perfect", 4)
    modes = scheduler_of(both.drafted)._modes
    engine = both.drafted.llm_engine
    modes.setting = "off"
    prompts = prompts_of(12, 6)
    for index, prompt in enumerate(prompts):
        params = greedy(max_tokens=80)
        engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
    before, accepted = both.stats.drafted, both.stats.accepted
    for _ in range(20):
        engine.step()
    assert both.stats.drafted == before
    modes.setting = "overlap"
    finished: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        finished |= {o.request_id: o for o in engine.step() if o.finished}
    plain = run(both.plain, prompts, greedy(max_tokens=80))
    assert tokens_of([finished[str(i)] for i in range(len(prompts))]) == tokens_of(plain)
    assert both.stats.drafted - before > 50
    assert both.stats.accepted - accepted > 0.9 * (both.stats.drafted - before)


def test_what_single_requests_ask(both: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    both.draft_with("perfect", 4)
    watch = Watch(monkeypatch, both.drafted)
    seeded = {"temperature": 0.8, "seed": 5}
    asked: list[dict[str, Any]] = [
        {},
        {"extra_args": {"minedraft_draft": 0}},
        {"extra_args": {"minedraft_max_draft_tokens": 2}},
        {"extra_args": {"minedraft_max_draft_tokens": "0"}},
        {"extra_args": {"somebody_elses": 1}},
        seeded,
        seeded | {"extra_args": {"minedraft_draft_seeded": True}},
        {"extra_args": {"minedraft_draftt": 0}},
    ]
    prompts = [prompt[:12] for prompt in prompts_of(13, len(asked))]
    params = [greedy(max_tokens=40, **options) for options in asked]
    drafted = run(both.drafted, prompts, params)
    plain = run(both.plain, prompts, params)
    same = [i for i in range(len(asked)) if i != 6]  # its text is another one with drafts
    assert tokens_of([drafted[i] for i in same]) == tokens_of([plain[i] for i in same])
    assert set(watch.most) == {"0", "2", "4", "6"}
    assert watch.most["0"] == 4
    assert watch.most["2"] == 2


def test_an_arrival_does_not_wait_for_the_drafts_of_others(
    both: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the target stands still for drafts, its engine takes in what comes and goes."""
    both.draft_with("perfect", 4)
    scheduler_of(both.drafted)._modes.setting = "sequential"
    engine = both.drafted.llm_engine
    engine.add_request("a", {"prompt_token_ids": [5, 6, 7]}, greedy(max_tokens=200))
    before = both.stats.drafted
    while both.stats.drafted == before:
        engine.step()
    stuck: list[bool] = []

    def silent(_: Any) -> list[Any]:
        stuck.append(True)
        return []

    monkeypatch.setattr(TransformersEngine, "step", silent)
    for _ in range(50):
        engine.step()
        if stuck:
            break
    params = SamplingParams(temperature=0, max_tokens=1)
    engine.add_request("b", {"prompt_token_ids": [8, 9]}, params)
    started = time.monotonic()
    done: list[str] = []
    while not done:
        done = [o.request_id for o in engine.step() if o.finished]
    assert done == ["b"]
    assert time.monotonic() - started < 20 * turns.WAIT_SLICE_S  # the deadline here is 60 s
    engine.abort_request(["a"])
    while engine.has_unfinished_requests():
        engine.step()

"""What is seen of a running engine: vLLM's counters and ours, against counts by hand; traces."""

import json
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import pytest
from engines import MOST_DRAFTS, Bench, bench, run, scheduler_of
from prometheus_client import REGISTRY
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from minedraft.config import ENV_CONTROL
from minedraft.control import Command, Status, ask
from minedraft.verifier.trace import DRAFT, VERIFY

NAME = "counted"
"""Of this model: other tests of the process have counters of their own."""
COUNTERS = {
    "num_drafts": "vllm:spec_decode_num_drafts",
    "num_draft_tokens": "vllm:spec_decode_num_draft_tokens",
    "num_accepted_tokens": "vllm:spec_decode_num_accepted_tokens",
    "num_accepted_tokens_per_pos": "vllm:spec_decode_num_accepted_tokens_per_pos",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("control")
    path.chmod(0o700)
    return path


@pytest.fixture(scope="module")
def both(tiny: Any, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENV_CONTROL, str(folder))
        with bench(tiny, tmp_path_factory.mktemp("drafter"), served_model_name=NAME) as engines:
            yield engines


@dataclass
class ByHand:
    """Drafts as they went into steps, and what came true of them."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=lambda: [0] * MOST_DRAFTS)

    def count(self, drafts: list[int], emitted: list[int]) -> None:
        self.num_drafts += 1
        self.num_draft_tokens += len(drafts)
        true = list(takewhile(lambda pair: pair[0] == pair[1], zip(drafts, emitted, strict=False)))
        self.num_accepted_tokens += len(true)
        for position in range(len(true)):
            self.num_accepted_tokens_per_pos[position] += 1


@dataclass
class Watched:
    """What the steps of a run gave."""

    by_hand: ByHand
    by_vllm: ByHand


@pytest.fixture
def watched(both: Bench, monkeypatch: pytest.MonkeyPatch) -> Watched:
    scheduler = scheduler_of(both.drafted)
    stock = scheduler.update_from_output
    found = Watched(ByHand(), ByHand())

    def update_from_output(step: Any, result: Any) -> Any:
        for request, drafts in step.scheduled_spec_decode_tokens.items():
            row = result.req_id_to_index[request]
            found.by_hand.count(list(drafts), list(result.sampled_token_ids[row]))
        outputs = stock(step, result)
        for output in outputs.values():
            stats = output.scheduler_stats and output.scheduler_stats.spec_decoding_stats
            if stats:
                add(found.by_vllm, stats)
        return outputs

    monkeypatch.setattr(scheduler, "update_from_output", update_from_output)
    return found


def add(total: ByHand, stats: Any) -> None:
    total.num_drafts += stats.num_drafts
    total.num_draft_tokens += stats.num_draft_tokens
    total.num_accepted_tokens += stats.num_accepted_tokens
    for position, number in enumerate(stats.num_accepted_tokens_per_pos):
        total.num_accepted_tokens_per_pos[position] += number


def on_the_page(llm: Any) -> ByHand:
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    found = {field: metrics[name] for field, name in COUNTERS.items()}
    return ByHand(*(getattr(m, "values", None) or m.value for m in found.values()))


def less(after: ByHand, before: ByHand) -> ByHand:
    return ByHand(
        after.num_drafts - before.num_drafts,
        after.num_draft_tokens - before.num_draft_tokens,
        after.num_accepted_tokens - before.num_accepted_tokens,
        [
            a - b
            for a, b in zip(
                after.num_accepted_tokens_per_pos,
                before.num_accepted_tokens_per_pos,
                strict=True,
            )
        ],
    )


@pytest.mark.parametrize("drafter", ["perfect", "perturbed", "unrelated"])
def test_counters_are_what_happened(both: Bench, watched: Watched, drafter: str) -> None:
    """Greedy requests that arrive at any time and end anywhere, some under a grammar."""
    both.draft_with(drafter, 5)
    rng = random.Random(5)
    prompts = [[rng.randrange(3, 64) for _ in range(rng.randint(1, 60))] for _ in range(10)]
    params = [
        SamplingParams(temperature=0.0, max_tokens=rng.randint(1, 40), ignore_eos=i % 2 == 0)
        for i in range(len(prompts))
    ]
    params[3].structured_outputs = StructuredOutputsParams(regex="[a-f]{4,30}")
    before, drafted, accepted = on_the_page(both.drafted), both.stats.drafted, both.stats.accepted
    run(both.drafted, prompts, params, [rng.randint(0, 12) for _ in prompts])
    found = watched.by_hand
    assert found.num_drafts > 10
    assert (found.num_accepted_tokens > 0) or drafter == "unrelated"
    assert (found.num_accepted_tokens_per_pos[0] < found.num_drafts) or drafter == "perfect"
    assert watched.by_vllm == found
    assert less(on_the_page(both.drafted), before) == found
    assert both.stats.drafted - drafted == found.num_draft_tokens
    assert both.stats.accepted - accepted == found.num_accepted_tokens


# --- seen and changed while it runs -----------------------------------------------------------


def some(both: Bench, seed: int, count: int = 6) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    run(both.drafted, [[3 + seed, 4, i + 5] for i in range(count)], params)


def comes(true: Callable[[], object]) -> bool:
    deadline = time.monotonic() + 10
    while not true() and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(true())


def told(folder: Path, command: Command) -> Status:
    (status,) = ask(folder, command)
    assert status.error == ""
    return status


def test_the_page_shows_what_the_verifier_counts(both: Bench, tiny: Any) -> None:
    labels = {"model_name": NAME, "engine": "0"}

    def shown(name: str) -> float | None:
        return REGISTRY.get_sample_value(f"minedraft:{name}", labels)

    both.draft_with("perturbed", 3)
    some(both, 0)
    counters = scheduler_of(both.drafted)._client.counters
    assert comes(lambda: shown("draft_tokens_verified_total") == both.stats.drafted)
    assert comes(lambda: shown("drafter_busy_seconds_total") == counters.drafter_busy_s)
    assert shown("draft_tokens_accepted_total") == both.stats.accepted
    assert shown("verifications_total") == both.stats.verifications
    requested, received = (
        shown("draft_tokens_requested_total"),
        shown("draft_tokens_received_total"),
    )
    assert requested is not None
    assert received is not None
    assert requested >= received >= both.stats.drafted > 0
    assert shown("drafter_attached") == 1
    assert shown("round_trip_seconds") == counters.round_trip_s


def test_the_mode_is_changed_and_shown(both: Bench, folder: Path) -> None:
    both.draft_with("perfect", 3)
    before = both.stats.drafted
    status = told(folder, Command(mode="off"))
    assert (status.pid, status.mode, status.drafter) == (os.getpid(), "off", "attached")
    some(both, 1)
    assert both.stats.drafted == before
    for mode in ("sequential", "overlap"):
        before = both.stats.drafted
        assert told(folder, Command(mode=mode)).mode == mode
        steps = both.stats.steps_by_mode.get(mode, 0)
        some(both, 1)
        assert told(folder, Command()).decision == f"{mode}, K=3"
        assert both.stats.drafted > before
        assert both.stats.steps_by_mode[mode] > steps


def test_a_trace_of_a_run_tells_what_the_counters_tell(
    both: Bench, folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "trace.json"
    told(folder, Command(mode="overlap"))
    both.draft_with("perturbed", 3)
    verifications, drafted = both.stats.verifications, both.stats.drafted
    assert told(folder, Command(trace=str(file))).trace == str(file)
    some(both, 2)
    assert told(folder, Command(trace="")).trace == ""
    spans = [event for event in json.loads(file.read_text()) if event["ph"] == "X"]
    verified = [event["args"] for event in spans if event["name"] == VERIFY]
    assert sum(args["rows"] for args in verified) == both.stats.verifications - verifications
    assert sum(args["draft_tokens"] for args in verified) == both.stats.drafted - drafted
    assert {args["mode"] for args in verified} == {"overlap"}
    drafts = [event for event in spans if event["name"] == DRAFT]
    assert sum(event["args"]["rows"] for event in drafts) >= len(verified)
    for lane in {e["pid"] for e in spans}:
        here = sorted((e["ts"], e["dur"]) for e in spans if e["pid"] == lane)
        assert all(a + length <= b for (a, length), (b, _) in pairwise(here))
    first, last = spans[0], max(spans, key=lambda e: e["ts"])
    assert all(first["ts"] - 1e6 <= e["ts"] <= last["ts"] for e in drafts), "on the same clock"


def test_what_cannot_be_is_refused_and_the_engine_goes_on(both: Bench, folder: Path) -> None:
    (status,) = ask(folder, Command(trace="/no/such/folder/trace.json"))
    assert "No such file" in status.error
    assert status.trace == ""
    some(both, 3)

"""Emulated models in stock vLLM: alone, with vLLM's own drafter, and with ours."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
from engines import ALWAYS_WAIT, ENGINE, run, scheduler_of
from scipy.stats import binom
from vllm import SamplingParams
from vllm.config.compilation import CUDAGraphMode

import minedraft
from minedraft.config import ConfigError
from minedraft.costmodel.curve import CostModel, Curve
from minedraft.emulation import folder
from minedraft.emulation.law import Law
from minedraft.emulation.model import EmulatedForCausalLM

V2 = pytest.mark.runner_v2

VOCAB_SIZE, SEED, AGREEMENT, NUM_DRAFTS = 512, 3, 0.8, 3
TARGET_S, DRAFTER_S = 0.004, 0.001
PROMPTS = [[3 + i, 90 + i, 200 + i] for i in range(8)]
GREEDY = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)


def curve(seconds: float) -> Curve:
    return Curve(
        source="made up",
        overhead_s=seconds,
        weights_s=0.0,
        per_token_s=0.0,
        per_request_s=0.0,
        per_context_token_s=0.0,
    )


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    cost = CostModel(version=1, name="made up", target=curve(TARGET_S), drafter=curve(DRAFTER_S))
    return folder.write_pair(
        tmp_path_factory.mktemp("pair"),
        cost,
        agreement=AGREEMENT,
        seed=SEED,
        vocab_size=VOCAB_SIZE,
    )


@contextmanager
def ended(llm: Any) -> Iterator[Any]:
    """The engine, which is ended after the block and not when it is garbage."""
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


OPTIONS = ENGINE | {"max_model_len": 256, "num_gpu_blocks_override": 24}
"""A KV cache of half of what the eight requests come to: some are preempted."""


@pytest.fixture(scope="module")
def plain(pair: tuple[Path, Path]) -> Iterator[Any]:
    with ended(vllm.LLM(str(pair[0]), **OPTIONS)) as llm:
        yield llm


def counts(llm: Any, name: str) -> Any:
    """A metric of vLLM's: a number, or one for each place in a draft."""
    (metric,) = (metric for metric in llm.get_metrics() if metric.name == f"vllm:{name}")
    return getattr(metric, "values", None) or metric.value


def check_text(outputs: list[Any]) -> None:
    law = Law(SEED, VOCAB_SIZE)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == law.continuation(prompt, GREEDY.max_tokens)


def check_acceptance(accepted: int, drafted: int) -> None:
    low, high = binom.interval(1 - 1e-6, drafted, AGREEMENT)
    assert low <= accepted <= high


@V2
def test_plain_decoding_gives_the_laws_text_when_requests_are_preempted_too(plain: Any) -> None:
    check_text(run(plain, PROMPTS, GREEDY))
    assert counts(plain, "num_preemptions") > 0


class Watch:
    """A curve that notes what it is asked, and takes its time."""

    def __init__(self) -> None:
        self.passes: list[tuple[int, int, int]] = []

    def seconds(self, tokens: int, requests: int, context: int) -> float:
        self.passes.append((tokens, requests, context))
        return TARGET_S + 0.001 * tokens


@V2
def test_a_pass_lasts_as_long_as_its_tokens_requests_and_context_cost(
    plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model,) = plain.collective_rpc(lambda worker: worker.model_runner.model)
    watch = Watch()
    monkeypatch.setattr(model, "_curve", watch)
    schedule, expected = scheduler_of(plain).schedule, []

    def watched(*args: Any) -> Any:
        output = schedule(*args)
        new, known = output.scheduled_new_reqs, output.scheduled_cached_reqs
        computed = {request.req_id: request.num_computed_tokens for request in new}
        computed |= zip(known.req_ids, known.num_computed_tokens, strict=True)
        if tokens := output.total_num_scheduled_tokens:
            requests = output.num_scheduled_tokens
            expected.append(
                (tokens, len(requests), tokens + sum(computed[name] for name in requests))
            )
        return output

    monkeypatch.setattr(scheduler_of(plain), "schedule", watched)
    began = time.perf_counter()
    prompts = [list(range(3, 203)), [7] * 20, [9]]  # the first in two chunks
    run(plain, prompts, SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    took = time.perf_counter() - began
    assert watch.passes == expected
    assert expected[0][0] == 128
    assert took >= sum(TARGET_S + 0.001 * tokens for tokens, *_ in expected)


def test_a_sampled_token_is_the_top_one_with_the_set_probability(plain: Any) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=1, n=500, seed=1)
    (output,) = plain.generate([{"prompt_token_ids": [7, 8]}], params, use_tqdm=False)
    (top,) = Law(SEED, VOCAB_SIZE).continuation([7, 8], 1)
    tokens = [completion.token_ids[0] for completion in output.outputs]
    low, high = binom.interval(1 - 1e-6, 500, 0.9)
    assert low <= tokens.count(top) <= high
    assert len(set(tokens)) > 10


def test_with_vllms_own_drafter_the_text_is_the_same_and_accepted_at_the_rate(
    pair: tuple[Path, Path],
) -> None:
    target, drafter = map(str, pair)
    own = {"method": "draft_model", "model": drafter, "num_speculative_tokens": NUM_DRAFTS}
    with ended(vllm.LLM(target, speculative_config=own, **OPTIONS)) as llm:
        check_text(run(llm, PROMPTS, GREEDY))
        assert counts(llm, "num_preemptions") > 0
        places = counts(llm, "spec_decode_num_accepted_tokens_per_pos")
        check_acceptance(places[0], counts(llm, "spec_decode_num_drafts"))
        for before, after in pairwise(places):
            check_acceptance(after, before)


def test_with_our_drafter_the_text_is_the_same_and_accepted_at_the_rate(
    pair: tuple[Path, Path],
) -> None:
    target, drafter = map(str, pair)
    with ended(
        minedraft.LLM(
            target,
            draft_model=drafter,
            mode="overlap",
            num_speculative_tokens=NUM_DRAFTS,
            **(OPTIONS | ALWAYS_WAIT),
        )
    ) as llm:
        check_text(run(llm, PROMPTS, GREEDY))
        assert counts(llm, "num_preemptions") > 0
        stats = scheduler_of(llm)._stats
        assert stats.verified_without_drafts < stats.verifications / 4
        places = counts(llm, "spec_decode_num_accepted_tokens_per_pos")
        check_acceptance(places[0], counts(llm, "spec_decode_num_drafts"))


def test_a_model_that_cannot_be_is_refused_in_one_line() -> None:
    def make(mode: CUDAGraphMode, **entries: Any) -> None:
        config = SimpleNamespace(
            model_config=SimpleNamespace(model="folder", hf_config=SimpleNamespace(**entries)),
            compilation_config=SimpleNamespace(cudagraph_mode=mode),
        )
        EmulatedForCausalLM(vllm_config=config)

    with pytest.raises(ConfigError, match="^folder: CUDA graphs do not wait, give --enforce-eager"):
        make(CUDAGraphMode.FULL)
    with pytest.raises(ConfigError, match="^folder: emulation in config.json: Expected `object`"):
        make(CUDAGraphMode.NONE)

"""Features of vLLM beside plain requests: the output with drafts is that of vLLM without.

All tests here share one pair of engines with the options of the features on, so that they are
tested together too. What needs a target or an engine of its own is in test_targets.py.
"""

from collections.abc import Callable, Iterator
from typing import Any

import interpreter
import pytest
import torch
from engines import Bench, Prompt, bench, core_request, scheduler_of
from features import RANK, Ask, Run, adapter, answers, assert_same, compare, greedy, prompts_of
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RepetitionDetectionParams

V2 = pytest.mark.runner_v2_slow
NUM_DRAFTS = 4
# vLLM's LoRA kernels for CPUs take one row of logits for each request on Model Runner V2.
ADAPTERS = {} if interpreter.is_wanted() else {"enable_lora": True, "max_loras": 3}
OPTIONS: dict[str, Any] = {
    **ADAPTERS,
    "max_lora_rank": RANK,
    "enable_prompt_embeds": True,
    "scheduling_policy": "priority",
    "max_num_batched_tokens": 160,
    "max_num_scheduled_tokens": 150,
    "max_num_active_seqs": 12,
    "long_prefill_token_threshold": 40,
    "scheduler_reserve_full_isl": False,
    "watermark": 0.05,
    "kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"},
    "kv_cache_metrics": True,
}


@pytest.fixture(scope="module")
def both(
    tiny: Any, tmp_path_factory: pytest.TempPathFactory, scheduling: dict[str, Any]
) -> Iterator[Bench]:
    with bench(tiny, tmp_path_factory.mktemp("drafter"), **OPTIONS, **scheduling) as engines:
        engines.draft_with("perfect", NUM_DRAFTS)
        yield engines


def core_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core


def differ(one: list[Any], other: list[Any]) -> list[bool]:
    return [
        a.outputs[0].token_ids != b.outputs[0].token_ids for a, b in zip(one, other, strict=True)
    ]


# --- requests -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    folder = tmp_path_factory.mktemp("adapters")
    return [adapter(folder / str(number), number) for number in (1, 2)]


def test_requests_with_and_without_adapters(both: Bench, adapters: list[LoRARequest]) -> None:
    """Two adapters in three slots: vLLM on CPU takes the last slot for requests without one."""
    prompts = prompts_of(1, 12)
    kinds = [None, *adapters]
    asks = [
        Ask(prompt, greedy(), {"lora_request": kinds[i % 3]}) for i, prompt in enumerate(prompts)
    ]
    plain, _ = compare(both, asks)
    without = answers(both.plain, [Ask(prompt, greedy()) for prompt in prompts])
    assert differ(plain, without) == [i % 3 > 0 for i in range(12)]


@V2
def test_prompt_embeddings_among_tokens(both: Bench) -> None:
    """Those given as embeddings are not drafted for."""
    prompts = prompts_of(2, 10)
    table = both.target.model.get_input_embeddings().weight.detach()
    embeddings = [{"prompt_embeds": table[torch.tensor(prompt)]} for prompt in prompts]
    before = both.stats.drafted
    answers(both.drafted, [Ask(prompt, greedy()) for prompt in embeddings])
    assert both.stats.drafted == before
    mixed = [
        Ask((p, e)[i % 2], greedy())
        for i, (p, e) in enumerate(zip(prompts, embeddings, strict=True))
    ]
    plain, _ = compare(both, mixed)
    tokens = answers(both.plain, [Ask(prompt, greedy()) for prompt in prompts])
    assert not any(differ(plain, tokens)), "the embeddings are those of the tokens"


@V2
def test_priorities(both: Bench) -> None:
    asks = [
        Ask(prompt, greedy(), {"priority": 7 * i % 5}) for i, prompt in enumerate(prompts_of(3, 16))
    ]
    compare(both, asks)


@V2
def test_repetitions_end_a_text(both: Bench) -> None:
    detection = RepetitionDetectionParams(max_pattern_size=3, min_pattern_size=1, min_count=2)
    params = greedy(repetition_detection=detection, max_tokens=60)
    plain, _ = compare(both, [Ask(prompt, params) for prompt in prompts_of(4, 12)])
    reasons = {output.outputs[0].stop_reason for output in plain}
    assert "repetition_detected" in reasons


@V2
@pytest.mark.parametrize(
    "params", [{"min_p": 0.1, "temperature": 1.0}, {"logit_bias": {5: 10.0}}], ids=str
)
def test_vllm_refuses_a_request_and_goes_on(both: Bench, params: dict[str, Any]) -> None:
    (prompt,) = prompts_of(7, 1)
    with pytest.raises(VLLMValidationError, match="not yet supported with speculative decoding"):
        answers(both.drafted, [Ask(prompt, greedy(**params))])
    compare(both, [Ask(prompt, greedy())])


def stream(llm: Any, chunks: list[Prompt], others: list[Prompt]) -> dict[str, list[int]]:
    """The tokens of a request whose prompt comes in chunks, and of others beside it."""
    client = llm.llm_engine.engine_core
    tokens: dict[str, list[int]] = {}
    for index, prompt in enumerate(others):
        client.add_request(core_request(llm, f"other-{index}", prompt, greedy()))

    def step() -> bool:
        """Whether the chunk at hand was answered."""
        outputs = client.get_output().outputs
        for output in outputs:
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
        return any(o.request_id == "stream" and o.finish_reason is not None for o in outputs)

    for chunk in chunks:
        # The scheduler's request is this very list, and grows.
        request = core_request(llm, "stream", chunk.copy(), greedy(max_tokens=7))
        request.resumable = True
        client.add_request(request)
        while not step():
            pass
    client.add_request(core_request(llm, "stream", [5], greedy()))  # not resumable: the end
    while core_of(llm).scheduler.has_unfinished_requests():
        step()
    client.get_output()
    return tokens


@V2
def test_a_prompt_that_comes_in_chunks(both: Bench) -> None:
    """It is decoded without drafts."""
    chunks, others = prompts_of(10, 3), prompts_of(11, 5)
    before = both.stats.drafted
    alone = stream(both.drafted, chunks, [])
    assert both.stats.drafted == before
    assert len(alone["stream"]) == 21
    plain, drafted = stream(both.plain, chunks, others), stream(both.drafted, chunks, others)
    assert both.stats.drafted > before
    assert plain == drafted


# --- the engine in mid-run ------------------------------------------------------------------------


def interrupted(llm: Any, asks: list[Ask], steps: int, act: Callable[[Any], None]) -> list[Any]:
    """The outputs of a run in which something happens to the engine after some steps."""
    run = Run(llm, asks)
    for _ in range(steps):
        assert run.step()
    act(core_of(llm))
    return run.outputs()


def reset_prefix_cache(core: Any) -> None:
    assert core.reset_prefix_cache(reset_running_requests=True)


def pause_and_keep(core: Any) -> None:
    core.pause_scheduler("keep", clear_cache=False)
    assert not core.scheduler.has_unfinished_requests()
    core.step()
    core.resume_scheduler()


def pause_keep_and_clear(core: Any) -> None:
    core.pause_scheduler("keep")
    core.resume_scheduler()


def sleep(core: Any) -> None:
    core.sleep(1, "keep")
    core.wake_up()


def reload_weights(core: Any) -> None:
    core.pause_scheduler("keep")
    core.collective_rpc("reload_weights")
    core.resume_scheduler()


@V2
@pytest.mark.parametrize("steps", [5, 15, 16])
@pytest.mark.parametrize(
    "act",
    [reset_prefix_cache, pause_and_keep, pause_keep_and_clear, sleep, reload_weights],
    ids=lambda act: act.__name__,
)
def test_interruptions_change_nothing(both: Bench, act: Callable[[Any], None], steps: int) -> None:
    asks = [Ask(prompt, greedy(logprobs=2)) for prompt in prompts_of(8, 10)]
    plain = answers(both.plain, asks)
    assert_same(plain, interrupted(both.drafted, asks, steps, act))


@V2
def test_a_pause_that_aborts(both: Bench) -> None:
    """Its requests are gone, at the drafter too; those that come meanwhile wait."""
    asks = [Ask(prompt, greedy(logprobs=2)) for prompt in prompts_of(9, 6)]
    run = Run(both.drafted, asks)
    for _ in range(8):
        assert run.step()
    core = core_of(both.drafted)
    core.pause_scheduler("abort")
    assert not scheduler_of(both.drafted)._client._sessions
    both.drafted.llm_engine.abort_request([str(i) for i in range(len(asks))])
    later = Run(both.drafted, asks)
    for _ in range(len(asks) + 2):
        assert not later.finished
        later.step()
    core.resume_scheduler()
    assert_same(answers(both.plain, asks), later.outputs())

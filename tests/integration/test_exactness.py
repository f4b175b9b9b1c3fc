"""Greedy output with drafts is that of plain vLLM, token by token, whatever vLLM is asked to do.

What is marked runner_v2 is so on Model Runner V2 too, with both kinds of scheduling.
"""

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import interpreter
import pytest
from engines import (
    BLOCK_SIZE,
    ENGINE,
    MAX_MODEL_LEN,
    MOST_DRAFTS,
    Bench,
    Prompt,
    bench,
    core_request,
    has_v2,
    run,
    scheduler_of,
)
from features import Ask, Run
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

NEAR_TIE = 1e-4
DRAFTERS = ("perfect", "perturbed", "unrelated")
V2 = pytest.mark.runner_v2
LENGTH = 14 if interpreter.is_wanted() else 24
"""Of most texts."""


@pytest.fixture(scope="module")
def both(
    tiny: Any, tmp_path_factory: pytest.TempPathFactory, scheduling: dict[str, Any]
) -> Iterator[Bench]:
    with bench(tiny, tmp_path_factory.mktemp("drafter"), **scheduling) as engines:
        yield engines


@V2
def test_what_these_tests_run_on(both: Bench, scheduling: dict[str, Any]) -> None:
    assert both.drafted.collective_rpc(has_v2) == [interpreter.is_wanted()]
    core = both.drafted.llm_engine.engine_core.engine_core
    assert core.async_scheduling == scheduling["async_scheduling"]
    assert core.batch_queue_size == 1 + scheduling["async_scheduling"]


def prompts_of(seed: int, count: int, longest: int = 300) -> list[Prompt]:
    rng = random.Random(seed)
    return [
        [
            rng.randrange(3, 64)
            for _ in range(rng.choice((1, 2, 31, 32, 33, rng.randint(1, longest))))
        ]
        for _ in range(count)
    ]


def short_prompts(seed: int, count: int) -> list[Prompt]:
    """Prefilled in one step together: vLLM on CPU fails on a seed and a prompt in chunks."""
    return [prompt[:12] for prompt in prompts_of(seed, count)]


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0.0, "max_tokens": LENGTH, "ignore_eos": True} | options
    )


def assert_same(
    engines: Bench, prompts: list[Prompt], plain: list[Any], drafted: list[Any]
) -> None:
    """Equal outputs; where the two best logits are within NEAR_TIE either token is right."""
    for prompt, one, other in zip(prompts, plain, drafted, strict=True):
        a, b = list(one.outputs[0].token_ids), list(other.outputs[0].token_ids)
        if a == b:
            assert one.outputs[0].text == other.outputs[0].text
            assert one.outputs[0].finish_reason == other.outputs[0].finish_reason
            assert one.outputs[0].stop_reason == other.outputs[0].stop_reason
            continue
        at = next(i for i in range(len(a)) if a[: i + 1] != b[: i + 1])
        best = engines.target.logits(prompt + a[:at]).topk(2).values
        assert best[0] - best[1] <= NEAR_TIE, f"{a} is not {b}, from {at}"


def compare(
    engines: Bench,
    prompts: list[Prompt],
    params: Any,
    arrivals: list[int] | None = None,
) -> tuple[list[Any], list[Any]]:
    plain = run(engines.plain, prompts, params, arrivals)
    before = engines.stats.drafted
    drafted = run(engines.drafted, prompts, params, arrivals)
    assert engines.stats.drafted > before, "nothing was drafted"
    assert_same(engines, prompts, plain, drafted)
    return plain, drafted


@pytest.mark.parametrize(
    ("drafter", "num_drafts"),
    [
        pytest.param(drafter, num, marks=[V2] if num == most else [])
        for drafter, most in zip(DRAFTERS, (8, 5, 3), strict=True)
        for num in range(1, MOST_DRAFTS + 1)
    ],
)
def test_random_arrivals(both: Bench, drafter: str, num_drafts: int) -> None:
    """1 to 16 requests, prompts of 1 to 300 tokens in chunks, arriving at random times."""
    both.draft_with(drafter, num_drafts)
    rng = random.Random(num_drafts)
    prompts = prompts_of(num_drafts % 4, rng.randint(1, 16))
    arrivals = [rng.randint(0, 12) for _ in prompts]
    accepted = both.stats.accepted
    compare(both, prompts, greedy(), arrivals)
    if drafter == "perfect":
        assert both.stats.accepted > accepted


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_random_loads(both: Bench, seed: int) -> None:
    """A longer sweep: everything at random, options of vLLM mixed within a batch."""
    rng = random.Random(seed)
    both.draft_with(rng.choice(DRAFTERS), rng.randint(1, MOST_DRAFTS))
    prompts = prompts_of(1000 + seed, rng.randint(2, 16))
    options: list[dict[str, Any]] = [
        {},
        {"ignore_eos": False},
        {"repetition_penalty": 1.3},
        {"logprobs": 2},
        {"min_tokens": 7, "ignore_eos": False},
        {"stop_token_ids": [rng.randrange(3, 64)], "ignore_eos": False},
        {"structured_outputs": StructuredOutputsParams(regex="[a-z]{2,30}"), "ignore_eos": False},
    ]
    params = [greedy(max_tokens=rng.randint(8, 40), **rng.choice(options)) for _ in prompts]
    compare(both, prompts, params, [rng.randint(0, 25) for _ in prompts])


@pytest.mark.parametrize("drafter", ["perfect", pytest.param("perturbed", marks=V2), "unrelated"])
def test_the_end_of_the_context_inside_a_draft(both: Bench, drafter: str) -> None:
    both.draft_with(drafter, MOST_DRAFTS)
    prompts = [prompts_of(5, 1, 300)[0][:1] * (MAX_MODEL_LEN - left) for left in range(1, 13)]
    plain, _ = compare(both, prompts, greedy(max_tokens=None))
    assert [o.outputs[0].finish_reason for o in plain] == ["length"] * 12


@pytest.mark.parametrize("max_tokens", range(1, MOST_DRAFTS + 4))
def test_max_tokens_inside_a_draft(both: Bench, max_tokens: int) -> None:
    both.draft_with("perfect", MOST_DRAFTS)
    prompts = prompts_of(6, 4)
    plain = run(both.plain, prompts, greedy(max_tokens=max_tokens))
    assert_same(both, prompts, plain, run(both.drafted, prompts, greedy(max_tokens=max_tokens)))


def references(engines: Bench, prompts: list[Prompt], length: int = 14) -> list[list[int]]:
    outputs = run(engines.plain, prompts, greedy(max_tokens=length))
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize(
    ("drafter", "kind"),
    [
        ("perfect", "stop token"),
        ("perfect", "min tokens"),
        pytest.param("perfect", "stop string", marks=V2),
        ("perfect", "stop string in"),
        ("perturbed", "stop token"),
        pytest.param("perturbed", "min tokens", marks=V2),
        ("perturbed", "stop string"),
        ("perturbed", "stop string in"),
    ],
)
def test_stopping_at_every_position_of_a_draft(both: Bench, drafter: str, kind: str) -> None:
    both.draft_with(drafter, MOST_DRAFTS)
    (prompt,) = prompts_of(7, 1)
    (reference,) = references(both, [prompt], 16)
    tokenizer = both.plain.get_tokenizer()
    prompts, params = [], []
    for position in range(1, 13):
        token = reference[position]
        kinds: dict[str, dict[str, Any]] = {
            "stop token": {"stop_token_ids": [token]},
            "min tokens": {"stop_token_ids": [token], "min_tokens": position + 1},
            "stop string": {"stop": [tokenizer.decode(reference[position - 1 : position + 1])]},
            "stop string in": {
                "stop": [tokenizer.decode(reference[position - 1 : position + 1])],
                "include_stop_str_in_output": True,
            },
        }
        prompts.append(prompt)
        params.append(greedy(max_tokens=30, **kinds[kind]))
    plain, _ = compare(both, prompts, params)
    if kind != "min tokens":
        assert all(output.outputs[0].finish_reason == "stop" for output in plain)
        assert len({len(output.outputs[0].token_ids) for output in plain}) > 6


@pytest.mark.parametrize("min_tokens", [0, 5])
def test_end_of_text_at_every_position_of_a_draft(both: Bench, min_tokens: int) -> None:
    both.draft_with("perfect", MOST_DRAFTS)
    candidates = prompts_of(22, 24, 40)
    outputs = run(both.plain, candidates, greedy(ignore_eos=False, max_tokens=60))
    texts = [list(output.outputs[0].token_ids) for output in outputs]
    prompt, text = next((p, t) for p, t in zip(candidates, texts, strict=True) if 12 < len(t) < 60)
    # Prompts that are further and further in that text: each ends one token earlier.
    prompts = [prompt + text[: len(text) - left] for left in range(1, 13)]
    params = greedy(ignore_eos=False, max_tokens=40, min_tokens=min_tokens)
    plain, _ = compare(both, prompts, params)
    lengths = [len(output.outputs[0].token_ids) for output in plain]
    assert lengths[min_tokens:] == list(range(min_tokens + 1, 13))


PENALTIES: list[dict[str, float]] = [
    {"repetition_penalty": 1.7},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 1.9},
    {"repetition_penalty": 1.5, "presence_penalty": 0.7, "frequency_penalty": 0.9},
]


@pytest.mark.parametrize(
    ("drafter", "penalty"),
    [
        *[(drafter, penalty) for drafter in ("perfect", "perturbed") for penalty in PENALTIES[:3]],
        pytest.param("perturbed", PENALTIES[3], marks=V2),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_penalties(both: Bench, drafter: str, penalty: dict[str, float]) -> None:
    both.draft_with(drafter, 5)
    prompts = prompts_of(8, 6)
    params = [greedy(**penalty) if i % 3 else greedy() for i in range(6)]
    plain, _ = compare(both, prompts, params)
    without = run(both.plain, prompts, greedy())
    changed = [
        a.outputs[0].token_ids != b.outputs[0].token_ids
        for a, b in zip(plain, without, strict=True)
    ]
    assert any(changed), "the penalty does nothing here"


@pytest.mark.runner_v2_slow
def test_bad_words_and_allowed_tokens(both: Bench) -> None:
    both.draft_with("perfect", 5)
    prompts = prompts_of(9, 4)
    common = [reference[2] for reference in references(both, prompts)]
    params = [
        greedy(bad_words=[both.plain.get_tokenizer().decode([common[0]])]),
        greedy(allowed_token_ids=list(range(10, 40))),
        greedy(),
        greedy(allowed_token_ids=[common[3], 5, 6]),
    ]
    compare(both, prompts, params)


@pytest.mark.parametrize("drafter", ["perfect", pytest.param("perturbed", marks=V2)])
def test_logprobs(both: Bench, drafter: str) -> None:
    both.draft_with(drafter, 4)
    prompts = prompts_of(10, 6, 100)
    plain, drafted = compare(both, prompts, greedy(logprobs=3, prompt_logprobs=2))
    for one, other in zip(plain, drafted, strict=True):
        for kind in ("prompt_logprobs", "logprobs"):
            source = (
                (one, other) if kind == "prompt_logprobs" else (one.outputs[0], other.outputs[0])
            )
            a, b = (getattr(x, kind) for x in source)
            assert len(a) == len(b)
            for left, right in zip(a, b, strict=True):
                if left is None:
                    assert right is None
                    continue
                assert left.keys() == right.keys()
                for token in left:
                    assert left[token].logprob == pytest.approx(right[token].logprob, abs=1e-4)


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "n": {"type": "integer"}},
    "required": ["name", "n"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("drafter", ["perfect", pytest.param("perturbed", marks=V2), "unrelated"])
def test_structured_outputs(both: Bench, drafter: str) -> None:
    both.draft_with(drafter, 5)
    prompts = prompts_of(11, 6, 60)
    shapes = [
        {"json": json.dumps(SCHEMA)},
        {"regex": r"[a-f]{3}-[0-9]{4}(\.[a-z]+)?"},
        None,
    ]
    params = [
        greedy(
            max_tokens=48,
            ignore_eos=False,
            **({"structured_outputs": StructuredOutputsParams(**shape)} if shape else {}),
        )
        for shape in shapes * 2
    ]
    plain, _ = compare(both, prompts, params)
    for index in (0, 3):
        if plain[index].outputs[0].finish_reason == "stop":
            assert set(json.loads(plain[index].outputs[0].text)) == {"name", "n"}


@V2
def test_prefix_caching(both: Bench) -> None:
    both.draft_with("perturbed", 4)
    first = prompts_of(12, 1)[0] + list(range(3, 60)) * 4
    prompts = [first, first, first[:100], [*first, 9, 9]]
    params = greedy()
    plain = [run(both.plain, [prompt], params)[0] for prompt in prompts]
    drafted = [run(both.drafted, [prompt], params)[0] for prompt in prompts]
    assert_same(both, prompts, plain, drafted)
    assert [o.num_cached_tokens for o in plain] == [o.num_cached_tokens for o in drafted]
    assert drafted[1].num_cached_tokens >= BLOCK_SIZE


@V2
def test_seeded_requests_are_not_drafted_and_equal_plain(both: Bench) -> None:
    both.draft_with("perfect", 4)
    prompts = short_prompts(13, 6)
    seeded = SamplingParams(temperature=0.9, seed=7, max_tokens=20, ignore_eos=True)
    params = [seeded if i % 2 else greedy() for i in range(6)]
    plain, drafted = compare(both, prompts, params)
    assert all(
        a.outputs[0].token_ids == b.outputs[0].token_ids
        for a, b in zip(plain, drafted, strict=True)
    )


@V2
def test_several_outputs_of_one_prompt(both: Bench) -> None:
    both.draft_with("perfect", 4)
    prompts = short_prompts(14, 3)
    params = SamplingParams(
        temperature=2.0,
        seed=3,
        n=3,
        max_tokens=12,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    plain, drafted = (run(llm, prompts, params) for llm in (both.plain, both.drafted))
    for one, other in zip(plain, drafted, strict=True):
        assert [o.token_ids for o in one.outputs] == [o.token_ids for o in other.outputs]
        assert len({tuple(o.token_ids) for o in one.outputs}) == 3


@pytest.mark.parametrize("steps", [pytest.param(n, marks=[V2] * (n in (3, 6))) for n in range(9)])
def test_abort_and_the_same_id_again_at_once(
    both: Bench, steps: int, scheduling: dict[str, Any]
) -> None:
    """Aborted while waiting, prefilling, verified or drafted for; its successor is not confused.

    With a step in flight stock vLLM would take its result for the successor's, if that had the
    same id: it gives out no id twice, so here it is another one then.
    """
    again = "again" if scheduling["async_scheduling"] else "same"
    both.draft_with("perfect", 4)
    prompts = prompts_of(15, 5)
    victim, successor = prompts_of(16, 1)[0] + [5] * 200, prompts_of(17, 1)[0]
    expected = run(both.plain, [*prompts, successor], greedy())
    client = both.drafted.llm_engine.engine_core
    for index, prompt in enumerate(prompts):
        client.add_request(core_request(both.drafted, f"other-{index}", prompt, greedy()))
    client.add_request(core_request(both.drafted, "same", victim, greedy()))
    tokens: dict[str, list[int]] = {}
    step = 0
    while step <= steps or scheduler_of(both.drafted).has_unfinished_requests():
        if step == steps:
            client.abort_requests(["same"])
            client.add_request(core_request(both.drafted, again, successor, greedy()))
            tokens.pop("same", None)
        for output in client.get_output().outputs:
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
        step += 1
    client.get_output()
    assert tokens[again] == list(expected[-1].outputs[0].token_ids)
    for index in range(len(prompts)):
        assert tokens[f"other-{index}"] == list(expected[index].outputs[0].token_ids)
    assert not scheduler_of(both.drafted)._client._sessions


def test_kv_cache_is_allocated_for_a_turn_only(
    both: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden requests get no blocks; nobody holds more than ceil((num_tokens + K) / block)."""
    both.draft_with("perturbed", MOST_DRAFTS)
    scheduler = scheduler_of(both.drafted)
    schedule, seen = scheduler.schedule, []

    def held(request: Any) -> int:
        return len(scheduler.kv_cache_manager.get_block_ids(request.request_id)[0])

    def watched(*args: Any) -> Any:
        before = {r.request_id: held(r) for r in scheduler.running}
        output = schedule(*args)
        for request in scheduler.running:
            most = -(-(request.num_tokens + MOST_DRAFTS) // BLOCK_SIZE)
            assert held(request) <= most
            if request.request_id not in output.num_scheduled_tokens:
                assert held(request) == before[request.request_id]
                seen.append(request.request_id)
        return output

    monkeypatch.setattr(scheduler, "schedule", watched)
    compare(both, prompts_of(18, 9), greedy(max_tokens=40))
    assert len(seen) > 20, "hardly anybody was ever hidden"


def test_a_drafter_that_is_not_there_changes_nothing(both: Bench) -> None:
    both.draft_with("perfect", 4)
    client = scheduler_of(both.drafted)._client
    client._disconnected("a test says so")
    prompts = prompts_of(21, 4)
    assert_same(
        both, prompts, run(both.plain, prompts, greedy()), run(both.drafted, prompts, greedy())
    )
    assert client.connected, "it attached again"


@V2
def test_a_drafter_that_dies_in_mid_run_and_comes_back(both: Bench) -> None:
    both.draft_with("perturbed", 4)
    prompts, params = prompts_of(23, 3, 60), greedy(max_tokens=40)
    plain = run(both.plain, prompts, params)
    client, before = scheduler_of(both.drafted)._client, both.stats.drafted

    def drafted_more() -> bool:
        return bool(both.stats.drafted > before)

    stopped_at = returned_at = None
    requests = Run(both.drafted, [Ask(prompt, params) for prompt in prompts])
    while requests.step():
        if stopped_at is None and drafted_more():
            both.stop_drafter()
            stopped_at = requests.steps
        elif returned_at is None and stopped_at and requests.steps == stopped_at + 5:
            assert not client.connected
            before = both.stats.drafted
            both.start_drafter()
            returned_at = requests.steps
            # Else all may be done before the verifier greets again.
            until = time.monotonic() + 30
            while not client.connected and time.monotonic() < until:
                client.poll(0.05)
    assert_same(both, prompts, plain, requests.outputs())
    assert drafted_more(), "the drafter was not used again"


@V2
@pytest.mark.parametrize("mode", ["sequential", "auto"])
def test_other_modes(both: Bench, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    both.draft_with("perturbed", 4)
    monkeypatch.setattr(scheduler_of(both.drafted)._modes, "setting", mode)
    prompts, arrivals = prompts_of(20, 8), [i // 2 for i in range(8)]
    plain = run(both.plain, prompts, greedy(), arrivals)
    before = both.stats.drafted
    drafted = run(both.drafted, prompts, greedy(), arrivals)
    assert_same(both, prompts, plain, drafted)
    assert both.stats.drafted > before or mode == "auto"


# Engines that end take vLLM's process groups with them, those of ``both`` too: from here on each
# test has engines of its own.


@pytest.mark.parametrize("mode", [pytest.param("overlap", marks=V2), "sequential"])
def test_preemption(tiny: Any, tmp_path: Path, mode: str, scheduling: dict[str, Any]) -> None:
    """A KV pool so small that requests are preempted while they are drafted for."""
    blocks = {"num_gpu_blocks_override": 14, "max_num_batched_tokens": 64, "max_model_len": 128}
    with bench(tiny, tmp_path, mode=mode, **blocks, **scheduling) as engines:
        kinds, number = [("perturbed", 8), ("perfect", 3)], 9
        if interpreter.is_wanted():
            kinds, number = kinds[:1], 6
        for drafter, num_drafts in kinds:
            engines.draft_with(drafter, num_drafts)
            preempted = _preemptions(engines.drafted)
            compare(engines, prompts_of(19, number, 60), greedy(max_tokens=50))
            assert _preemptions(engines.drafted) > preempted


def _preemptions(llm: Any) -> int:
    return sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")


assert ENGINE["max_num_batched_tokens"] < 300, "prompts of 300 tokens are prefilled in chunks"

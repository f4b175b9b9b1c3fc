"""The drafter's engine in real vLLM: every draft is what the model itself says, whatever happened.

The reference is Hugging Face's implementation of the same checkpoint, given the whole context.
"""

import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import interpreter
import pytest
import torch
from conftest import TinyModels
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tiny import make_model
from transformers import AutoModelForCausalLM, JambaConfig
from vllm import EngineArgs
from vllm.v1.core.sched.output import NewRequestData

from minedraft.drafter.engine import DraftEngine, DraftEngineError
from minedraft.drafter.sessions import Drafted, Lost
from minedraft.drafter.steps import DraftStep, RowPatch, passes
from minedraft.protocol import LOST_CONTEXT, LOST_KV_FULL, LOST_UNKNOWN, LOST_VOCABULARY
from minedraft.rows import TokenList

pytestmark = pytest.mark.runner_v2
BLOCK = 32
MAX_LEN = 384
NEAR_TIE = 1e-4
VOCAB = 64
V2 = interpreter.is_wanted()
"""Whether this process has Model Runner V2, in which a pass takes some ten times as long."""
MakeEngine = Callable[..., DraftEngine]


class Reference:
    """What the model says without any cache."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def check(self, context: Sequence[int], draft: Drafted) -> None:
        """The draft's tokens are the greedy ones, near ties aside, with their log-probabilities."""
        assert draft.base_len == len(context)
        assert len(draft.tokens) == len(draft.logprobs)
        with torch.no_grad():
            logits = self.model(torch.tensor([[*context, *draft.tokens]])).logits[0]
        rows = logits[len(context) - 1 : -1].double()
        chosen = rows.gather(1, torch.tensor(draft.tokens)[:, None])[:, 0]
        assert (rows.max(dim=1).values - chosen).max() < NEAR_TIE
        logprobs = chosen - rows.logsumexp(dim=1)
        assert (logprobs - torch.tensor(draft.logprobs)).abs().max() < 1e-4

    def greedy(self, context: Sequence[int], count: int) -> list[int]:
        """The model's own continuation."""
        tokens = list(context)
        for _ in range(count):
            with torch.no_grad():
                tokens.append(int(self.model(torch.tensor([tokens])).logits[0, -1].argmax()))
        return tokens[len(context) :]


def words(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(length)]


@pytest.fixture(scope="module")
def make_engine() -> Iterator[Callable[..., DraftEngine]]:
    engines: list[DraftEngine] = []

    def make(model: Path, *, chunk: int = 24, **options: Any) -> DraftEngine:
        defaults: dict[str, Any] = {
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": MAX_LEN,
            "block_size": BLOCK,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 64,
            "num_gpu_blocks_override": 100,
        }
        engines.append(DraftEngine(EngineArgs(model=str(model), **defaults | options), chunk=chunk))
        return engines[-1]

    yield make
    for engine in engines:
        engine.shutdown()


@pytest.fixture(scope="module")
def shared(make_engine: MakeEngine, tiny: TinyModels) -> DraftEngine:
    return make_engine(tiny.target)


@pytest.fixture(scope="module")
def reference(tiny: TinyModels) -> Reference:
    return Reference(tiny.target)


@pytest.fixture
def engine(shared: DraftEngine) -> Iterator[DraftEngine]:
    """The shared engine, which must come back empty."""
    free = shared.num_free_blocks
    yield shared
    assert shared.num_sessions == 0
    assert shared.num_free_blocks == free
    assert not shared.has_work()


def drain(engine: DraftEngine) -> list[Drafted | Lost]:
    answers: list[Drafted | Lost] = []
    for _ in range(1000):
        if not engine.has_work():
            return answers
        answers += engine.step()
    raise AssertionError("the engine never finishes")


def draft(engine: DraftEngine, key: object, base_len: int, tokens: list[int], n: int) -> Drafted:
    engine.extend(key, base_len, tokens, n)
    [answer] = drain(engine)
    assert isinstance(answer, Drafted)
    assert answer.key == key
    return answer


def other(token: int) -> int:
    return 3 + (token - 2) % (VOCAB - 3)


class Traffic(RuleBasedStateMachine):
    """Random sessions on one engine, more of them than fit in a batch."""

    engine: DraftEngine
    reference: Reference

    def __init__(self) -> None:
        super().__init__()
        self.free = self.engine.num_free_blocks
        self.known: dict[int, list[int]] = {}
        self.owed: dict[int, int] = {}
        self.hints: dict[int, list[int]] = {}
        self.opened = 0

    @precondition(lambda self: len(self.known) < 7)
    @rule(length=st.integers(1, 300), text=st.integers(0, 3))
    def open(self, length: int, text: int) -> None:
        key, self.opened = self.opened, self.opened + 1
        self.known[key] = words(text, length)  # few texts: prefixes are shared
        self.engine.open(key, self.known[key])

    def _extend(self, key: int, base_len: int, tokens: list[int], wanted: int) -> None:
        self.engine.extend(key, base_len, tokens, wanted)
        self.known[key][base_len:] = tokens
        self.owed.pop(key, None)
        if wanted:
            self.owed[key] = wanted

    @precondition(lambda self: self.known)
    @rule(
        data=st.data(),
        agreeing=st.integers(0, 5),
        others=st.lists(st.integers(3, VOCAB - 1), max_size=2),
        repeated=st.integers(0, 2),
        wanted=st.integers(0, 5),
    )
    def extend(
        self, data: Any, agreeing: int, others: list[int], repeated: int, wanted: int
    ) -> None:
        key = data.draw(st.sampled_from(sorted(self.known)))
        known = self.known[key]
        base = max(0, len(known) - repeated)
        drafts = self.hints.pop(key, []) or self.reference.greedy(known, 2)
        if len(known) + 40 > MAX_LEN:
            self.close(data, key)
            return
        self._extend(key, base, known[base:] + drafts[:agreeing] + others, wanted)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def close(self, data: Any, key: int | None = None) -> None:
        if key is None:
            key = data.draw(st.sampled_from(sorted(self.known)))
        self.engine.close(key)
        self.known.pop(key)
        self.owed.pop(key, None)
        self.hints.pop(key, None)

    @rule(passes=st.integers(1, 8))
    def step(self, passes: int) -> None:
        for _ in range(passes):
            self._check(self.engine.step())

    def _check(self, answers: list[Drafted | Lost]) -> None:
        for answer in answers:
            assert isinstance(answer, Drafted)
            key = answer.key
            assert isinstance(key, int)
            self.reference.check(self.known[key], answer)
            assert len(answer.tokens) == self.owed.pop(key)
            self.hints[key] = answer.tokens

    @invariant()
    def sessions(self) -> None:
        assert self.engine.num_sessions == len(self.known)

    def teardown(self) -> None:
        self._check(drain(self.engine))
        owed, left = self.owed, list(self.known)
        for key in left:
            self.engine.close(key)
        assert not owed
        assert self.engine.num_free_blocks == self.free


def test_the_model_runner_is_vllms_choice(engine: DraftEngine) -> None:
    runner = type(engine._core.model_executor.driver_worker.worker.model_runner).__module__
    assert engine.model_runner == ("V2" if V2 else "V1")
    assert runner == f"vllm.v1.worker.{'cpu.model_runner' if V2 else 'cpu_model_runner'}"


def test_random_traffic_drafts_what_the_model_says(
    engine: DraftEngine, reference: Reference
) -> None:
    Traffic.engine, Traffic.reference = engine, reference
    run_state_machine_as_test(
        Traffic,
        settings=settings(
            max_examples=25 if V2 else 60,
            stateful_step_count=25,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
            derandomize=True,
        ),
    )


@pytest.mark.parametrize("accepted", [0, 1, 3, 4])
def test_rounds_of_rejection_and_acceptance(
    engine: DraftEngine, reference: Reference, accepted: int
) -> None:
    known = words(10 + accepted, 50)
    engine.open("a", known)
    answer = draft(engine, "a", 50, [], 4)
    for _ in range(12):  # over several block boundaries
        reference.check(known, answer)
        following = [*answer.tokens, *reference.greedy(known + answer.tokens, 1)]
        new = [*following[:accepted], other(following[accepted])]
        base = len(known)
        known += new
        before = engine.num_computed
        answer = draft(engine, "a", base, new, 4)
        assert engine.num_computed - before == (5 if accepted == 4 else 4)
    engine.close("a")


def test_long_prompts_are_chunked_within_the_batch(
    engine: DraftEngine, reference: Reference
) -> None:
    known = words(20, 300)
    engine.open("a", known)
    passes = engine.num_passes
    assert drain(engine) == []
    assert engine.num_passes - passes == 5  # 299 tokens, at most 64 at once
    reference.check(known, draft(engine, "a", 300, [], 3))
    engine.close("a")


def test_a_step_says_for_whom_it_computed(engine: DraftEngine) -> None:
    engine.open("a", words(80, 10))
    engine.open("b", words(81, 1))
    engine.step()
    assert engine.last_pass == ["a"], "a prompt of one token needs no prefill"
    engine.step()
    assert engine.last_pass == []
    engine.extend("b", 1, [], 1)
    assert len(engine.step()) == 1
    assert engine.last_pass == ["b"]
    for key in ("a", "b"):
        engine.close(key)


def test_a_long_prefill_does_not_hold_up_drafts(engine: DraftEngine) -> None:
    engine.open("short", words(21, 8))
    engine.open("long", words(22, 300))
    engine.extend("long", 300, [], 2)
    drain(engine)
    engine.open("longer", words(23, 310))
    engine.extend("longer", 310, [], 1)
    engine.extend("short", 8, [], 4)
    before = engine.num_computed
    assert [engine.step() for _ in range(3)] == [[], [], []]
    assert engine.num_computed - before <= 8 + 2 + 3 * 24
    [answer] = engine.step()
    assert answer.key == "short"
    for key in ("short", "long", "longer"):
        engine.close(key)


def test_a_second_session_reuses_the_prompt_of_the_first(
    engine: DraftEngine, reference: Reference
) -> None:
    prompt = words(30, 200)
    engine.open("a", prompt)
    drain(engine)
    before = engine.num_computed
    engine.open("b", prompt + words(31, 5))
    reference.check(prompt + words(31, 5), draft(engine, "b", 205, [], 2))
    assert engine.num_computed - before == 205 - 192 + 1  # 192 tokens fill six blocks
    engine.open("c", prompt[:193])
    assert drain(engine) == []  # all but the last token are there
    reference.check(prompt[:193], draft(engine, "c", 193, [], 2))
    for key in "abc":
        engine.close(key)


def test_accepted_drafts_are_reused_as_a_prefix(engine: DraftEngine, reference: Reference) -> None:
    known = words(32, 62)
    engine.open("a", known)
    while len(known) < 130:  # drafts fill the fourth block before they are verified
        answer = draft(engine, "a", len(known), [], 4)
        engine.extend("a", len(known), answer.tokens, 0)
        known += answer.tokens
    engine.close("a")
    before = engine.num_computed
    engine.open("b", known)
    reference.check(known, draft(engine, "b", len(known), [], 1))
    assert engine.num_computed - before == len(known) - 128
    engine.close("b")


@pytest.mark.parametrize("how", ["corrected", "closed", "extended past the boundary"])
def test_rejected_drafts_never_enter_the_prefix_cache(
    engine: DraftEngine, reference: Reference, how: str
) -> None:
    prompt = words(40 + len(how), 60)
    engine.open("a", prompt[:50])
    drain(engine)
    rejected = draft(engine, "a", 50, prompt[50:], 12).tokens  # the second block ends at 64
    assert rejected == reference.greedy(prompt, 12)
    known = [*prompt, other(rejected[0])]
    if how != "closed":
        engine.extend("a", 60, known[60:], 0)
    if how == "extended past the boundary":
        known += words(41, 20)
        engine.extend("a", 61, known[61:], 0)
        reference.check(known, draft(engine, "a", len(known), [], 2))
    engine.close("a")
    text = prompt + rejected
    before = engine.num_computed
    engine.open("b", text)
    reference.check(text, draft(engine, "b", len(text), [], 4))
    assert engine.num_computed - before == len(text) - 32 + 3  # the first block only
    engine.close("b")
    # The other way round: what was verified instead of the drafts.
    engine.open("c", known)
    reference.check(known, draft(engine, "c", len(known), [], 4))
    engine.close("c")


def workers_requests(engine: DraftEngine) -> dict[str, Any]:
    """What the workers have of each request: its state, in Model Runner V2 its slot."""
    runner = engine._core.model_executor.driver_worker.worker.model_runner
    requests: dict[str, Any] = runner.req_states.req_id_to_index if V2 else runner.requests
    return requests


def test_rows_that_sit_out_come_back_right(engine: DraftEngine, reference: Reference) -> None:
    known = {key: words(50 + key, 40 + 7 * key) for key in range(4)}
    for key, tokens in known.items():
        engine.open(key, tokens)
    for turn in range(10):
        for key in (turn % 2, turn % 2 + 2):
            engine.extend(key, len(known[key]), [], 3)
        for answer in drain(engine):
            assert isinstance(answer, Drafted)
            tokens = known[answer.key]  # type: ignore[index]
            reference.check(tokens, answer)
            new = [*answer.tokens[: turn % 4], 3 + turn]
            engine.extend(answer.key, len(tokens), new, 0)
            tokens += new
    states = workers_requests(engine).values()
    assert len(states) == 4
    if not V2:
        assert all(isinstance(state.output_token_ids, TokenList) for state in states)
    for key in known:
        engine.close(key)


def test_more_sessions_than_the_workers_hold(engine: DraftEngine, reference: Reference) -> None:
    """Who comes back brings its drafts along: not computed again, they can be taken back."""
    known = {key: words(57 + key, 40 + key) for key in range(6)}
    for key, tokens in known.items():
        engine.open(key, tokens)
    drain(engine)
    new: dict[object, list[int]] = {key: [] for key in known}
    for turn in range(6):
        before, kept = engine.num_computed, turn % 4
        for key in range(turn % 2, 6, 2):
            engine.extend(key, len(known[key]), new[key], 4)
            known[key] += new[key]
        for answer in drain(engine):
            assert isinstance(answer, Drafted)
            reference.check(known[answer.key], answer)  # type: ignore[index]
            new[answer.key] = answer.tokens[:kept]
            if answer.key not in {2, 3}:  # of these the other drafts stand, not verified
                new[answer.key].append(other(answer.tokens[kept]))
        assert engine.num_computed - before == (12 if turn < 2 else 8 + turn - 2)
        assert len(workers_requests(engine)) == (4 if V2 else 6)
    for key in known:
        engine.close(key)


def test_workers_forget_sessions_that_are_gone(engine: DraftEngine) -> None:
    for key in range(3):
        engine.open(key, words(55, 20))
        draft(engine, key, 20, [], 1)
        if key:
            engine.close(key)
    draft(engine, 0, 20, words(56, 1), 1)
    assert len(workers_requests(engine)) == 1
    engine.close(0)


def test_context_limit(engine: DraftEngine, reference: Reference) -> None:
    known = words(60, MAX_LEN - 3)
    engine.open("a", known)
    answer = draft(engine, "a", len(known), [], 8)
    assert len(answer.tokens) == 3
    reference.check(known, answer)
    engine.extend("a", len(known), answer.tokens, 8)
    engine.open("b", words(61, MAX_LEN))
    assert drain(engine) == [Lost("a", LOST_CONTEXT), Lost("b", LOST_CONTEXT)]


def test_what_is_unknown_or_not_in_the_vocabulary_is_lost(engine: DraftEngine) -> None:
    engine.extend("nobody", 3, [5], 2)
    engine.close("none")
    engine.open("a", [3, engine.vocab_size])
    engine.open("b", [3, 4])
    engine.extend("b", 2, [engine.vocab_size], 2)
    engine.open("c", words(62, 40))
    drain_first = engine.step()
    engine.extend("c", 39, [other(words(62, 40)[-1])], 1)
    assert [*drain_first, *drain(engine)] == [
        Lost("nobody", LOST_UNKNOWN),
        Lost("a", LOST_VOCABULARY),
        Lost("b", LOST_VOCABULARY),
        Lost("c", LOST_UNKNOWN),
    ]


@pytest.fixture(scope="module")
def crowded(make_engine: MakeEngine, tiny: TinyModels) -> DraftEngine:
    """Room for 13 blocks, one more than the longest session needs; no prefix cache."""
    return make_engine(tiny.target, num_gpu_blocks_override=14, enable_prefix_caching=False)


def test_full_cache_loses_the_youngest_that_only_prefills(
    crowded: DraftEngine, reference: Reference
) -> None:
    free = crowded.num_free_blocks
    old, idle, young = words(70, 120), words(71, 150), words(72, 180)
    crowded.open("old", old)
    draft(crowded, "old", 120, [], 2)  # 4 blocks
    crowded.open("idle", idle)
    assert drain(crowded) == []  # 5 blocks
    crowded.open("young", young)
    crowded.extend("young", 180, [], 1)  # would need 6
    assert drain(crowded) == [Lost("young", LOST_KV_FULL)]
    tokens = words(73, 136)  # 8 blocks: it drafted, so the one that never did makes room
    crowded.extend("old", 120, tokens, 2)
    lost, answer = drain(crowded)
    assert lost == Lost("idle", LOST_KV_FULL)
    assert isinstance(answer, Drafted)
    reference.check(old + tokens, answer)
    crowded.extend("idle", 150, [5], 1)
    assert drain(crowded) == [Lost("idle", LOST_UNKNOWN)]
    crowded.close("old")
    assert crowded.num_free_blocks == free


def test_full_cache_among_drafting_sessions_spares_the_oldest(
    crowded: DraftEngine, reference: Reference
) -> None:
    free = crowded.num_free_blocks
    known = {key: words(80 + key, 62 + 32 * (key % 2)) for key in range(5)}
    for key, tokens in known.items():
        crowded.open(key, tokens)
    lost: list[object] = []
    for _ in range(30):
        for key, tokens in known.items():
            crowded.extend(key, len(tokens), [], 3)
        for answer in drain(crowded):
            if isinstance(answer, Lost):
                assert answer.reason == LOST_KV_FULL
                lost.append(answer.key)
                del known[answer.key]  # type: ignore[arg-type]
                continue
            tokens = known[answer.key]  # type: ignore[index]
            reference.check(tokens, answer)
            crowded.extend(answer.key, len(tokens), [*answer.tokens, 9], 0)
            tokens += [*answer.tokens, 9]
    assert lost == [4, 3, 2]
    assert sorted(known) == [0, 1]
    for key in known:
        crowded.close(key)
    assert crowded.num_free_blocks == free


def test_a_session_of_the_same_batch_never_makes_room(
    crowded: DraftEngine, reference: Reference
) -> None:
    drafted, idle, late = words(95, 64), words(96, 310), words(97, 10)
    crowded.open("drafted", drafted)
    draft(crowded, "drafted", 64, [], 1)  # 2 blocks, full
    crowded.open("idle", idle)
    assert drain(crowded) == []  # 10 blocks
    crowded.open("late", late)
    crowded.extend("late", 10, [], 1)  # first in the batch, takes the last block
    crowded.extend("drafted", 64, [7], 1)
    lost, *answers = drain(crowded)
    assert lost == Lost("idle", LOST_KV_FULL)
    contexts = {"late": late, "drafted": [*drafted, 7]}
    for answer in answers:
        assert isinstance(answer, Drafted)
        reference.check(contexts.pop(str(answer.key)), answer)
    assert not contexts
    crowded.close("late")
    crowded.close("drafted")


def test_prefix_caching_can_be_switched_off(crowded: DraftEngine) -> None:
    computed = []
    for key in "ab":
        before = crowded.num_computed
        crowded.open(key, words(90, 100))
        drain(crowded)
        computed.append(crowded.num_computed - before)
        crowded.close(key)
    assert computed == [99, 99]


@pytest.fixture(scope="module")
def window(
    make_engine: MakeEngine, tmp_path_factory: pytest.TempPathFactory
) -> tuple[DraftEngine, Reference]:
    """A model that looks back on 32 tokens, and few blocks, so that freed ones are used again."""
    folder = tmp_path_factory.mktemp("window")
    make_model(folder, seed=5, family="mistral", sliding_window=33)
    return make_engine(folder, num_gpu_blocks_override=20), Reference(folder)


def test_sliding_window_rolls_back_exactly(window: tuple[DraftEngine, Reference]) -> None:
    """Rolling back needs a block that had left the window of what was drafted meanwhile."""
    engine, reference = window
    free = engine.num_free_blocks
    known = words(100, 99)
    engine.open("a", known)
    # Token 128 is drafted in a new block, when the window has passed the third (64 to 95).
    reference.check(known, draft(engine, "a", 99, [], 32))
    for key in range(8):  # in turn these use every block that is free
        engine.open(key, words(101 + key, 350))
        drain(engine)
    for key in range(8):
        engine.close(key)
    reference.check([*known, 7], draft(engine, "a", 99, [7], 32))
    engine.close("a")
    assert engine.num_free_blocks == free


def test_sliding_window_with_prefixes(window: tuple[DraftEngine, Reference]) -> None:
    engine, reference = window
    free = engine.num_free_blocks
    known = words(110, 100)
    for turn in range(12):
        engine.open(turn, known)
        answer = draft(engine, turn, len(known), [], 20)
        reference.check(known, answer)
        new = [*answer.tokens[: (5 * turn) % 17], 3 + turn]
        reference.check(known + new, draft(engine, turn, len(known), new, 2))
        known += new
        engine.close(turn)
    assert engine.num_free_blocks == free


def test_drafts_for_the_same_wish_are_one_step_where_passes_overlap(
    engine: DraftEngine, reference: Reference
) -> None:
    engine.open("a", words(120, 20))
    drain(engine)
    engine.extend("a", 20, [], 4)
    answers = [engine.step() for _ in range(1 if V2 else 4)]
    [answer] = answers[-1]
    assert isinstance(answer, Drafted)
    reference.check(words(120, 20), answer)
    engine.close("a")


def test_a_step_survives_the_way_to_a_worker_process() -> None:
    step = DraftStep.make_empty()
    step.patches.append(RowPatch("1", 3, [4, 5], 2))
    step.num_passes = 2
    assert pickle.loads(pickle.dumps(step)) == step


def test_later_passes_go_on_by_one_token() -> None:
    step = DraftStep.make_empty()
    step.num_passes = 3
    step.scheduled_new_reqs.append(
        NewRequestData("new", [5, 6], [], None, None, ([1],), 0, None, prefill_token_ids=[5, 6, 7])
    )
    known = step.scheduled_cached_reqs
    known.req_ids.append("known")
    known.new_block_ids.append(([2],))
    known.num_computed_tokens.append(40)
    step.num_scheduled_tokens = {"known": 2, "new": 3}
    step.finished_req_ids = {"gone"}
    step.new_block_ids_to_zero = [2]
    first, second, third = passes(step)
    assert first is step
    for index, later in enumerate((second, third)):
        assert later.num_scheduled_tokens == {"known": 1, "new": 1}
        assert later.total_num_scheduled_tokens == 2
        rows = later.scheduled_cached_reqs
        assert rows.req_ids == ["new", "known"]
        assert rows.num_computed_tokens == [3 + index, 42 + index]
        assert rows.new_block_ids == [None, None]
        assert not later.scheduled_new_reqs
        assert not later.finished_req_ids
        assert not later.new_block_ids_to_zero


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "speculative"),
        ({"worker_cls": "some.Worker"}, "worker_cls"),
        ({"pipeline_parallel_size": 2}, "pipeline"),
        ({"runner": "pooling"}, "pooling"),
    ],
)
def test_what_cannot_draft_is_refused_in_one_line(
    tiny: TinyModels, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(DraftEngineError, match=reason) as error:
        DraftEngine(EngineArgs(model=str(tiny.target), enforce_eager=True, **options))
    assert "\n" not in str(error.value)


def test_hybrid_models_are_refused(tmp_path: Path) -> None:
    JambaConfig(architectures=["JambaForCausalLM"], num_hidden_layers=8).save_pretrained(tmp_path)
    with pytest.raises(DraftEngineError, match="recurrent"):
        DraftEngine(EngineArgs(model=str(tmp_path), skip_tokenizer_init=True, enforce_eager=True))

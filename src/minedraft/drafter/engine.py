"""The drafter's engine: vLLM holds the model, its KV cache and its workers, we say what to run.

A vLLM EngineCore is used as a container. Its scheduler's ``schedule`` is never called: stopping,
preemption and output processing are not wanted here, and rolling back is not foreseen there.
Instead each step is described by a SchedulerOutput of ours, built from Sessions.plan.

The vLLM Request of a session holds verified tokens only. The KV cache manager caches no block
beyond a request's tokens, so the prefix cache never learns a draft that may still be rejected.
"""

import copy
import sys
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vllm import EngineArgs, SamplingParams
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    MLAAttentionSpec,
    SlidingWindowSpec,
    iter_layer_specs,
)
from vllm.v1.request import Request, RequestStatus

from minedraft.drafter.residents import Residents
from minedraft.drafter.sessions import Drafted, Lost, Row, Session, Sessions
from minedraft.drafter.steps import DraftStep, RowPatch
from minedraft.drafter.worker import QUALIFIED_NAME

MAX_PASSES = 4
"""In one step, where one pass can be prepared while another runs; what comes in waits for them."""
DEFAULT_CHUNK = 256
"""Prefill tokens in a pass that also drafts: they should not make it much longer."""
_EXACT_CACHES = (
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    ChunkedLocalAttentionSpec,
)
"""KV caches addressed by position: rolling back is writing over what is there."""


class DraftEngineError(RuntimeError):
    """This model or configuration cannot draft; one line says why."""


@dataclass(slots=True)
class _Held:
    """What vLLM has of a session."""

    request: Request
    slots: int = 0
    """Tokens that its KV cache blocks have room for."""
    prompt: int = 0
    """Tokens of the prompt under which the workers know it; 0 while they do not."""


class _Part(NamedTuple):
    """A session's part of a pass: its next tokens, and the blocks that are new for them."""

    session: Session
    num_tokens: int
    blocks: KVCacheBlocks | None


class DraftEngine:
    """Drafts greedily for any number of sessions, all that want drafts in one batch.

    ``chunk`` bounds the prefill tokens in a pass that also drafts. Raises DraftEngineError for a
    model or configuration that cannot draft, and what vLLM raises for one that it cannot run.
    """

    def __init__(self, engine_args: EngineArgs, *, chunk: int = DEFAULT_CHUNK) -> None:
        config = configure(engine_args)
        self._core = EngineCore(config, Executor.get_class(config), log_stats=False)
        self._kv = self._core.scheduler.kv_cache_manager
        try:
            self._block_size = _smallest_block(self._kv.kv_cache_config)
        except DraftEngineError:
            self._core.shutdown()
            raise
        self.model_config = config.model_config
        self.model: str = config.model_config.model
        self.max_model_len: int = config.model_config.max_model_len
        self.vocab_size: int = config.model_config.get_vocab_size()
        self.model_runner: str = "V2" if config.use_v2_model_runner else "V1"
        """vLLM's, by its name: the one that vLLM would take without us."""
        self.num_passes = 0
        """Forward passes so far."""
        self.num_computed = 0
        """Tokens computed so far, of all passes and sessions."""
        self.last_pass: list[Hashable] = []
        """Keys of the sessions for which the last step computed something."""
        self._executor = self._core.model_executor
        self._sampling = SamplingParams(
            temperature=0.0, logprobs=0, max_tokens=1 << 30, ignore_eos=True, detokenize=False
        )
        self._forgotten: set[str] = set()  # requests that the workers may forget
        v2, max_rows = self.model_runner == "V2", config.scheduler_config.max_num_seqs
        # Model Runner V2 has a place for so many requests and no more, running or not.
        self._residents: Residents[Session] = Residents(max_rows if v2 else sys.maxsize)
        self._sessions = Sessions(
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            max_rows=max_rows,
            max_tokens=config.scheduler_config.max_num_batched_tokens,
            chunk=chunk,
            # Model Runner V1 knows a token only when its pass is over: nothing would overlap.
            max_passes=MAX_PASSES if v2 else 1,
            release=self._release,
        )

    @property
    def num_sessions(self) -> int:
        """Sessions that are open."""
        return len(self._sessions)

    @property
    def num_free_blocks(self) -> int:
        """Blocks of the KV cache that no session holds, those of cached prefixes included."""
        return int(self._kv.block_pool.get_num_free_blocks())

    def open(self, key: Hashable, tokens: Sequence[int]) -> None:
        """Start a session with its first verified tokens, its prompt, to be prefilled ahead."""
        self._sessions.open(key, tokens)

    def extend(self, key: Hashable, base_len: int, tokens: Sequence[int], num_drafts: int) -> None:
        """Take ``tokens`` as verified from ``base_len`` on and draft ``num_drafts`` after them.

        The answer comes from ``step``. A newer call replaces the wish of an older one; tokens
        that are verified already may be repeated but not contradicted.
        """
        self._sessions.extend(key, base_len, tokens, num_drafts)

    def close(self, key: Hashable) -> None:
        """End a session and free what it holds; an unknown key is ignored."""
        self._sessions.close(key)

    def has_work(self) -> bool:
        """Whether ``step`` would compute or answer something."""
        return self._sessions.has_work

    def step(self) -> list[Drafted | Lost]:
        """Run one forward pass, or a few for the same drafts; the answers complete after it."""
        rows = self._sessions.plan()
        num_passes = self._sessions.num_passes(rows)
        batch = self._admit(rows, num_passes - 1)
        self.last_pass = [part.session.key for part in batch]
        if batch:
            self._run(batch, num_passes)
        return self._sessions.take_answers()

    def shutdown(self) -> None:
        """End the workers; the engine cannot be used any more."""
        self._core.shutdown()

    def _admit(self, rows: list[Row], ahead: int) -> list[_Part]:
        """The rows, with the KV cache they need; who gets none is lost.

        ``ahead``: tokens that each samples and computes in passes after the first.
        """
        self._kv.new_step_starts()
        batch: list[_Part] = []
        for row in rows:
            session = row.session
            part = None
            while not (session.gone or part):
                part = self._allocate(session, row.count, ahead)
                if part is None:
                    # Sessions of this batch stay: their new blocks count as cached already.
                    self._sessions.make_room(session, spared=(p.session for p in batch))
            if part and part.num_tokens:
                batch.append(part)
        return batch

    def _allocate(self, session: Session, limit: int, ahead: int) -> _Part | None:
        """Find KV cache for the session's next tokens, at most ``limit``, and ``ahead`` more.

        None if it is full.
        """
        held: _Held = session.handle or self._hold(session)
        request = held.request
        hit, hit_blocks = 0, None
        if not held.slots:
            hit_blocks, hit = self._kv.get_computed_blocks(request)[:2]
        count = min(limit, session.todo - hit)
        end = session.computed + hit + count + ahead
        if end <= held.slots:
            return _Part(session, count, None)
        _append_verified(request, session)
        request.num_computed_tokens = session.computed
        # A sliding window keeps what these might need again: they can be rolled back.
        request.num_in_flight_tokens = max(0, session.computed - session.verified)
        blocks = self._kv.allocate_slots(request, count + ahead, hit, hit_blocks)
        if blocks is None:
            return None
        held.slots = -(-end // self._block_size) * self._block_size
        if hit:
            self._sessions.advance(session, hit, None)
        return _Part(session, count, blocks)

    def _hold(self, session: Session) -> _Held:
        request = Request(
            str(session.number),
            session.tokens[: session.verified],
            self._sampling,
            None,
            block_hasher=self._core.request_block_hasher,
        )
        request.status = RequestStatus.RUNNING
        session.handle = held = _Held(request)
        return held

    def _release(self, session: Session) -> None:
        held: _Held | None = session.handle
        if held is None:
            return
        if held.slots:
            _append_verified(held.request, session)
            self._kv.cache_blocks(held.request, min(session.computed, session.verified))
        self._kv.free(held.request)
        self._residents.drop(session)
        self._forget(held)
        session.handle = None

    def _forget(self, held: _Held) -> None:
        if held.prompt:
            self._forgotten.add(held.request.request_id)
            held.prompt = 0

    def _run(self, batch: list[_Part], num_passes: int) -> None:
        step = self._describe(batch, num_passes)
        self.num_passes += num_passes
        self.num_computed += step.total_num_scheduled_tokens + (num_passes - 1) * len(batch)
        for index, output in enumerate(self._executor.execute_model(step)):
            logprobs = output.logprobs.logprobs[:, 0].tolist()  # [rows, 1]: of the sampled token
            for session, count, _ in batch:
                req_id = session.handle.request.request_id
                row = output.req_id_to_index[req_id]
                sampled = output.sampled_token_ids[row]  # empty unless it reached the last token
                draft = (sampled[0], logprobs[row]) if sampled else None
                self._sessions.advance(session, 1 if index else count, draft)

    def _describe(self, batch: list[_Part], num_passes: int) -> DraftStep:
        step: DraftStep = DraftStep.make_empty()
        step.num_passes = num_passes
        for session in self._residents.use(part.session for part in batch):
            self._forget(session.handle)
        for part in batch:
            held: _Held = part.session.handle
            if held.prompt:
                self._describe_known(step, part, held)
            else:
                self._describe_new(step, part.session, held)
            step.num_scheduled_tokens[held.request.request_id] = part.num_tokens
        step.total_num_scheduled_tokens = sum(step.num_scheduled_tokens.values())
        step.finished_req_ids, self._forgotten = self._forgotten, set()
        step.new_block_ids_to_zero = self._kv.take_new_block_ids() or None
        return step

    def _describe_new(self, step: DraftStep, session: Session, held: _Held) -> None:
        # Drafts are no part of the prompt: they may be taken back.
        held.prompt, session.agreed = session.verified, len(session.tokens)
        step.scheduled_new_reqs.append(
            NewRequestData(
                req_id=held.request.request_id,
                prompt_token_ids=session.tokens[: session.verified],
                prefill_token_ids=session.tokens.copy(),
                mm_features=[],
                sampling_params=self._sampling,
                pooling_params=None,
                block_ids=self._kv.get_block_ids(held.request.request_id),
                num_computed_tokens=session.computed,
                lora_request=None,
            )
        )

    def _describe_known(self, step: DraftStep, part: _Part, held: _Held) -> None:
        session, req_id = part.session, held.request.request_id
        if session.agreed < len(session.tokens):
            new = session.tokens[session.agreed :]
            step.patches.append(RowPatch(req_id, session.agreed, new, session.computed))
            session.agreed = len(session.tokens)
        known = step.scheduled_cached_reqs
        known.req_ids.append(req_id)
        blocks = part.blocks
        known.new_block_ids.append(blocks.get_block_ids(allow_none=True) if blocks else None)
        known.num_computed_tokens.append(session.computed)
        known.num_output_tokens.append(len(session.tokens) - held.prompt)


def _append_verified(request: Request, session: Session) -> None:
    if request.num_tokens < session.verified:
        request.append_output_token_ids(session.tokens[request.num_tokens : session.verified])


def configure(engine_args: EngineArgs) -> VllmConfig:
    """The configuration of a drafter. Raises DraftEngineError."""
    if engine_args.speculative_config is not None:
        raise DraftEngineError("a drafter drafts token by token: give it no speculative_config")
    if engine_args.worker_cls != "auto":
        raise DraftEngineError("a drafter has workers of its own: give it no worker_cls")
    if not (current_platform.is_cpu() or current_platform.is_cuda_alike()):
        raise DraftEngineError("a drafter runs on CUDA, ROCm or a CPU")
    args = copy.copy(engine_args)
    args.worker_cls = QUALIFIED_NAME
    # It would let vLLM's loop run ahead of its workers; ours waits for each draft token.
    args.async_scheduling = False
    args.logprobs_mode = "raw_logprobs"
    config = args.create_engine_config()
    if reason := next(_obstacles(config), None):
        raise DraftEngineError(f"{config.model_config.model} cannot draft here: {reason}")
    return config


def _obstacles(config: VllmConfig) -> Iterator[str]:
    """Why a model or configuration cannot draft, if it cannot."""
    model, parallel = config.model_config, config.parallel_config
    if model.runner_type != "generate":
        yield "it is a pooling model"
    if model.is_encoder_decoder:
        yield "it is an encoder-decoder model"
    if model.is_diffusion:
        yield "it is a diffusion model"
    if model.is_hybrid or model.is_attention_free or model.has_inner_state:
        yield "it has recurrent layers (Mamba or alike), which cannot take back tokens"
    if parallel.pipeline_parallel_size > 1:
        yield "pipeline parallelism is not supported, use tensor parallelism"
    if parallel.data_parallel_size > 1:
        yield "data parallelism is not supported, start several drafters"
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        yield "context parallelism is not supported"
    if config.kv_transfer_config is not None:
        yield "KV transfer is not supported"


def _smallest_block(cache: KVCacheConfig) -> int:
    """Tokens in the smallest block. Raises DraftEngineError for caches that cannot roll back."""
    for group in cache.kv_cache_groups:
        for spec in iter_layer_specs(group.kv_cache_spec):
            if type(spec) not in _EXACT_CACHES:
                raise DraftEngineError(f"tokens in a {type(spec).__name__} cannot be taken back")
    return int(min(group.kv_cache_spec.block_size for group in cache.kv_cache_groups))

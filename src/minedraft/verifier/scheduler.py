"""Glue between vLLM's scheduler, the turns and the drafter.

vLLM's own scheduler does all the work. Before each of its steps this subclass puts the drafts that
have come in into the requests whose turn it is, and hides the others by their
``next_decode_eligible_step``; after the step it tells the drafter what was verified. A hidden
request is not scheduled, so nothing is allocated for it while it is being drafted for.
"""

import logging
import os
import time
from typing import Any

from vllm.sampling_params import SamplingType
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds

from minedraft import lifeline
from minedraft.config import (
    ADDITIONAL_CONFIG_KEY,
    ENV_CONTROL,
    ENV_STATS,
    ENV_TRACE,
    ConfigError,
    Endpoint,
    MineDraftConfig,
    path_of_engine,
)
from minedraft.tokenizers import tokenizer_fingerprint
from minedraft.transport import Link
from minedraft.verifier import contract, refusals, stats
from minedraft.verifier.attendant import Attendant
from minedraft.verifier.choices import OFF, Mode, Step
from minedraft.verifier.client import DrafterClient
from minedraft.verifier.metrics import Metrics
from minedraft.verifier.modes import Modes
from minedraft.verifier.operations import Operations
from minedraft.verifier.options import RequestOptions
from minedraft.verifier.session import printable
from minedraft.verifier.turns import Turn, Turns, take_turn

logger = logging.getLogger("vllm.minedraft")


MAX_COMPLAINT = 300
MAX_COMPLAINTS = 32
"""Different faults in the options of requests that are logged, each once."""


PAUSE_S = 0.1
"""Between two steps: the engine was paused, or busy with what is no step."""


class _Everything:
    """Stands for the set of requests of the last step, to which nobody is new.

    For a request that was not in the last step vLLM re-sends all token ids, for workers that need
    them: KV connectors and asynchronous scheduling, both of which are refused. With turns that is
    every request in every step.
    """

    def clear(self) -> None: ...

    def update(self, _: Any) -> None: ...

    def __contains__(self, _: object) -> bool:
        return True


class MineDraftScheduler(Scheduler):  # type: ignore[misc]
    """vLLM's scheduler with drafts from a drafter of its own, by ``--scheduler-cls``."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        contract.ensure()
        refusals.check_target(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)
        lifeline.exit_with_parent_process()
        options = (vllm_config.additional_config or {}).get(ADDITIONAL_CONFIG_KEY)
        config = MineDraftConfig.parse(options)
        endpoint = Endpoint.from_environment()
        self._draft_seeded = config.draft_seeded
        self._modes = Modes(config.mode, self.num_spec_tokens)
        self._turns = Turns(overlap=True)
        self._client = DrafterClient(
            Link(endpoint),
            config,
            vocabulary_fingerprint=tokenizer_fingerprint(vllm_config.model_config),
            vocab_size=vllm_config.model_config.get_vocab_size(),
            tokens_of=lambda request: self.requests[request]._all_token_ids,
            clock=time.monotonic,
            on_drafts=self._modes.policy.drafted,
            on_message=lambda message, received_s: self._operations.heard(message, received_s),
        )
        self._stats = stats.Stats()
        self._scheduled_at = 0.0
        self._ended_at: float | None = None
        self._waited_s = 0.0
        self._verified: set[str] = set()
        self._complaints: set[str] = set()
        self.prev_step_scheduled_req_ids = _Everything()
        # vLLM pads one-token prefills with drafts of -1 to keep full CUDA graphs, unless it thinks
        # that K varies with the batch. They count as rejected drafts, and CPU kernels misread them.
        self.dynamic_sd_lookup = [self.num_spec_tokens] * (self.max_num_running_reqs + 1)
        self._attend(vllm_config, endpoint)

    def _attend(self, vllm_config: Any, endpoint: Endpoint) -> None:
        """Starts the thread through which operators see and change this engine."""
        names = vllm_config.model_config.served_model_name
        name = names[0] if isinstance(names, list) else names
        number = vllm_config.parallel_config.data_parallel_index
        self._stats_path = path_of_engine(os.environ.get(ENV_STATS, ""), number)
        self._operations = Operations(
            self._client,
            self._modes,
            self._stats,
            name=f"{name} (rank {number})" if number else name,
            number=number,
            running=lambda: len(self.running),
            shared_clock=endpoint.address.startswith("ipc://"),
        )
        if path := os.environ.get(ENV_TRACE):
            self._operations.set_trace(path)
        self._attendant = Attendant(
            self._operations, Metrics(name, number), os.environ.get(ENV_CONTROL)
        )

    # --- a step -------------------------------------------------------------------------------

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """The next step: the requests whose turn it is, with their drafts, and any prefill.

        Where the turns wait for drafts the step may be empty; the engine then comes again.
        """
        with self._operations.lock:
            if time.monotonic() - self._operations.stepped_at > PAUSE_S:
                self._ended_at = None
            self._client.poll()
            turn = self._take_turn()
            self._verified = set(turn.verify)
            for request_id in turn.hide:
                request = self.requests[request_id]
                # schedule() counts the step first, so this hides it from the coming step only.
                eligible = self.current_step + 2
                request.next_decode_eligible_step = max(request.next_decode_eligible_step, eligible)
            most = self._modes.choice.num_drafts
            drafts = [self._client.drafts(request_id, most) for request_id in turn.verify]
            # The stock method also drops what a request's grammar does not allow.
            super().update_draft_token_ids(DraftTokenIds(list(turn.verify), drafts))
            output = super().schedule(throttle_prefills)
            self._scheduled_at = time.monotonic()
            return output

    def _take_turn(self) -> Turn:
        decoding = [r.request_id for r in self.running if not r.is_prefill_chunk]
        choice = self._modes.choose(len(decoding), attached=self._client.connected)
        self._client.rest(choice == OFF)
        if choice == OFF:
            return Turn(decoding, [])
        self._turns.overlap = choice.mode is Mode.OVERLAP
        # A prefill chunk fills the time: no need to stand still.
        may_wait = len(decoding) == len(self.running)
        before, began = self._client.counters.waited_s, time.monotonic()
        turn = take_turn(
            self._turns, self._client, decoding, may_wait=may_wait, clock=time.monotonic
        )
        waited_s = self._client.counters.waited_s - before
        self._waited_s += waited_s
        if waited_s and (trace := self._operations.trace):
            trace.waited(began, began + waited_s)
        return Turn([], decoding) if turn.wait_for else turn

    def _room_for_drafts(self, request: Any) -> int:
        """Draft tokens of which the request can use every one; the step itself emits one more."""
        room: int = min(
            request.max_tokens - request.num_output_tokens,
            self.max_model_len - request.num_tokens,
            (self._modes.choice.num_drafts or self._modes.most_drafts) + 1,
        )
        missing = request.sampling_params.min_tokens - request.num_output_tokens
        if missing > 0:
            # vLLM decides for the token after the drafts by the tokens before them whether it may
            # end the text, so a step must not cross min_tokens.
            room = min(room, missing)
        return max(0, room - 1)

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """Ignores the proposer's result: drafts enter in schedule() only.

        Near max_model_len vLLM skips the proposer and brings zeros for the whole batch.
        """

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """The step's result, of which the drafter is told."""
        ended_at = time.monotonic()
        # Before vLLM cuts them where a text ends.
        emitted = [len(tokens) for tokens in model_runner_output.sampled_token_ids]
        with self._operations.lock:
            outputs = super().update_from_output(scheduler_output, model_runner_output)
            if scheduler_output.num_scheduled_tokens:
                self._tell_drafter(scheduler_output)
                rows = model_runner_output.req_id_to_index
                self._count(
                    scheduler_output, {r: emitted[row] for r, row in rows.items()}, ended_at
                )
            self._client.flush()
            self._operations.stepped_at = time.monotonic()
            if self._stats_path and not self.requests:
                stats.write(self._stats_path, self._operations.report())
            return outputs

    def _tell_drafter(self, scheduler_output: Any) -> None:
        advanced = []
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests.get(request_id)
            if request is None or request.is_prefill_chunk:
                continue
            advanced.append(request_id)
            known = self._client.session_length(request_id)
            if known is not None and known < request.num_tokens:
                tokens = request._all_token_ids[known:]
                self._client.advance(request_id, tokens, self._room_for_drafts(request))
        self._turns.step(advanced)

    def _count(self, scheduler_output: Any, emitted: dict[str, int], ended_at: float) -> None:
        drafts = scheduler_output.scheduled_spec_decode_tokens
        outcome = stats.Outcome()
        for request_id in self._verified.intersection(scheduler_output.num_scheduled_tokens):
            num_drafts, tokens = len(drafts.get(request_id, ())), emitted[request_id]
            outcome.verified(num_drafts, tokens)
            if num_drafts:
                self._modes.policy.verified(num_drafts, tokens - 1)
        prefill = outcome.rows < len(scheduler_output.num_scheduled_tokens)
        began, choice = self._scheduled_at, self._modes.choice
        self._stats.step(outcome, choice.mode, choice.num_drafts)
        if not prefill:
            self._stats.decode_step(outcome.rows, ended_at - began)
        self._client.counters.used = self._stats.drafted
        if trace := self._operations.trace:
            trace.verification(began, ended_at, outcome.rows, outcome.drafted, choice.mode)
        self._learn(outcome, prefill=prefill)

    def _learn(self, outcome: stats.Outcome, *, prefill: bool) -> None:
        """Tells the policy of a decode step, if it knows when that began."""
        now, began, waited_s = time.monotonic(), self._ended_at, self._waited_s
        decoding = sum(not request.is_prefill_chunk for request in self.running)
        self._ended_at, self._waited_s = (now if decoding else None), 0.0
        if prefill:
            return self._modes.interrupted()
        if began is None:
            return None
        step = Step(
            seconds=now - began,
            waited_s=waited_s,
            decoding=max(decoding, outcome.rows),
            drafted=outcome.drafted_rows,
            plain=outcome.rows - outcome.drafted_rows,
            draft_tokens=outcome.drafted,
        )
        return self._modes.stepped(step)

    # --- requests -----------------------------------------------------------------------------

    def add_request(self, request: Any) -> None:
        """Queues a request; the drafter prefills it meanwhile."""
        with self._operations.lock:
            known = request.request_id in self.requests
            super().add_request(request)
            most = 0 if known else self._most_drafts(request)
            if most:
                self._client.open(request.request_id, request._all_token_ids, most)
                self._client.flush()

    def _most_drafts(self, request: Any) -> int:
        """Draft tokens that the request may get at a time; 0 if it is not drafted for."""
        params = request.sampling_params
        if (
            params is None
            or request.prompt_token_ids is None
            or request.prompt_is_token_ids is not None
            or request.mm_features
            or request.resumable
            or request.max_tokens <= 1
        ):
            return 0
        try:
            options = RequestOptions.of(params.extra_args)
        except ConfigError as error:
            if str(error) not in self._complaints and len(self._complaints) < MAX_COMPLAINTS:
                self._complaints.add(str(error))
                what = printable(str(error))[:MAX_COMPLAINT]
                logger.warning("MineDraft: no drafts for %s: %s", request.request_id, what)
            return 0
        seeded = self._draft_seeded if options.draft_seeded is None else options.draft_seeded
        if not options.draft or (params.sampling_type == SamplingType.RANDOM_SEED and not seeded):
            return 0
        return options.max_draft_tokens

    def _handle_blocked_waiting_request(self, request: Any) -> bool:
        """Whether a waiting request may join the step.

        vLLM 0.32 counts the adapters of a step only, and fails if those of the hidden come on top.
        """
        may_join: bool = super()._handle_blocked_waiting_request(request)
        return may_join and self._adapter_fits(request)

    def _adapter_fits(self, request: Any) -> bool:
        if self.lora_config is None or request.lora_request is None:
            return True
        held = {r.lora_request.lora_int_id for r in self.running if r.lora_request is not None}
        most: int = self.lora_config.max_loras
        return len(held | {request.lora_request.lora_int_id}) <= most

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """The one way out of a request: stopped, aborted or failed."""
        with self._operations.lock:
            self._client.close(request.request_id)
            self._turns.forget(request.request_id)
            return super()._free_request(request, *args, **kwargs)

    def shutdown(self) -> None:
        """Tells the drafter goodbye."""
        self._attendant.stop()
        self._operations.set_trace("")
        with self._operations.lock:
            if self._stats_path:
                stats.write(self._stats_path, self._operations.report())
            self._client.shutdown()
        super().shutdown()

"""Glue between vLLM's scheduler, the turns and the drafter.

vLLM's own scheduler does all the work. Before each of its steps this subclass puts the drafts that
have come in into the requests whose turn it is, and hides the others by their
``next_decode_eligible_step``; after the step it tells the drafter what was verified. A hidden
request is not scheduled, so nothing is allocated for it while it is being drafted for.

With asynchronous scheduling vLLM asks for the next step while the target is at work on this one.
A request that may be drafted is then hidden until its outcome is known, so that the other half is
scheduled meanwhile; one that may not goes on as in stock vLLM, its next token still unknown.
"""

import logging
import os
import time
from collections.abc import Collection, Sequence
from typing import Any

from vllm.config.compilation import CUDAGraphMode
from vllm.sampling_params import SamplingType
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
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
    PadDrafts,
    path_of_engine,
)
from minedraft.tokenizers import tokenizer_fingerprint
from minedraft.transport import Link
from minedraft.verifier import contract, refusals, runner_choice, stats
from minedraft.verifier.attendant import Attendant
from minedraft.verifier.bell import Bell, Ring
from minedraft.verifier.choices import OFF, Mode
from minedraft.verifier.client import DrafterClient
from minedraft.verifier.metrics import Metrics
from minedraft.verifier.modes import Modes
from minedraft.verifier.operations import Operations
from minedraft.verifier.options import RequestOptions
from minedraft.verifier.padding import padding
from minedraft.verifier.session import printable
from minedraft.verifier.steps import Steps
from minedraft.verifier.turns import (
    BUSY_SLICE_S,
    JOIN_SLICE_S,
    WAIT_SLICE_S,
    Turn,
    Turns,
    take_turn,
)

logger = logging.getLogger("vllm.minedraft")


MAX_COMPLAINT = 300
MAX_COMPLAINTS = 32
"""Different faults in the options of requests that are logged, each once."""


class _Everything:
    """Stands for the set of requests of the last step, to which nobody is new.

    For a request that was not in the last step vLLM re-sends all token ids to Model Runner V1, for
    workers that need them: KV connectors and asynchronous scheduling, both of which are refused
    there. With turns that is every request in every step.
    """

    def clear(self) -> None: ...

    def update(self, _: Any) -> None: ...

    def __contains__(self, _: object) -> bool:
        return True


def _tiers(vllm_config: Any, pad_drafts: PadDrafts, schedule: Sequence[int] | None) -> list[int]:
    """Numbers of draft tokens for which there are CUDA graphs, if drafts are to be padded.

    ``schedule``: K by number of requests from 0 on, as vLLM made it of ours. None with Model Runner
    V1, and with data parallelism, where vLLM drops it.
    """
    has_graphs = vllm_config.compilation_config.cudagraph_mode.decode_mode() == CUDAGraphMode.FULL
    if pad_drafts == "never" or (pad_drafts == "auto" and not has_graphs):
        return []
    if schedule is None:
        return [vllm_config.speculative_config.num_speculative_tokens]
    return sorted(set(schedule[1:]))


class MineDraftScheduler(AsyncScheduler):  # type: ignore[misc]
    """vLLM's scheduler with drafts from a drafter of its own, by ``--scheduler-cls``."""

    dynamic_sd_lookup: list[int] | None

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
        self._complaints: set[str] = set()
        self._tiers = _tiers(vllm_config, config.pad_drafts, self.dynamic_sd_lookup)
        self.prev_step_scheduled_req_ids = _Everything()
        # By batch size, how many drafts of unknown tokens vLLM gives to a request that it has just
        # scheduled: ours are known or there are none. Where it thinks that K varies it also does
        # not pad one-token prefills with drafts of -1, which CPU kernels misread.
        self.dynamic_sd_lookup = [0] * (self.max_num_running_reqs + 1)
        self._attend(vllm_config, endpoint)
        self._steps = Steps(self._stats, self._modes, self._client.counters, self._operations)
        self._bell = self._hang_bell() if vllm_config.scheduler_config.async_scheduling else None

    def _attend(self, vllm_config: Any, endpoint: Endpoint) -> None:
        """Starts the thread through which operators see and change this engine."""
        logger.info("MineDraft: %s", runner_choice.describe(vllm_config))
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

    def _hang_bell(self) -> Bell | None:
        try:
            bell = Bell()
        except OSError as error:
            logger.warning("MineDraft: steps end unheard, drafts may be late: %s", error)
            return None
        self._client.wake_on(bell)
        return bell

    # --- a step -------------------------------------------------------------------------------

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """The next step: the requests whose turn it is, with their drafts, and any prefill.

        Where the turns wait for drafts the step may be empty; the engine then takes the result of
        the step in flight, if there is one, and comes again.
        """
        with self._operations.lock:
            self._steps.begin(time.monotonic())
            self._client.poll()
            turn = self._take_turn()
            for request_id in turn.hide:
                request = self.requests[request_id]
                # schedule() counts the step first, so this hides it from the coming step only.
                eligible = self.current_step + 2
                request.next_decode_eligible_step = max(request.next_decode_eligible_step, eligible)
            drafted = self._put_drafts(turn.verify)
            self._pad(drafted)
            output = super().schedule(throttle_prefills)
            self._plan(output, drafted)
            return output

    def _put_drafts(self, verify: Collection[str]) -> dict[str, int]:
        """Gives each request its drafts; their numbers."""
        most = self._modes.choice.num_drafts
        drafts = [
            # What is drafted for a request in flight does not follow its next token.
            [] if self.requests[r].num_in_flight_tokens else self._client.drafts(r, most)
            for r in verify
        ]
        # The stock method also drops what a request's grammar does not allow.
        super().update_draft_token_ids(DraftTokenIds(list(verify), drafts))
        return {r: len(self.requests[r].spec_token_ids) for r in verify}

    def _pad(self, drafted: dict[str, int]) -> None:
        """Fills short drafts up where that makes the step one that has a CUDA graph."""
        if not self._tiers or any(request.is_prefill_chunk for request in self.running):
            return
        requests = {request_id: self.requests[request_id] for request_id in drafted}
        room = {request_id: self._room_for_padding(r) for request_id, r in requests.items()}
        if width := padding(drafted, room, self._tiers):
            for request in requests.values():
                missing = width - len(request.spec_token_ids)
                any_token = request._all_token_ids[-1]
                request.spec_token_ids = [*request.spec_token_ids, *[any_token] * missing]

    def _room_for_padding(self, request: Any) -> int:
        """Draft tokens that may be put into the request's next step, whether of use or not."""
        if request.use_structured_output:
            return len(request.spec_token_ids)
        if not self._client.may_draft(request.request_id):
            return 0  # it may have a seed, and drafts take numbers of its random generator
        return max(0, self._longest_step(request) - 1)

    def _plan(self, scheduler_output: Any, drafted: dict[str, int]) -> None:
        """Notes what was put into the step."""
        drafts = scheduler_output.scheduled_spec_decode_tokens
        requests = scheduler_output.num_scheduled_tokens
        given = {r: len(drafts.get(r, ())) for r in drafted if r in requests}
        counted = {r: min(num, drafted[r]) for r, num in given.items()}
        padded = {r: num - counted[r] for r, num in given.items() if num > counted[r]}
        if padded:  # vLLM then leaves them out of what it counts as drafted; not as accepted
            scheduler_output.num_invalid_spec_tokens = padded
        step = self._steps.planned(
            counted, len(requests), time.monotonic(), padded=sum(padded.values())
        )
        if self._bell is not None and requests:
            self._bell.last()  # a socket that nobody empties loses rings
            scheduler_output.bell = Ring(self._bell.address, step.number)

    def _take_turn(self) -> Turn:
        decoding = [r for r in self.running if not r.is_prefill_chunk]
        names = [r.request_id for r in decoding]
        choice = self._modes.choose(len(decoding), attached=self._client.connected)
        self._client.rest(choice == OFF)
        if choice == OFF:
            return Turn(names, [])
        self._turns.overlap = choice.mode is Mode.OVERLAP
        busy = {r.request_id for r in decoding if r.num_in_flight_tokens}
        # Those in flight who get no drafts need not wait for their outcome, as in stock vLLM.
        plain = {request_id for request_id in busy if not self._client.may_draft(request_id)}
        # A prefill chunk fills the time: no need to stand still.
        may_wait = len(decoding) == len(self.running)
        turn = self._wait_for_turn([n for n in names if n not in plain], busy - plain, may_wait)
        return Turn([], names) if turn.wait_for else Turn([*plain, *turn.verify], turn.hide)

    def _wait_for_turn(self, names: list[str], verifying: set[str], may_wait: bool) -> Turn:
        step, bell = self._steps.oldest(), self._bell
        before, began = self._client.waited_s, time.monotonic()
        could_join = bool(self.waiting) and len(self.running) < self.max_num_running_reqs
        if could_join:
            slice_s = WAIT_SLICE_S if step else JOIN_SLICE_S
        else:
            slice_s = BUSY_SLICE_S if step and bell else WAIT_SLICE_S
        turn = take_turn(
            self._turns,
            self._client,
            names,
            verifying=verifying,
            may_wait=may_wait,
            clock=time.monotonic,
            slice_s=slice_s,
            is_over=lambda: bool(step and bell and bell.last() >= step.number),
        )
        waited_s = self._client.waited_s - before
        if waited_s and not step:
            self._steps.waited(began, waited_s)
        return turn

    def _room_for_drafts(self, request: Any) -> int:
        """Draft tokens of which the request can use every one; the step itself emits one more."""
        room: int = min(
            request.max_tokens - request.num_output_tokens,
            self._longest_step(request),
            (self._modes.choice.num_drafts or self._modes.most_drafts) + 1,
        )
        return max(0, room - 1)

    def _longest_step(self, request: Any) -> int:
        """Tokens that the request may emit in one step; not positive at its context's end."""
        room: int = self.max_model_len - request.num_tokens
        missing = request.sampling_params.min_tokens - request.num_output_tokens
        # vLLM decides for the token after the drafts by the tokens before them whether it may end
        # the text, so a step must not cross min_tokens.
        return min(room, missing) if missing > 0 else room

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """Ignores the proposer's result: drafts enter in schedule() only.

        Near max_model_len vLLM skips the proposer and brings zeros for the whole batch.
        """

    def update_draft_token_ids_in_output(self, draft_token_ids: Any, scheduler_output: Any) -> None:
        """Ignores the proposer's result, which vLLM takes for the drafts in the step.

        Our drafts are real ones, and fit the grammar: their request was not in flight.
        """

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """The step's result, of which the drafter is told."""
        result_at = time.monotonic()
        # Before vLLM cuts them where a text ends.
        rows = model_runner_output.req_id_to_index
        counts = [len(tokens) for tokens in model_runner_output.sampled_token_ids]
        emitted = {r: counts[rows[r]] for r in scheduler_output.num_scheduled_tokens}
        with self._operations.lock:
            step = self._steps.take()
            outputs = super().update_from_output(scheduler_output, model_runner_output)
            if emitted:
                self._tell_drafter([r for r, count in emitted.items() if count])
                decoding = sum(not request.is_prefill_chunk for request in self.running)
                self._steps.ended(step, emitted, result_at, time.monotonic(), decoding)
            self._client.flush()
            self._operations.stepped_at = time.monotonic()
            if self._stats_path and not self.requests:
                stats.write(self._stats_path, self._operations.report())
            return outputs

    def _tell_drafter(self, emitted: list[str]) -> None:
        advanced = [request_id for request_id in emitted if request_id in self.requests]
        for request_id in advanced:
            request = self.requests[request_id]
            known = self._client.session_length(request_id)
            if known is not None and known < request.num_tokens:
                tokens = request._all_token_ids[known:]
                self._client.advance(request_id, tokens, self._room_for_drafts(request))
        self._turns.step(advanced)

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
        if self._bell is not None:
            self._bell.close()
        super().shutdown()

"""Glue between vLLM's scheduler, the turns and the drafter.

vLLM's own scheduler does all the work. Before each of its steps this subclass puts the drafts that
have come in into the requests whose turn it is, and hides the others by their
``next_decode_eligible_step``; after the step it tells the drafter what was verified. A hidden
request is not scheduled, so nothing is allocated for it while it is being drafted for.
"""

import os
import time
from typing import Any

from vllm.sampling_params import SamplingType
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds

from minedraft import lifeline
from minedraft.config import ADDITIONAL_CONFIG_KEY, ENV_STATS, Endpoint, MineDraftConfig
from minedraft.tokenizers import tokenizer_fingerprint
from minedraft.transport import Link
from minedraft.verifier import contract, refusals, stats
from minedraft.verifier.client import DrafterClient
from minedraft.verifier.turns import Turn, Turns, take_turn


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
        self._draft_seeded = config.draft_seeded
        self.most_drafts: int = self.num_spec_tokens
        """Draft tokens for each verification, at most; K as configured, or less."""
        self._turns = Turns(overlap=config.mode == "overlap")
        self._client = DrafterClient(
            Link(Endpoint.from_environment()),
            config,
            vocabulary_fingerprint=tokenizer_fingerprint(vllm_config.model_config),
            vocab_size=vllm_config.model_config.get_vocab_size(),
            tokens_of=lambda request: self.requests[request]._all_token_ids,
            clock=time.monotonic,
        )
        self._stats = stats.Stats()
        self._stats_path = os.environ.get(ENV_STATS)
        self._scheduled_at = 0.0
        self.prev_step_scheduled_req_ids = _Everything()
        # vLLM pads one-token prefills with drafts of -1 to keep full CUDA graphs, unless it thinks
        # that K varies with the batch. They count as rejected drafts, and CPU kernels misread them.
        self.dynamic_sd_lookup = [self.num_spec_tokens] * (self.max_num_running_reqs + 1)

    # --- a step -------------------------------------------------------------------------------

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """The next step: the requests whose turn it is, with their drafts, and any prefill."""
        self._client.poll()
        turn = self._take_turn()
        for request_id in turn.hide:
            request = self.requests[request_id]
            # schedule() counts the step first, so this hides it from the coming step only.
            eligible = self.current_step + 2
            request.next_decode_eligible_step = max(request.next_decode_eligible_step, eligible)
        drafts = [self._client.drafts(request_id, self.most_drafts) for request_id in turn.verify]
        # The stock method also drops what a request's grammar does not allow.
        super().update_draft_token_ids(DraftTokenIds(list(turn.verify), drafts))
        output = super().schedule(throttle_prefills)
        self._scheduled_at = time.monotonic()
        return output

    def _take_turn(self) -> Turn:
        decoding = [r.request_id for r in self.running if not r.is_prefill_chunk]
        # A prefill chunk fills the time: no need to stand still.
        may_wait = len(decoding) == len(self.running)
        return take_turn(
            self._turns, self._client, decoding, may_wait=may_wait, clock=time.monotonic
        )

    def _room_for_drafts(self, request: Any) -> int:
        """Draft tokens of which the request can use every one; the step itself emits one more."""
        room: int = min(
            request.max_tokens - request.num_output_tokens,
            self.max_model_len - request.num_tokens,
            self.most_drafts + 1,
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
        model_s = time.monotonic() - self._scheduled_at
        outputs = super().update_from_output(scheduler_output, model_runner_output)
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
        self._client.flush()
        self._count(scheduler_output, model_runner_output, model_s)
        return outputs

    def _count(self, scheduler_output: Any, model_runner_output: Any, model_s: float) -> None:
        tally = self._stats
        tally.steps += 1
        drafts = scheduler_output.scheduled_spec_decode_tokens
        sampled = model_runner_output.sampled_token_ids
        index = model_runner_output.req_id_to_index
        prefill = bool(scheduler_output.scheduled_new_reqs)
        rows = emitted = drafted = drafted_rows = 0
        for request_id, scheduled in scheduler_output.num_scheduled_tokens.items():
            num_drafts = len(drafts.get(request_id, ()))
            if scheduled != 1 + num_drafts:
                prefill = True
                continue
            rows += 1
            emitted += len(sampled[index[request_id]])
            drafted += num_drafts
            drafted_rows += num_drafts > 0
        tally.verifications += rows
        tally.verified_without_drafts += rows - drafted_rows
        tally.emitted += emitted
        tally.drafted += drafted
        tally.accepted += emitted - rows
        self._client.counters.used = tally.drafted
        if not prefill and scheduler_output.num_scheduled_tokens:
            tally.decode_step(len(scheduler_output.num_scheduled_tokens), model_s)
        if self._stats_path and not self.requests:
            stats.write(self._stats_path, tally.report(self._client.counters))

    # --- requests -----------------------------------------------------------------------------

    def add_request(self, request: Any) -> None:
        """Queues a request; the drafter prefills it meanwhile."""
        known = request.request_id in self.requests
        super().add_request(request)
        if not known and self._may_be_drafted(request):
            self._client.open(request.request_id, request._all_token_ids)
            self._client.flush()

    def _may_be_drafted(self, request: Any) -> bool:
        params = request.sampling_params
        return (
            params is not None
            and request.prompt_token_ids is not None
            and request.prompt_is_token_ids is None
            and not request.mm_features
            and not request.resumable
            and request.max_tokens > 1
            and (self._draft_seeded or params.sampling_type != SamplingType.RANDOM_SEED)
        )

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """The one way out of a request: stopped, aborted or failed."""
        self._client.close(request.request_id)
        self._turns.forget(request.request_id)
        return super()._free_request(request, *args, **kwargs)

    def shutdown(self) -> None:
        """Tells the drafter goodbye."""
        if self._stats_path:
            stats.write(self._stats_path, self._stats.report(self._client.counters))
        self._client.shutdown()
        super().shutdown()

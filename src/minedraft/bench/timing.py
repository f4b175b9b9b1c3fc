"""How long the workers of an engine compute, measured in the workers themselves, for any system.

Plain Python, no vLLM: a worker is anything with ``execute_model`` and ``sample_tokens``. What a GPU
goes on computing after these have returned is not seen; on CPUs nothing goes on.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec

MOST_PASSES = 500
"""That are kept of a run, spread over it."""


class Times(msgspec.Struct):
    """Sums over the steps of a run, in seconds; a decode step has no prefill in it."""

    steps: int = 0
    model_s: float = 0.0
    """The target's computing."""
    draft_s: float = 0.0
    """That of a drafter in the same worker."""
    decode_steps: int = 0
    decode_model_s: float = 0.0
    decode_draft_s: float = 0.0
    step_s: float | None = None
    """Median seconds from the begin of a decode step to that of the next."""
    passes: list[tuple[int, int, int, float]] = []
    """Of the target: tokens, requests, KV tokens read (summed over requests), and seconds."""


@dataclass(slots=True)
class _Step:
    began: float
    is_decode: bool
    tokens: int
    requests: int
    context: int
    seconds: float = 0.0
    draft_s: float = 0.0


class Timer:
    """Measures one worker from its installation on."""

    def __init__(self, worker: Any, num_drafts: int, clock: Callable[[], float]) -> None:
        self._most = 1 + num_drafts
        self._clock = clock
        self._steps: list[_Step] = []
        self._execute, self._sample = worker.execute_model, worker.sample_tokens
        worker.execute_model = self._execute_model
        worker.sample_tokens = self._sample_tokens
        self._time_drafting(worker.model_runner)

    def _time_drafting(self, runner: Any) -> None:
        """Where vLLM's own drafters work: in Model Runner V1, or V2."""
        speculator = getattr(runner, "speculator", None)
        holder, name = (
            (speculator, "propose") if speculator else (runner, "propose_draft_token_ids")
        )
        propose = getattr(holder, name, None)
        if propose is None:
            return

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = self._clock()
            try:
                return propose(*args, **kwargs)
            finally:
                self._steps[-1].draft_s += self._clock() - began

        setattr(holder, name, timed)

    def _execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        requests = scheduler_output.num_scheduled_tokens
        if requests:
            new = scheduler_output.scheduled_new_reqs
            tokens = sum(requests.values())
            cached = sum(scheduler_output.scheduled_cached_reqs.num_computed_tokens)
            cached += sum(request.num_computed_tokens for request in new)
            is_decode = not new and max(requests.values()) <= self._most
            self._steps.append(
                _Step(self._clock(), is_decode, tokens, len(requests), cached + tokens)
            )
        return self._timed(self._execute, bool(requests), scheduler_output, *args, **kwargs)

    def _sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        return self._timed(self._sample, bool(self._steps), *args, **kwargs)

    def _timed(self, call: Callable[..., Any], counts: bool, *args: Any, **kwargs: Any) -> Any:
        began = self._clock()
        result = call(*args, **kwargs)
        if counts:
            self._steps[-1].seconds += self._clock() - began
        return result

    def take(self) -> Times:
        """The sums since the last call."""
        steps, self._steps = self._steps, []
        decode = [step for step in steps if step.is_decode]
        gaps = [after.began - step.began for step, after in pairwise(steps) if step.is_decode]
        draft_s, decode_draft_s = (sum(step.draft_s for step in s) for s in (steps, decode))
        return Times(
            steps=len(steps),
            model_s=sum(step.seconds for step in steps) - draft_s,
            draft_s=draft_s,
            decode_steps=len(decode),
            decode_model_s=sum(step.seconds for step in decode) - decode_draft_s,
            decode_draft_s=decode_draft_s,
            step_s=statistics.median(gaps) if gaps else None,
            passes=[
                (step.tokens, step.requests, step.context, step.seconds - step.draft_s)
                for step in steps[:: len(steps) // MOST_PASSES + 1]
            ],
        )


def install(worker: Any, num_drafts: int) -> None:
    """For collective_rpc: measures from now on; K is what a decode step may hold at most."""
    worker.minedraft_timer = Timer(worker, num_drafts, time.perf_counter)


def take(worker: Any) -> Times:
    """For collective_rpc: the sums since the last call."""
    times: Times = worker.minedraft_timer.take()
    return times

"""Loads on an engine with drafts whose drafter fails: are they answered as they should, in time?"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from drafters import Reference
from engines import Prompt, run, scheduler_of
from vllm import SamplingParams

SLACK_S = 0.3
"""For steps between two waits, and for a machine that has other things to do."""
RESUME_S = 2.0
PATIENCE_S = 10.0
NEAR_TIE = 1e-4


@dataclass
class Engines:
    """Plain vLLM and one with drafts from whatever listens at ``address``."""

    plain: Any
    drafted: Any
    address: str
    model: Path
    reference: Reference

    @property
    def scheduler(self) -> Any:
        return scheduler_of(self.drafted)

    @property
    def client(self) -> Any:
        return self.scheduler._client

    @cached_property
    def load(self) -> "Load":
        rng = random.Random(1)
        prompts = [[rng.randrange(3, 64) for _ in range(rng.randint(1, 40))] for _ in range(12)]
        params = [greedy(rng.randint(8, 40)) for _ in prompts]
        return Load(prompts, params, texts(run(self.plain, prompts, params)))

    def check(self, prompt: Prompt, found: list[int], expected: list[int]) -> None:
        """The same tokens; where the two best logits are close either is right."""
        if found == expected:
            return
        at = next(i for i in range(len(expected)) if found[: i + 1] != expected[: i + 1])
        best = self.reference.logits(prompt + expected[:at]).topk(2).values
        assert best[0] - best[1] <= NEAR_TIE, f"{found} is not {expected}, from {at}"


@dataclass(frozen=True)
class Load:
    """Requests and what plain vLLM answers."""

    prompts: list[Prompt]
    params: list[SamplingParams]
    expected: list[list[int]]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def texts(outputs: Sequence[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def until(
    condition: Callable[[], bool], meanwhile: Callable[[], None], seconds: float = PATIENCE_S
) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        meanwhile()


def idle() -> None:
    time.sleep(0.01)


class Watch:
    """How long requests stood still for drafts between two of their tokens, and who got drafts."""

    def __init__(self, engines: Engines, patch: pytest.MonkeyPatch) -> None:
        self._scheduler, self._client = engines.scheduler, engines.client
        self._stood: dict[str, float] = {}
        self._allowed: dict[str, float] = {}
        self.excess_s = 0.0
        """Over the deadline for drafts, at the worst."""
        self.drafted_at: dict[str, float] = {}
        """The last step with drafts, by request."""
        self._wait = self._client._wait
        self._schedule, self._update = self._scheduler.schedule, self._scheduler.update_from_output
        patch.setattr(self._client, "_wait", self._watched_wait)
        patch.setattr(self._scheduler, "schedule", self._watched_schedule)
        patch.setattr(self._scheduler, "update_from_output", self._watched_update)

    def _watched_wait(self, seconds: float) -> bool:
        started, deadline_s = time.monotonic(), self._client.deadline_s()
        came: bool = self._wait(seconds)
        took = time.monotonic() - started
        for request in self._scheduler.requests:
            self._stood[request] = self._stood.get(request, 0.0) + took
            self._allowed[request] = max(self._allowed.get(request, 0.0), deadline_s)
        return came

    def _watched_schedule(self, *args: Any) -> Any:
        output = self._schedule(*args)
        for request in output.scheduled_spec_decode_tokens:
            self.drafted_at[request] = time.monotonic()
        return output

    def _watched_update(self, scheduler_output: Any, result: Any) -> Any:
        for request in scheduler_output.num_scheduled_tokens:
            stood = self._stood.pop(request, 0.0)
            self.excess_s = max(self.excess_s, stood - self._allowed.pop(request, 0.0))
        return self._update(scheduler_output, result)

    def last_drafted_at(self) -> float:
        return max(list(self.drafted_at.values()), default=0.0)


class Running:
    """Requests in the engine with drafts, step by step."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._engine = engines.drafted.llm_engine
        self._wanted: dict[str, tuple[Prompt, list[int]]] = {}
        self.ids: dict[str, str] = {}
        """Of the engine's core, by ours."""
        self.added = self.finished = 0

    def add(self, name: str, prompt: Prompt, params: SamplingParams, expected: list[int]) -> None:
        known = set(self._engines.scheduler.requests)
        self._engine.add_request(name, {"prompt_token_ids": prompt}, params.clone())
        (self.ids[name],) = set(self._engines.scheduler.requests) - known
        self._wanted[name] = prompt, expected
        self.added += 1

    def step(self) -> None:
        for output in self._engine.step():
            if output.finished:
                self._check(output)

    def _check(self, output: Any) -> None:
        prompt, expected = self._wanted.pop(output.request_id)
        self._engines.check(prompt, list(output.outputs[0].token_ids), expected)
        self.finished += 1

    def abort(self, name: str) -> None:
        del self._wanted[name]
        self._engine.abort_request([self.ids[name]], internal=True)

    def close(self) -> None:
        for name in self.names:
            self.abort(name)

    @property
    def names(self) -> list[str]:
        return list(self._wanted)

    def __len__(self) -> int:
        return len(self._wanted)

    def __contains__(self, name: str) -> bool:
        return name in self._wanted

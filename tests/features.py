"""Requests with any of vLLM's options, and whether two engines answer them alike."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from engines import Bench
from safetensors.torch import save_file
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

NEAR_TIE = 1e-4
"""Where plain vLLM's two best log-probabilities are that close, either token is right."""
RANK = 8
"""Of the adapters."""


@dataclass(frozen=True)
class Ask:
    """One request; ``options`` are those of LLMEngine.add_request."""

    prompt: Any
    """Token ids, or a prompt as vLLM takes it."""
    params: SamplingParams
    options: dict[str, Any] = field(default_factory=dict)


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 24, "ignore_eos": True} | options)


def prompts_of(seed: int, count: int, longest: int = 60) -> list[list[int]]:
    """Token ids of the tiny models' characters."""
    rng = random.Random(seed)
    return [
        [rng.randrange(3, 64) for _ in range(rng.choice((1, 31, 32, 33, rng.randint(1, longest))))]
        for _ in range(count)
    ]


class Run:
    """Requests on their way through an engine in this process, the i-th before its i-th step."""

    def __init__(self, llm: Any, asks: Sequence[Ask]) -> None:
        self._engine = llm.llm_engine
        self._asks = list(asks)
        self._added = 0
        self.steps = 0
        self.finished: dict[str, Any] = {}

    def step(self) -> bool:
        """One engine step; False if all is done."""
        if self._added < len(self._asks):
            ask = self._asks[self._added]
            prompt = {"prompt_token_ids": ask.prompt} if _is_tokens(ask.prompt) else ask.prompt
            # vLLM changes what it is given.
            self._engine.add_request(str(self._added), prompt, ask.params.clone(), **ask.options)
            self._added += 1
        self.steps += 1
        for output in self._engine.step():
            if output.finished:
                self.finished[output.request_id] = output
        return self._added < len(self._asks) or self._engine.has_unfinished_requests()

    def outputs(self) -> list[Any]:
        """Steps until all is done; the outputs in the order of the requests."""
        while self.step():
            pass
        return [self.finished[str(index)] for index in range(len(self._asks))]


def _is_tokens(prompt: Any) -> bool:
    return isinstance(prompt, list)


def answers(llm: Any, asks: Sequence[Ask]) -> list[Any]:
    """The outputs of an engine, in the order of the requests."""
    return Run(llm, asks).outputs()


def compare(engines: Bench, asks: Sequence[Ask]) -> tuple[list[Any], list[Any]]:
    """The outputs of both engines, which are the same; something was drafted."""
    plain = answers(engines.plain, [_with_margins(ask) for ask in asks])
    before = engines.stats.drafted
    drafted = answers(engines.drafted, asks)
    assert engines.stats.drafted > before, "nothing was drafted"
    assert_same(plain, drafted)
    return plain, drafted


def _with_margins(ask: Ask) -> Ask:
    params = ask.params.clone()
    params.logprobs = max(2, params.logprobs or 0)
    return Ask(ask.prompt, params, ask.options)


def assert_same(plain: Sequence[Any], drafted: Sequence[Any]) -> None:
    """Equal outputs up to near ties; ``plain`` with the log-probabilities of two tokens."""
    for one, other in zip(plain, drafted, strict=True):
        a, b = one.outputs[0], other.outputs[0]
        if list(a.token_ids) == list(b.token_ids):
            assert (a.text, a.finish_reason) == (b.text, b.finish_reason)
            assert a.stop_reason == b.stop_reason
            continue
        pairs = zip(a.token_ids, b.token_ids, a.logprobs, strict=False)
        best = next((entry for x, y, entry in pairs if x != y), None)
        assert best is not None, f"{a.token_ids} and {b.token_ids} end at different places"
        first, second = sorted((entry.logprob for entry in best.values()), reverse=True)[:2]
        assert first - second <= NEAR_TIE, f"{a.token_ids} is not {b.token_ids}"


def adapter(folder: Path, number: int) -> LoRARequest:
    """A LoRA adapter of the attention of the tiny target."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(number)
    weights = {}
    for layer in range(2):
        for name, rows in (("q_proj", 128), ("v_proj", 64)):
            path = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{path}.lora_A.weight"] = 0.3 * torch.randn(RANK, 64, generator=generator)
            weights[f"{path}.lora_B.weight"] = 0.3 * torch.randn(rows, RANK, generator=generator)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "bias": "none"}
    config["target_modules"] = ["q_proj", "v_proj"]
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return LoRARequest(f"adapter-{number}", number, str(folder))

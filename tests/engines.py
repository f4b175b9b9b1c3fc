"""Engines that the exactness tests share, and ways to run requests through them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import vllm
from drafters import Reference, TransformersEngine, serving
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest

import minedraft

BLOCK_SIZE = 32
MAX_MODEL_LEN = 512
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": MAX_MODEL_LEN,
    "max_num_seqs": 16,
    "block_size": BLOCK_SIZE,
    "max_num_batched_tokens": 128,
    "disable_log_stats": False,
    "kv_cache_memory_bytes": 64 << 20,
    "structured_outputs_config": {"backend": "xgrammar"},
}
MOST_DRAFTS = 8
ALWAYS_WAIT = {"wait_for_first_drafts": True, "min_wait_s": 60.0, "max_wait_s": 60.0}
"""The target's steps are shorter than this drafter's, and what is tested is steps with drafts."""
Prompt = list[int]


def scheduler_of(llm: Any) -> Any:
    """The scheduler of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler


@dataclass
class Bench:
    """Plain vLLM and one with drafts, of the same target; the drafter can be changed any time."""

    plain: Any
    drafted: Any
    engine: TransformersEngine
    references: dict[str, Reference]
    target: Reference

    def draft_with(self, drafter: str, num_drafts: int) -> None:
        self.engine.reference = self.references[drafter]
        scheduler_of(self.drafted)._modes.most_drafts = num_drafts

    @property
    def stats(self) -> Any:
        return scheduler_of(self.drafted)._stats


@contextmanager
def bench(tiny: Any, folder: Path, *, mode: str = "overlap", **options: Any) -> Iterator[Bench]:
    """Both engines with these engine options on top of ENGINE."""
    references = {
        name: Reference(getattr(tiny, name)) for name in ("perfect", "perturbed", "unrelated")
    }
    engine = TransformersEngine(references["perfect"])
    address = f"ipc://{folder}/drafter"
    folder.chmod(0o700)
    with serving(engine, tiny.target, address):
        both = Bench(
            plain=vllm.LLM(str(tiny.target), **(ENGINE | options)),
            drafted=minedraft.LLM(
                str(tiny.target),
                drafter=address,
                mode=mode,
                num_speculative_tokens=MOST_DRAFTS,
                **(ALWAYS_WAIT | ENGINE | options),
            ),
            engine=engine,
            references=references,
            target=references["perfect"],
        )
        yield both
        # It would go on looking for its drafter.
        scheduler_of(both.drafted)._attendant.stop()


def run(
    llm: Any,
    prompts: Sequence[Prompt],
    params: Sequence[SamplingParams] | SamplingParams,
    arrivals: Sequence[int] | None = None,
) -> list[Any]:
    """Outputs in the order of the prompts; request i arrives before engine step ``arrivals[i]``."""
    engine = llm.llm_engine
    every = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    waiting = sorted(range(len(prompts)), key=lambda i: arrivals[i] if arrivals else 0)
    finished: dict[str, Any] = {}
    step = 0
    while waiting or engine.has_unfinished_requests():
        while waiting and (not arrivals or arrivals[waiting[0]] <= step):
            index = waiting.pop(0)
            prompt = {"prompt_token_ids": prompts[index]}
            engine.add_request(str(index), prompt, every[index].clone())
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = output
        step += 1
    return [finished[str(index)] for index in range(len(prompts))]


def core_request(llm: Any, request_id: str, prompt: Prompt, params: Any) -> EngineCoreRequest:
    """A request under exactly this engine-level id."""
    request = llm.llm_engine.input_processor.process_inputs(
        request_id, {"prompt_token_ids": prompt}, params.clone(), ("generate",)
    )
    request.request_id = request_id
    return request

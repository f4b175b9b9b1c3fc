"""Engines that the exactness tests share, and ways to run requests through them."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import vllm
from drafters import Reference, TransformersEngine, serving
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest

import minedraft
from minedraft.config import MineDraftConfig

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


def has_v2(worker: Any) -> bool:
    """For collective_rpc: whether the worker runs Model Runner V2."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    return isinstance(worker.model_runner, GPUModelRunner)


@dataclass
class Bench:
    """Plain vLLM and one with drafts, of the same target; the drafter can be changed any time."""

    model: Path
    address: str
    options: dict[str, Any]
    """Of both engines."""
    references: dict[str, Reference]
    engine: TransformersEngine
    drafted: Any = None
    _drafter: ExitStack = field(default_factory=ExitStack)

    @cached_property
    def plain(self) -> Any:
        return vllm.LLM(str(self.model), **self.options)

    @property
    def target(self) -> Reference:
        return self.references["perfect"]

    def start_drafter(self) -> None:
        self._drafter.enter_context(serving(self.engine, self.model, self.address))

    def stop_drafter(self) -> None:
        self._drafter.close()

    def draft_with(self, drafter: str, num_drafts: int) -> None:
        self.engine.reference = self.references[drafter]
        scheduler_of(self.drafted)._modes.most_drafts = num_drafts

    @property
    def stats(self) -> Any:
        return scheduler_of(self.drafted)._stats

    def close(self) -> None:
        """Ends the drafter and both engines, now and not when they are garbage.

        Engines that end take the process groups of others with them.
        """
        self.stop_drafter()
        for llm in (self.drafted, self.__dict__.get("plain")):
            if llm is not None:
                llm.llm_engine.engine_core.shutdown()


@contextmanager
def bench(tiny: Any, folder: Path, *, mode: str = "overlap", **options: Any) -> Iterator[Bench]:
    """Both engines with these engine options on top of ENGINE; our own are for the drafted one."""
    ours = {k: options.pop(k) for k in MineDraftConfig.__struct_fields__ if k in options}
    references = {
        name: Reference(getattr(tiny, name)) for name in ("perfect", "perturbed", "unrelated")
    }
    folder.chmod(0o700)
    both = Bench(
        tiny.target,
        f"ipc://{folder}/drafter",
        ENGINE | options,
        references,
        TransformersEngine(references["perfect"]),
    )
    both.start_drafter()
    try:
        both.drafted = minedraft.LLM(
            str(tiny.target),
            drafter=both.address,
            mode=mode,
            num_speculative_tokens=MOST_DRAFTS,
            **(ALWAYS_WAIT | both.options | ours),
        )
        yield both
    finally:
        both.close()


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

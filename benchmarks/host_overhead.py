"""Host time per step: ours, and what alternating halves cost vLLM, over the context length.

    python benchmarks/host_overhead.py [--requests 64] [--contexts 64 512 2000] [--steps 40]
    python benchmarks/host_overhead.py --drafter

A tiny model (dummy weights) and a drafter that answers at once from a process of its own, so what
is measured is Python: the time inside our overrides without the stock methods that they call and
without waiting, and the rest of the step without the model's forward pass, against plain decoding.
With --drafter: of the drafter's engine, per pass, when every draft is rejected, with one pass in a
step and with several.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

VOCAB_SIZE = 512
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}
NUM_DRAFTS = 4


class InstantEngine:
    """Drafts token 1, always and at once."""

    def __init__(self) -> None:
        self.lengths: dict[Hashable, int] = {}
        self.answers: list[Any] = []
        self.last_pass: list[Hashable] = []

    def open(self, key: Hashable, tokens: Sequence[int]) -> None:
        self.lengths[key] = len(tokens)

    def extend(self, key: Hashable, base_len: int, tokens: Sequence[int], num_drafts: int) -> None:
        from minedraft.drafter.sessions import Drafted

        ones, zeros = [1] * num_drafts, [0.0] * num_drafts
        if num_drafts:
            self.answers.append(Drafted(key, base_len + len(tokens), ones, zeros))

    def close(self, key: Hashable) -> None:
        self.lengths.pop(key, None)

    def has_work(self) -> bool:
        return bool(self.answers)

    def step(self) -> list[Any]:
        answers, self.answers = self.answers, []
        self.last_pass = [answer.key for answer in answers]
        return answers


def serve(address: str) -> None:
    """The drafter's process."""
    from minedraft import protocol, transport
    from minedraft.config import Endpoint
    from minedraft.drafter.server import DraftServer

    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    welcome = protocol.Welcome(protocol.PROTOCOL_VERSION, "instant", "", VOCAB_SIZE, 4096)
    server = DraftServer(InstantEngine(), transport.Server(Endpoint(address)), welcome)
    while True:
        server.serve_once()


class Clock:
    """Seconds spent in wrapped methods during a step."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)

    def wrap(self, owner: Any, name: str, label: str) -> None:
        """Times ``owner.name`` from now on."""
        stock: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return stock(*args, **kwargs)
            finally:
                self.spent[label] += time.perf_counter() - started

        setattr(owner, name, timed)


def engine_options(requests: int) -> dict[str, Any]:
    """Of both engines."""
    return {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "dtype": "float32",
        "max_model_len": 4096,
        "max_num_seqs": requests,
        "max_num_batched_tokens": 8192,
        "block_size": 32,
        "kv_cache_memory_bytes": 1 << 30,
        "enable_prefix_caching": False,
    }


def measure(llm: Any, clock: Clock, requests: int, context: int, steps: int) -> dict[str, float]:
    """Median milliseconds a decode step: total, by label, and the model's forward pass."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True, detokenize=False)
    for index in range(requests):
        prompt = {"prompt_token_ids": [(index * 7 + i * 3) % 500 + 2 for i in range(context)]}
        engine.add_request(f"{context}-{index}", prompt, params)
    core = engine.engine_core.engine_core
    while any(r.num_output_tokens < 3 for r in core.scheduler.requests.values()):
        engine.step()
    rows = []
    for _ in range(steps):
        clock.spent.clear()
        started = time.perf_counter()
        engine.step()
        rows.append({"step": time.perf_counter() - started, **clock.spent})
    ids = [r.request_id for r in core.scheduler.requests.values()]
    engine.engine_core.abort_requests(ids)
    engine.abort_request(ids, internal=True)
    engine.step()
    labels = {label for row in rows for label in row}
    return {label: 1000 * statistics.median(r.get(label, 0.0) for r in rows) for label in labels}


def report(name: str, requests: int, context: int, ms: dict[str, float]) -> dict[str, Any]:
    """One line of the result."""
    ours = sum(
        ms.get(f"our {part}", 0.0) - ms.get(f"stock {part}", 0.0)
        for part in ("schedule", "update", "execute")
        if f"our {part}" in ms
    )
    ours -= ms.get("waiting", 0.0)
    rest = ms["step"] - ms["forward"] - ours - ms.get("waiting", 0.0)
    row = {"engine": name, "requests": requests, "context": context, "ours_ms": ours}
    row |= {"vllm_host_ms": rest, "rows_ms": ms["rows"], "forward_ms": ms["forward"]}
    print(
        f"{name:10} {requests:4} requests, context {context:5}: ours {ours:6.3f} ms, "
        f"vLLM's host work {rest:6.2f} ms (of it rows {ms['rows']:5.2f}), "
        f"forward {ms['forward']:6.2f} ms"
    )
    return row


def measure_drafter(
    engine: Any, clock: Clock, sessions: int, context: int, rounds: int
) -> dict[str, float]:
    """Median microseconds a forward pass, over rounds of NUM_DRAFTS passes, by label."""
    lengths = dict.fromkeys(range(sessions), context)
    for key in lengths:
        engine.open(key, [(key * 7 + i * 3) % 500 + 2 for i in range(context)])
    while engine.has_work():
        engine.step()
    outcomes: dict[Any, list[int]] = {key: [] for key in lengths}
    rows = []
    for _ in range(rounds):
        clock.spent.clear()
        passes, answers = engine.num_passes, []
        for key, tokens in outcomes.items():
            engine.extend(key, lengths[key], tokens, NUM_DRAFTS)
            lengths[key] += len(tokens)
        while engine.has_work():
            answers += engine.step()
        outcomes = {answer.key: [(answer.tokens[0] + 1) % VOCAB_SIZE] for answer in answers}
        passes = engine.num_passes - passes
        rows.append({label: 1e6 * spent / passes for label, spent in clock.spent.items()})
    for key in lengths:
        engine.close(key)
    labels = {label for row in rows for label in row}
    return {label: statistics.median(row.get(label, 0.0) for row in rows) for label in labels}


def report_drafter(
    passes: int, sessions: int, context: int, us: dict[str, float]
) -> dict[str, Any]:
    """One line of the result."""
    parts = {label: us[label] for label in ("extend", "plan", "describe", "patch")}
    parts["advance"] = us["step"] - us["plan"] - us["describe"] - us["execute"]
    vllm = us["execute"] - us["patch"] - us.get("forward", 0.0)
    row: dict[str, Any] = {"passes": passes, "sessions": sessions, "context": context}
    row |= {"ours_us": sum(parts.values()), **parts}
    row |= {"vllm_host_us": vllm, "forward_us": us.get("forward", 0.0)}
    split = ", ".join(f"{label} {value:.0f}" for label, value in parts.items())
    print(
        f"{passes} passes a step, {sessions:4} sessions, context {context:5}: "
        f"ours {row['ours_us']:5.0f} us ({split}), "
        f"vLLM's host work {vllm:5.0f} us, forward {row['forward_us']:6.0f} us"
    )
    return row


def drafter(model: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A pass of the drafter's engine for one, some and all of the sessions."""
    from vllm import EngineArgs
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from minedraft.drafter import runner_v1, runner_v2
    from minedraft.drafter.engine import MAX_PASSES, DraftEngine

    engine = DraftEngine(EngineArgs(model, **engine_options(options.requests)))
    clock = Clock()
    for owner, name, label in (
        (engine, "extend", "extend"),
        (engine, "step", "step"),
        (engine._sessions, "plan", "plan"),
        (engine, "_admit", "plan"),
        (engine, "_describe", "describe"),
        (engine._executor, "execute_model", "execute"),
        (runner_v1, "prepare", "patch"),
        (runner_v2, "prepare", "patch"),
        (GPUModelRunner, "_model_forward", "forward"),
    ):
        clock.wrap(owner, name, label)
    rows = []
    for context in options.contexts:
        for sessions in sorted({1, max(1, options.requests // 4), options.requests}):
            for passes in (1, MAX_PASSES):
                engine._sessions._max_passes = passes
                us = measure_drafter(engine, clock, sessions, context, options.steps)
                rows.append(report_drafter(passes, sessions, context, us))
    engine.shutdown()
    return rows


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--contexts", type=int, nargs="+", default=[64, 512, 2000])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--drafter", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    defaults = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    os.environ.update(defaults | {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"})
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        address = f"ipc://{folder}/drafter"
        if not options.drafter:
            multiprocessing.get_context("spawn").Process(
                target=serve, args=(address,), daemon=True
            ).start()
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        rows = drafter(folder, options) if options.drafter else compare(folder, address, options)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


def compare(model: str, address: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Plain decoding of all and of half of the requests, then halves."""
    import vllm
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    import minedraft
    from minedraft.verifier.client import DrafterClient
    from minedraft.verifier.scheduler import MineDraftScheduler
    from minedraft.verifier.worker import TargetWorker

    clock = Clock()
    for owner, name, label in (
        (GPUModelRunner, "_model_forward", "forward"),
        (GPUModelRunner, "_update_states", "rows"),
        (Scheduler, "schedule", "stock schedule"),
        (Scheduler, "update_from_output", "stock update"),
        (CPUWorker, "execute_model", "stock execute"),
        (MineDraftScheduler, "schedule", "our schedule"),
        (MineDraftScheduler, "update_from_output", "our update"),
        (TargetWorker, "execute_model", "our execute"),
        (DrafterClient, "_wait", "waiting"),
    ):
        clock.wrap(owner, name, label)
    rows = []
    halves = (options.requests, options.requests // 2)
    plain = vllm.LLM(model, **engine_options(options.requests))
    drafted = minedraft.LLM(
        model,
        drafter=address,
        mode="overlap",
        num_speculative_tokens=NUM_DRAFTS,
        wait_for_first_drafts=True,
        **engine_options(options.requests),
    )
    for context in options.contexts:
        for requests in halves:
            ms = measure(plain, clock, requests, context, options.steps)
            rows.append(report("plain", requests, context, ms))
        ms = measure(drafted, clock, options.requests, context, options.steps)
        rows.append(report("overlapped", options.requests, context, ms))
    return rows


if __name__ == "__main__":
    main()

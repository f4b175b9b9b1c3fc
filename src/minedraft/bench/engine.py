"""An engine under measurement, in a process of its own: runs what it is told, line by line.

    python -m minedraft.bench.engine

The first line of standard input is an EngineJob; each other one is a Task, and is answered by a
Result in one line of standard output.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import REGISTRY
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from minedraft import lifeline
from minedraft.bench import counts, driver, records, timing
from minedraft.bench.messages import READY, Result, Task
from minedraft.bench.replay import Recorded, Recorder, Replay
from minedraft.bench.systems import EngineJob
from minedraft.llm import LLM
from minedraft.offline import PromptLine, engine_prompt

DEFAULT_OUTPUT_TOKENS = 256


class Server:
    """vLLM's engine as the driver sees it."""

    def __init__(self, llm: LLM, temperature: float) -> None:
        self._engine = llm.llm_engine
        self._tokenizer = llm.get_tokenizer()
        self._temperature = temperature

    def add(
        self, request: int, messages: Sequence[driver.Message], output_tokens: int | None
    ) -> int:
        """Takes a request; as long an answer as is asked for, whatever the model would do."""
        if self._tokenizer.chat_template is None:
            text = "\n".join(message["content"] for message in messages)
            tokens = self._tokenizer.encode(text)
        else:
            line = PromptLine(messages=list(messages))
            tokens = engine_prompt(line, self._tokenizer)["prompt_token_ids"]
        params = SamplingParams(
            temperature=self._temperature,
            max_tokens=output_tokens or DEFAULT_OUTPUT_TOKENS,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )
        self._engine.add_request(str(request), {"prompt_token_ids": tokens}, params)
        return len(tokens)

    def step(self) -> list[driver.Output]:
        """One step."""
        return [
            driver.Output(
                int(output.request_id),
                output.outputs[0].token_ids,
                output.outputs[0].text,
                output.finished,
            )
            for output in self._engine.step()
        ]


class Bench:
    """The engine and what is measured of it."""

    def __init__(self, job: EngineJob) -> None:
        self._llm = LLM(job.model, disable_log_stats=False, **job.options)
        self._llm.collective_rpc(timing.install, args=(job.num_drafts,))
        self._scheduler: Any = None
        if job.options.get("mode") != "off":
            self._scheduler = self._llm.llm_engine.engine_core.engine_core.scheduler
            self._client = self._scheduler._client
            self._recorded: dict[str, Recorded] = {}
            self._recorder = Recorder(self._client)

    def run(self, task: Task) -> Result:
        """Runs a task."""
        if self._scheduler is not None:
            self._choose(task)
        before, report = counts.read(REGISTRY.collect()), self._report()
        self._llm.collective_rpc(timing.take)
        server = Server(self._llm, task.temperature)
        seconds, requests = driver.run(server, task.conversations, task.load, seed=task.seed)
        times = self._llm.collective_rpc(timing.take)
        grown = counts.grown(before, counts.read(REGISTRY.collect()))
        engine = _engine(times[0], seconds, grown)
        if self._scheduler is not None:
            self._ours(task, engine, report, seconds)
        engine.peak_bytes = _peak_bytes()
        return Result(seconds, requests, engine)

    # --- ours ---------------------------------------------------------------------------------

    def _choose(self, task: Task) -> None:
        system, scheduler = task.system, self._scheduler
        scheduler._modes.setting = system.name
        scheduler._modes.most_drafts = system.num_drafts
        key = f"{system.name} {system.num_drafts} {task.load}"
        if system.free:
            scheduler._client = Replay(self._recorded.get(key, {}))
        else:
            scheduler._client = self._client
            self._recorder.recorded = self._recorded[key] = {}
        if task.trace:
            scheduler._operations.set_trace(task.trace)

    def _report(self) -> dict[str, Any]:
        return {} if self._scheduler is None else dict(self._scheduler._operations.report())

    def _ours(
        self, task: Task, engine: records.Engine, before: dict[str, Any], seconds: float
    ) -> None:
        self._scheduler._client = self._client  # a replay could not say goodbye at the end
        after = self._report()
        busy, waited = (
            after["drafter"][name] - before["drafter"][name]
            for name in ("drafter_busy_s", "waited_s")
        )
        modes = after["steps_by_mode"].items()
        engine.choices = {m: n - before["steps_by_mode"].get(m, 0) for m, n in modes}
        if task.trace:
            self._scheduler._operations.set_trace("")
        if task.system.free:
            return
        engine.draft_s = counts.draft_s(busy, engine.choices)
        engine.drafter_idle = max(0.0, 1 - busy / seconds)
        engine.hidden = max(0.0, 1 - waited / busy) if busy else None


def _engine(times: timing.Times, seconds: float, grown: counts.Counts) -> records.Engine:
    decode = times.decode_steps
    return records.Engine(
        steps=times.steps,
        step_s=times.step_s,
        verify_s=times.decode_model_s / decode if decode else None,
        draft_s=times.decode_draft_s / decode if times.draft_s and decode else None,
        target_idle=max(0.0, 1 - times.model_s / seconds),
        passes=times.passes,
        **counts.drafting(grown),
    )


def _peak_bytes() -> dict[str, int]:
    """Of this process and, if there is one, the drafter's."""
    import psutil  # vLLM brings it

    found = {"engine": _high_water(os.getpid())}
    for child in psutil.Process().children(recursive=True):
        try:
            is_drafter = "drafter" in child.cmdline()
            name = "drafter" if is_drafter else "workers"
            found[name] = found.get(name, 0) + _high_water(child.pid)
        except (psutil.Error, OSError):
            continue
    return found


def _high_water(pid: int) -> int:
    """Peak resident memory of a process, in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def main() -> None:
    """Runs until standard input ends."""
    lifeline.exit_with_parent()
    # Libraries print to standard output: the results have a file of their own.
    results = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    job = msgspec.json.decode(sys.stdin.readline(), type=EngineJob)
    bench = Bench(job)
    results.write(msgspec.json.encode(READY) + b"\n")
    for line in sys.stdin:
        task = msgspec.json.decode(line, type=Task)
        results.write(msgspec.json.encode(bench.run(task)) + b"\n")


if __name__ == "__main__":
    main()

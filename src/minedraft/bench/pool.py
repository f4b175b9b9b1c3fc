"""Engines in processes of their own, so many loaded at a time as there is room for."""

import os
import subprocess
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import IO

import msgspec

from minedraft import devices, lifeline
from minedraft.bench.messages import READY, Result, Task
from minedraft.bench.systems import EngineJob
from minedraft.config import ConfigError

SPARE = 1.2
"""Another engine is loaded if so many times the memory of the largest is free."""
KEPT_FREE = 0.1
"""Of the machine's memory."""
STARTED_TOGETHER = 2
"""Engines that load at the same time: most of it is reading and compiling Python on one core."""


class EngineProcess:
    """One engine. Raises ConfigError, with its last words, where it ends before it should."""

    def __init__(self, job: EngineJob) -> None:
        environment = os.environ | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            lifeline.ENV_PARENT: str(os.getpid()),
        }
        environment.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        if job.cores:
            environment |= devices.cpu_environment(job.cores)
        self._job = job
        self._errors: IO[str] = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "minedraft.bench.engine"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
        )
        self._say(msgspec.json.encode(job))

    def wait_ready(self) -> None:
        """Until its models are loaded."""
        if msgspec.json.decode(self._hear()) != READY:
            raise ConfigError(f"{self._job.model}: the engine speaks another language")

    def run(self, task: Task) -> Result:
        """Runs a task."""
        self._say(msgspec.json.encode(task))
        return msgspec.json.decode(self._hear(), type=Result)

    def memory_bytes(self) -> int:
        """Resident memory of its processes, what they share counted in each."""
        import psutil  # vLLM brings it

        found = 0
        try:
            family = psutil.Process(self._process.pid)
            for process in [family, *family.children(recursive=True)]:
                found += process.memory_info().rss
        except psutil.NoSuchProcess:
            pass  # one has just ended
        return found

    def stop(self) -> None:
        """Ends it."""
        assert self._process.stdin
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def _say(self, line: bytes) -> None:
        assert self._process.stdin
        try:
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def _hear(self) -> bytes:
        assert self._process.stdout
        for line in self._process.stdout:
            if line.startswith((b"{", b'"')):  # others are vLLM's log, from before it was imported
                return line
        raise self._ended()

    def _ended(self) -> ConfigError:
        code = self._process.wait()
        self._errors.seek(0)
        last = lifeline.last_words(self._errors.read(), code)
        kind = self._job.options.get("speculative_config", {}).get("method", "plain")
        ours = "MineDraft" if self._job.options.get("mode") != "off" else f"vLLM, {kind}"
        return ConfigError(f"the engine of {ours} ended: {last}")


class Pool:
    """The engines of some jobs, least recently used ones ended where there is no more room."""

    def __init__(self, most: int, on_start: Callable[[EngineJob, EngineProcess], None]) -> None:
        """So many engines at a time at most, and no more than there is memory for.

        ``on_start`` is called with every engine that was started, before it is used.
        """
        self._most = most
        self._on_start = on_start
        self._loaded: OrderedDict[bytes, EngineProcess] = OrderedDict()

    def load(self, jobs: Iterable[EngineJob]) -> None:
        """Starts as many of these as there is room for, some at the same time."""
        missing = list({job.key: job for job in jobs}.values())
        together = 1  # the first shows how much memory one takes
        while missing and self._has_room(together):
            started = []
            for job in missing[:together]:
                process = self._loaded[job.key] = EngineProcess(job)
                started.append((job, process))
            for job, process in started:
                process.wait_ready()
                self._on_start(job, process)
            missing = missing[together:]
            together = min(STARTED_TOGETHER, self._most - len(self._loaded))

    def _has_room(self, more: int) -> bool:
        import psutil  # vLLM brings it

        if not self._loaded:
            return True
        largest = max(process.memory_bytes() for process in self._loaded.values())
        memory = psutil.virtual_memory()
        free = memory.available - KEPT_FREE * memory.total  # engines grow a little as they run
        return 0 < more <= self._most - len(self._loaded) and free > more * SPARE * largest

    def get(self, job: EngineJob) -> EngineProcess:
        """The engine of a job, ready."""
        key = job.key
        if key not in self._loaded:
            while self._loaded and not self._has_room(1):
                self._loaded.popitem(last=False)[1].stop()
            self.load([job])
        self._loaded.move_to_end(key)
        return self._loaded[key]

    def close(self) -> None:
        """Ends all."""
        while self._loaded:
            self._loaded.popitem()[1].stop()

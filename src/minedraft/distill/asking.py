"""Has a model answer or judge, in a process of its own; the parent's side of answering.py."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from typing import IO

import msgspec

from minedraft import devices, lifeline
from minedraft.config import ConfigError
from minedraft.distill.messages import Job, Progress


def ask(job: Job) -> Iterator[Progress]:
    """Runs a job, and says how far it is. Raises ConfigError with its last words if it fails."""
    cores = tuple(devices.available_cores())
    environment = {
        **os.environ,
        **devices.cpu_environment(cores),
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        lifeline.ENV_PARENT: str(os.getpid()),
    }
    errors: IO[str]
    # To a file: libraries draw progress bars of their own, which would run through ours.
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "minedraft.distill.answering"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
        )
        assert process.stdin
        assert process.stdout
        try:
            with suppress(BrokenPipeError):  # it has ended, and says why below
                process.stdin.write(msgspec.json.encode(job))
                process.stdin.close()
            for line in process.stdout:
                if not line.startswith(b"{"):
                    continue  # vLLM's log, of the time when it was imported
                progress = msgspec.json.decode(line, type=Progress)
                yield progress
                if progress.ended:
                    return
            code = process.wait()
            errors.seek(0)
            last = lifeline.last_words(errors.read(), code)
            raise ConfigError(f"{job.model}: the engine ended: {last}")
        finally:
            process.kill()
            process.wait()
            process.stdout.close()

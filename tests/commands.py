"""The commands as a user types them, for tests with real processes."""

import os
import subprocess
import sys

FLAGS = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--block-size", "32"]
DRAFTER_FLAGS = "--dtype float32 --block-size 32"


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "minedraft", *map(str, words)]


def environment(**variables: str) -> dict[str, str]:
    """Without what conftest.py sets for engines in the test process."""
    ours = ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS")
    clean = {name: value for name, value in os.environ.items() if name not in ours}
    return clean | {"VLLM_CPU_KVCACHE_SPACE": "1"} | variables


def run(*words: object, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*words),
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )

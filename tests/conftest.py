"""What every test shares: vLLM's environment and the tiny models."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import interpreter
import pytest

# vLLM reads these when it is imported, so they are set before any test module can do that.
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
for _name, _value in _ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

if interpreter.is_wanted():
    interpreter.install()
    interpreter.keep_async_scheduling()

SCHEDULING = ("synchronous", "asynchronous") if interpreter.is_wanted() else ("synchronous",)
ALONE = ("e2e", "test_faults.py", "test_modes.py")
"""Folders and files of tests that measure time or need all cores."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves what is for the runner of this process, and says what takes the machine for itself."""
    for item in items:
        if not set(ALONE).isdisjoint(item.path.parts):
            item.add_marker(pytest.mark.alone)
    if interpreter.is_wanted():
        for item in items:
            if item.get_closest_marker("runner_v2_slow"):
                item.add_marker(pytest.mark.slow)
                item.add_marker(pytest.mark.runner_v2)
        others = [item for item in items if not item.get_closest_marker("runner_v2")]
        items[:] = [item for item in items if item.get_closest_marker("runner_v2")]
        config.hook.pytest_deselected(items=others)


@pytest.fixture(scope="module", params=SCHEDULING)
def scheduling(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The engine option; Model Runner V1 has synchronous scheduling only."""
    return {"async_scheduling": request.param == "asynchronous"}


@dataclass(frozen=True)
class TinyModels:
    """Folders of tiny checkpoints that share one tokenizer."""

    target: Path
    perfect: Path
    """The target's weights in a folder of their own."""
    perturbed: Path
    """The target's weights with noise: agrees with the target on most tokens."""
    unrelated: Path


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    """The tiny models, written once for each test run."""
    from tiny import PERTURBATION, make_model  # imports transformers, which takes seconds

    root = tmp_path_factory.mktemp("tiny")
    target = make_model(root / "target", seed=1)
    return TinyModels(
        target=target,
        perfect=make_model(root / "perfect", seed=1),
        perturbed=make_model(root / "perturbed", seed=2, base=target, noise=PERTURBATION),
        unrelated=make_model(root / "unrelated", seed=3),
    )

"""What is said of the model runner and the scheduling, for every way to get there."""

from types import SimpleNamespace
from typing import Any

import pytest

from minedraft.verifier import runner_choice

ENV = "VLLM_USE_V2_MODEL_RUNNER"
SYNCHRONOUS_V1 = "synchronous scheduling (Model Runner V1 takes drafts in no other way)"


def config(*, v2: bool, is_async: bool) -> Any:
    scheduler = SimpleNamespace(async_scheduling=is_async)
    return SimpleNamespace(use_v2_model_runner=v2, scheduler_config=scheduler)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    def is_one(*, cpu: bool = False, triton: bool = True, wanted: str | None = None) -> None:
        platform = SimpleNamespace(is_cpu=lambda: cpu)
        monkeypatch.setattr(runner_choice, "current_platform", platform)
        monkeypatch.setattr(runner_choice, "HAS_TRITON", triton)
        if wanted is None:
            monkeypatch.delenv(ENV, raising=False)
        else:
            monkeypatch.setenv(ENV, wanted)

    return is_one


@pytest.mark.parametrize(
    ("triton", "wanted", "runner"),
    [
        (False, None, "Model Runner V1 (no Triton that works here)"),
        (False, "0", f"Model Runner V1 ({ENV}=0)"),
        (True, "0", f"Model Runner V1 ({ENV}=0)"),
        (True, None, "Model Runner V1 (vLLM says why in its log)"),
    ],
)
@pytest.mark.parametrize("cpu", [False, True])
def test_v1(machine: Any, triton: bool, wanted: str | None, runner: str, cpu: bool) -> None:
    machine(cpu=cpu, triton=triton, wanted=wanted)
    said = runner_choice.describe(config(v2=False, is_async=False))
    assert said == f"{runner}, {SYNCHRONOUS_V1}"


@pytest.mark.parametrize(
    ("cpu", "is_async", "scheduling"),
    [
        (False, True, "asynchronous scheduling"),
        (True, True, "asynchronous scheduling"),
        (True, False, "synchronous scheduling (vLLM schedules so on CPU)"),
        (
            False,
            False,
            "synchronous scheduling (--no-async-scheduling, or the executor takes no other)",
        ),
    ],
)
@pytest.mark.parametrize(
    ("wanted", "runner"), [(None, "Model Runner V2"), ("1", f"Model Runner V2 ({ENV}=1)")]
)
def test_v2(
    machine: Any, cpu: bool, is_async: bool, scheduling: str, wanted: str | None, runner: str
) -> None:
    machine(cpu=cpu, wanted=wanted)
    said = runner_choice.describe(config(v2=True, is_async=is_async))
    assert said == f"{runner}, {scheduling}"

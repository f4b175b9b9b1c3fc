"""Model Runner V2 on a machine without a GPU: Triton's interpreter in place of compiled kernels.

vLLM takes V2 where Triton has a driver. The CPU build of Triton has none, so one is made up here
that says "cpu"; its kernels are then run by Triton's interpreter, in a step of a tiny model about
20 ms for each request. What vLLM decides by it is decided when it is imported, so a process has
either this or the usual runner: the tests for V2 have a pytest process of their own, see
CONTRIBUTING.md.
"""

import os
import sys
import types
from typing import Any

ENV_INTERPRETER = "TRITON_INTERPRET"
"""Set to 1 for a process that is to have Model Runner V2; Triton reads it too."""


class _Driver:
    """What vLLM and Triton ask of a driver."""

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cpu", "x86", 1)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        import torch

        return torch.cpu


def is_wanted() -> bool:
    """Whether this process is one for Model Runner V2."""
    return os.environ.get(ENV_INTERPRETER) == "1"


def install() -> None:
    """Makes vLLM take Model Runner V2 in this process and in those that it spawns.

    vLLM must not be imported yet.
    """
    if "vllm" in sys.modules:
        raise RuntimeError("vLLM has chosen its model runner already: install this before")
    from triton.backends import backends
    from triton.runtime import interpreter

    backends["cpu"] = types.SimpleNamespace(driver=_Driver, compiler=None)
    builder = interpreter.interpreter_builder
    # Integers may overflow unseen, as they do on a GPU: looking takes a third of the time.
    builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    store = builder.create_masked_store

    def create_masked_store(ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        # One truth value in an array with others makes integers of them, which are no mask.
        mask = interpreter.TensorHandle(mask.data.astype(bool), mask.dtype)
        return store(ptrs, value, mask, *rest)

    # vLLM's kernel for structured outputs has such a mask.
    builder.create_masked_store = create_masked_store
    # A spawned process, such as a worker of vLLM, first imports the main module of its parent.
    sys.modules["__main__"].__spec__ = __spec__


def keep_async_scheduling() -> None:
    """Lets vLLM's CPU platform leave the scheduling as it is asked for: it would switch it off."""
    from vllm.platforms.cpu import CpuPlatform

    stock = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        scheduling = vllm_config.scheduler_config.async_scheduling
        stock(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = scheduling

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


if __name__ == "__mp_main__":
    install()

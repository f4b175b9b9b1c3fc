"""Worker classes of the target, for Model Runner V1.

V1 drops the row of a request that sits out a step and later copies all its tokens back from Python
lists. Here every request sits out every second step, so its lists become TokenLists (rows.py): the
copy back is then a memcpy, and host time per step does not grow with the context.
"""

from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform

from minedraft import lifeline, rows
from minedraft.verifier import patches

if TYPE_CHECKING or not current_platform.is_cpu():
    from vllm.v1.worker.gpu_worker import Worker
else:
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker


class TargetWorker(Worker):  # type: ignore[misc]
    """The platform's worker with rows that are cheap to drop and to write again."""

    def init_device(self) -> None:
        """Prepares the platform's device, and mends what is broken there."""
        lifeline.exit_with_parent_process()
        super().init_device()
        if current_platform.is_cpu():
            patches.apply_on_cpu()

    def execute_model(self, scheduler_output: Any) -> Any:
        """Runs one step."""
        rows.install(self.model_runner, scheduler_output)
        return super().execute_model(scheduler_output)

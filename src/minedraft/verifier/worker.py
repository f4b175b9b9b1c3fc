"""The target's worker: vLLM's own, which takes the drafts that the scheduler put into a step.

Model Runner V2 has slots that are filled (slots.py). V1 takes drafts as they come, but drops the
row of a request that sits out a step and later copies all its tokens back from Python lists. Here
every request sits out every second step, so its lists become TokenLists (rows.py): the copy back is
then a memcpy, and host time per step does not grow with the context.
"""

from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform

from minedraft import lifeline, rows
from minedraft.verifier import patches
from minedraft.verifier.bell import Ring, Ringer

if TYPE_CHECKING or not current_platform.is_cpu():
    from vllm.v1.worker.gpu_worker import Worker
else:
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker


class TargetWorker(Worker):  # type: ignore[misc]
    """The platform's worker, for a scheduler that brings the drafts."""

    _ringer: Ringer | None = None
    _ring: Ring | None = None

    def init_device(self) -> None:
        """Prepares the platform's device, and mends what is broken there."""
        lifeline.exit_with_parent_process()
        super().init_device()
        if self.use_v2_model_runner:
            from minedraft.verifier import slots  # imports V2, which needs Triton

            slots.install(self.model_runner)
            self._fill = slots.fill
        else:
            self._fill = rows.install
            if current_platform.is_cpu():
                patches.apply_on_cpu()

    def execute_model(self, scheduler_output: Any) -> Any:
        """Runs one step."""
        self._ring = getattr(scheduler_output, "bell", None)
        self._fill(self.model_runner, scheduler_output)
        return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Ends the step, and has the scheduler told when its result is there."""
        output = super().sample_tokens(grammar_output)
        # There is none if the step has failed.
        if self._ring is not None and output is not None and self.is_driver_worker:
            if self._ringer is None:
                self._ringer = Ringer(lambda: current_platform.set_device(self.device))
            self._ringer.ring_after(output.copy_event.synchronize, self._ring)
        return output

"""The drafter's workers: vLLM's own, which also take back tokens and run several passes at once.

The model runner appends every token it samples to its own copy of a request. When the target
decides otherwise, the engine sends the tokens that replace the rejected ones with the next step.
"""

from typing import Any

from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput

from minedraft.drafter import runner_v1, runner_v2
from minedraft.drafter.steps import DraftStep, passes

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker

QUALIFIED_NAME = f"{__name__}.DraftWorker"


class DraftWorker(Worker):  # type: ignore[misc]
    """A worker that brings its requests up to date before each step, and samples in it."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """Run a step; of a DraftStep, the ModelRunnerOutputs of its passes, the first first."""
        if not isinstance(scheduler_output, DraftStep):
            return super().execute_model(scheduler_output)
        ours = runner_v2 if self.use_v2_model_runner else runner_v1
        ours.prepare(self.model_runner, scheduler_output)
        outputs: list[Any] = []
        for one_pass in passes(scheduler_output):
            super().execute_model(one_pass)
            outputs.append(self.sample_tokens(None))
            # The next pass is prepared while this one runs. No more than that: vLLM has buffers
            # for two.
            if len(outputs) > 1:
                outputs[-2] = ours.wait_for(outputs[-2])
        outputs[-1] = ours.wait_for(outputs[-1])
        return outputs

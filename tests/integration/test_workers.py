"""Asynchronous scheduling with the target's worker in a process of its own, as on a GPU.

The engine's core stays in this process, where a test can watch its scheduler.
"""

from collections.abc import Iterator
from typing import Any

import interpreter
import pytest
from drafters import Reference
from engines import Bench, Prompt, bench, has_v2, run
from features import greedy, prompts_of

pytestmark = [
    pytest.mark.runner_v2,
    pytest.mark.skipif(
        not interpreter.is_wanted(), reason="Model Runner V1 is scheduled synchronously"
    ),
]
LENGTH = 24


@pytest.fixture(scope="module")
def apart(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """An engine whose worker is apart. There is no need for ``plain``: see ``expected``."""
    folder = tmp_path_factory.mktemp("drafter")
    options: dict[str, Any] = {"distributed_executor_backend": "mp", "async_scheduling": True}
    with bench(tiny, folder, **options) as engines:
        yield engines


def expected(target: Reference, prompt: Prompt) -> list[int]:
    """What the target says greedily, by Transformers."""
    tokens = list(prompt)
    for _ in range(LENGTH):
        tokens.append(target.best(tokens)[0])
    return tokens[len(prompt) :]


def test_the_worker_has_the_runner_and_the_core_a_queue_of_two(apart: Bench) -> None:
    assert apart.drafted.collective_rpc(has_v2) == [True]
    assert apart.drafted.llm_engine.engine_core.engine_core.batch_queue_size == 2


def test_the_tokens_are_the_targets(apart: Bench) -> None:
    apart.draft_with("perturbed", 4)
    prompts = prompts_of(31, 6, 60)
    before = apart.stats.drafted
    outputs = run(apart.drafted, prompts, greedy(max_tokens=LENGTH), [0, 0, 0, 3, 4, 9])
    assert apart.stats.drafted > before
    found = [list(output.outputs[0].token_ids) for output in outputs]
    assert found == [expected(apart.target, prompt) for prompt in prompts]

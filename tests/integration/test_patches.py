"""The repairs of vLLM: right, and only where they are needed."""

from types import ModuleType
from typing import Any

import pytest
import torch
import zmq
from hypothesis import given
from hypothesis import strategies as st
from vllm.utils.network_utils import zmq_socket_ctx
from vllm.v1.engine import utils as engine_utils
from vllm.v1.sample import rejection_sampler

from minedraft.verifier import patches
from minedraft.verifier.patches import Patch


@given(
    st.lists(st.tuples(st.floats(0, 2, width=32), st.integers(0, 5)), min_size=1, max_size=8),
    st.sampled_from([torch.float32, torch.int32, torch.int64]),
)
def test_every_draft_token_gets_its_requests_value(
    rows: list[tuple[float, int]], dtype: torch.dtype
) -> None:
    values = torch.tensor([value * 10 for value, _ in rows]).to(dtype)
    ends = torch.tensor([count for _, count in rows], dtype=torch.int32).cumsum(0).to(torch.int32)
    expected = [
        1 if value == 0 else value
        for value, (_, count) in zip(values.tolist(), rows, strict=True)
        for _ in range(count)
    ]
    expand = patches.EXPAND_ON_CPU.replacement
    expanded = expand(values, ends, int(ends[-1]), replace_from=0, replace_to=1)
    assert expanded.dtype == dtype
    assert expanded.tolist() == expected


def test_top_k_of_some_tokens_is_vllms_own_and_of_none_is_nothing() -> None:
    mask = patches.TOP_K_OF_NOTHING_ON_CPU.replacement
    logits, k = torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([2])
    assert mask(logits.clone(), k, None).tolist() == [[-torch.inf, 3.0, 2.0]]
    assert mask(torch.zeros(0, 3), k[:0], None).shape == (0, 3)


@pytest.mark.parametrize("patch", [patches.EXPAND_ON_CPU, patches.TOP_K_OF_NOTHING_ON_CPU])
def test_the_probe_finds_nothing_wrong_with_the_replacement(patch: Patch) -> None:
    assert patch.module is rejection_sampler
    assert not patch.is_faulty(patch.replacement)


def test_an_interruption_comes_out_of_vllms_socket() -> None:
    patch = patches.INTERRUPTION_OF_A_START
    assert patch.module is engine_utils
    assert patch.is_faulty(zmq_socket_ctx)
    assert not patch.is_faulty(patch.replacement)
    with patch.replacement("inproc://there", zmq.PAIR, bind=True) as socket:
        assert not socket.closed
    assert socket.closed
    with (
        pytest.raises(RuntimeError, match="another"),
        patch.replacement("inproc://there", zmq.PAIR, bind=True),
    ):
        raise RuntimeError("another")


def test_only_a_faulty_function_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    module: Any = ModuleType("module")

    def good() -> None: ...

    def bad() -> None: ...

    def mended() -> None: ...

    patch = Patch(module, "f", mended, lambda function: function is bad, "it is bad")
    module.f = good
    assert not patch.apply()
    assert module.f is good
    module.f = bad
    assert patch.apply()
    assert module.f is mended
    assert not patch.apply(), "once is enough"

"""The divergence that students are taught by."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minedraft.distill.loss import divergence

VOCABULARY = 16


def distributions(seed: int, positions: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a student and log-probabilities of a target, [positions, VOCABULARY]."""
    generator = torch.Generator().manual_seed(seed)
    shape = (positions, VOCABULARY)
    student = 2 * torch.randn(shape, generator=generator)
    target = torch.log_softmax(2 * torch.randn(shape, generator=generator), dim=1)
    return student, target


def exact(student: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """KL of the whole distributions."""
    return (target.exp() * (target - torch.log_softmax(student, dim=1))).sum(dim=1)


@given(st.integers(0, 2**31))
@settings(deadline=None)
def test_with_all_tokens_listed_it_is_the_whole_divergence(seed: int) -> None:
    student, target = distributions(seed)
    logprobs, ids = target.topk(VOCABULARY)
    found = divergence(student, ids, logprobs)
    torch.testing.assert_close(found, exact(student, target), rtol=1e-3, atol=1e-4)


@given(st.integers(0, 2**31), st.integers(1, VOCABULARY - 1))
@settings(deadline=None)
def test_with_some_it_is_between_zero_and_that(seed: int, kept: int) -> None:
    student, target = distributions(seed)
    logprobs, ids = target.topk(kept)
    found = divergence(student, ids, logprobs)
    assert (found >= -1e-5).all()
    assert (found <= exact(student, target) + 1e-4).all()


@given(st.integers(0, 2**31), st.integers(1, VOCABULARY))
@settings(deadline=None)
def test_it_is_zero_where_the_student_is_the_target(seed: int, kept: int) -> None:
    _, target = distributions(seed)
    logprobs, ids = target.topk(kept)
    assert divergence(target, ids, logprobs).abs().max() < 1e-4


@given(st.integers(0, 2**31))
@settings(deadline=None)
def test_tokens_that_are_not_told_apart_count_with_the_others(seed: int) -> None:
    student, target = distributions(seed)
    logprobs, ids = target.topk(4)
    expected = divergence(student, ids[:, :3], logprobs[:, :3])
    ids[:, 3] = -1
    torch.testing.assert_close(divergence(student, ids, logprobs), expected)


def test_its_gradient_leads_to_the_target() -> None:
    student, target = distributions(0)
    logprobs, ids = target.topk(5)
    student.requires_grad_(True)
    optimizer = torch.optim.Adam([student], lr=0.1)
    for _ in range(300):
        optimizer.zero_grad()
        divergence(student, ids, logprobs).sum().backward()
        optimizer.step()
    found = torch.log_softmax(student.detach(), dim=1).gather(1, ids)
    assert (found - logprobs).abs().max() < 0.02


def test_a_student_that_is_sure_of_the_wrong_token_has_a_finite_loss() -> None:
    student = torch.tensor([[1000.0, 0.0, 0.0]], requires_grad=True)
    loss = divergence(student, torch.tensor([[1, 0]]), torch.tensor([[-0.1, -5.0]]))
    loss.sum().backward()
    assert loss.isfinite().all()
    assert student.grad is not None
    assert student.grad.isfinite().all()
    assert loss.item() == pytest.approx(0.9 * 1000, rel=0.1)

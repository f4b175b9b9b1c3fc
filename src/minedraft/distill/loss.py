"""What the student is taught: the target's distribution, as far as it was kept."""

import torch


def divergence(
    logits: torch.Tensor, top_ids: torch.Tensor, top_logprobs: torch.Tensor
) -> torch.Tensor:
    """KL(target, student) at each of n positions, in nats: float [n].

    ``logits`` [n, v] are the student's. ``top_ids`` [n, k] are the tokens that the target found
    most likely, as columns of the logits and -1 where the loss does not tell a token apart;
    ``top_logprobs`` [n, k] are the target's natural logarithms of their probabilities. All other
    tokens count as one, of which only the probability is known: the divergence of these coarser
    distributions is a lower bound of that of the whole ones (data processing inequality; Cover and
    Thomas, Elements of Information Theory, section 2.8), and 0 only where the k agree.
    """
    known = top_ids >= 0
    target = top_logprobs.exp() * known
    student = torch.log_softmax(logits, dim=-1).gather(1, top_ids.clamp(min=0))
    listed = torch.where(known, target * (top_logprobs - student), 0.0).sum(dim=1)
    rest = (1 - target.sum(dim=1)).clamp(min=0.0)
    covered = torch.where(known, student.exp(), 0.0).sum(dim=1).clamp(max=1 - 1e-6)
    others = rest * (rest.clamp(min=1e-9).log() - torch.log1p(-covered))
    return listed + others

"""How many tokens a verification would give, from where student and target choose alike.

Plain Python, no torch.
"""

from collections.abc import Iterable, Sequence

MOST_DRAFTS = 8


def tokens_per_verification(answers: Iterable[Sequence[bool]], num_drafts: int) -> float:
    """Tokens that a verification of ``num_drafts`` draft tokens emits, its own among them; mean.

    ``answers`` say of every token of every answer of the target whether it is the one that the
    drafter, having read all before it, finds most likely. MineDraft's drafters propose that token.
    So the drafts that are accepted are those up to the first that is not the answer's token, with
    greedy answers and, in distribution, with sampled ones too: the target accepts a proposal with
    its own probability of it (Leviathan et al., arXiv 2211.17192, section 2.3, with a draft
    distribution of one token). The first token of an answer comes from prefill; towards its end
    there are fewer drafts. 1.0 if there is nothing to verify.
    """
    emitted = verifications = 0
    for alike in answers:
        at = 1
        while at < len(alike):
            accepted = 0
            most = min(num_drafts, len(alike) - at - 1)
            while accepted < most and alike[at + accepted]:
                accepted += 1
            at += accepted + 1
            emitted += accepted + 1
            verifications += 1
    return emitted / verifications if verifications else 1.0


def agreement(answers: Iterable[Sequence[bool]]) -> float:
    """Share of the tokens that the drafter would have chosen too; of nothing 0."""
    found = [alike for answer in answers for alike in answer]
    return sum(found) / len(found) if found else 0.0

"""Padding of short drafts, so that a step fits a CUDA graph.

A full CUDA graph of a decode step wants the same number of tokens of every request. Any token will
do as a draft: it is verified like the others, and rejected unless the target would emit it.

Plain Python, no vLLM.
"""

from collections.abc import Mapping, Sequence


def graph_tiers(num_speculative_tokens: int) -> list[int]:
    """Draft tokens for each request for which there shall be graphs, ascending: 0, some, all."""
    return sorted({0, (num_speculative_tokens + 1) // 2, num_speculative_tokens})


def graph_schedule(num_speculative_tokens: int) -> list[tuple[int, int, int]]:
    """What makes vLLM capture graphs for these tiers: its schedule of K by batch size.

    Ours is never followed. vLLM captures a graph for each K in it, as far as ``max_num_seqs``
    reaches, so the full K stands first; its last entry goes on for ever.
    """
    *shorter, full = graph_tiers(num_speculative_tokens)
    return [(size, size, k) for size, k in enumerate([full, *shorter, full], start=1)]


def padding(drafts: Mapping[str, int], room: Mapping[str, int], tiers: Sequence[int]) -> int:
    """Draft tokens to which all requests of a step are to be padded; 0 if they had better not.

    ``drafts`` and ``room`` are the draft tokens that each has and could have. A step without any
    draft tokens, or with one request that has no room, is left as it is: its graph, if there is
    one, is another. So is one that would more than double its tokens.
    """
    longest = max(drafts.values(), default=0)
    width = next((tier for tier in tiers if tier >= longest), 0) if longest else 0
    missing = sum(width - num for num in drafts.values())
    fits = all(width <= room[request] for request in drafts)
    return width if fits and missing <= len(drafts) + sum(drafts.values()) else 0

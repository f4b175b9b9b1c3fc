"""Padding makes steps uniform or leaves them alone, and graphs are captured for what it makes."""

from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

from minedraft.verifier.padding import graph_schedule, graph_tiers, padding

REQUESTS = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 12)), max_size=8)


@given(REQUESTS, st.integers(1, 8))
def test_a_padded_step_is_uniform_and_a_tier(requests: list[tuple[int, int]], most: int) -> None:
    drafts = {str(i): min(num, most) for i, (num, _) in enumerate(requests)}
    room = {str(i): extra for i, (_, extra) in enumerate(requests)}
    width = padding(drafts, room, graph_tiers(most))
    if width:
        assert width in graph_tiers(most)
        assert all(drafts[r] <= width <= room[r] for r in drafts)
        real = len(drafts) + sum(drafts.values())
        assert len(drafts) * (1 + width) <= 2 * real
        smaller = [tier for tier in graph_tiers(most) if tier < width]
        assert all(max(drafts.values()) > tier for tier in smaller)
    else:
        longest = max(drafts.values(), default=0)
        fitting = [tier for tier in graph_tiers(most) if tier >= longest]
        real = len(drafts) + sum(drafts.values())
        assert (
            not longest
            or any(room[r] < fitting[0] for r in drafts)
            or len(drafts) * (1 + fitting[0]) > 2 * real
        )


def test_a_step_without_drafts_is_left_alone() -> None:
    assert padding({"a": 0, "b": 0}, {"a": 9, "b": 9}, [0, 2, 4]) == 0
    assert padding({}, {}, [0, 2, 4]) == 0


@given(st.integers(1, 16), st.integers(1, 64))
def test_vllm_captures_graphs_for_all_tiers(num_drafts: int, max_num_seqs: int) -> None:
    lookup = build_dynamic_sd_schedule_lookup(
        graph_schedule(num_drafts),
        vllm_max_batch_size=max_num_seqs,
        vllm_num_speculative_tokens=num_drafts,
    )
    captured = set(lookup[1:])
    assert num_drafts in captured
    if max_num_seqs > 2:
        assert captured == set(graph_tiers(num_drafts))
    assert lookup[-1] == num_drafts or max_num_seqs < 4  # the widest batches are of full drafts

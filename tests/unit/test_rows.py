"""rows.TokenList: a plain list in every respect but the speed at which numpy reads it."""

import copy
import pickle
import timeit
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minedraft.rows import TokenList, install

tokens = st.integers(-1, 2**31 - 1)
indices = st.integers(-12, 12)
few = st.lists(tokens, max_size=4)
slices = st.builds(slice, *[st.none() | indices] * 2)

Change = Callable[[list[int]], Any]


def _set_item(index: int, value: int) -> Change:
    return lambda x: x.__setitem__(index, value)


def _set_stepped(step: int, value: int) -> Change:
    def change(x: list[int]) -> None:
        x[::step] = [value] * len(x[::step])

    return change


changes = st.one_of(
    st.builds(lambda v: lambda x: x.append(v), tokens),
    st.builds(lambda v: lambda x: x.extend(v), few),
    st.builds(lambda v: lambda x: x.__iadd__(v), few),
    st.builds(lambda n: lambda x: x.__imul__(n), st.integers(-1, 2)),
    st.builds(_set_item, indices, tokens),
    st.builds(lambda s, v: lambda x: x.__setitem__(s, v), slices, few),
    st.builds(_set_stepped, st.sampled_from([-3, -1, 2]), tokens),
    st.builds(lambda i: lambda x: x.__delitem__(i), indices | slices),
    st.builds(lambda s: lambda x: x.__delitem__(slice(None, None, s)), st.sampled_from([-2, 3])),
    st.builds(lambda i, v: lambda x: x.insert(i, v), indices, tokens),
    st.builds(lambda i: lambda x: x.pop(i), indices),
    st.builds(lambda v: lambda x: x.remove(v), tokens | st.integers(0, 2)),
    st.builds(lambda _: lambda x: x.pop(), st.none()),
    st.sampled_from([list.clear, list.reverse, list.sort]).map(lambda m: _method(m.__name__)),
)


def _method(name: str) -> Change:
    return lambda x: getattr(x, name)()


def _outcome(change: Change, x: list[int]) -> Any:
    try:
        return change(x)
    except (IndexError, ValueError) as error:
        return type(error)


@given(st.lists(tokens, max_size=8), st.lists(st.tuples(changes, st.booleans()), max_size=20))
def test_it_changes_like_a_list_and_reads_like_its_array(
    start: list[int], steps: list[tuple[Change, bool]]
) -> None:
    plain, subject = list(start), TokenList(start)
    for change, read in steps:
        expected = _outcome(change, plain)
        result = _outcome(change, subject)
        assert result == expected
        assert subject == plain
        if read:
            row = np.full(len(plain) + 2, -7, dtype=np.int32)
            row[1 : len(plain) + 1] = subject
            assert row.tolist() == [-7, *plain, -7]
    assert np.array(subject).tolist() == plain


def test_numpy_sees_the_types_of_a_plain_list() -> None:
    subject = TokenList([3, 4])
    assert np.array(subject).dtype == np.array([3, 4]).dtype
    assert np.asarray(subject, dtype=np.float32).tolist() == [3.0, 4.0]
    assert (np.asarray([[1, 2], [0, 0]]) + subject).tolist() == [[4, 6], [3, 4]]
    copied = np.array(subject, dtype=np.int32)
    subject[0] = 9
    assert copied.tolist() == [3, 4]
    with pytest.raises(ValueError, match="must be copied"):
        subject.__array__(np.dtype(np.int64), copy=False)


def test_copies_and_parts_are_independent() -> None:
    subject = TokenList([1, 2, 3])
    assert np.asarray(subject).tolist() == [1, 2, 3]
    for other in (copy.copy(subject), copy.deepcopy(subject), pickle.loads(pickle.dumps(subject))):
        assert type(other) is TokenList
        assert other == subject
        other.append(4)
        other[0] = 5
        assert np.asarray(other).tolist() == [5, 2, 3, 4]
    assert np.asarray(subject).tolist() == [1, 2, 3]
    assert type(subject[1:]) is list
    assert [0].__add__(subject) == [0, 1, 2, 3]


def test_it_is_copied_several_times_faster_than_a_list() -> None:
    plain = list(range(2000))
    subject = TokenList(plain)
    row = np.zeros(4000, dtype=np.int32)

    def seconds(source: list[int]) -> float:
        def assign() -> None:
            row[:2000] = source

        return min(timeit.repeat(assign, number=50, repeat=5))

    assert seconds(subject) * 5 < seconds(plain)


def _state(prompt: list[int] | None, output: list[int]) -> SimpleNamespace:
    return SimpleNamespace(
        prompt_token_ids=prompt, output_token_ids=output, block_ids=([1, 2], [3])
    )


def test_install_converts_what_leaves_the_batch_and_nothing_else() -> None:
    states = {name: _state([1, 2], [3]) for name in ("stays", "leaves", "finished", "absent")}
    states["embeds"] = _state(None, [])
    runner = SimpleNamespace(
        requests=states,
        input_batch=SimpleNamespace(
            req_id_to_index={"stays": 0, "leaves": 1, "finished": 2, "embeds": 3, "stale": 4}
        ),
    )
    step = SimpleNamespace(num_scheduled_tokens={"stays": 1}, finished_req_ids={"finished"})
    install(runner, step)
    assert [name for name, s in states.items() if type(s.output_token_ids) is TokenList] == [
        "leaves",
        "embeds",
    ]
    leaves = states["leaves"]
    assert type(leaves.prompt_token_ids) is TokenList
    assert leaves.prompt_token_ids == [1, 2]
    assert leaves.output_token_ids == [3]
    assert leaves.block_ids == ([1, 2], [3])
    assert all(type(ids) is TokenList for ids in leaves.block_ids)
    assert states["embeds"].prompt_token_ids is None
    before = leaves.output_token_ids
    install(runner, step)
    assert leaves.output_token_ids is before

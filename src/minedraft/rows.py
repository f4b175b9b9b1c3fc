"""Token lists that numpy copies at memory speed.

vLLM's V1 model runner drops the row of every request that sits out a step and writes it again
later: prompt, output and block ids, copied from Python lists at some 50 ns a token, so that a step
costs time in proportion to the context. Alternating between two sets of requests does this all the
time. A TokenList is a list whose numbers are also kept in an array; `array[row, :n] = token_list`
then copies the array, and only tokens that are new since the last copy are converted.
"""

from collections.abc import Iterable
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

_NOTHING: npt.NDArray[np.int32] = np.empty(0, dtype=np.int32)


class TokenList(list[int]):
    """A list of integers below 2**31 that numpy reads as an array.

    It equals, pickles, slices and grows like a plain list. Asked for int32, numpy gets a view of
    the mirror instead of a copy: read it at once, it changes with the list.
    """

    __slots__ = ("_clean", "_mirror")

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        super().__init__(tokens)
        self._mirror = _NOTHING
        self._clean = 0  # so many leading items are in the mirror as they are in the list

    def __array__(
        self, dtype: npt.DTypeLike | None = None, copy: bool | None = None
    ) -> npt.NDArray[Any]:
        self._refresh()
        view = self._mirror[: len(self)]
        # Numpy makes int64 of a plain list when it is not told otherwise.
        wanted = np.dtype(np.int64 if dtype is None else dtype)
        if wanted == view.dtype:
            return view.copy() if copy else view
        if copy is False:
            raise ValueError(f"a TokenList is {view.dtype} and must be copied to become {wanted}")
        return view.astype(wanted)

    def _refresh(self) -> None:
        length, clean = len(self), self._clean
        if clean >= length:
            return
        if length > len(self._mirror):
            grown = np.empty(max(length, 2 * len(self._mirror)), dtype=np.int32)
            grown[:clean] = self._mirror[:clean]
            self._mirror = grown
        self._mirror[clean:length] = self[clean:]  # a slice is a plain list
        self._clean = length

    def _dirty(self, start: int) -> None:
        self._clean = min(self._clean, max(start, 0))

    # append, extend and += leave the leading items alone and stay as they are.

    def __setitem__(self, index: Any, value: Any) -> None:
        self._dirty(self._first(index))
        super().__setitem__(index, value)

    def __delitem__(self, index: SupportsIndex | slice) -> None:
        self._dirty(self._first(index))
        super().__delitem__(index)

    def _first(self, index: SupportsIndex | slice) -> int:
        """The lowest position that a change at ``index`` can touch."""
        if not isinstance(index, slice):
            position = index.__index__()
            return position if position >= 0 else position + len(self)
        positions = range(*index.indices(len(self)))
        return min(positions[0], positions[-1]) if positions else positions.start

    def insert(self, index: SupportsIndex, value: int) -> None:
        """Insert before ``index``."""
        self._dirty(self._first(index))
        super().insert(index, value)

    def pop(self, index: SupportsIndex = -1) -> int:
        """Remove and return the item at ``index``."""
        value = super().pop(index)
        position = index.__index__()
        self._dirty(position if position >= 0 else position + len(self) + 1)
        return value

    def remove(self, value: int) -> None:
        """Remove the first ``value``."""
        self._dirty(0)
        super().remove(value)

    def clear(self) -> None:
        """Remove everything."""
        self._dirty(0)
        super().clear()

    def reverse(self) -> None:
        """Reverse in place."""
        self._dirty(0)
        super().reverse()

    def sort(self, **options: Any) -> None:
        """Sort in place."""
        self._dirty(0)
        super().sort(**options)

    def __imul__(self, times: SupportsIndex) -> "TokenList":
        super().__imul__(times)
        self._dirty(len(self))
        return self

    def __reduce__(self) -> tuple[type["TokenList"], tuple[list[int]]]:
        return TokenList, (list(self),)


def install(runner: Any, scheduler_output: Any) -> None:
    """Give the requests that leave the batch in this step TokenLists; once for each request.

    ``runner`` is vLLM's GPUModelRunner or CPUModelRunner, ``scheduler_output`` what its
    ``execute_model`` is about to get: call this first. A request is converted when its row is
    about to be dropped because only then nothing else refers to its lists: while it has a row, the
    batch and the logits processors hold the same ``output_token_ids`` and watch it grow.
    """
    scheduled = scheduler_output.num_scheduled_tokens
    for req_id in runner.input_batch.req_id_to_index:
        if req_id in scheduled:
            continue
        state = runner.requests.get(req_id)
        if state is None or isinstance(state.output_token_ids, TokenList):
            continue
        if req_id in scheduler_output.finished_req_ids:
            continue
        state.output_token_ids = TokenList(state.output_token_ids)
        if state.prompt_token_ids is not None:
            state.prompt_token_ids = TokenList(state.prompt_token_ids)
        state.block_ids = tuple(TokenList(ids) for ids in state.block_ids)

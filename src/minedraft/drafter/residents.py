"""Which sessions the workers hold."""

from collections.abc import Hashable, Iterable
from itertools import islice
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Residents(Generic[T]):
    """Holds at most ``limit`` items, those used last."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: dict[T, None] = {}  # longest unused first

    def use(self, items: Iterable[T]) -> list[T]:
        """Hold all of these, at most ``limit``; what had to go for them, longest unused first."""
        for item in items:
            self._held.pop(item, None)
            self._held[item] = None
        gone = list(islice(self._held, max(0, len(self._held) - self._limit)))
        for item in gone:
            del self._held[item]
        return gone

    def drop(self, item: T) -> None:
        """Hold it no more; one that is not held is ignored."""
        self._held.pop(item, None)

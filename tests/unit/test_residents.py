"""drafter.residents: what is in use stays, what was unused longest goes."""

from hypothesis import given
from hypothesis import strategies as st

from minedraft.drafter.residents import Residents

LIMIT = 4


@given(
    st.lists(
        st.tuples(st.booleans(), st.lists(st.integers(0, 9), max_size=LIMIT, unique=True)),
        max_size=30,
    )
)
def test_those_used_last_stay(events: list[tuple[bool, list[int]]]) -> None:
    residents: Residents[int] = Residents(LIMIT)
    history: list[int] = []  # who is held, longest unused first
    for dropping, items in events:
        history = [item for item in history if item not in items]
        if dropping:
            for item in items:
                residents.drop(item)
            continue
        history += items
        surplus = max(0, len(history) - LIMIT)
        assert residents.use(items) == history[:surplus]
        history = history[surplus:]

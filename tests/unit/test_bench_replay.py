"""A replay hands out what was recorded, at the lengths at which it was taken, and nothing else."""

from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from minedraft.bench.replay import Recorder, Replay
from minedraft.verifier.turns import Drafts

PROMPT = [1, 2, 3]


class Client:
    """A client that has these drafts, by length."""

    def __init__(self, drafts: dict[int, list[int]]) -> None:
        self.held = drafts
        self.length = 0

    def open(self, request: str, tokens: list[int], most_drafts: int) -> None:
        self.length = len(tokens)

    def drafts(self, request: str, most: int) -> list[int]:
        return self.held.get(self.length, [])[:most]

    def session_length(self, request: str) -> int | None:
        return self.length if request == "a" else None


DRAFTS = st.dictionaries(st.integers(3, 20), st.lists(st.integers(0, 9), max_size=4))


@given(DRAFTS, st.lists(st.integers(1, 5), max_size=6))
def test_the_same_requests_get_the_same_drafts(
    held: dict[int, list[int]], steps: list[int]
) -> None:
    client = Client(held)
    recorder = Recorder(cast(Any, client))
    drive: Any = client
    drive.open("a", PROMPT, 8)
    taken = []
    for emitted in steps:
        taken.append(drive.drafts("a", 3))
        client.length += emitted
    replay = Replay(recorder.recorded)
    replay.open("another id", PROMPT, 8)
    for emitted, drafts in zip(steps, taken, strict=True):
        ready = replay.state("another id", 0.0)
        assert ready is (Drafts.READY if drafts else Drafts.NONE)
        assert replay.drafts("another id", 3) == drafts
        replay.advance("another id", [0] * emitted, 3)
    assert replay.session_length("another id") == len(PROMPT) + sum(steps)
    replay.close("another id")
    assert not replay.may_draft("another id")


def test_a_prompt_that_was_not_there_is_decoded_without_drafts() -> None:
    replay = Replay({(1, 2, 3): {3: [5]}})
    replay.open("a", [1, 2], 4)
    assert replay.drafts("a", 4) == []
    assert replay.drafts("unknown", 4) == []
    assert replay.session_length("unknown") is None


def test_two_runs_are_recorded_apart() -> None:
    client: Any = SimpleNamespace(
        open=lambda *_: None, drafts=lambda *_: [7], session_length=lambda _: 3
    )
    recorder = Recorder(client)
    client.open("a", [1], 4)
    client.drafts("a", 4)
    first, recorder.recorded = recorder.recorded, {}
    client.open("b", [2], 4)
    client.drafts("b", 4)
    assert (first, recorder.recorded) == ({(1,): {3: [7]}}, {(2,): {3: [7]}})

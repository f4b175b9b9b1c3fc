"""The free-draft bound: the same engine, with the drafts of an earlier run at no cost.

A recorder notes which drafts the scheduler took for a request at each length. The replay stands in
the client's place and hands them out at once: no drafter, no socket, no wait. What the engine then
does in less time is what drafting, its messages and its bookkeeping cost. Greedy output is the same
in both runs, so the drafts fit; where it is not, a request is decoded without.

Plain Python, no vLLM.
"""

from collections.abc import Sequence

from minedraft.verifier.bell import Bell
from minedraft.verifier.client import DrafterClient
from minedraft.verifier.session import Counters
from minedraft.verifier.turns import Drafts

Prompt = tuple[int, ...]
Recorded = dict[Prompt, dict[int, list[int]]]
"""By prompt, and by the number of its tokens and those emitted: the draft tokens that followed."""


class Recorder:
    """Notes the drafts that a client gives to its scheduler, from now on."""

    def __init__(self, client: DrafterClient) -> None:
        self.recorded: Recorded = {}
        self._open, self._drafts = client.open, client.drafts
        self._by_request: dict[str, dict[int, list[int]]] = {}
        self._length = client.session_length
        client.open = self._opened  # type: ignore[method-assign, assignment]
        client.drafts = self._taken  # type: ignore[method-assign]

    def _opened(self, request: str, tokens: Sequence[int], most_drafts: int) -> None:
        self._by_request[request] = self.recorded.setdefault(tuple(tokens), {})
        self._open(request, tokens, most_drafts)

    def _taken(self, request: str, most: int) -> list[int]:
        drafts = self._drafts(request, most)
        length = self._length(request)
        if drafts and length is not None:
            self._by_request[request][length] = drafts
        return drafts


class Replay:
    """A DrafterClient, as far as a scheduler asks one, that has all drafts."""

    def __init__(self, recorded: Recorded) -> None:
        self.connected = True
        self.counters = Counters()
        self.waited_s = 0.0
        self._recorded = recorded
        self._lengths: dict[str, int] = {}
        self._drafts: dict[str, dict[int, list[int]]] = {}

    def open(self, request: str, tokens: Sequence[int], most_drafts: int) -> None:  # noqa: ARG002
        """A new request, with its prompt."""
        self._lengths[request] = len(tokens)
        self._drafts[request] = self._recorded.get(tuple(tokens), {})

    def close(self, request: str) -> None:
        """The request is gone."""
        self._lengths.pop(request, None)
        self._drafts.pop(request, None)

    def advance(self, request: str, tokens: Sequence[int], num_drafts: int) -> None:  # noqa: ARG002
        """These tokens were verified."""
        self._lengths[request] += len(tokens)

    def session_length(self, request: str) -> int | None:
        """Verified tokens of the request."""
        return self._lengths.get(request)

    def state(self, request: str, now: float) -> Drafts:  # noqa: ARG002
        """READY, unless nothing was recorded at this length."""
        return Drafts.READY if self.drafts(request, 1) else Drafts.NONE

    def drafts(self, request: str, most: int) -> list[int]:
        """What was recorded."""
        length = self._lengths.get(request)
        return [] if length is None else self._drafts[request].get(length, [])[:most]

    def may_draft(self, request: str) -> bool:
        """Whether it is a request with drafts."""
        return request in self._lengths

    def next_deadline(self, requests: Sequence[str]) -> float:
        """Never asked: nobody is waited for."""
        raise AssertionError(f"drafts of {requests} are waited for")

    def poll(self, wait_s: float = 0.0) -> bool:  # noqa: ARG002
        """Nothing comes."""
        return False

    def rest(self, resting: bool) -> None:
        """Nobody is told."""

    def flush(self) -> None:
        """Nothing is sent."""

    def wake_on(self, bell: Bell) -> None:
        """Nothing waits."""

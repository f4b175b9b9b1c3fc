"""A real drafter in a thread of the test process: the server and its socket, a Transformers model.

It has no KV cache and no sessions worth the name, so it is slow and obviously right.
"""

import threading
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from minedraft import protocol
from minedraft.config import Endpoint
from minedraft.drafter.server import DraftServer
from minedraft.drafter.sessions import Drafted, Lost
from minedraft.transport import Server
from minedraft.vocabulary import fingerprint


class Reference:
    """A Transformers model that says what comes after some tokens, remembering what it said."""

    def __init__(self, model: Path) -> None:
        self.model = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._said: dict[tuple[int, ...], tuple[int, float]] = {}

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """float32 [vocabulary]: the logits of the token after these."""
        with torch.inference_mode():
            return self.model(torch.tensor([list(tokens)])).logits[0, -1]

    def best(self, tokens: Sequence[int]) -> tuple[int, float]:
        """The greedy next token and its log-probability."""
        key = tuple(tokens)
        if key not in self._said:
            logprobs = self.logits(tokens).log_softmax(-1)
            token = int(logprobs.argmax())
            self._said[key] = token, float(logprobs[token])
        return self._said[key]


class TransformersEngine:
    """Drafts greedily by a full forward pass for each token; the model may be changed any time."""

    def __init__(self, reference: Reference) -> None:
        self.reference = reference
        self.sessions: dict[Hashable, list[int]] = {}
        self.wishes: dict[Hashable, int] = {}
        self.lost: list[Lost] = []
        self.last_pass: list[Hashable] = []

    def open(self, key: Hashable, tokens: Sequence[int]) -> None:
        self.sessions[key] = list(tokens)

    def extend(self, key: Hashable, base_len: int, tokens: Sequence[int], num_drafts: int) -> None:
        session = self.sessions.get(key)
        if session is None or base_len > len(session):
            self.lost.append(Lost(key, protocol.LOST_UNKNOWN))
            return
        session[base_len:] = tokens
        self.wishes[key] = num_drafts

    def close(self, key: Hashable) -> None:
        self.sessions.pop(key, None)
        self.wishes.pop(key, None)

    def has_work(self) -> bool:
        return bool(self.wishes or self.lost)

    def step(self) -> list[Drafted | Lost]:
        results: list[Drafted | Lost] = [*self.lost]
        self.lost = []
        self.last_pass = [key for key, num_drafts in self.wishes.items() if num_drafts]
        results.extend(self.draft(key, self.wishes[key]) for key in self.last_pass)
        self.wishes = {}
        return results

    def draft(self, key: Hashable, num_drafts: int) -> Drafted:
        tokens = list(self.sessions[key])
        base_len, logprobs = len(tokens), []
        for _ in range(num_drafts):
            token, logprob = self.reference.best(tokens)
            logprobs.append(logprob)
            tokens.append(token)
        return Drafted(key, base_len, tokens[base_len:], logprobs)


@contextmanager
def serving(engine: TransformersEngine, tokenizer: Path, address: str) -> Iterator[DraftServer]:
    """A drafter on this address, until the end of the block."""
    config = engine.reference.model.config
    welcome = protocol.Welcome(
        version=protocol.PROTOCOL_VERSION,
        model="transformers",
        vocabulary=fingerprint(AutoTokenizer.from_pretrained(tokenizer).get_vocab()),
        vocab_size=config.vocab_size,
        max_model_len=config.max_position_embeddings,
    )
    socket = Server(Endpoint(address))
    server = DraftServer(engine, socket, welcome)
    stop = threading.Event()

    def loop() -> None:
        while not stop.is_set():
            server.serve_once()
        socket.close()

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        stop.set()
        thread.join(timeout=10)

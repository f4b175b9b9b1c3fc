"""The messages between verifier and drafter, their codec and version.

Every message is one ZMQ frame: a MessagePack map with a ``type`` tag, encoded and checked by
msgspec. Token ids travel as lists of integers, log-probabilities are natural logarithms.

A *session* is one request on one verifier. Its number is chosen by the verifier and never used
twice on a connection, so it stands for the pair (request id, epoch): a request id that comes back
after an abort is another session. A draft belongs to ``(session, base_len)``: its first token is
proposed for the position ``base_len``, that is after ``base_len`` verified tokens.
"""

from typing import Annotated, TypeVar

import msgspec

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 16 << 20
"""A frame larger than this is not read. A prompt of a million tokens fits."""
MAX_OPEN_TOKENS = MAX_FRAME_BYTES // 8
"""Tokens with which the sessions of one frame are opened, at most: 5 bytes each, and room."""
MAX_ENTRIES = 8192
"""In each list of a message, so that a small frame cannot become much memory. With as many tokens
as it may open, and the longest extends, such a message is still no larger than a frame."""
MAX_DRAFT_TOKENS = 32
MAX_TEXT = 512
MAX_SPANS = 64

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Length = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Session = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
_entries = msgspec.Meta(max_length=MAX_ENTRIES)
NumDrafts = Annotated[int, msgspec.Meta(ge=0, le=MAX_DRAFT_TOKENS)]


class ProtocolError(ValueError):
    """A frame that is not a message of this protocol version."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Verifier to drafter, first on a connection and again whenever the drafter asks."""

    version: int
    vocabulary: Text
    """Fingerprint of the target's tokenizer (vocabulary.py); empty if it has none."""
    vocab_size: Length


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Drafter to verifier: the verifier's sessions will be served."""

    version: int
    model: Text
    vocabulary: Text
    vocab_size: Length
    max_model_len: Length


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Drafter to verifier: no session of this verifier will be served, and why."""

    reason: Text


class Greet(msgspec.Struct, frozen=True, tag="greet"):
    """Drafter to verifier: this drafter does not know you, say hello first and open all again."""


class Open(msgspec.Struct, frozen=True, array_like=True):
    """A new session and its first verified tokens (the prompt)."""

    session: Session
    tokens: list[TokenId]


class Extend(msgspec.Struct, frozen=True, array_like=True):
    """``tokens`` were verified for the positions from ``base_len`` on."""

    session: Session
    base_len: Length
    tokens: list[TokenId]
    num_drafts: NumDrafts
    """Draft tokens wanted after them; 0 wants none."""


class Update(msgspec.Struct, frozen=True, tag="update"):
    """Verifier to drafter, usually one for each step of the verifier; closes are applied first."""

    close: Annotated[list[Session], _entries] = []
    open: Annotated[list[Open], _entries] = []
    extend: Annotated[list[Extend], _entries] = []


class Draft(msgspec.Struct, frozen=True, array_like=True):
    """Draft tokens for the positions from ``base_len`` on, with their log-probabilities."""

    session: Session
    base_len: Length
    tokens: Annotated[list[TokenId], msgspec.Meta(max_length=MAX_DRAFT_TOKENS)]
    logprobs: Annotated[list[float], msgspec.Meta(max_length=MAX_DRAFT_TOKENS)]


class Lost(msgspec.Struct, frozen=True, array_like=True):
    """The drafter does not hold this session (any more) and will not draft for it."""

    session: Session
    reason: Text
    """One of LOST_REASONS."""


class Span(msgspec.Struct, frozen=True, array_like=True):
    """A time in which the drafter computed, on its own clock."""

    start_s: float
    end_s: float
    rows: Length
    """Sessions that were answered at its end."""


class Drafts(msgspec.Struct, frozen=True, tag="drafts"):
    """Drafter to verifier."""

    drafts: Annotated[list[Draft], _entries] = []
    lost: Annotated[list[Lost], _entries] = []
    busy_s: float = 0.0
    """Seconds the drafter computed for this verifier since its last message."""
    spans: Annotated[list[Span], msgspec.Meta(max_length=MAX_SPANS)] = []
    """When it computed, as far as it was not said yet; the latest."""
    sent_s: float = 0.0
    """When this was sent, on the drafter's clock, if there are spans."""


LOST_UNKNOWN = "unknown session"
LOST_KV_FULL = "drafter KV cache full"
LOST_CONTEXT = "beyond the drafter's context"
LOST_VOCABULARY = "token outside the drafter's vocabulary"
LOST_REASONS = (LOST_UNKNOWN, LOST_KV_FULL, LOST_CONTEXT, LOST_VOCABULARY)

ToDrafter = Hello | Update
ToVerifier = Welcome | Refused | Greet | Drafts

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()
_to_drafter = msgspec.msgpack.Decoder(ToDrafter)
_to_verifier = msgspec.msgpack.Decoder(ToVerifier)


def encode(message: ToDrafter | ToVerifier) -> bytes:
    """The frame of a message."""
    return _encoder.encode(message)


def _decode(decoder: msgspec.msgpack.Decoder[T], frame: bytes) -> T:
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"frame of {len(frame)} bytes, at most {MAX_FRAME_BYTES} are read")
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(str(error)) from error


def decode_to_drafter(frame: bytes) -> ToDrafter:
    """The message in a frame that a verifier sent. Raises ProtocolError."""
    return _decode(_to_drafter, frame)


def decode_to_verifier(frame: bytes) -> ToVerifier:
    """The message in a frame that a drafter sent. Raises ProtocolError."""
    return _decode(_to_verifier, frame)

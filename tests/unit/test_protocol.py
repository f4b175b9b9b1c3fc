"""Laws of the wire: what is encoded comes back, and nothing else is ever taken for a message."""

import struct
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minedraft import protocol
from minedraft.protocol import (
    MAX_DRAFT_TOKENS,
    MAX_SPANS,
    MAX_TEXT,
    Draft,
    Drafts,
    Extend,
    Greet,
    Hello,
    Lost,
    Open,
    ProtocolError,
    Refused,
    Span,
    Update,
    Welcome,
    decode_to_drafter,
    decode_to_verifier,
    encode,
)
from minedraft.verifier.session import updates as updates_of

TOKEN_END = 1 << 31
SESSION_END = 1 << 62

tokens = st.integers(0, TOKEN_END - 1)
lengths = st.integers(0, TOKEN_END - 1)
sessions = st.integers(0, SESSION_END - 1)
versions = st.integers(-(1 << 63), (1 << 64) - 1)
texts = st.text(max_size=MAX_TEXT)
some_tokens = st.lists(tokens, max_size=40)
drafted = st.lists(tokens, max_size=MAX_DRAFT_TOKENS)
logprobs = st.lists(st.floats(allow_nan=False), max_size=MAX_DRAFT_TOKENS)

hellos = st.builds(Hello, versions, texts, lengths)
updates = st.builds(
    Update,
    st.lists(sessions, max_size=5),
    st.lists(st.builds(Open, sessions, some_tokens), max_size=3),
    st.lists(
        st.builds(Extend, sessions, lengths, some_tokens, st.integers(0, MAX_DRAFT_TOKENS)),
        max_size=3,
    ),
)
welcomes = st.builds(Welcome, versions, texts, texts, lengths, lengths)
answers = st.builds(
    Drafts,
    st.lists(st.builds(Draft, sessions, lengths, drafted, logprobs), max_size=3),
    st.lists(st.builds(Lost, sessions, texts), max_size=3),
    st.floats(allow_nan=False),
    st.lists(st.builds(Span, *[st.floats(allow_nan=False)] * 2, lengths), max_size=3),
    st.floats(allow_nan=False),
)
to_drafter = hellos | updates
to_verifier = welcomes | st.builds(Refused, texts) | st.just(Greet()) | answers


def is_int(value: Any, end: int) -> bool:
    return type(value) is int and 0 <= value < end


def is_text(value: Any) -> bool:
    return type(value) is str and len(value) <= MAX_TEXT


def are_tokens(value: Any, most: int | None = None) -> bool:
    fits = type(value) is list and (most is None or len(value) <= most)
    return fits and all(is_int(token, TOKEN_END) for token in value)


def are_floats(value: Any) -> bool:
    fits = type(value) is list and len(value) <= MAX_DRAFT_TOKENS
    return fits and all(type(number) is float for number in value)


def is_valid(message: Any) -> bool:
    """Whether every field of a message, and of the structs in it, is in its bounds."""
    match message:
        case Hello(version, vocabulary, size):
            return type(version) is int and is_text(vocabulary) and is_int(size, TOKEN_END)
        case Welcome(version, model, vocabulary, size, longest):
            known = type(version) is int and is_text(model) and is_text(vocabulary)
            return known and is_int(size, TOKEN_END) and is_int(longest, TOKEN_END)
        case Refused(reason):
            return is_text(reason)
        case Greet():
            return True
        case Update(close, opened, extended):
            closes = all(is_int(session, SESSION_END) for session in close)
            return closes and all(is_valid(part) for part in [*opened, *extended])
        case Drafts(drafts, lost, busy_s, spans, sent_s):
            times = type(busy_s) is float and type(sent_s) is float and len(spans) <= MAX_SPANS
            return times and all(is_valid(part) for part in [*drafts, *lost, *spans])
        case _:
            return is_valid_part(message)


def is_valid_part(part: Any) -> bool:
    match part:
        case Open(session, verified):
            return is_int(session, SESSION_END) and are_tokens(verified)
        case Extend(session, base_len, verified, num_drafts):
            where = is_int(session, SESSION_END) and is_int(base_len, TOKEN_END)
            return where and are_tokens(verified) and is_int(num_drafts, MAX_DRAFT_TOKENS + 1)
        case Draft(session, base_len, draft, numbers):
            where = is_int(session, SESSION_END) and is_int(base_len, TOKEN_END)
            return where and are_tokens(draft, MAX_DRAFT_TOKENS) and are_floats(numbers)
        case Span(start_s, end_s, rows):
            return type(start_s) is type(end_s) is float and is_int(rows, TOKEN_END)
        case Lost(session, reason):
            return is_int(session, SESSION_END) and is_text(reason)
        case _:
            return False


def check_decoders(frame: bytes) -> None:
    """A frame is a message with all fields in their bounds, of the right side, or an error."""
    for decode, kinds in (
        (decode_to_drafter, (Hello, Update)),
        (decode_to_verifier, (Welcome, Refused, Greet, Drafts)),
    ):
        try:
            message = decode(frame)
        except ProtocolError:
            continue
        assert isinstance(message, kinds)
        assert is_valid(message)


@given(to_drafter)
def test_what_a_verifier_says_comes_back(message: Any) -> None:
    assert is_valid(message), "the checker itself"
    assert decode_to_drafter(encode(message)) == message
    with pytest.raises(ProtocolError):
        decode_to_verifier(encode(message))


@given(to_verifier)
def test_what_a_drafter_says_comes_back(message: Any) -> None:
    assert is_valid(message), "the checker itself"
    assert decode_to_verifier(encode(message)) == message
    with pytest.raises(ProtocolError):
        decode_to_drafter(encode(message))


@given(st.binary(max_size=200))
def test_random_bytes(noise: bytes) -> None:
    check_decoders(noise)


@given(to_drafter | to_verifier, st.data())
def test_a_frame_that_is_cut_or_too_long_is_no_message(message: Any, data: st.DataObject) -> None:
    frame = encode(message)
    cut = frame[: data.draw(st.integers(0, len(frame) - 1))]
    longer = frame + data.draw(st.binary(min_size=1, max_size=5))
    for decode in (decode_to_drafter, decode_to_verifier):
        for wrong in (cut, longer):
            with pytest.raises(ProtocolError):
                decode(wrong)


@settings(max_examples=200)
@given(to_drafter | to_verifier, st.data())
def test_bit_flips_never_give_fields_out_of_bounds(message: Any, data: st.DataObject) -> None:
    frame = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        bit = data.draw(st.integers(0, 8 * len(frame) - 1))
        frame[bit // 8] ^= 1 << bit % 8
    check_decoders(bytes(frame))


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=6,
)
shapes = st.fixed_dictionaries(
    {"type": st.sampled_from(["hello", "update", "welcome", "refused", "greet", "drafts"])},
    optional=dict.fromkeys(
        ["version", "vocabulary", "vocab_size", "model", "max_model_len", "reason", "busy_s"],
        anything,
    )
    | {"sent_s": anything}
    | dict.fromkeys(
        ["close", "open", "extend", "drafts", "lost", "spans"], st.lists(anything, max_size=3)
    ),
)


@given(shapes)
def test_fields_of_any_type_in_the_right_places(shape: dict[str, Any]) -> None:
    check_decoders(msgspec.msgpack.encode(shape))


GOOD: dict[str, dict[str, Any]] = {
    "hello": {"version": 1, "vocabulary": "v", "vocab_size": 9},
    "welcome": {
        "version": 1,
        "model": "m",
        "vocabulary": "v",
        "vocab_size": 9,
        "max_model_len": 99,
    },
    "refused": {"reason": "no"},
    "open": {"open": [[1, [2]]]},
    "close": {"close": [1]},
    "extend": {"extend": [[1, 2, [3], 4]]},
    "draft": {"drafts": [[1, 2, [3], [-0.5]]]},
    "lost": {"lost": [[1, "why"]]},
    "busy": {"busy_s": 1.5},
    "spans": {"spans": [[0.5, 1.5, 2]], "sent_s": 2.5},
}
TAGS = dict.fromkeys(("open", "close", "extend"), "update")
TAGS |= dict.fromkeys(("draft", "lost", "busy", "spans"), "drafts")

NOT_A_COUNT: list[Any] = [-1, True, 1.0, 1.5, "1", None, [1], {}, b"1"]
NOT_A_LENGTH = [*NOT_A_COUNT, TOKEN_END, 1 << 40, (1 << 64) - 1]
NOT_A_SESSION = [*NOT_A_COUNT, SESSION_END, 1 << 63, (1 << 64) - 1]
NOT_A_TEXT: list[Any] = [1, None, True, b"v", ["v"], "x" * (MAX_TEXT + 1)]
NOT_A_LIST: list[Any] = [1, None, "ab", b"ab", {}]
BOUNDS: list[tuple[str, list[Any], list[Any], list[Any]]] = [
    ("hello", ["version"], [-1, 2, (1 << 64) - 1], [True, 1.0, "1", None]),
    ("hello", ["vocabulary"], ["", "é" * MAX_TEXT], NOT_A_TEXT),
    ("hello", ["vocab_size"], [0, TOKEN_END - 1], NOT_A_LENGTH),
    ("welcome", ["model"], ["", "x" * MAX_TEXT], NOT_A_TEXT),
    ("welcome", ["vocabulary"], ["", "x" * MAX_TEXT], NOT_A_TEXT),
    ("welcome", ["vocab_size"], [0, TOKEN_END - 1], NOT_A_LENGTH),
    ("welcome", ["max_model_len"], [0, TOKEN_END - 1], NOT_A_LENGTH),
    ("refused", ["reason"], ["", "x" * MAX_TEXT], NOT_A_TEXT),
    ("close", ["close"], [[]], NOT_A_LIST),
    ("close", ["close", 0], [0, SESSION_END - 1], NOT_A_SESSION),
    ("open", ["open", 0], [[1, []]], [*NOT_A_LIST, [], [1]]),
    ("open", ["open", 0, 0], [0, SESSION_END - 1], NOT_A_SESSION),
    ("open", ["open", 0, 1], [[], [0, TOKEN_END - 1], [5] * 5000], NOT_A_LIST),
    ("open", ["open", 0, 1, 0], [0, TOKEN_END - 1], NOT_A_LENGTH),
    ("extend", ["extend", 0, 0], [0, SESSION_END - 1], NOT_A_SESSION),
    ("extend", ["extend", 0, 1], [0, TOKEN_END - 1], NOT_A_LENGTH),
    ("extend", ["extend", 0, 2, 0], [0, TOKEN_END - 1], NOT_A_LENGTH),
    ("extend", ["extend", 0, 3], [0, MAX_DRAFT_TOKENS], [*NOT_A_COUNT, MAX_DRAFT_TOKENS + 1]),
    ("draft", ["drafts", 0, 0], [0, SESSION_END - 1], NOT_A_SESSION),
    ("draft", ["drafts", 0, 1], [0, TOKEN_END - 1], NOT_A_LENGTH),
    ("draft", ["drafts", 0, 2], [[], [1] * MAX_DRAFT_TOKENS], [[1] * (MAX_DRAFT_TOKENS + 1)]),
    ("draft", ["drafts", 0, 2, 0], [0, TOKEN_END - 1], NOT_A_LENGTH),
    ("draft", ["drafts", 0, 3], [[], [0.5] * MAX_DRAFT_TOKENS], [[0.5] * (MAX_DRAFT_TOKENS + 1)]),
    ("draft", ["drafts", 0, 3, 0], [-1.5, 0], ["0.5", None, True, [0.5]]),
    ("lost", ["lost", 0, 0], [0, SESSION_END - 1], NOT_A_SESSION),
    ("lost", ["lost", 0, 1], ["", "x" * MAX_TEXT], NOT_A_TEXT),
    ("busy", ["busy_s"], [0, 0.5, 1e9], ["1", None, True, [1.0]]),
    ("spans", ["sent_s"], [0, 0.5, 1e9], ["1", None, True, [1.0]]),
    ("spans", ["spans"], [[], [[0, 1, 2]] * MAX_SPANS], [[[0, 1, 2]] * (MAX_SPANS + 1), 1, "ab"]),
    ("spans", ["spans", 0], [[0, 0, 0]], [[], [0, 1], 1.0, None]),
    ("spans", ["spans", 0, 0], [-1.5, 0], ["1", None, True, [1.0]]),
    ("spans", ["spans", 0, 2], [0, TOKEN_END - 1], NOT_A_LENGTH),
]


def frame_with(name: str, path: list[Any], value: Any) -> bytes:
    """The frame of a good message in which one field is another."""
    message: Any = msgspec.msgpack.decode(msgspec.msgpack.encode(GOOD[name]))
    inner = message
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    return msgspec.msgpack.encode({"type": TAGS.get(name, name)} | message)


@pytest.mark.parametrize(
    ("name", "path", "good", "bad"), BOUNDS, ids=lambda value: str(value)[:40].replace(" ", "")
)
def test_bounds_of_a_field(name: str, path: list[Any], good: list[Any], bad: list[Any]) -> None:
    ours = decode_to_drafter if TAGS.get(name, name) in ("hello", "update") else decode_to_verifier
    for value in good:
        assert is_valid(ours(frame_with(name, path, value)))
    for value in bad:
        with pytest.raises(ProtocolError):
            ours(frame_with(name, path, value))


def test_a_text_that_is_no_text_is_an_error() -> None:
    frame = encode(Refused("no"))
    assert frame.count(b"no") == 1
    for wrong in (b"\xff\xfe", b"\xed\xa0"):
        with pytest.raises(ProtocolError):
            decode_to_verifier(frame.replace(b"no", wrong))


@pytest.mark.parametrize("name", ["hello", "welcome", "refused"])
def test_a_missing_field_is_an_error(name: str) -> None:
    for field in GOOD[name]:
        message = {key: value for key, value in GOOD[name].items() if key != field}
        frame = msgspec.msgpack.encode({"type": name} | message)
        for decode in (decode_to_drafter, decode_to_verifier):
            with pytest.raises(ProtocolError):
                decode(frame)


def test_fields_of_a_later_version_are_skipped() -> None:
    frame = msgspec.msgpack.encode({"type": "refused", "reason": "no", "later": [1, {"a": 2}]})
    assert decode_to_verifier(frame) == Refused("no")


@pytest.mark.parametrize("opening", [b"\x91", b"\xdd\x00\x00\x00\x01", b"\x81\xa1a"])
@pytest.mark.parametrize("field", [b"\xa4open", b"\xa6drafts", b"\xa5later", b"\xa4type"])
def test_deep_nesting_is_an_error_and_no_crash(opening: bytes, field: bytes) -> None:
    for tag in (b"\xa6update", b"\xa6drafts"):
        check_decoders(b"\x82\xa4type" + tag + field + opening * 200_000)
        with pytest.raises(ProtocolError):
            decode_to_drafter(b"\x82\xa4type" + tag + field + opening * 200_000)


@pytest.mark.parametrize("announced", [b"\xdd\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"])
def test_a_length_that_is_only_announced_takes_no_memory(announced: bytes) -> None:
    for field in (b"\xa5close", b"\xa5later"):
        with pytest.raises(ProtocolError):
            decode_to_drafter(b"\x82\xa4type\xa6update" + field + announced)


SMALLEST = {
    "close": b"\x00",
    "open": b"\x92\x00\x90",
    "extend": b"\x94\x00\x00\x90\x00",
    "drafts": b"\x94\x00\x00\x90\x90",
    "lost": b"\x92\x00\xa0",
    "spans": b"\x93\x00\x00\x00",
    "tokens": b"\x00",
}


@pytest.mark.parametrize("field", SMALLEST)
def test_a_frame_takes_no_more_than_some_times_its_size_in_memory(field: str) -> None:
    """A small entry becomes an object of a hundred bytes: ten million of them would be a lot."""
    count = (protocol.MAX_FRAME_BYTES - 100) // len(SMALLEST[field])
    tag = b"\xa6drafts" if field in ("drafts", "lost", "spans") else b"\xa6update"
    entries = b"\xdd" + struct.pack(">I", count) + SMALLEST[field] * count
    name = bytes([0xA0 + len(field)]) + field.encode()
    if field == "tokens":
        name, entries = b"\xa4open", b"\x91\x92\x00" + entries
    frame = b"\x82\xa4type" + tag + name + entries
    assert len(frame) <= protocol.MAX_FRAME_BYTES
    tracemalloc.start()
    try:
        check_decoders(frame)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= 10 * len(frame)


def test_lists_are_as_long_as_the_drafter_has_sessions_for_a_verifier() -> None:
    most = list(range(protocol.MAX_ENTRIES))
    for update in (
        Update(most),
        Update([], [Open(number, []) for number in most]),
        Update([], [], [Extend(number, 1, [], 1) for number in most]),
    ):
        assert decode_to_drafter(encode(update)) == update
    answer = Drafts([Draft(n, 1, [], []) for n in most], [Lost(n, "") for n in most])
    assert decode_to_verifier(encode(answer)) == answer
    for longer in (Update([*most, 1]), Update([], [Open(1, [])] * (len(most) + 1))):
        with pytest.raises(ProtocolError):
            decode_to_drafter(encode(longer))


def test_the_largest_messages_are_no_larger_than_a_frame() -> None:
    many, far = 2 * protocol.MAX_ENTRIES, SESSION_END - 1
    opened = Open(far, [TOKEN_END - 1] * 600)
    extend = Extend(far, TOKEN_END - 1, [TOKEN_END - 1] * 300, MAX_DRAFT_TOKENS)
    sent = list(updates_of([far] * many, [opened] * many, [extend] * many))
    assert all(len(encode(update)) <= protocol.MAX_FRAME_BYTES for update in sent)
    assert len(sent) <= 10
    for kind in ("close", "open", "extend"):
        assert sum(len(getattr(update, kind)) for update in sent) == many
    longest = [TOKEN_END - 1] * MAX_DRAFT_TOKENS, [0.1] * MAX_DRAFT_TOKENS
    answer = Drafts([Draft(far, TOKEN_END - 1, *longest)] * protocol.MAX_ENTRIES)
    assert len(encode(answer)) <= protocol.MAX_FRAME_BYTES // 2


def test_an_oversized_frame_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = encode(Refused("no"))
    monkeypatch.setattr(protocol, "MAX_FRAME_BYTES", len(frame))
    assert decode_to_verifier(frame) == Refused("no")
    monkeypatch.setattr(protocol, "MAX_FRAME_BYTES", len(frame) - 1)
    with pytest.raises(ProtocolError, match=f"frame of {len(frame)} bytes, at most"):
        decode_to_verifier(frame)


def test_a_prompt_of_a_million_tokens_fits() -> None:
    frame = encode(Update(open=[Open(SESSION_END - 1, [TOKEN_END - 1] * 1_000_000)]))
    assert len(frame) <= protocol.MAX_FRAME_BYTES
    message = decode_to_drafter(frame)
    assert isinstance(message, Update)
    assert len(message.open[0].tokens) == 1_000_000

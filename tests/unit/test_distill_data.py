"""Questions, answers, batches: what a student learns from."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minedraft.config import ConfigError
from minedraft.distill import answers, batches
from minedraft.distill.answers import Answer
from minedraft.distill.questions import digest, questions
from minedraft.distill.recipe import Recipe, RunFolder

TOP = 3


def answer(question: int, sample: int, prompt: int, tokens: int) -> Answer:
    """With numbers that say where they belong."""
    rng = np.random.default_rng([question, sample])
    return Answer(
        question,
        sample,
        rng.integers(0, 99, prompt, np.int32),
        rng.integers(0, 99, tokens, np.int32),
        rng.integers(0, 99, (tokens, TOP), np.int32),
        np.log(rng.random((tokens, TOP), np.float32) / TOP),
    )


SIZES = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=30)


def of_sizes(sizes: list[tuple[int, int]]) -> list[Answer]:
    return [answer(index, 0, *size) for index, size in enumerate(sizes)]


def lines(file: Path, *entries: dict[str, Any]) -> str:
    file.write_text("\n".join(json.dumps(entry) for entry in entries))
    return str(file)


def recipe(**settings: Any) -> Recipe:
    return Recipe(**{"target": "t", "layers": (0,), "held_out": 1, **settings})


# --- questions ------------------------------------------------------------------------------------


def test_each_question_comes_once_and_the_first_files_are_held_out(tmp_path: Path) -> None:
    one = lines(tmp_path / "one.jsonl", *({"prompt": f"one {i % 5}"} for i in range(9)))
    two = lines(tmp_path / "two.jsonl", {"prompt": "two"}, {"prompt": "one 1"})
    found = questions(recipe(prompts=(one, two), held_out=2))
    texts = [question.messages[0].content for question in found]
    assert sorted(texts) == ["one 0", "one 1", "one 2", "one 3", "one 4", "two"]
    assert [question.held_out for question in found] == [True] * 2 + [False] * 4
    assert all(text.startswith("one") for text in texts[:2])


def test_the_seed_draws_and_most_cuts(tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", *({"prompt": str(i)} for i in range(50)))
    first = questions(recipe(prompts=(file,), max_prompts=20))
    assert len(first) == 20
    assert digest(first) == digest(questions(recipe(prompts=(file,), max_prompts=20)))
    assert digest(first) != digest(questions(recipe(prompts=(file,), max_prompts=20, seed=1)))


def test_a_transcript_is_a_question_with_its_answer(tmp_path: Path) -> None:
    talk = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    messages = [{"role": role, "content": text} for role, text in talk]
    file = lines(tmp_path / "a.jsonl", {"messages": messages}, {"messages": messages[:2]})
    last, first = questions(recipe(transcripts=(file,)))
    assert [m.content for m in last.messages] == ["a", "b", "c"]
    assert (last.answer, first.answer) == ("d", "b")


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        ({"messages": [{"role": "user", "content": "a"}]}, "line 1: does not end with an answer"),
        ({"prompt": "a"}, "line 1: .*messages"),
        ({"messages": [{"role": "user", "content": 1}]}, "line 1: .*messages"),
    ],
)
def test_a_transcript_that_is_none(entry: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", entry)
    with pytest.raises(ConfigError, match=complaint):
        questions(recipe(transcripts=(file,)))


def test_prompts_that_are_all_held_out_or_not_there(tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", {"prompt": "a"})
    with pytest.raises(ConfigError, match="smaller --held-out"):
        questions(recipe(prompts=(file,)))
    with pytest.raises(ConfigError, match="no conversations"):
        questions(recipe(prompts=(lines(tmp_path / "empty.jsonl"),)))
    with pytest.raises(ConfigError, match="No such file"):
        questions(recipe(transcripts=(str(tmp_path / "none.jsonl"),)))


# --- answers --------------------------------------------------------------------------------------


@given(st.lists(SIZES, min_size=1, max_size=4))
@settings(max_examples=30, deadline=None)
def test_answers_come_back_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, files: list[list[tuple[int, int]]]
) -> None:
    folder = tmp_path_factory.mktemp("answers")
    written = []
    for number, sizes in enumerate(files):
        some = [answer(index, number, *size) for index, size in enumerate(sizes)]
        answers.write(folder, some)
        written += some
    read = list(answers.read(folder))
    assert [(a.question, a.sample) for a in read] == [(a.question, a.sample) for a in written]
    for one, other in zip(read, written, strict=True):
        for name in ("prompt", "tokens", "top_ids", "top_logprobs"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    keys, tokens = answers.done(folder)
    assert keys == {(a.question, a.sample) for a in written}
    assert tokens == sum(len(a.tokens) for a in written)


def test_a_file_that_could_not_be_written_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="No space"):
        answers.write(tmp_path, of_sizes([(2, 2)]))
    assert not list(tmp_path.iterdir())


def test_the_tokens_that_the_loss_tells_apart_have_the_most_probability() -> None:
    ids = np.array([[1, 2], [2, 3]], np.int32)
    logprobs = np.log(np.array([[0.5, 0.3], [0.4, 0.1]], np.float32))
    known = [Answer(0, 0, ids[0], ids[0], ids, logprobs)]
    assert answers.likely_tokens(known, 2).tolist() == [1, 2]
    assert answers.likely_tokens(known, 1).tolist() == [2]
    assert answers.likely_tokens(known, 9).tolist() == [1, 2, 3]


# --- batches --------------------------------------------------------------------------------------


@given(SIZES, st.integers(1, 100), st.integers(0, 99))
def test_every_answer_is_in_one_batch_and_batches_are_not_too_large(
    sizes: list[tuple[int, int]], most: int, seed: int
) -> None:
    known = of_sizes(sizes)
    ordered = batches.order(known, most, random.Random(seed))
    assert sorted(index for batch in ordered for index in batch) == list(range(len(sizes)))
    for batch in ordered:
        width = max(sum(sizes[index]) for index in batch)
        assert len(batch) == 1 or len(batch) * width <= most
    assert ordered == batches.order(known, most, random.Random(seed))


@given(SIZES)
def test_positions_are_those_before_the_tokens_of_answers(sizes: list[tuple[int, int]]) -> None:
    known = of_sizes(sizes)
    batch = batches.make(known)
    assert batch.positions.sum() == len(batch.labels) == sum(batch.lengths)
    after = torch.zeros_like(batch.positions)
    after[:, 1:] = batch.positions[:, :-1]
    assert batch.input_ids[after].tolist() == batch.labels.tolist()
    assert batch.attention_mask.sum() == sum(prompt + tokens for prompt, tokens in sizes)
    assert batch.labels.tolist() == [t for a in known for t in a.tokens]


# --- recipes --------------------------------------------------------------------------------------


def test_a_run_goes_on_with_the_same_recipe_only(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.open(recipe(prompts=("a",)))
    RunFolder(tmp_path / "run").open(recipe(prompts=("a",)))
    with pytest.raises(ConfigError, match=r"other settings \(--epochs, --seed\)"):
        folder.open(recipe(prompts=("a",), seed=1, epochs=9))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(ConfigError, match="not empty"):
        RunFolder(tmp_path / "other").open(recipe(prompts=("a",)))


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({}, "--prompts"),
        ({"prompts": ("a",), "layers": ()}, "--student"),
        ({"prompts": ("a",), "student": "s"}, "one of"),
        ({"prompts": ("a",), "samples": -1}, "--samples: give 0 or more"),
        ({"prompts": ("a",), "learning_rate": 2.0}, "--learning-rate"),
        ({"prompts": ("a",), "lora_rank": 4}, "--lora-rank is for --student"),
    ],
)
def test_recipes_that_cannot_be_followed(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        recipe(**settings).check()

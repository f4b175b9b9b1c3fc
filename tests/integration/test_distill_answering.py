"""A tiny target answers, and judges answers that are there already, in vLLM."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import FLAGS
from transformers import AutoTokenizer

from minedraft.distill import answers
from minedraft.distill.answering import Answering
from minedraft.distill.answers import Answer
from minedraft.distill.messages import Job, Progress, Text
from minedraft.distill.questions import Message, Question
from minedraft.engine_options import parse_flags

TOP = 5
TEMPLATE = (
    "{% for message in messages %}{{ message.role[0] }}:{{ message.content }}"
    "{% if message.role == 'assistant' %}</s>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
"""A line for each message; what the assistant says ends with the token that ends a text."""
EOS = 2


@pytest.fixture(scope="module")
def talking(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target with a chat template."""
    folder = tmp_path_factory.mktemp("answering") / "target"
    shutil.copytree(tiny.target, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def run(model: Path, folder: Path, **job: Any) -> tuple[dict[tuple[int, int], Answer], Progress]:
    """What came, by question and number."""
    folder.mkdir()
    engine = parse_flags([*FLAGS, "--kv-cache-memory-bytes", "64M"], program="test")
    whole = Job(model=str(model), engine=engine, folder=str(folder), top=TOP, **job)
    *_, last = Answering(whole).run()
    assert last.ended
    found = list(answers.read(folder))
    assert last.answers == len(found)
    return {(answer.question, answer.sample): answer for answer in found}, last


def ask(*texts: str, answer: str | None = None) -> Question:
    roles = ("user", "assistant")
    said = tuple(Message(roles[number % 2], text) for number, text in enumerate(texts))
    return Question(said, answer)


def test_what_it_wrote_it_finds_as_likely_when_it_reads_it(talking: Path, tmp_path: Path) -> None:
    asked = [ask("hello"), ask("what now", "this", "and then")]
    wanted = [(0, 0), (1, 0), (0, 1), (1, 1)]
    written, _ = run(
        talking, tmp_path / "written", questions=asked, wanted=wanted, answer_tokens=20
    )
    assert written.keys() == set(wanted)
    for (_, sample), answer in written.items():
        assert answer.top_ids.shape == answer.top_logprobs.shape == (len(answer.tokens), TOP)
        assert (np.diff(answer.top_logprobs, axis=1) <= 1e-5).all()
        assert sample or answer.tokens.tolist() == answer.top_ids[:, 0].tolist()
    texts = [Text(*key, a.prompt.tolist(), a.tokens.tolist()) for key, a in written.items()]
    read, _ = run(talking, tmp_path / "read", texts=texts)
    assert read.keys() == written.keys()
    for key, answer in read.items():
        np.testing.assert_array_equal(answer.tokens, written[key].tokens)
        np.testing.assert_array_equal(answer.top_ids[:, 0], written[key].top_ids[:, 0])
        np.testing.assert_allclose(answer.top_logprobs, written[key].top_logprobs, atol=1e-3)


def test_a_transcript_is_read_to_the_end_of_its_answer(talking: Path, tmp_path: Path) -> None:
    asked = [ask("hello", answer="yes"), ask("a", "b", "c", answer="no."), ask("d", answer="d" * 9)]
    read, last = run(
        talking,
        tmp_path / "read",
        questions=asked,
        wanted=[(0, 0), (1, 0), (2, 0)],
        answer_tokens=6,
        max_prompt_tokens=60,
    )
    tokenizer = AutoTokenizer.from_pretrained(talking)
    encode = tokenizer.convert_tokens_to_ids
    assert read[0, 0].tokens.tolist() == [*encode(list("yes")), EOS]
    assert tokenizer.decode(read[1, 0].prompt) == tokenizer.apply_chat_template(
        [{"role": m.role, "content": m.content} for m in asked[1].messages],
        add_generation_prompt=True,
        tokenize=False,
    )
    assert read[2, 0].tokens.tolist() == encode(["d"] * 6)
    assert last.left_out == 0


def test_what_is_too_long_or_cannot_be_told_is_left_out_and_counted(
    talking: Path, tmp_path: Path
) -> None:
    rewriting = tmp_path / "rewriting"
    shutil.copytree(talking, rewriting)
    tokenizer = AutoTokenizer.from_pretrained(rewriting)
    tokenizer.chat_template = TEMPLATE.replace("a:{% endif %}", "a:b{% endif %}")
    tokenizer.save_pretrained(rewriting)
    asked = [ask("hello", answer="yes"), ask("x" * 50), ask("hello")]
    read, last = run(
        rewriting,
        tmp_path / "read",
        questions=asked,
        wanted=[(0, 0), (1, 0), (2, 0)],
        answer_tokens=6,
        max_prompt_tokens=40,
    )
    assert read.keys() == {(2, 0)}
    assert last.left_out == 2


def test_no_more_are_begun_than_the_tokens_that_are_wanted(talking: Path, tmp_path: Path) -> None:
    asked = [ask(f"number {number}") for number in range(60)]
    wanted = [(number, 0) for number in range(60)]
    _, last = run(
        talking,
        tmp_path / "read",
        questions=asked,
        wanted=wanted,
        answer_tokens=20,
        most_tokens=200,
    )
    assert 100 <= last.tokens <= 400

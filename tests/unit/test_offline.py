"""Files of prompts: what is wrong in a line is said with its number, before a model is loaded."""

import argparse
import json
from io import BytesIO, TextIOWrapper
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams

from minedraft import beside, offline
from minedraft.config import ConfigError
from minedraft.llm import LLM
from minedraft.offline import PromptLine, engine_prompt, generate, read_prompts, sampling_params


def write(folder: Path, *lines: str) -> Path:
    path = folder / "prompts.jsonl"
    path.write_bytes("\n".join(lines).encode())
    return path


def refusal(folder: Path, *lines: str) -> str:
    """What is said of the file, without its name."""
    path = write(folder, *lines)
    with pytest.raises(ConfigError) as raised:
        read_prompts(path)
    text = str(raised.value)
    assert "\n" not in text
    assert str(path) in text
    return text.replace(str(path), "FILE")


def test_the_three_kinds_of_prompts_are_read(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '{"prompt": "a"}',
        "",
        '  {"messages": [{"role": "user", "content": "b"}], "id": "x"}\r',
        "\t",
        '{"prompt_token_ids": [1, 2], "sampling": {"temperature": 0.5}, "id": 7}',
    )
    assert read_prompts(path) == [
        PromptLine(prompt="a"),
        PromptLine(messages=[{"role": "user", "content": "b"}], id="x"),
        PromptLine(prompt_token_ids=[1, 2], sampling={"temperature": 0.5}, id=7),
    ]


@given(st.lists(st.text(min_size=1), min_size=1, max_size=5), st.booleans())
def test_any_text_is_read_as_it_was_written(texts: list[str], ascii_only: bool) -> None:
    path = Path("prompts.jsonl")
    lines = [json.dumps({"prompt": text}, ensure_ascii=ascii_only) for text in texts]
    content = "\n".join(lines).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "open", _opens(content))
        assert [line.prompt for line in read_prompts(path)] == texts


def _opens(content: bytes) -> Any:
    def opened(self: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        return BytesIO(content) if "b" in mode else TextIOWrapper(BytesIO(content), "utf-8")

    return opened


GOOD = '{"prompt": "a"}'


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("prompt", "line 3: JSON is malformed"),
        ('{"prompt": "a"', "line 3: Input data was truncated"),
        ('["a"]', "line 3: Expected `object`, got `array`"),
        ('{"prompt": 5}', "line 3: Expected `str | null`, got `int` - at `$.prompt`"),
        ('{"promt": "a"}', "line 3: Object contains unknown field `promt`"),
        ('{"prompt": "a", "x\\ny": 1}', "line 3: Object contains unknown field `x"),
        ("{}", "line 3: give one of prompt, messages and prompt_token_ids"),
        ('{"prompt": "a", "messages": []}', "line 3: give one of prompt, messages"),
        ('{"prompt": ""}', "line 3: the prompt is empty"),
        ('{"messages": []}', "line 3: the prompt is empty"),
        ('{"prompt_token_ids": []}', "line 3: the prompt is empty"),
        ('{"prompt_token_ids": [-1]}', "line 3: Expected `int` >= 0"),
        ('{"prompt_token_ids": [1.5]}', "line 3: Expected `int`, got `float`"),
        ('{"prompt": "a", "sampling": []}', "line 3: Expected `object`, got `array`"),
        ('{"prompt": "a", "id": 1.5}', "line 3: Expected `int | str | null`, got `float`"),
        ('{"prompt": "a", "sampling": {"max_token": 5}}', "line 3: sampling: "),
        ('{"prompt": "a", "sampling": {"temperature": -1}}', "line 3: sampling: temperature must"),
        pytest.param('{"sampling": {"a": ' + "[" * 100_000, "line 3: maximum recursion", id="deep"),
    ],
)
def test_an_error_names_its_line(tmp_path: Path, line: str, says: str) -> None:
    assert says in refusal(tmp_path, GOOD, "", line)


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path, "", "  ") == "prompts file FILE: no prompts in it"
    with pytest.raises(ConfigError, match=r"prompts file .*none: .*No such file"):
        read_prompts(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"prompts file .*: .*Is a directory"):
        read_prompts(tmp_path)
    (tmp_path / "prompts.jsonl").write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(ConfigError, match=r"prompts file .*: .*can't decode"):
        read_prompts(tmp_path / "prompts.jsonl")


# --- sampling -------------------------------------------------------------------------------------


def sampling(fields: dict[str, Any], defaults: dict[str, Any] | None = None) -> SamplingParams:
    return sampling_params(PromptLine(prompt="a", sampling=fields), defaults or {}, "FILE, line 3")


def test_a_line_goes_before_the_models_defaults() -> None:
    params = sampling({"temperature": 0.5}, {"temperature": 0.1, "top_k": 7})
    assert (params.temperature, params.top_k) == (0.5, 7)
    assert params == SamplingParams(temperature=0.5, top_k=7)


def test_everything_that_vllm_takes_is_taken() -> None:
    fields: dict[str, Any] = {
        "n": 2,
        "temperature": 1,
        "top_p": 0.9,
        "seed": 3,
        "stop": ["x"],
        "stop_token_ids": [1],
        "max_tokens": 4,
        "logprobs": 2,
        "bad_words": ["y"],
        "extra_args": {"a": [1]},
    }
    assert sampling(fields) == SamplingParams(**fields)
    assert sampling({"stop": "x"}).stop == ["x"]
    schema = {"type": "object"}
    assert sampling({"structured_outputs": {"json": schema}}).structured_outputs.json == schema
    assert sampling({"logit_bias": {"5": 1.5}}).logit_bias == {5: 1.5}, "JSON has no other keys"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"temperature": -1}, "temperature must be non-negative"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": None}, "temperature"),
        ({"n": 0}, "n must be at least 1"),
        ({"n": 2.5}, "n"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"seed": "a"}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"ignore_eos": "yes"}, "ignore_eos"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"max_token": 5}, "max_token"),
        ({"structured_outputs": 5}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured outputs"),
        ({"structured_outputs": {"json": "{}", "regex": "a"}}, "structured outputs"),
        ({"structured_outputs": {"regex": 5}}, "regex"),
        ({"structured_outputs": {"choice": "ab"}}, "choice"),
        ({"structured_outputs": {"json": "{}", "sregex": "a"}}, "sregex"),
    ],
    ids=str,
)
def test_sampling_that_cannot_be_is_refused_in_one_line(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        sampling(fields)
    text = str(raised.value)
    assert text.startswith("FILE, line 3: sampling: ")
    assert says in text
    assert "\n" not in text
    assert "http" not in text


# --- before the models are loaded -----------------------------------------------------------------


def run(folder: Path, **changes: Any) -> argparse.Namespace:
    if not (folder / "prompts.jsonl").exists():
        write(folder, GOOD)
    options: dict[str, Any] = {
        "prompts": folder / "prompts.jsonl",
        "output": folder / "out.jsonl",
        "stats": None,
        "engine_flags": [],
    }
    return argparse.Namespace(**(options | changes))


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def loads(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr(offline, "LLM", loads)
    monkeypatch.setattr(offline, "_engine", loads, raising=False)


def test_mode_off_is_stock_vllm_and_says_what_it_leaves_unused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    started: list[Any] = []
    monkeypatch.setattr(beside.logger, "info", lambda text, *a: said.append(text % a))
    monkeypatch.setattr("vllm.LLM.__init__", lambda self, model, **o: started.append((model, o)))
    LLM("target", mode="off", draft_model="d", stats="s.json", seed=1)
    ((model, options),) = started
    assert (model, options["seed"]) == ("target", 1)
    assert "scheduler_cls" not in options
    assert said == ["MineDraft: off, so this is stock vLLM; unused: draft_model, stats"]


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize("name", ["output", "stats"])
def test_a_file_that_cannot_be_written_is_said_first(tmp_path: Path, name: str) -> None:
    for path, why in (
        (tmp_path, "directory"),
        (tmp_path / "none" / "out", "no folder|No such file"),
        (tmp_path / "prompts.jsonl" / "out", "no folder|Not a directory"),
    ):
        with pytest.raises(ConfigError, match=why) as raised:
            generate(run(tmp_path, **{name: path}))
        assert str(path) in str(raised.value)
        assert "\n" not in str(raised.value)


@pytest.mark.usefixtures("no_engine")
def test_answers_of_an_earlier_run_are_kept_until_there_are_new_ones(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text("answers")
    with pytest.raises(AssertionError, match="a model is loaded"):
        generate(run(tmp_path))
    assert (tmp_path / "out.jsonl").read_text() == "answers"


@pytest.mark.usefixtures("no_engine")
def test_wrong_sampling_is_said_first(tmp_path: Path) -> None:
    write(tmp_path, GOOD, "", '{"prompt": "a", "sampling": {"n": 0}}')
    with pytest.raises(ConfigError, match="prompts.jsonl, line 3: sampling: n must be"):
        generate(run(tmp_path))


# --- prompts and answers --------------------------------------------------------------------------


def test_messages_go_through_the_chat_template() -> None:
    messages = [{"role": "user", "content": "b"}]

    def template(given: Any, **kwargs: Any) -> list[int]:
        assert given == messages
        assert kwargs["add_generation_prompt"]
        return [1, 2]

    tokenizer = SimpleNamespace(apply_chat_template=template)
    prompt = engine_prompt(PromptLine(messages=messages), tokenizer)
    assert prompt == {"prompt_token_ids": [1, 2]}
    assert engine_prompt(PromptLine(prompt="a"), None) == {"prompt": "a"}
    assert engine_prompt(PromptLine(prompt_token_ids=[3]), None) == {"prompt_token_ids": [3]}


def test_answers_are_in_the_order_of_the_prompts_and_have_their_ids() -> None:
    def answer(token: int) -> SimpleNamespace:
        completion = SimpleNamespace(
            text=str(token),
            token_ids=[token],
            finish_reason="length",
            stop_reason=None,
            logprobs=[{token: SimpleNamespace(logprob=-0.5)}] if token else None,
        )
        return SimpleNamespace(prompt_token_ids=[9, 9], outputs=[completion])

    lines = [PromptLine(prompt="a"), PromptLine(prompt="b", id="x"), PromptLine(prompt="c", id=0)]
    first, second, third = offline.records(lines, [answer(0), answer(1), answer(2)])
    assert [first["id"], second["id"], third["id"]] == [0, "x", 0]
    assert [record["outputs"][0]["text"] for record in (first, second, third)] == ["0", "1", "2"]
    assert first["prompt_tokens"] == 2
    assert "logprobs" not in first["outputs"][0]
    assert second["outputs"][0]["logprobs"] == [{1: -0.5}]
    with pytest.raises(ValueError, match="zip"):
        list(offline.records(lines, [answer(0)]))

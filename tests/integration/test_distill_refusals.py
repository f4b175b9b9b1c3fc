"""What `minedraft distill` refuses before it begins, in one line."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from tiny import make_model

from minedraft.commands import distill
from minedraft.config import ConfigError


def distilled(*words: object) -> int:
    parser = argparse.ArgumentParser()
    distill.add(parser.add_subparsers())
    options, engine_flags = parser.parse_known_args(["distill", *map(str, words)])
    options.engine_flags = engine_flags
    return int(options.run(options))


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("refusals")
    lines = [json.dumps({"prompt": str(number)}) for number in range(99)]
    (root / "prompts.jsonl").write_text("\n".join(lines))
    (root / "empty.jsonl").touch()
    (root / "full").mkdir()
    (root / "full/file").touch()
    models = {
        "TARGET": make_model(root / "target", seed=1),
        "OTHER": make_model(root / "other", seed=1, vocab_size=128),
        "QUANTISED": make_model(root / "quantised", seed=1, quantization_config={"bits": 4}),
    }
    files = {"PROMPTS": "prompts.jsonl", "EMPTY": "empty.jsonl", "FULL": "full", "NONE": "none"}
    return {**models, **{name: root / file for name, file in files.items()}}


PROMPTS = ("--prompts", "PROMPTS")
ONE = (*PROMPTS, "--num-layers", 1)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--num-layers", 1), "--prompts FILE"),
        (PROMPTS, "--num-layers"),
        ((*ONE, "--layers", "0"), "one of --layers and --num-layers"),
        ((*PROMPTS, "--layers", "a"), "give numbers"),
        ((*PROMPTS, "--num-layers", 3), "give 1 to 2"),
        ((*PROMPTS, "--layers", "0,7"), "layers 0 to 1"),
        (("--prompts", "NONE", "--num-layers", 1), "No such file"),
        (("--prompts", "EMPTY", "--num-layers", 1), "no conversations"),
        ((*PROMPTS, "--student", "OTHER"), "tokenizer is not the target's"),
        ((*PROMPTS, "--student", "QUANTISED"), "cannot learn"),
        ((*PROMPTS, "--student", "NONE"), "no folder here"),
        ((*ONE, "--held-out", 999), "smaller --held-out"),
        ((*ONE, "--minutes", -1), "--minutes: give 0 or more"),
        ((*ONE, "--concurrency", 0), "--concurrency"),
        ((*ONE, "--answers-of", "NONE"), "no run that has all its answers"),
        ((*ONE, "--out", "FULL"), "not empty"),
        ((*ONE, "--drafter-cores", "77"), "77"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_is_said_in_one_line(
    places: dict[str, Path], tmp_path: Path, words: tuple[Any, ...], complaint: str
) -> None:
    named = [places.get(str(word), word) for word in words]
    with pytest.raises(ConfigError, match=complaint) as error:
        distilled(places["TARGET"], "--out", tmp_path / "run", *named)
    assert "\n" not in str(error.value)


def test_a_disk_without_room_is_found_before_the_work(
    places: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil
    from types import SimpleNamespace

    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    words = [places.get(str(word), word) for word in ONE]
    with pytest.raises(ConfigError, match="GB are needed and 0.0 GB are free"):
        distilled(places["TARGET"], "--out", tmp_path / "run", *words)

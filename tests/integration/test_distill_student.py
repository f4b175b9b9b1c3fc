"""Students of tiny targets: cut, taught, stopped, continued, saved."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import make_model
from transformers import AutoModelForCausalLM

from minedraft.config import ConfigError
from minedraft.distill import batches, checkpoint
from minedraft.distill.answers import Answer, likely_tokens
from minedraft.distill.quantise import quantise
from minedraft.distill.recipe import Recipe
from minedraft.distill.slicing import keep_layers
from minedraft.distill.student import Student
from minedraft.distill.training import State, Training

LAYERS = 4
TOP = 8


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With input embeddings that are, or are not, the output layer."""
    folder = tmp_path_factory.mktemp("distill") / "target"
    make_model(folder, seed=1, layers=LAYERS, tie_word_embeddings=request.param)
    (folder / "README.md").write_text("of the target")
    return folder


@pytest.fixture(scope="module")
def known(target: Path) -> list[Answer]:
    """What the target says to random prompts, and finds likely at each token."""
    model = load(target)
    rng = np.random.default_rng(0)
    found = []
    for number in range(24):
        prompt = rng.integers(3, 64, rng.integers(3, 9))
        ids = torch.tensor(prompt)[None]
        whole = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
        tokens = whole[0, len(prompt) :]
        with torch.no_grad():
            logits = model(whole).logits[0, len(prompt) - 1 : -1]
        logprobs, top = torch.log_softmax(logits, dim=1).topk(TOP)
        asked = prompt.astype(np.int32)
        said, likely = (x.numpy().astype(np.int32) for x in (tokens, top))
        found.append(Answer(number, 0, asked, said, likely, logprobs.numpy()))
    return found


def cut(target: Path, folder: Path, layers: tuple[int, ...] = (0, 3)) -> Path:
    keep_layers(target, folder, layers)
    return folder


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logits_of(model: Any) -> torch.Tensor:
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        found: torch.Tensor = model(ids).logits
    return found


def recipe(**settings: Any) -> Recipe:
    common = {"target": "t", "prompts": ("p",), "layers": (0,), "batch_tokens": 64, "epochs": 3}
    return Recipe(**{**common, **settings})


# --- slices ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [(0,), (0, 3), (2, 1, 0)], ids=str)
def test_a_slice_computes_what_these_layers_of_the_target_do(
    target: Path, tmp_path: Path, layers: tuple[int, ...]
) -> None:
    model = load(target)
    kept = [model.model.layers[index] for index in layers]
    for number, layer in enumerate(kept):
        layer.self_attn.layer_idx = number
    model.model.layers = torch.nn.ModuleList(kept)
    model.config.num_hidden_layers = len(kept)
    slice_ = load(cut(target, tmp_path / "slice", layers))
    assert slice_.config.num_hidden_layers == len(layers)
    assert not (tmp_path / "slice/README.md").exists()
    torch.testing.assert_close(logits_of(slice_), logits_of(model))


@pytest.mark.parametrize("layers", [(), (0, 0), (LAYERS,), (-1,)], ids=str)
def test_layers_that_are_not_there(target: Path, tmp_path: Path, layers: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="layers 0 to 3"):
        keep_layers(target, tmp_path / "slice", layers)
    assert not (tmp_path / "slice").exists()


def test_so_many_layers_are_the_first_and_the_last() -> None:
    assert checkpoint.outer_layers(30, 1) == (0,)
    assert checkpoint.outer_layers(30, 5) == (0, 1, 2, 28, 29)
    for total in range(1, 40):
        for count in range(1, total + 1):
            outer = checkpoint.outer_layers(total, count)
            assert len(outer) == count
            assert list(outer) == sorted(set(outer) & set(range(total)))
    with pytest.raises(ConfigError, match="1 to 3"):
        checkpoint.outer_layers(3, 4)


# --- the head -------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"train_embeddings": True}], ids=["frozen", "learning"])
def test_logits_are_those_of_the_model_where_the_loss_looks(
    target: Path, known: list[Answer], settings: dict[str, Any]
) -> None:
    tokens = likely_tokens(known, 40)
    student = Student(target, recipe(**settings), tokens)
    batch = batches.make(known[:3])
    student.head.positions = batch.positions
    found = student.module(batch.input_ids, attention_mask=batch.attention_mask).logits
    model = load(target)
    for row, answer in enumerate(known[:3]):
        ids = torch.tensor(np.concatenate([answer.prompt, answer.tokens]))[None].long()
        whole = model(ids).logits[0, len(answer.prompt) - 1 : -1]
        start = sum(batch.lengths[:row])
        mine = found[start : start + len(answer.tokens)]
        columns = student.columns[torch.from_numpy(tokens).long()]
        torch.testing.assert_close(mine[:, columns], whole[:, tokens], rtol=1e-3, atol=1e-3)


def test_what_is_frozen_stays_and_all_else_learns(
    target: Path, known: list[Answer], tmp_path: Path
) -> None:
    folder = cut(target, tmp_path / "slice")
    student = Student(folder, recipe(), likely_tokens(known, 40))
    train(student, known, tmp_path)
    student.save(tmp_path / "saved", torch.float32)
    before, after = (load(path).state_dict() for path in (folder, tmp_path / "saved"))
    assert before.keys() == after.keys()
    for name in before:
        is_frozen = "embed_tokens" in name or "lm_head" in name
        assert torch.equal(before[name], after[name]) == is_frozen, name


def test_adapters_are_merged_into_what_is_saved(
    target: Path, known: list[Answer], tmp_path: Path
) -> None:
    student = Student(target, recipe(layers=(), student="s", lora_rank=2), None)
    train(student, known, tmp_path, recipe(layers=(), student="s", lora_rank=2, epochs=1))
    batch = batches.make(known[:3])
    student.head.positions = None
    expected = student.module(batch.input_ids, attention_mask=batch.attention_mask).logits
    student.save(tmp_path / "saved", torch.float32)
    model = load(tmp_path / "saved")
    assert not any("lora" in name for name in model.state_dict())
    found = model(batch.input_ids, attention_mask=batch.attention_mask).logits
    mask = batch.attention_mask.bool()
    torch.testing.assert_close(found[mask], expected[mask], rtol=1e-3, atol=1e-3)
    assert not torch.equal(logits_of(model), logits_of(load(target)))


# --- training -------------------------------------------------------------------------------------


def train(
    student: Student,
    known: list[Answer],
    folder: Path,
    settings: Recipe | None = None,
    is_to_stop: Callable[[State], bool] = lambda _: False,
    minutes: float = 0.0,
) -> tuple[list[dict[str, Any]], bool]:
    """What it logged, and whether it came to its end."""
    log: list[dict[str, Any]] = []
    training = Training(
        student,
        settings or recipe(),
        minutes,
        known[4:],
        known[:4],
        folder / "checkpoint",
        lambda **event: log.append(event),
    )
    ended = training.run(lambda: is_to_stop(training.state))
    return log, ended


def weights(student: Student) -> dict[str, torch.Tensor]:
    return {name: w.detach().clone() for name, w in student.module.named_parameters()}


def test_a_student_comes_nearer_to_its_target(
    target: Path, known: list[Answer], tmp_path: Path
) -> None:
    folder = cut(target, tmp_path / "slice")
    student = Student(folder, recipe(), None)
    log, ended = train(student, known, tmp_path, recipe(epochs=12, learning_rate=3e-3))
    assert ended
    looks = [event for event in log if event["event"] == "look"]
    assert looks[-1]["divergence"] < looks[0]["divergence"]
    assert looks[-1]["agreement_sampled"] is None, "all these answers are greedy"
    steps = [event for event in log if event["event"] == "step"]
    assert steps[-1]["divergence"] < 0.5 * steps[0]["divergence"]
    assert steps[-1]["share"] == 1.0
    assert steps[-1]["tokens"] == 12 * sum(len(answer.tokens) for answer in known[4:])


@pytest.mark.parametrize(
    ("at", "settings"),
    [(1, {}), (15, {}), (2, {"train_embeddings": True}), (2, {"lora_rank": 2})],
    ids=["soon", "in a later epoch", "embeddings", "adapters"],
)
def test_who_was_stopped_ends_where_he_would_have_ended(
    target: Path, known: list[Answer], tmp_path: Path, at: int, settings: dict[str, Any]
) -> None:
    folder = cut(target, tmp_path / "slice")
    given = recipe(**settings)

    def begin() -> Student:
        torch.manual_seed(0)
        return Student(folder, given, None)

    whole = begin()
    train(whole, known, tmp_path / "whole", given)
    steps = 0

    def stop(_: State) -> bool:
        nonlocal steps
        steps += 1
        return steps > at

    stopped = begin()
    _, ended = train(stopped, known, tmp_path / "parts", given, is_to_stop=stop)
    assert not ended
    assert any(not torch.equal(w, weights(stopped)[n]) for n, w in weights(whole).items())
    continued = begin()
    log, ended = train(continued, known, tmp_path / "parts", given)
    assert ended
    assert log[0]["event"] == "step"  # the look at the beginning was had
    for name, weight in weights(whole).items():
        torch.testing.assert_close(weights(continued)[name], weight, rtol=0, atol=0)


def test_a_checkpoint_that_was_being_replaced_is_not_lost(
    target: Path, known: list[Answer], tmp_path: Path
) -> None:
    student = Student(target, recipe(), None)
    train(student, known, tmp_path)
    checkpoint_ = tmp_path / "checkpoint"
    shutil.move(checkpoint_, tmp_path / "checkpoint.old")  # killed between the two renames
    (tmp_path / "checkpoint.unfinished").mkdir()
    log, ended = train(Student(target, recipe(), None), known, tmp_path)
    assert ended
    assert not log


def test_minutes_end_it_and_the_rate_falls_to_nothing_by_then(
    target: Path, known: list[Answer], tmp_path: Path
) -> None:
    settings = recipe(epochs=100_000)
    log, ended = train(Student(target, settings, None), known, tmp_path, settings, minutes=0.05)
    assert ended
    steps = [event for event in log if event["event"] == "step"]
    assert steps[-1]["share"] == 1.0
    rates = [event["rate"] for event in steps]
    assert max(rates) > 0.9 * settings.learning_rate
    assert rates[-1] < 0.2 * max(rates)
    assert 3 <= steps[-1]["seconds"] < 10


def test_a_disk_that_is_full_is_an_error_of_the_system(
    target: Path, known: list[Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate import Accelerator
    from safetensors import SafetensorError

    def full(*_: Any, **__: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device")

    monkeypatch.setattr(Accelerator, "save_state", full)
    with pytest.raises(OSError, match="No space left"):
        train(Student(target, recipe(), None), known, tmp_path)


# --- eight bits -----------------------------------------------------------------------------------


def test_eight_bits_are_an_eighth_of_a_per_cent_away_or_so(target: Path, tmp_path: Path) -> None:
    quantise(target, tmp_path / "int8", "int8")
    from safetensors.torch import load_file

    whole = load_file(target / "model.safetensors")
    small = load_file(tmp_path / "int8/model.safetensors")
    quantised = [name for name in small if f"{name}_scale" in small]
    assert len(quantised) == 7 * LAYERS
    for name in quantised:
        assert small[name].dtype == torch.int8
        back = small[name].float() * small[f"{name}_scale"].float()
        assert (back - whole[name]).abs().max() <= 0.51 * small[f"{name}_scale"].float().max()
    for name in set(whole) - set(quantised):
        assert torch.equal(whole[name], small[name])
    assert (tmp_path / "int8/tokenizer.json").exists()

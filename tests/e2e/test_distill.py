"""`minedraft distill` as a user types it: a tiny student for a tiny target."""

import json
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from commands import DRAFTER_FLAGS, FLAGS, command, environment, run
from tiny import CHARACTERS, make_model

from minedraft.distill import answers

OPTIONS = (
    *("--num-layers", 1, "--held-out", 8, "--answer-tokens", 32, "--learning-rate", 3e-3),
    *("--batch-tokens", 512, "--epochs", 30),
)
NUM_ANSWERS = 400
"""A greedy one and a sampled one to each prompt."""
RUN_FLAGS = [*FLAGS, "--kv-cache-memory-bytes", "64M"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its layers do little beside what a token is, so that one layer can learn of two."""
    folder = tmp_path_factory.mktemp("distill") / "target"
    return make_model(folder, seed=5, layers=2, weight_std=0.1)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rng = random.Random(0)
    lines = [{"prompt": "".join(rng.choices(CHARACTERS, k=12))} for _ in range(200)]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    file = folder / "log.jsonl"
    text = file.read_text() if file.exists() else ""
    found = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
    return [event for event in found if event["event"] == kind]


def broken_off(out: Path, event: str, words: tuple[Any, ...], by: signal.Signals) -> str:
    """Starts a run, and ends it when it has logged the event; what it said."""
    with subprocess.Popen(
        command(*words, *RUN_FLAGS),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        deadline = time.monotonic() + 300
        while not events(out, event) and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(by)
        said, _ = process.communicate(timeout=60)
    assert process.returncode == (130 if by is signal.SIGINT else -by), said
    return said


def test_a_drafter_is_made_although_its_training_is_broken_off(
    target: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    (target / "README.md").write_text("of the target")
    words = ("distill", target, "--prompts", prompts, "--out", out, *OPTIONS, "--no-run")
    assert "goes on from here" in broken_off(out, "step", words, signal.SIGINT)
    taught = len(events(out, "step"))
    done = run(*words, *RUN_FLAGS)
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
    tokens = [event["tokens"] for event in events(out, "step")]
    assert tokens == sorted(set(tokens))
    assert len(tokens) > taught
    looks = events(out, "look")
    assert looks[-1]["agreement"] > looks[0]["agreement"] + 0.1
    evaluation = json.loads((out / "evaluation.json").read_text())
    greedy = evaluation["greedy"]
    assert greedy["answers"] == evaluation["sampled"]["answers"] == 8
    # vLLM loaded it, and finds what the training saw.
    assert greedy["agreement"] == pytest.approx(looks[-1]["agreement"], abs=0.03)
    sampled = evaluation["sampled"]["agreement"]
    assert sampled == pytest.approx(looks[-1]["agreement_sampled"], abs=0.03)
    assert 1.2 < greedy["tokens_per_verification"][3] <= 5
    card = (out / "drafter/README.md").read_text()
    assert "minedraft distill" in card
    assert "tokens per verification" in card
    assert (out / "evaluation-drafts.svg").exists()


@pytest.mark.slow
def test_answers_that_were_written_are_not_asked_for_again(
    target: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    words = ("distill", target, "--prompts", prompts, "--out", out, *OPTIONS, "--no-run")
    broken_off(out, "answers", words, signal.SIGKILL)
    first = len(list(answers.read(out / "answers")))
    assert 0 < first < NUM_ANSWERS
    assert run(*words, *RUN_FLAGS).returncode == 0
    keys = [(answer.question, answer.sample) for answer in answers.read(out / "answers")]
    assert len(keys) == len(set(keys)) == NUM_ANSWERS
    again = run(*words, *RUN_FLAGS)
    assert again.returncode == 0
    assert "is finished" in again.stdout


@pytest.mark.slow
@pytest.mark.parametrize("quantise", [(), ("--quantise", "int8")], ids=["whole", "int8"])
def test_the_run_in_the_end_accepts_what_the_text_promised(
    target: Path, prompts: Path, tmp_path: Path, quantise: tuple[str, ...]
) -> None:
    out = tmp_path / "run"
    done = run(
        *("distill", target, "--prompts", prompts, "--out", out, *OPTIONS, *quantise),
        f"--drafter-args={DRAFTER_FLAGS} --kv-cache-memory-bytes 64M",
        *RUN_FLAGS,
    )
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
    evaluation = json.loads((out / "evaluation.json").read_text())
    machine = evaluation["machine"]
    assert set(machine["overlap_tokens_per_s"]) == {"1", "2", "4", "8"}
    # Of 8 requests in the run, of all that are held out on text.
    for k, emitted in machine["tokens_per_verification"].items():
        on_text = evaluation["greedy"]["tokens_per_verification"][int(k) - 1]
        assert emitted == pytest.approx(on_text, rel=0.35), k
    if quantise:
        whole = evaluation["unquantised"]["greedy"]["agreement"]
        assert evaluation["greedy"]["agreement"] == pytest.approx(whole, abs=0.1)
    assert "expected tokens/s" in (out / "drafter/README.md").read_text()

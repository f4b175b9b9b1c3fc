"""The commands as a user types them: real processes, sockets and engines, tiny models."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from commands import DRAFTER_FLAGS, FLAGS, command, environment, run
from tiny import MAMBA, make_model, make_tokenizer

START_S = 150.0


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plain, chat and token prompts with sampling options of their own."""
    greedy = {"temperature": 0, "max_tokens": 200, "ignore_eos": True}
    lines: list[dict[str, Any]] = [
        {"prompt": f"prompt number {i} " * (i + 1), "sampling": greedy} for i in range(5)
    ]
    lines.append(
        {"messages": [{"role": "user", "content": "a chat"}], "sampling": greedy, "id": "chat"}
    )
    lines.append({"prompt_token_ids": [5, 6, 7], "sampling": {"temperature": 1, "seed": 1}})
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


@pytest.fixture(scope="module")
def plain(tiny: Any, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What stock vLLM answers."""
    output = tmp_path_factory.mktemp("plain") / "out.jsonl"
    done = run(
        "generate", tiny.target, "--mode", "off", "--prompts", prompts, "--output", output, *FLAGS
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return answers(output)


def answers(output: Path) -> list[Any]:
    return [json.loads(line) for line in output.read_text().splitlines()]


def children(marker: str) -> list[psutil.Process]:
    """Processes with this text on their command line."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(marker in word for word in process.info["cmdline"] or ())
    ]


def generate_with_child(tiny: Any, prompts: Path, folder: Path, *flags: str, **env: str) -> Any:
    output, stats = folder / "out.jsonl", folder / "stats.json"
    done = run(
        *("generate", tiny.target, "--draft-model", tiny.perturbed, "--prompts", prompts),
        *("--output", output, "--stats", stats, "--num-speculative-tokens", 3, *FLAGS),
        *("--drafter-args", DRAFTER_FLAGS, "--mode", "overlap", *flags),
        **env,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert not children(str(tiny.perturbed)), "the drafter outlived its verifier"
    written = json.loads(stats.read_text())
    assert written["drafter"]["disconnects"] == 0, "the verifier outlived its drafter"
    return answers(output), written


def test_generate_with_a_drafter_of_its_own(
    tiny: Any, prompts: Path, plain: list[Any], tmp_path: Path
) -> None:
    found, stats = generate_with_child(tiny, prompts, tmp_path)
    assert found == plain
    assert found[5]["id"] == "chat"
    assert stats["accepted"] > 0
    assert stats["tokens_per_verification"] > 1.2
    assert stats["drafter"]["drafter_busy_s"] > 0


@pytest.mark.slow
def test_generate_with_tensor_parallel_workers_in_processes_of_their_own(
    tiny: Any, prompts: Path, plain: list[Any], tmp_path: Path
) -> None:
    found, stats = generate_with_child(
        tiny,
        prompts,
        tmp_path,
        *("--tensor-parallel-size", "2", "--drafter-cores", "1", "--mode", "sequential"),
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
        VLLM_CPU_OMP_THREADS_BIND="0|1",
    )
    assert found == plain
    assert stats["accepted"] > 0


@contextmanager
def drafter(model: Path, address: str, *flags: object) -> Iterator[subprocess.Popen[str]]:
    """A drafter that runs alone, from when it is ready."""
    process = subprocess.Popen(
        command("drafter", model, "--listen", address, *DRAFTER_FLAGS.split(), *flags),
        env=environment(),
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


@pytest.mark.slow  # test_transport.py has TCP with keys, test_serve.py two servers on one drafter
def test_two_verifiers_on_one_drafter_over_tcp(
    tiny: Any, prompts: Path, plain: list[Any], tmp_path: Path
) -> None:
    address, key = "tcp://127.0.0.1:28471", tmp_path / "key"
    with drafter(tiny.perturbed, address, "--key-file", key, "--cores", "1"):
        while not key.exists():
            time.sleep(0.1)
        runs = []
        for index in range(2):
            output, stats = tmp_path / f"out{index}", tmp_path / f"stats{index}"
            words: list[Any] = ["generate", tiny.target, "--drafter", address, "--key-file", key]
            words += ("--prompts", prompts, "--output", output, "--stats", stats, *FLAGS)
            words += ("--mode", "overlap")
            process = subprocess.Popen(
                command(*words), env=environment(), stderr=subprocess.PIPE, text=True
            )
            runs.append((process, output, stats))
        for process, output, stats in runs:
            _, errors = process.communicate(timeout=400)
            assert process.returncode == 0, errors[-2000:]
            assert answers(output) == plain
            assert json.loads(stats.read_text())["accepted"] > 0


@pytest.mark.parametrize("own_process", [pytest.param("0", marks=pytest.mark.slow), "1"])
def test_nothing_outlives_a_parent_that_is_killed(
    tiny: Any, tmp_path: Path, own_process: str
) -> None:
    script = tmp_path / "parent.py"
    script.write_text(f"""
import time
from minedraft import LLM

if __name__ == "__main__":
    llm = LLM({str(tiny.target)!r}, draft_model={str(tiny.perturbed)!r}, dtype="float32",
              enforce_eager=True, max_model_len=512, block_size=32,
              drafter_args={DRAFTER_FLAGS!r})
    print("ready", flush=True)
    time.sleep(600)
""")
    parent = subprocess.Popen(
        [sys.executable, script],
        env=environment(VLLM_ENABLE_V1_MULTIPROCESSING=own_process),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    try:
        assert any(line.startswith("ready") for line in parent.stdout)
        family = psutil.Process(parent.pid).children(recursive=True)
        assert len(family) >= 1 + 2 * int(own_process)
    finally:
        parent.kill()
        parent.wait()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive


def refused(*words: object, **variables: str) -> str:
    """The one line with which a command refuses."""
    done = run(*words, **variables)
    assert done.returncode == 2, done.stderr[-2000:]
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("minedraft: ")]
    return line


def test_a_drafter_of_another_vocabulary_is_refused(
    tiny: Any, prompts: Path, tmp_path: Path
) -> None:
    other = make_model(tmp_path / "other", seed=9)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    line = refused(
        *("generate", tiny.target, "--draft-model", other, "--prompts", prompts),
        *("--output", tmp_path / "out", *FLAGS, "--drafter-args", DRAFTER_FLAGS),
    )
    assert "tokenizer is not the target's" in line


@pytest.mark.slow
def test_a_vocabulary_padded_otherwise_is_no_difference(
    tiny: Any, prompts: Path, plain: list[Any], tmp_path: Path
) -> None:
    padded = make_model(tmp_path / "padded", seed=9, vocab_size=96)
    make_tokenizer(64).save_pretrained(padded)
    output, stats = tmp_path / "out.jsonl", tmp_path / "stats.json"
    done = run(
        *("generate", tiny.target, "--draft-model", padded, "--prompts", prompts, *FLAGS),
        *("--output", output, "--stats", stats, "--drafter-args", DRAFTER_FLAGS),
        *("--mode", "overlap"),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert answers(output) == plain
    assert json.loads(stats.read_text())["drafted"] > 0


@pytest.mark.slow
def test_a_drafter_that_cannot_roll_back_is_refused(
    tiny: Any, prompts: Path, tmp_path: Path
) -> None:
    mamba = tmp_path / "mamba"
    make_tokenizer(64).save_pretrained(mamba)
    (mamba / "config.json").write_text(json.dumps(MAMBA))
    line = refused(
        *("generate", tiny.target, "--draft-model", mamba, "--prompts", prompts),
        *("--output", tmp_path / "out", *FLAGS, "--drafter-args", "--load-format dummy"),
    )
    assert "cannot take back tokens" in line


@pytest.mark.slow  # test_refusals.py has the rules
def test_refusals_come_before_a_model_is_loaded(tiny: Any, prompts: Path, tmp_path: Path) -> None:
    words = ("generate", tiny.target, "--prompts", prompts, "--output", tmp_path / "out", *FLAGS)
    line = refused(*words, "--draft-model", tiny.perturbed, "--pipeline-parallel-size", "2")
    assert "pipeline parallelism" in line
    line = refused(*words, "--mode", "off", "--max-model-len", "100000")
    assert "100000" in line
    line = refused("generate", tmp_path / "nothing", *words[2:], "--mode", "off")
    assert "nothing" in line
    line = refused(*words, "--drafter", "tcp://127.0.0.1:1")
    assert "--key-file" in line

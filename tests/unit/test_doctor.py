"""Each finding of `minedraft doctor` can be provoked, and says what to do."""

import json
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tiny import MAMBA, make_model, make_tokenizer

from minedraft import cli, devices, doctor, doctor_models, protocol, weights
from minedraft.config import ConfigError, Endpoint
from minedraft.doctor import Check, Finding, Subject, attempt, examine
from minedraft.drafter.child import DrafterError, NoDrafterError
from minedraft.verifier import contract, runner_choice

GIB = 1 << 30
ELSEWHERE = Endpoint("ipc:///nowhere/drafter")


def only(check: Check, subject: Subject | None = None) -> Finding:
    """The one finding of a check; what is not ok comes with advice."""
    (finding,) = attempt(check, subject or Subject())
    assert finding.check == check.__name__
    assert bool(finding.advice) == (finding.state != "ok"), finding
    return finding


@pytest.fixture
def mamba(tmp_path: Path) -> Path:
    folder = tmp_path / "mamba"
    make_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(MAMBA))
    return folder


# --- findings -------------------------------------------------------------------------------------


def test_a_check_that_fails_is_a_finding() -> None:
    def crash(_: Subject) -> Iterator[Finding]:
        yield Finding("crash", "ok", "before")
        raise KeyError("what\nis this")

    def leave(_: Subject) -> Iterator[Finding]:
        yield from ()
        raise SystemExit(2)

    before, found = attempt(crash, Subject())
    assert before.state == "ok"
    assert (found.check, found.state) == ("crash", "problem")
    assert "KeyError" in found.found
    assert "\n" not in found.found
    assert only(leave).state == "problem"


@pytest.mark.parametrize(
    ("error", "found", "advice"),
    [
        (ConfigError("a; b: c; do this"), "a; b: c", "do this"),
        (DrafterError("it fell; lift it"), "it fell", "lift it"),
        (contract.ContractError("hooks:\n  one\nget another"), "hooks:\n  one", "get another"),
        (ConfigError("only what is wrong"), "only what is wrong", ""),
    ],
)
def test_errors_of_ours_say_what_to_do(error: Exception, found: str, advice: str) -> None:
    def check(_: Subject) -> Iterator[Finding]:
        yield from ()
        raise error

    assert attempt(check, Subject()) == [Finding("check", "problem", found, advice)]


def test_models_are_examined_only_where_they_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    def good(_: Subject) -> Iterator[Finding]:
        yield Finding("good", "ok", "")

    def bad(_: Subject) -> Iterator[Finding]:
        yield Finding("bad", "problem", "", "mend it")

    monkeypatch.setattr(doctor_models, "CHECKS", [good])
    monkeypatch.setattr(doctor, "CHECKS", [good])
    assert [f.check for f in examine(Subject())] == ["good"]
    assert [f.check for f in examine(Subject("model"))] == ["good", "vllm_import", "good"]
    monkeypatch.setattr(doctor, "CHECKS", [good, bad])
    assert [f.check for f in examine(Subject("m"))] == ["good", "bad", "vllm_import", "good"]
    monkeypatch.setattr(doctor, "NEEDED_BY_VLLM", (bad,))
    assert [f.check for f in examine(Subject("model"))] == ["good", "bad", "models"]


def test_a_vllm_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise OSError(f"libcudart.so is missing, so no {name}")

    monkeypatch.setattr(doctor, "CHECKS", [])
    monkeypatch.setattr("importlib.import_module", fail)
    (finding,) = examine(Subject("model"))
    assert (finding.check, finding.state) == ("vllm_import", "problem")
    assert "libcudart" in finding.found


# --- the machine ----------------------------------------------------------------------------------


def test_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(contract.installed_version()) in only(doctor.vllm).found
    monkeypatch.setattr(contract, "installed_version", lambda: "0.31.0")
    found = only(doctor.vllm)
    assert "0.31.0" in found.found
    assert "pip install" in found.advice
    monkeypatch.setattr(contract, "find_spec", lambda name: None)
    (missing,) = attempt(doctor.vllm, Subject())
    assert missing.found.startswith("vLLM is not installed: pip install")


def test_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "NVIDIA", tmp_path / "none")
    monkeypatch.setattr(doctor, "version", lambda name: "2.13.0+cpu")
    assert only(doctor.torch).found == "2.13.0+cpu"
    monkeypatch.setattr(doctor, "NVIDIA", tmp_path)
    assert only(doctor.torch).state == "warning"
    monkeypatch.setattr(doctor, "version", lambda name: "2.13.0+cu130")
    assert only(doctor.torch).state == "ok"

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "version", missing)
    assert "not installed" in only(doctor.torch).found


def test_companions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = ("companion_that_loads", "companion_that_breaks")
    monkeypatch.setattr(doctor, "COMPANIONS", names)
    assert "none" in only(doctor.companions).found
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / f"{names[0]}.py").write_text("")
    assert names[0] in only(doctor.companions).found
    (tmp_path / f"{names[1]}.py").write_text("raise RuntimeError('no operator nms\\nmore')")
    found = only(doctor.companions)
    assert (found.state, found.found) == ("problem", f"{names[1]} does not load: no operator nms")
    assert f"pip uninstall {names[1]}" in found.advice


def test_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "visible_gpus", list)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setenv("LD_PRELOAD", "/lib/other.so:/lib/libiomp5.so")
    found = only(doctor.openmp)
    assert found.state == "ok"
    assert found.found.startswith("/lib/libiomp5.so is preloaded")
    monkeypatch.delenv("LD_PRELOAD")
    assert "pip install intel-openmp" in only(doctor.openmp).advice
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert attempt(doctor.openmp, Subject()) == []


@pytest.mark.parametrize(
    ("gpus", "cores", "state", "says"),
    [
        ([], {0, 1}, "ok", "target on CPU 0, drafter on CPU 1"),
        ([], {0}, "problem", "no core is left for the drafter"),
        (["0", "1"], {0}, "ok", "drafter on GPU 1"),
        (["3"], {0, 1}, "problem", "takes all 1 visible GPUs"),
    ],
)
def test_placement(
    monkeypatch: pytest.MonkeyPatch, gpus: list[str], cores: set[int], state: str, says: str
) -> None:
    monkeypatch.setattr(devices, "visible_gpus", lambda: gpus)
    monkeypatch.setattr(devices, "available_cores", lambda: cores)
    found = only(doctor.placement)
    assert found.state == state
    assert says in found.found
    assert only(doctor.placement, Subject("t", drafter=ELSEWHERE)).state == "ok"


# --- models ---------------------------------------------------------------------------------------


def test_a_pair_that_works(tiny: Any) -> None:
    subject = Subject(str(tiny.target), str(tiny.perturbed))
    for check in (doctor_models.target, doctor_models.draft_model, doctor_models.tokens):
        assert only(check, subject).state == "ok"
    of_target, of_drafter = attempt(doctor_models.runner, subject)
    assert of_target.found == f"target: {runner_choice.describe(subject.target_config)}"
    assert of_drafter.found.startswith(f"drafter: {runner_choice.runner(subject.draft_config)}, ")
    assert (of_target.state, of_drafter.state) == ("ok", "ok")
    assert attempt(doctor_models.runner, Subject("target")) == [], "no models were made yet"


def test_targets_that_cannot_be_served(tmp_path: Path, mamba: Path) -> None:
    found = only(doctor_models.target, Subject(str(mamba)))
    assert "hybrid and Mamba" in found.found
    assert "--mode off" in found.advice
    (missing,) = attempt(doctor_models.target, Subject(str(tmp_path / "nothing")))
    assert missing.state == "problem"
    assert "nothing" in missing.found
    assert missing.check == "target"


def test_drafters_that_cannot_draft(mamba: Path) -> None:
    found = only(doctor_models.draft_model, Subject("target", str(mamba)))
    assert "cannot take back tokens" in found.found
    assert "take another drafter" in found.advice
    assert attempt(doctor_models.draft_model, Subject("target")) == []


def test_vocabularies_that_differ(tiny: Any, tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", seed=9, vocab_size=70)
    subject = Subject(str(tiny.target), str(other))
    assert attempt(doctor_models.tokens, subject) == [], "no models were made yet"
    attempt(doctor_models.target, subject)
    attempt(doctor_models.draft_model, subject)
    found = only(doctor_models.tokens, subject)
    assert "tokenizer is not the target's" in found.found
    assert "same model family" in found.advice


def test_memory_of_a_cpu(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "visible_gpus", list)
    monkeypatch.setattr(weights, "available", lambda: 5 * GIB)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    subject = Subject(str(tiny.target), str(tiny.perturbed))
    assert "4.0 GiB of 5.0 GiB" in only(doctor_models.memory, subject).found
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "3")
    found = only(doctor_models.memory, subject)
    assert (found.state, "6.0 GiB of 5.0 GiB" in found.found) == ("problem", True)
    assert "--kv-cache-memory-bytes" in found.advice
    unknown, known = attempt(doctor_models.memory, Subject("no/such", str(tiny.target)))
    assert (unknown.state, known.state) == ("warning", "ok")
    assert "no/such" in unknown.found


def test_memory_of_gpus(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "visible_gpus", lambda: ["4", "6"])
    monkeypatch.setattr(weights, "free_on_gpu", [0, GIB].__getitem__)
    subject = Subject(str(tiny.target), str(tiny.perturbed))
    states = [finding.state for finding in attempt(doctor_models.memory, subject)]
    assert states == ["problem", "ok"]


def test_a_drafter_elsewhere(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = Subject(str(tiny.target), drafter=ELSEWHERE)
    assert attempt(doctor_models.running_drafter, subject) == [], "nothing is known of the target"
    attempt(doctor_models.target, subject)

    def greet(answer: Exception | protocol.Welcome) -> Any:
        def say_hello(endpoint: Endpoint, *_: Any) -> protocol.Welcome:
            assert endpoint == ELSEWHERE
            if isinstance(answer, Exception):
                raise answer
            return answer

        return say_hello

    welcome = protocol.Welcome(protocol.PROTOCOL_VERSION, "/models/small", "v", 64, 100)
    monkeypatch.setattr(doctor_models, "greet", greet(welcome))
    assert "small" in only(doctor_models.running_drafter, subject).found
    monkeypatch.setattr(doctor_models, "greet", greet(DrafterError("other tokens; take another")))
    assert only(doctor_models.running_drafter, subject).advice == "take another"
    monkeypatch.setattr(doctor_models, "greet", greet(NoDrafterError("nobody")))
    found = only(doctor_models.running_drafter, subject)
    assert "nobody is there, or the key file is another one" in found.advice


# --- weights --------------------------------------------------------------------------------------


def test_weights_are_read_from_headers(tiny: Any, tmp_path: Path) -> None:
    tensors = load_file(tiny.target / "model.safetensors")
    total = sum(tensor.numel() * 4 for tensor in tensors.values())
    assert weights.num_bytes(str(tiny.target)) == total
    halves = list(tensors.items())
    save_file(dict(halves[::2]), tmp_path / "model-1.safetensors", {"format": "pt"})
    save_file(dict(halves[1::2]), tmp_path / "model-2.safetensors")
    save_file(tensors, tmp_path / "consolidated.safetensors")
    assert weights.num_bytes(str(tmp_path)) == total
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"any": "model-2.safetensors"}}))
    second = sum(tensor.numel() * 4 for _, tensor in halves[1::2])
    assert weights.num_bytes(str(tmp_path)) == second, "what the index names"
    for file in (index, tmp_path / "model-1.safetensors", tmp_path / "model-2.safetensors"):
        file.unlink()
    assert weights.num_bytes(str(tmp_path)) == total, "the consolidated ones alone"
    (tmp_path / "consolidated.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ValueError, match="is no safetensors file"):
        weights.num_bytes(str(tmp_path))


def test_weights_without_headers(tiny: Any, tmp_path: Path) -> None:
    assert weights.num_bytes("no/such-model") is None
    assert weights.num_bytes(str(tmp_path)) is None
    config = json.loads((tiny.target / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert weights.num_bytes(str(tmp_path)) == weights.num_bytes(str(tiny.target))
    (tmp_path / "model.gguf").write_bytes(bytes(123))
    assert weights.num_bytes(str(tmp_path)) == 123
    assert weights.num_bytes(str(tmp_path / "model.gguf")) == 123


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(None, 9000 << 10), ("max", 9000 << 10), ("5000000", 4000000), ("50000000", 9000 << 10)],
)
def test_memory_that_is_available(tmp_path: Path, limit: str | None, expected: int) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:   16000 kB\nMemFree:  1000 kB\nMemAvailable:   9000 kB\n")
    if limit is not None:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text("1000000\n")
    assert weights.available(meminfo, tmp_path) == expected


# --- the command ----------------------------------------------------------------------------------


FINDINGS = [
    Finding("one", "ok", "fine"),
    Finding("two_words", "warning", "so so", "mind it"),
    Finding("three", "problem", "broken", "mend it"),
]


def run(monkeypatch: pytest.MonkeyPatch, findings: Sequence[Finding], *words: str) -> int:
    def noisy(_: Subject) -> Iterator[Finding]:
        print("what libraries say")
        yield from findings

    monkeypatch.setattr(devices, "openmp_preload", dict)
    monkeypatch.setattr("minedraft.commands.doctor.examine", noisy)
    return cli.main(["doctor", *words])


def test_findings_for_people(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, FINDINGS) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [
        ["ok", "one", "fine"],
        ["warning", "two", "words", "so", "so"],
        ["mind", "it"],
        ["problem", "three", "broken"],
        ["mend", "it"],
    ]
    assert run(monkeypatch, FINDINGS[:2]) == 0


def test_findings_for_machines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, FINDINGS, "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert found[2] == {
        "check": "three",
        "state": "problem",
        "found": "broken",
        "advice": "mend it",
    }
    assert [set(one) for one in found] == [{"check", "state", "found", "advice"}] * 3


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--fast"], "doctor does not know --fast"),
        (["--key-file", "key"], "a key file is for a drafter that runs elsewhere"),
        (["--drafter", "ipc:///a/b"], "give the target"),
        (["target", "draft", "--drafter", "ipc:///a/b"], "no draft model"),
        (["target", "--drafter", "here"], "write ipc:///folder/name"),
    ],
)
def test_bad_usage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    assert run(monkeypatch, [], *words) == 2
    assert says in capsys.readouterr().err

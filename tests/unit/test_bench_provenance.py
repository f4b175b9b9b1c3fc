"""Provenance: what stands beside a result, and the CPU time of processes that are not ours."""

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minedraft
from minedraft import devices
from minedraft.bench import provenance as module
from minedraft.bench.provenance import Neighbours, cpu_model, git_state, provenance, relevant

TICKS = os.sysconf("SC_CLK_TCK")


# What stands beside a result


def test_a_result_says_where_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["minedraft", "bench", "--title", "two words"])
    monkeypatch.setattr(module, "_gpus", lambda: ["a GPU"])
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    found = provenance()
    assert json.loads(json.dumps(found)) == found
    assert found["command"] == "minedraft bench --title 'two words'"
    assert found["versions"]["minedraft"] == minedraft.__version__
    assert sys.version.startswith(found["versions"]["python"])
    assert found["environment"]["VLLM_LOGGING_LEVEL"] == "ERROR"
    assert found["gpus"] == ["a GPU"]
    assert found["cpu"]
    assert found["memory_bytes"] > 1 << 28
    assert len(found["load"]) == 3
    assert found["date"].endswith("+00:00")


def test_what_is_not_installed_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    monkeypatch.setattr(module, "version", missing)
    monkeypatch.setattr(module, "installed_version", lambda: None)
    found = provenance()
    assert found["versions"]["torch"] is None
    assert found["versions"]["vllm"] is None
    assert found["gpus"] == []


def missing(name: str) -> str:
    raise PackageNotFoundError(name)


def test_gpus_are_named_by_a_process_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def output(*command: str) -> str:
        asked.append(command)
        return "NVIDIA H200\nNVIDIA H200"

    monkeypatch.setattr(module, "find_spec", lambda name: object())
    monkeypatch.setattr(devices, "visible_gpus", lambda: ["0", "3"])
    monkeypatch.setattr(module, "_output", output)
    assert module._gpus() == ["NVIDIA H200", "NVIDIA H200"]
    assert asked[0][0] == sys.executable
    compile(asked[0][2], "the program", "exec")


@pytest.mark.parametrize(
    ("variables", "kept"),
    [
        ({"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": ""}, True),
        ({"TORCHINDUCTOR_FREEZING": "1", "TORCH_LOGS": "x", "PYTORCH_ALLOC_CONF": "y"}, True),
        ({"VLLM_API_KEY": "x"}, False),
        ({"VLLM_HF_TOKEN": "x", "VLLM_Secret": "x", "MINEDRAFT_KEY_FILE": "/k"}, False),
        ({"HOME": "/home/me", "HF_TOKEN": "x", "MY_VLLM_X": "1", "AWS_SECRET": "x"}, False),
    ],
)
def test_environment_variables_are_chosen(variables: dict[str, str], kept: bool) -> None:
    assert relevant(variables) == (variables if kept else {})


NAMES = st.text(alphabet="ABCKEYTOKNSRVLM_")


@given(st.dictionaries(NAMES, st.text()), st.sampled_from(["KEY", "TOKEN", "SECRET"]), NAMES, NAMES)
def test_no_secret_gets_out(
    variables: dict[str, str], secret: str, before: str, behind: str
) -> None:
    name = f"VLLM_{before}{secret}{behind}"
    assert name not in relevant({**variables, name: "hush"})
    assert relevant(variables).items() <= variables.items()


def test_the_cpu_by_its_name() -> None:
    assert cpu_model("processor : 0\nmodel name\t: Some CPU @ 2.0 GHz\nprocessor : 1\n") == (
        "Some CPU @ 2.0 GHz"
    )
    assert cpu_model("processor : 0\nBogoMIPS : 50\n")


# git


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with one commit, a package in it, and an environment that git ignores."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_NAME", "a")
        monkeypatch.setenv(f"GIT_{role}_EMAIL", "a@b")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "file.py").write_text("1")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "installed.py").write_text("1")
    (tmp_path / ".gitignore").write_text(".venv\n")
    for command in ("init -q", "add .", "commit -qm x"):
        subprocess.run(["git", "-C", str(tmp_path), *command.split()], check=True)
    return tmp_path


def test_the_state_of_a_checkout(checkout: Path) -> None:
    package = checkout / "package"
    command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert git_state(package) == commit
    (package / "file.py").write_text("2")
    assert git_state(package) == f"{commit}-dirty"


def test_an_environment_in_someones_checkout_is_none(checkout: Path) -> None:
    assert git_state(checkout / ".venv") == ""


def test_no_checkout_has_no_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_state(tmp_path) == ""
    monkeypatch.setenv("PATH", "")
    assert git_state(Path(__file__).parent) == "", "without git"


# Neighbours


class Machine:
    """A /proc whose processes do as the test says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._up = 0.0
        self._busy = 0
        self._processes: dict[int, list[int]] = {}
        """By PID: parent, own ticks, ticks of ended children that it waited for."""

    def start(self, pid: int, parent: int) -> None:
        self._processes[pid] = [parent, 0, 0]

    def use(self, pid: int, seconds: float) -> None:
        self._processes[pid][1] += round(seconds * TICKS)
        self._busy += round(seconds * TICKS)

    def end(self, pid: int) -> None:
        parent, own, waited = self._processes.pop(pid)
        self._processes[parent][2] += own + waited

    def wait(self, seconds: float) -> None:
        self._up += seconds

    def write(self) -> Path:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        (self.folder / "uptime").write_text(f"{self._up:.2f} 12.3\n")
        # user, nice, system, idle, iowait, irq, softirq, steal, guest, guest_nice
        (self.folder / "stat").write_text(f"cpu  {self._busy} 0 0 999 99 0 0 0 0 0\ncpu0 1 2 3\n")
        for pid, (parent, own, waited) in self._processes.items():
            (self.folder / str(pid)).mkdir()
            ticks = f"{own} 0 {waited} 0"
            line = f"{pid} (a) b) S {parent} 1 1 0 -1 0 0 0 0 0 {ticks} 20 0 1 0 5 9 9"
            (self.folder / str(pid) / "stat").write_text(line)
        return self.folder


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """1: init, 10: the benchmark, 11 and 12: its child and grandchild, 20: someone else's."""
    made = Machine(tmp_path / "proc")
    for pid, parent in ((1, 0), (10, 1), (11, 10), (12, 11), (20, 1)):
        made.start(pid, parent)
    return made


def test_only_what_others_use_counts(machine: Machine) -> None:
    neighbours = Neighbours([10], machine.write())
    for pid in (10, 11, 12):
        machine.use(pid, 3)
    machine.use(20, 1)
    machine.wait(10)
    machine.write()
    assert neighbours.share_since() == pytest.approx(0.1)


def test_each_call_counts_from_the_last(machine: Machine) -> None:
    machine.use(20, 50)
    neighbours = Neighbours([10], machine.write())
    shares = []
    for used in (5, 0, 2):
        machine.use(20, used)
        machine.wait(10)
        machine.write()
        shares.append(neighbours.share_since())
    assert shares == pytest.approx([0.5, 0, 0.2])


def test_what_started_and_ended_meanwhile_is_ours(machine: Machine) -> None:
    neighbours = Neighbours([10], machine.write())
    machine.start(13, 10)
    machine.use(13, 4)
    machine.end(13)
    machine.use(12, 2)
    machine.end(12)
    machine.end(11)
    machine.wait(10)
    machine.write()
    assert neighbours.share_since() == 0


def test_no_time_no_share(machine: Machine) -> None:
    neighbours = Neighbours([10], machine.write())
    machine.use(20, 1)
    machine.write()
    assert neighbours.share_since() == 0


def test_processes_that_end_while_they_are_read_do_no_harm(machine: Machine) -> None:
    neighbours = Neighbours([10], machine.write())
    machine.use(20, 1)
    machine.wait(1)
    machine.write()
    (machine.folder / "12" / "stat").unlink()
    assert neighbours.share_since() == 1


SECONDS = st.integers(0, 1000).map(lambda hundredths: hundredths / 100)


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=10),
    st.lists(SECONDS, min_size=10, max_size=10),
    st.sets(st.integers(1, 10)),
)
@settings(max_examples=50, deadline=None)  # writes files
def test_a_process_is_ours_if_a_root_is_above_it(
    tmp_path_factory: pytest.TempPathFactory,
    parents: list[int],
    used: list[float],
    roots: set[int],
) -> None:
    machine = Machine(tmp_path_factory.mktemp("machine") / "proc")
    above = {pid: min(parent, pid - 1) for pid, parent in enumerate(parents, 1)}
    for pid, parent in above.items():
        machine.start(pid, parent)
    neighbours = Neighbours(roots, machine.write())
    others = 0.0
    for pid in above:
        machine.use(pid, used[pid - 1])
        line = [pid]
        while line[-1]:
            line.append(above[line[-1]])
        others += 0 if roots & set(line) else used[pid - 1]
    machine.wait(10)
    machine.write()
    assert neighbours.share_since() == pytest.approx(others / 10)


def test_this_machine_can_be_read() -> None:
    neighbours = Neighbours([os.getpid()])
    subprocess.run([sys.executable, "-c", "sum(range(3_000_000))"], check=True)
    assert 0 <= neighbours.share_since() <= (os.cpu_count() or 1) * 1.5

"""What `minedraft serve` decides before anything is loaded."""

import argparse
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from servers import HELLO, WELCOME, answering
from tiny import make_model

from minedraft import beside, lifeline, serve
from minedraft.cli import main
from minedraft.commands import serve as command
from minedraft.config import ENV_CONTROL, ENV_METRICS, ConfigError, Endpoint, MineDraftConfig
from minedraft.drafter.child import DrafterError, DrafterProcess
from minedraft.placement import Placement
from minedraft.protocol import Refused
from minedraft.verifier.plugin import class_options

OURS = class_options(MineDraftConfig(), 3)
NO_WISH: dict[str, Any] = dict.fromkeys(
    ("draft_model", "drafter", "key_file", "drafter_cores", "target_cores", "drafter_gpu")
)


def wish(**options: Any) -> beside.DrafterOptions:
    return beside.DrafterOptions(**(NO_WISH | {"drafter_args": ""} | options))


# --- options --------------------------------------------------------------------------------------


def test_our_options_and_the_users_go_together() -> None:
    settings = beside.merged({"port": 1, "additional_config": {"theirs": 2}}, OURS)
    assert settings["port"] == 1
    assert settings["scheduler_cls"] == OURS["scheduler_cls"]
    assert settings["additional_config"] == {"theirs": 2, **OURS["additional_config"]}


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ({"scheduler_cls": "x"}, "scheduler_cls is set by MineDraft"),
        ({"speculative_config": {"method": "ngram"}}, "speculative_config is set by MineDraft"),
        ({"worker_cls": "x"}, "worker_cls is set by MineDraft"),
        ({"additional_config": {"minedraft": {}}}, "give its options by their own names"),
    ],
)
def test_what_both_set_is_an_error(option: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        beside.merged(option, OURS)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "give a draft model or the address"),
        ({"draft_model": "d", "drafter": "ipc:///a/b"}, "one of the two"),
        ({"draft_model": "d", "key_file": "k"}, "a key file is for a drafter that runs elsewhere"),
        ({"drafter": "ipc:///a/b", "drafter_args": "--x"}, "are given there"),
        ({"drafter": "ipc:///a/b", "drafter_cores": "1"}, "are given there"),
        ({"drafter": "ipc:///a/b", "drafter_gpu": "1"}, "are given there"),
    ],
)
def test_wishes_that_contradict_each_other_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        wish(**options)


@pytest.mark.parametrize(
    ("options", "ranks"),
    [
        ({}, 1),
        ({"tensor_parallel_size": 2}, 2),
        ({"tensor_parallel_size": 2, "data_parallel_size": 3}, 6),
        ({"data_parallel_size": 4, "data_parallel_size_local": 2}, 2),
    ],
)
def test_workers_of_the_target_are_counted(options: dict[str, Any], ranks: int) -> None:
    assert beside.num_ranks(options) == ranks


@pytest.mark.parametrize("words", [["--drafter", "ipc:///a/b"], ["--draft-model", "d"]])
def test_a_target_that_is_not_there_is_said_in_one_line(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minedraft.cli._preload_openmp", lambda words: None)
    monkeypatch.setattr("os.environ", dict(os.environ))
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert main(["serve", "/nothing/here", *words]) == 2
    finally:
        signal.signal(signal.SIGTERM, before)
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("minedraft: ")]
    assert "/nothing/here" in line


def test_without_drafts_there_is_no_trace(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minedraft.cli._preload_openmp", lambda words: None)
    assert main(["serve", "t", "--mode", "off", "--trace", "/tmp/t.json"]) == 2
    assert "minedraft: --trace: stock vLLM writes none" in capsys.readouterr().err


def test_what_mode_off_leaves_unused_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(beside.logger, "info", lambda text, *a: said.append(text % a))
    beside.say_unused({"draft_model": None, "drafter_args": "", "target_cores": "0"})
    assert said == []
    beside.say_unused({"draft_model": "d", "drafter_cores": "1", "target_cores": "0"})
    assert said == ["MineDraft: off, so this is stock vLLM; unused: draft_model, drafter_cores"]


# --- vLLM's command -------------------------------------------------------------------------------


def parsed(*flags: str) -> serve._Serving:
    return serve._Serving(argparse.Namespace(target="some/model", engine_flags=flags))


def test_flags_of_the_server_and_of_the_engine_are_vllms() -> None:
    given = parsed("--port", "81", "--max_model_len", "9", "--middleware", "a.B").given
    expected = {"port": 81, "max_model_len": 9, "middleware": ["a.B"], "model_tag": "some/model"}
    assert {name: given[name] for name in expected} == expected


def test_flags_that_vllm_does_not_know_or_take_are_refused() -> None:
    with pytest.raises(SystemExit):
        parsed("--no-such-flag")
    with pytest.raises(ConfigError, match="--tool-call-parser"):
        parsed("--enable-auto-tool-choice")


def test_vllm_is_run_with_the_settings_and_nothing_is_left_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served: list[Any] = []
    forgotten = [SimpleNamespace(kill=lambda: served.append("killed"))]

    def cmd(arguments: argparse.Namespace) -> None:
        served.append((arguments.model_tag, arguments.port, arguments.scheduler_cls))
        raise RuntimeError("an engine did not start")

    serving = parsed("--port", "81")
    monkeypatch.setattr(serving._command, "cmd", cmd)
    monkeypatch.setattr("multiprocessing.active_children", lambda: forgotten)
    with pytest.raises(RuntimeError, match="did not start"):
        serving.run({**serving.given, "scheduler_cls": "ours"}, Placement())
    assert served == [("some/model", 81, "ours"), "killed"]


# --- the drafter ----------------------------------------------------------------------------------


def target_hello(tiny: Any) -> Any:
    config = beside.vllm_config(str(tiny.target), {"dtype": "float32", "max_model_len": 128})
    return beside.hello(config.model_config)


def test_vocabularies_are_compared_before_anything_is_loaded(tiny: Any, tmp_path: Path) -> None:
    hello = target_hello(tiny)
    options = {"enforce_eager": True}
    beside.check_draft_model(hello, wish(draft_model=str(tiny.unrelated)), options)
    other = make_model(tmp_path / "other", seed=9)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    (other / "model.safetensors").unlink()
    with pytest.raises(DrafterError, match="tokenizer is not the target's"):
        beside.check_draft_model(hello, wish(draft_model=str(other)), options)
    with pytest.raises(ConfigError, match=r"/nothing.*: ") as raised:
        beside.check_draft_model(hello, wish(draft_model="/nothing/here"), options)
    assert "\n" not in str(raised.value)


@pytest.fixture
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Endpoint:
    folder = tmp_path_factory.mktemp("s")
    folder.chmod(0o700)
    return Endpoint(f"ipc://{folder}/d")


def test_a_drafter_elsewhere_may_come_later_but_not_refuse(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(serve, "FIRST_GREETING_S", 0.5)
    monkeypatch.setattr(serve.logger, "warning", lambda text, *a: said.append(text % a))
    assert serve._elsewhere(endpoint, HELLO) == endpoint
    assert "Serving without drafts until it comes" in said.pop()
    monkeypatch.setattr(serve, "FIRST_GREETING_S", 10.0)
    with answering(endpoint, WELCOME):
        assert serve._elsewhere(endpoint, HELLO) == endpoint
    assert said == []
    with (
        answering(endpoint, Refused("no")),
        pytest.raises(DrafterError, match="refuses this target: no"),
    ):
        serve._elsewhere(endpoint, HELLO)


@pytest.fixture
def terminated() -> Iterator[list[int]]:
    """The SIGTERMs that this process got."""
    got: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
    yield got
    signal.signal(signal.SIGTERM, before)


def test_a_drafter_that_cannot_start_ends_the_server_with_its_words(
    terminated: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "SIGNAL_AGAIN_S", 0.1)
    tmp_path.chmod(0o700)
    child = DrafterProcess("model", ["--cores", "x"], {}, tmp_path)

    def run() -> None:
        with serve._supervised(child, HELLO):
            end = time.monotonic() + 30.0
            while len(terminated) < 2:  # the first may be lost
                assert time.monotonic() < end
                time.sleep(0.05)
            raise KeyboardInterrupt  # as vLLM does while it starts

    with pytest.raises(DrafterError, match="the drafter did not start: .*cores 'x'"):
        run()


LOST_SIGNALS = """
import os, signal, sys, time
from minedraft.commands import serve
serve.AGAIN_S = 1
signal.signal(signal.SIGTERM, serve._interrupt)
try:
    os.kill(os.getpid(), signal.SIGTERM)
    sys.exit("not interrupted")
except KeyboardInterrupt:
    pass
try:
    time.sleep(20)
    sys.exit("lost for ever")
except KeyboardInterrupt:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
time.sleep(20)
"""


def test_a_signal_that_is_lost_comes_again_until_vllm_handles_it() -> None:
    """In a process of its own: the alarm clock of this one is that of the tests' timeouts."""
    done = subprocess.run(
        [sys.executable, "-c", LOST_SIGNALS], timeout=60, capture_output=True, check=False
    )
    assert done.returncode == 7, done.stderr


# --- the environment ------------------------------------------------------------------------------


def test_folders_are_private_and_those_of_the_user_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ENV_CONTROL, raising=False)
    monkeypatch.setenv(ENV_METRICS, "/theirs")
    variables = command._environment(tmp_path)
    control = Path(variables[ENV_CONTROL])
    assert control.parent == tmp_path
    assert stat.S_IMODE(control.stat().st_mode) == 0o700
    assert ENV_METRICS not in variables
    assert variables[lifeline.ENV_FOLDER] == str(tmp_path)
    monkeypatch.setenv(ENV_CONTROL, "/theirs")
    assert command._environment(tmp_path).keys() == lifeline.family(tmp_path).keys()

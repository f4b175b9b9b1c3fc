"""``minedraft serve`` as its users see it: the official client, real processes, tiny models."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from openai import OpenAI
from servers import (
    DRAFTER_FLAGS,
    ENGINE_FLAGS,
    Process,
    free_port,
    running,
    serving,
    until,
    vllm_command,
)

GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 60}
IGNORE_EOS = {"ignore_eos": True}
PROMPTS = [f"prompt number {i} " * (i + 1) for i in range(5)]
CHAT: Any = [{"role": "user", "content": "a chat about this"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
GONE_S = 12.0
PUBLISHED_S = 1.0
"""After so long what was done shows in our metrics."""
START_ENDED_S = 40.0


def short(factory: pytest.TempPathFactory) -> Path:
    """A folder for temporary files whose name leaves room for those of sockets in it."""
    folder = factory.mktemp("s")
    folder.chmod(0o700)
    return folder


def child_words(tiny: Any) -> list[object]:
    words = ["--mode", "overlap", "--draft-model", tiny.perturbed]
    return [*words, "--drafter-args", " ".join(DRAFTER_FLAGS)]


@pytest.fixture(scope="module")
def servers(
    tiny: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Process, Process]]:
    """With a drafter of its own, and stock vLLM; they start at the same time."""
    words = ["--enable-auto-tool-choice", "--tool-call-parser", "xlam"]
    words += ["--structured-outputs-config.disable_any_whitespace", "true"]
    words += ["--structured-outputs-config.backend", "xgrammar"]
    with (
        serving(tiny.target, short(tmp_path_factory), *child_words(tiny), *words) as drafted,
        serving(
            tiny.target, short(tmp_path_factory), *child_words(tiny), "--mode", "off", *words
        ) as plain,
    ):
        yield drafted.wait_healthy(), plain.wait_healthy()


@pytest.fixture(scope="module")
def drafted(servers: tuple[Process, Process]) -> Process:
    return servers[0]


@pytest.fixture(scope="module")
def clients(servers: tuple[Process, Process]) -> tuple[OpenAI, OpenAI]:
    first, second = (client(server) for server in servers)
    return first, second


def client(server: Process) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def texts(server: Process, **body: Any) -> list[str]:
    """Greedy answers to a batch of prompts."""
    answer = client(server).completions.create(
        prompt=PROMPTS, extra_body=IGNORE_EOS | body, **GREEDY
    )
    return [choice.text for choice in sorted(answer.choices, key=lambda choice: choice.index)]


def metric(server: Process, name: str) -> float:
    """A number on the page of metrics, summed over its labels."""
    lines = server.get("/metrics")[1].decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name + "{"))


def accepted(server: Process) -> float:
    """Draft tokens that the target took, as vLLM's own metrics say."""
    return metric(server, "vllm:spec_decode_num_accepted_tokens_total")


def counts(server: Process) -> tuple[float, float, float]:
    """Verifications, those of them without drafts, and draft tokens that were verified."""
    time.sleep(PUBLISHED_S)
    names = ("verifications", "verifications_without_drafts", "draft_tokens_verified")
    first, second, third = (metric(server, f"minedraft:{name}_total") for name in names)
    return first, second, third


def wait_drafted(server: Process, expected: list[str]) -> None:
    """Until a drafter is attached and its drafts are used; all answers are as expected.

    The first drafts of a drafter that has just started may all come too late to be used.
    """
    before = accepted(server)

    def is_drafted() -> bool:
        assert texts(server) == expected
        return server.attached() and accepted(server) > before

    until(is_drafted, 90.0, "the drafts used")


# --- the API --------------------------------------------------------------------------------------


def test_a_batch_is_answered_as_by_stock_vllm_and_drafts_were_used(
    servers: tuple[Process, Process],
) -> None:
    drafted, plain = servers
    drafted.wait_attached()
    before = accepted(drafted)
    assert texts(drafted) == texts(plain)
    assert accepted(drafted) > before
    assert plain.get("/minedraft/status")[0] == 404
    assert "stock vLLM; unused: draft_model, drafter_args" in plain.text()


def test_the_start_says_what_runs_where(drafted: Process) -> None:
    (line,) = [line for line in drafted.text().splitlines() if "MineDraft: overlap, K=4" in line]
    assert "target on CPU" in line
    assert "drafter on CPU" in line
    assert "control folder" in line


def test_streams_chats_and_n_are_answered_as_by_stock_vllm(clients: tuple[OpenAI, OpenAI]) -> None:
    found: list[Any] = []
    for api in clients:
        stream = api.completions.create(
            prompt=PROMPTS[1], stream=True, extra_body=IGNORE_EOS, **GREEDY
        )
        text = "".join(chunk.choices[0].text for chunk in stream)
        chat = api.chat.completions.create(messages=CHAT, extra_body=IGNORE_EOS, **GREEDY)
        chat_stream = api.chat.completions.create(
            messages=CHAT, stream=True, extra_body=IGNORE_EOS, **GREEDY
        )
        chat_text = "".join(chunk.choices[0].delta.content or "" for chunk in chat_stream)
        many = api.completions.create(
            model="tiny", prompt=PROMPTS[0], n=2, seed=7, temperature=1, max_tokens=20
        )
        assert chat_text == chat.choices[0].message.content
        found.append((text, chat_text, [choice.text for choice in many.choices]))
    assert found[0] == found[1]
    assert all(len(text) > 20 for text in found[0][:2])


def test_logprobs_are_those_of_stock_vllm(clients: tuple[OpenAI, OpenAI]) -> None:
    found = []
    for api in clients:
        chat = api.chat.completions.create(messages=CHAT, logprobs=True, top_logprobs=2, **GREEDY)
        logprobs = chat.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content
        found.append(logprobs.content)
    assert [entry.token for entry in found[0]] == [entry.token for entry in found[1]]
    for ours, stock in zip(*found, strict=True):
        assert ours.logprob == pytest.approx(stock.logprob, abs=1e-4)
        assert [top.token for top in ours.top_logprobs] == [top.token for top in stock.top_logprobs]


def test_schemas_and_tools_are_answered_as_by_stock_vllm(clients: tuple[OpenAI, OpenAI]) -> None:
    schema: Any = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    found = []
    for api in clients:
        chat = api.chat.completions.create(messages=CHAT, response_format=schema, **GREEDY)
        called = api.chat.completions.create(
            messages=CHAT, tools=[TOOL], tool_choice=choice, **GREEDY
        )
        (call,) = called.choices[0].message.tool_calls or []
        assert call.type == "function"
        found.append((chat.choices[0].message.content, call.function.arguments))
    assert found[0] == found[1]
    for text in found[0]:
        assert json.loads(text or "").keys() == {"name", "ok"}


def test_vllms_own_benchmark_runs_against_it(drafted: Process, tiny: Any, tmp_path: Path) -> None:
    command = vllm_command("bench", "serve", "--base-url", drafted.url)
    command += ["--model", "tiny", "--tokenizer", str(tiny.target)]
    command += ["--dataset-name", "random", "--random-input-len", "20"]
    command += ["--random-output-len", "10", "--num-prompts", "6", "--save-result"]
    command += ["--result-dir", str(tmp_path), "--result-filename", "out.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads((tmp_path / "out.json").read_text())["completed"] == 6


# --- our own options and commands -----------------------------------------------------------------


def test_single_requests_say_by_http_how_they_are_drafted_for(
    servers: tuple[Process, Process],
) -> None:
    drafted, plain = servers
    drafted.wait_attached()
    expected = texts(plain)

    def asking(**options: object) -> tuple[float, float]:
        """Verifications with drafts, and draft tokens in them."""
        before = counts(drafted)
        assert texts(drafted, vllm_xargs=options) == expected
        rows, without, tokens = (b - a for a, b in zip(before, counts(drafted), strict=True))
        assert rows > 0
        return rows - without, tokens

    assert asking(minedraft_draft=0) == (0, 0)
    assert asking(minedraft_draft="perhaps") == (0, 0)
    assert "no drafts for" in drafted.text()
    rows, tokens = asking(minedraft_max_draft_tokens=1)
    assert rows == tokens > 0
    rows, tokens = asking(minedraft_draft=1)
    assert tokens > rows > 0


def control(server: Process, *words: object) -> dict[str, Any]:
    """What the only engine says to ``minedraft control``."""
    found = re.search(r"control folder (\S+)", server.text())
    assert found is not None
    command = [sys.executable, "-m", "minedraft", "control", found[1], "--json", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    (status,) = json.loads(done.stdout)
    return dict(status)


def test_a_running_server_is_changed_and_traced_by_the_command(
    servers: tuple[Process, Process], tmp_path: Path
) -> None:
    drafted, plain = servers
    drafted.wait_attached()
    expected, trace = texts(plain), tmp_path / "run.json"
    assert control(drafted)["mode"] == "overlap"
    assert control(drafted, "--trace", trace)["trace"] == str(trace)
    assert texts(drafted) == expected
    assert control(drafted, "--mode", "off")["mode"] == "off"
    try:
        before = counts(drafted)
        assert texts(drafted) == expected
        after = counts(drafted)
        assert after[0] > before[0]
        assert after[2] == before[2]
        assert control(drafted, "--no-trace")["trace"] == ""
    finally:
        control(drafted, "--mode", "overlap")
    spans = {event["name"] for event in json.loads(trace.read_text()) if event["ph"] == "X"}
    assert {"verify", "draft"} <= spans
    wait_drafted(drafted, expected)


# --- the drafter ----------------------------------------------------------------------------------


def drafter_of(server: Process) -> psutil.Process | None:
    found = server.members("minedraft")
    drafters = [p for p in found if "drafter" in p.cmdline()]
    return drafters[0] if len(drafters) == 1 else None


def test_a_drafter_that_is_killed_comes_back(servers: tuple[Process, Process]) -> None:
    drafted, plain = servers
    drafted.wait_attached()
    first = drafter_of(drafted)
    assert first is not None
    first.kill()
    until(lambda: not drafted.attached(), 2.0, "the loss shows, though there is no request")
    expected = texts(plain)
    assert texts(drafted) == expected
    assert drafted.get("/health")[0] == 200
    until(lambda: drafter_of(drafted) not in {first, None}, 10.0, "another drafter")
    drafted.wait_attached()
    wait_drafted(drafted, expected)
    (line,) = [line for line in drafted.text().splitlines() if "the drafter ended with" in line]
    assert "exit code -9" in line


def test_sigterm_ends_everything_cleanly(drafted: Process) -> None:
    family = drafted.family()
    assert len(family) >= 2
    drafted.popen.send_signal(signal.SIGTERM)
    assert drafted.popen.wait(60) == 0
    drafted.wait_all_gone(GONE_S)
    assert list(drafted.log.parent.glob("minedraft-*")) == []


@pytest.fixture
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"ipc://{short(tmp_path_factory)}/d"


def plain_vllm(tiny: Any, folder: Path, address: str) -> Any:
    """``vllm serve`` with our classes, as flags."""
    speculative = {
        "method": "custom_class",
        "model": "minedraft.verifier.proposer.NoDrafts",
        "num_speculative_tokens": 3,
    }
    # A tiny target is done before a drafter that shares its cores has drafted for the first time.
    options = {"mode": "sequential", "wait_for_first_drafts": True}
    port = free_port()
    command = vllm_command("serve", tiny.target, *ENGINE_FLAGS)
    command += ["--port", str(port), "--served-model-name", "tiny"]
    command += ["--scheduler-cls", "minedraft.verifier.scheduler.MineDraftScheduler"]
    command += ["--worker-cls", "minedraft.verifier.worker.TargetWorker"]
    command += ["--speculative-config", json.dumps(speculative), "--no-async-scheduling"]
    command += ["--additional-config", json.dumps({"minedraft": options})]
    command += ["--middleware", "minedraft.status.StatusMiddleware"]
    control = folder / "control"
    control.mkdir(mode=0o700)
    variables = {
        "MINEDRAFT_DRAFTER": address,
        "MINEDRAFT_CONTROL": str(control),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    return running(command, folder, port=port, variables=variables)


def test_two_servers_find_one_drafter_that_comes_late(
    servers: tuple[Process, Process],
    tiny: Any,
    address: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """One of them is plain ``vllm serve``. Then processes of theirs are killed."""
    expected = texts(servers[1])
    folders = [short(tmp_path_factory) for _ in range(3)]
    drafter = [sys.executable, "-m", "minedraft", "drafter", str(tiny.perturbed)]
    drafter += ["--listen", address, *DRAFTER_FLAGS]
    words = ["--mode", "overlap", "--wait-for-first-drafts"]
    with (
        serving(tiny.target, folders[0], *words, "--drafter", address) as ours,
        plain_vllm(tiny, folders[1], address) as vllms,
    ):
        for server in (ours.wait_healthy(), vllms.wait_healthy()):
            assert not server.attached()
            assert texts(server) == expected
        assert "no drafter answers" in ours.text()
        with running(drafter, folders[2]):
            for server in (ours, vllms):
                wait_drafted(server, expected)
            (engine,) = ours.members("EngineCore")
            engine.kill()
            ours.popen.wait(30)
            ours.wait_all_gone(GONE_S)
            vllms.family()
            vllms.popen.kill()
            vllms.wait_all_gone(GONE_S)


# --- ends that nobody wants -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["serve", "EngineCore", "APIServer", "drafter"])
def test_nothing_is_left_when_a_process_is_killed(
    tiny: Any, tmp_path_factory: pytest.TempPathFactory, victim: str
) -> None:
    folder = short(tmp_path_factory)
    words = [*child_words(tiny), "--api-server-count", "2"]
    with serving(tiny.target, folder, *words) as server:
        server.wait_healthy().wait_attached()
        assert len(server.family()) >= 4
        if victim == "drafter":
            drafter = drafter_of(server)
            assert drafter is not None
            drafter.kill()
        if victim in {"serve", "drafter"}:
            server.popen.kill()
        else:
            server.members(victim)[0].kill()
            server.popen.wait(60)
        server.wait_all_gone(GONE_S)
        assert list(folder.glob("minedraft-*")) == []


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [2, 8, 15])
def test_one_sigterm_ends_everything_also_during_the_start(
    tiny: Any, tmp_path_factory: pytest.TempPathFactory, seconds: int
) -> None:
    """Stock vLLM loses a signal that comes while it starts."""
    folder = short(tmp_path_factory)
    with serving(tiny.target, folder, *child_words(tiny)) as server:
        time.sleep(seconds)
        server.popen.send_signal(signal.SIGTERM)

        def ended() -> bool:
            left = server.family()
            return server.popen.poll() is not None and not left

        until(ended, START_ENDED_S, "all processes gone")
        # With SIGINT it ends if some library was interrupted; a shell says 130 of that too.
        assert server.popen.returncode in {130, -signal.SIGINT}, server.text()[-3000:]
        assert list(folder.glob("minedraft-*")) == []


def refused(tiny: Any, folder: Path, *words: object) -> str:
    """The one line with which the command refuses."""
    with serving(tiny.target, folder, *words) as server:
        assert server.popen.wait(150) == 2, server.text()[-3000:]
        lines = server.text().splitlines()
        server.wait_all_gone(GONE_S)
    (line,) = [line for line in lines if line.startswith("minedraft: ")]
    assert list(folder.glob("minedraft-*")) == []
    return line


def test_a_drafter_that_cannot_start_ends_the_server(
    tiny: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    words = ["--draft-model", tiny.perturbed, "--drafter-args", "--max-num-seqs 0"]
    assert "the drafter did not start" in refused(tiny, short(tmp_path_factory), *words)


@pytest.mark.slow
def test_data_parallel_engines_share_the_drafter(
    servers: tuple[Process, Process], tiny: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = short(tmp_path_factory)
    words = [*child_words(tiny), "--data-parallel-size", "2"]
    with serving(tiny.target, folder, *words) as server:
        server.wait_healthy().wait_attached()
        status, body = server.get("/minedraft/status")
        assert status == 200
        assert len(json.loads(body)["engines"]) == 2
        assert texts(server) == texts(servers[1])
        assert accepted(server) > 0
        os.kill(server.popen.pid, signal.SIGKILL)
        server.wait_all_gone(GONE_S)

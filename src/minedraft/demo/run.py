"""``minedraft demo``: the same prompts plainly, sequentially and overlapped, side by side."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from minedraft import devices, lifeline
from minedraft.config import ENV_TRACE, ConfigError
from minedraft.demo.models import DemoError, demo_pair
from minedraft.demo.timeline import TraceError, svg
from minedraft.placement import format_cores, place_on_cpu

MAX_TOKENS = 64
NUM_SPECULATIVE_TOKENS = 4
TIMELINE_S = 1.0
"""Some turns of both halves, which take a tenth of a second each here."""


@dataclass(frozen=True)
class Way:
    """One way to decode: its name, where it runs and the options of LLM."""

    name: str
    cores: str
    options: dict[str, Any]


@dataclass(frozen=True)
class Result:
    """What one way gave."""

    way: Way
    seconds: float
    token_ids: list[list[int]]
    tokens_per_verification: float
    hidden_share: float | None

    @property
    def tokens_per_s(self) -> float:
        """Output tokens of all prompts, per second."""
        return sum(map(len, self.token_ids)) / self.seconds


def demo(timeline: Path | None) -> int:
    """Runs the demo, and draws its overlapped run if a file is named for it.

    Raises ConfigError if it cannot.
    """
    console = Console()
    try:
        target, drafter = demo_pair(lambda line: console.print(f"[dim]{line}[/]"))
    except DemoError as error:
        raise ConfigError(str(error)) from error
    lines = (files("minedraft.demo") / "prompts.jsonl").read_text().splitlines()
    messages = [json.loads(line)["messages"] for line in lines]
    questions = [str(m[-1]["content"]) for m in messages]
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for way in ways(str(drafter)):
            job = {
                "target": str(target),
                "options": way.options,
                "messages": messages,
                "max_tokens": MAX_TOKENS,
                "trace": f"{folder}/{way.name}.json",
            }
            results.append(_show(console, way, job, questions))
        if timeline is not None:
            _draw(timeline, Path(str(job["trace"])))
    console.print(table(results))
    console.print(
        f"Target {target.name}, drafter {drafter.name}, float32, greedy, {len(messages)} prompts "
        f"together, K = {NUM_SPECULATIVE_TOKENS}. A CPU core pays for each token that it verifies, "
        "and plain decoding has all cores, so drafting does not pay here: the table shows that it "
        "is hidden behind verification and changes no token."
    )
    return 0


def _draw(file: Path, trace: Path) -> None:
    try:
        file.write_text(svg(trace, window_s=TIMELINE_S))
    except (OSError, TraceError) as error:
        raise ConfigError(f"{file}: {error}") from error


def ways(drafter: str) -> list[Way]:
    """Plain decoding on all cores, and drafting with the drafter on some of them."""
    placement = place_on_cpu(devices.available_cores())
    every = format_cores(sorted({*placement.target_cores, *placement.drafter_cores}))
    target, own = format_cores(placement.target_cores), format_cores(placement.drafter_cores)
    drafted = {
        "draft_model": drafter,
        "num_speculative_tokens": NUM_SPECULATIVE_TOKENS,
        "target_cores": target,
        "drafter_cores": own,
        "drafter_args": "--dtype float32 --max-model-len 1024 --no-enable-prefix-caching",
    }
    return [
        Way("plain vLLM", every, {"mode": "off", "target_cores": every}),
        Way("sequential", f"{target} + {own}", {"mode": "sequential", **drafted}),
        Way("overlapped", f"{target} + {own}", {"mode": "overlap", **drafted}),
    ]


def _show(console: Console, way: Way, job: dict[str, Any], questions: Sequence[str]) -> Result:
    texts = dict.fromkeys(range(len(questions)), "")
    state = "loading the models"
    with Live(console=console, refresh_per_second=8, transient=True) as live:
        for event in events(job, way):
            if event["event"] == "done":
                result = _result(way, event)
            elif event["event"] == "text":
                texts[event["prompt"]] = event["text"]
            else:
                state = "answering"
            live.update(_screen(f"{way.name}: {state}", questions, texts, console.width))
    console.print(f"[green]✓[/] {way.name}: {result.seconds:.1f} s")
    return result


def _screen(title: str, questions: Sequence[str], texts: dict[int, str], width: int) -> Group:
    rows = [Text(title, style="bold")]
    for index, question in enumerate(questions):
        text = " ".join(texts[index].split())
        rows.append(Text(f"  {question[: width - 4]}", style="cyan"))
        rows.append(Text(f"    {text[-(width - 6) :]}"))
    return Group(*rows)


def events(job: dict[str, Any], way: Way) -> Iterator[dict[str, Any]]:
    """What a run says. Raises ConfigError with its last words if it fails."""
    cores = tuple(devices.available_cores())
    threads = len(cores) if job["options"]["mode"] == "off" else len(cores) - 1
    environment = {
        **os.environ,
        **devices.cpu_environment(cores),
        "OMP_NUM_THREADS": str(max(1, threads)),
        "VLLM_LOGGING_LEVEL": "ERROR",
        lifeline.ENV_PARENT: str(os.getpid()),
        ENV_TRACE: job["trace"],
    }
    command = [sys.executable, "-m", "minedraft.demo.answer"]
    # To a file: libraries draw progress bars of their own, which would run through ours.
    with (
        tempfile.TemporaryFile("w+", errors="replace") as errors,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
        ) as process,
    ):
        assert process.stdin
        assert process.stdout
        json.dump(job, process.stdin)
        process.stdin.close()
        for line in process.stdout:
            if line.startswith("{"):
                event = json.loads(line)
                yield event
                if event["event"] == "done":
                    return
        code = process.wait()
        errors.seek(0)
        last = lifeline.last_words(errors.read(), code)
        raise ConfigError(f"the run {way.name!r} failed: {last}")


def _result(way: Way, event: dict[str, Any]) -> Result:
    """From the measurements after the run, less those after the warm-up."""

    def spent(*names: str) -> float:
        after, before = event["after"], event["before"]
        for name in names:
            after, before = after.get(name, {}), before.get(name, {})
        return float(after or 0.0) - float(before or 0.0)

    tokens = sum(map(len, event["token_ids"]))
    verifications = spent("verifications") or tokens
    busy = spent("drafter", "drafter_busy_s")
    return Result(
        way=way,
        seconds=event["seconds"],
        token_ids=event["token_ids"],
        tokens_per_verification=(spent("emitted") or tokens) / verifications,
        hidden_share=max(0.0, 1 - spent("drafter", "waited_s") / busy) if busy else None,
    )


def table(results: Sequence[Result]) -> Table:
    """The one table: the first result is what the others are compared with."""
    plain = results[0]
    view = Table(title="The same prompts, three ways")
    for column in ("", "CPU"):
        view.add_column(column)
    for column in ("tokens/s", "tokens per\nverification", "drafting\nhidden", "output\nidentical"):
        view.add_column(column, justify="right")
    for result in results:
        hidden = "" if result.hidden_share is None else f"{result.hidden_share:.0%}"
        identical = "yes" if result.token_ids == plain.token_ids else "no"
        view.add_row(
            result.way.name,
            result.way.cores,
            f"{result.tokens_per_s:.1f}",
            f"{result.tokens_per_verification:.2f}",
            hidden,
            "" if result is plain else identical,
        )
    return view

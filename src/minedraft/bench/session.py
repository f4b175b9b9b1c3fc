"""A benchmark from start to end: engines or a server, a live table, and the files it leaves."""

import asyncio
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from minedraft.bench import online, plots, records, report, timeline
from minedraft.bench.offline import Offline, Plan
from minedraft.bench.provenance import provenance
from minedraft.bench.records import Benchmark, Load, Run, Setting, System
from minedraft.bench.summary import summarize
from minedraft.bench.workloads import Conversation
from minedraft.config import ConfigError

RESULT = "result.json"
REPORT = "report.md"


@dataclass(frozen=True)
class Served:
    """A running server that is to be measured."""

    base_url: str
    model: str
    system: System
    """What it is, as the user says."""


class Session:
    """Gathers the runs, shows them, and keeps them in a folder."""

    def __init__(self, title: str, devices: dict[records.Devices, str], folder: Path) -> None:
        """Raises ConfigError if the folder cannot be made."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{folder}: {error.strerror}") from error
        self.folder = folder
        self.console = Console()
        self.benchmark = Benchmark(records.VERSION, title, provenance(), devices, [])
        self._doing = ""
        self._table: Table | str = ""
        self._live = Live(console=self.console, refresh_per_second=4, transient=True)

    def offline(self, plan: Plan) -> None:
        """Runs a plan."""
        with self._live, Offline(plan, self._say) as bench:
            bench.load()
            bench.run(self._take)
            timeline = self._timeline(bench)
        self._finish(timeline)

    def online(
        self,
        served: Served,
        loads: Sequence[Load],
        conversations: Sequence[Conversation],
        *,
        repetitions: int,
        seed: int,
        temperature: float,
        output_tokens: int,
    ) -> None:
        """Measures a running server under all loads, in each repetition once.

        Which processes are the server's is not known, so nothing is said of the machine's others.
        """
        with self._live:
            for repetition in range(repetitions):
                for load in loads:
                    self._say(f"repetition {repetition + 1} of {repetitions}: {load}")
                    load_before = os.getloadavg()[0]
                    before = asyncio.run(online.measurements(served.base_url))
                    seconds, requests = asyncio.run(
                        online.run(
                            served.base_url,
                            served.model,
                            conversations,
                            load,
                            output_tokens=output_tokens,
                            seed=seed,
                            temperature=temperature,
                        )
                    )
                    after = asyncio.run(online.measurements(served.base_url))
                    engine = online.engine_between(before, after, seconds)
                    setting = Setting(served.system, load)
                    run = Run(setting, repetition, seconds, requests, engine, load_before)
                    self._take(run)
        self._finish([])

    # --- the screen ---------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        self._doing = text
        if not self.console.is_terminal:
            self.console.print(text, style="dim", highlight=False)
        self._show()

    def _show(self) -> None:
        self._live.update(Group(Text(self._doing, style="bold"), self._table))

    def _take(self, run: Run) -> None:
        self.benchmark.runs.append(run)
        self.benchmark.write(self.folder / RESULT)  # a benchmark that is broken off is kept
        self._table = report.table(self.benchmark)
        self._show()

    # --- the files ----------------------------------------------------------------------------

    def _timeline(self, bench: Offline) -> list[Path]:
        """A picture of some steps of the fastest overlapped setting."""
        ours = [
            summary
            for summary in summarize(self.benchmark)
            if summary.setting.system.name == "overlap" and not summary.setting.system.free
        ]
        if not ours:
            return []
        fastest = max(ours, key=lambda summary: summary.tokens_per_s.median)
        self._say(f"a timeline: {fastest.setting.system}, {fastest.setting.load}")
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.json"
            bench.trace(fastest.setting, trace)
            return timeline.timeline(trace, self.folder / "plot")

    def _finish(self, timeline: Sequence[Path]) -> None:
        write_report(self.benchmark, self.folder, timeline)
        self.console.print(self._table)
        self.console.print(f"{self.folder / REPORT} has the report, {RESULT} beside it all runs.")


def write_report(benchmark: Benchmark, folder: Path, more: Sequence[Path] = ()) -> Path:
    """Writes the report and its plots into a folder; the report. Raises ConfigError."""
    pictures = [*plots.draw(benchmark, folder / "plot"), *more]
    file = folder / REPORT
    try:
        file.write_text(
            report.markdown(benchmark, [p.name for p in pictures if p.suffix == ".svg"])
        )
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    return file

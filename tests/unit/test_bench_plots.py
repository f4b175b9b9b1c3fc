"""The plots: what is drawn, and that it can be read."""

import subprocess
import sys
from pathlib import Path
from typing import get_args
from xml.etree import ElementTree

import pytest
from results import benchmark, request, run

from minedraft.bench.plots import COLOURS, LINES, MARKERS, draw
from minedraft.bench.records import Benchmark, Devices, Load, Name, Setting, System
from minedraft.config import ConfigError

PNG = b"\x89PNG\r\n"


def swept(*loads: Load) -> Benchmark:
    """Two systems under each load; the first request of a run is slower."""
    runs = []
    for load in loads:
        systems: tuple[tuple[Name, Devices], ...] = (("plain", "target"), ("overlap", "all"))
        for name, devices in systems:
            for repetition, speed in enumerate((10, 12)):
                asked = [request(first=0.9), request()]
                setting = Setting(System(name, devices, 2 * (name == "overlap")), load)
                runs.append(run(setting, speed, repetition, requests=asked))
    return benchmark(*runs, title="a pair at $5 <b>")


def words(svg: Path) -> str:
    """The text in a picture."""
    return " ".join(" ".join(ElementTree.parse(svg).getroot().itertext()).split())


def test_throughput_over_concurrency(tmp_path: Path) -> None:
    png, svg = draw(swept(Load(concurrency=2), Load(concurrency=8)), tmp_path / "plot")
    assert (png.name, svg.name) == ("plot-throughput.png", "plot-throughput.svg")
    assert png.read_bytes().startswith(PNG)
    text = words(svg)
    for said in (
        "a pair at $5 <b>", "output tokens/s", "requests at a time", "2 8",
        "plain vLLM (CPU 0)", "MineDraft overlapped (CPU 0-1)",
    ):  # fmt: skip
        assert said in text


def test_latency_over_rate(tmp_path: Path) -> None:
    png, svg = draw(swept(Load(rate=0.5), Load(rate=2.0)), tmp_path / "plot")
    assert (png.name, svg.name) == ("plot-latency.png", "plot-latency.svg")
    text = words(svg)
    for said in (
        "requests a second", "time to first token, ms, median", "inter-token latency, ms, 99th",
        "end-to-end latency, s, median", "MineDraft overlapped (CPU 0-1)",
    ):  # fmt: skip
        assert said in text


def test_a_plot_needs_two_loads_of_its_kind(tmp_path: Path) -> None:
    assert draw(swept(), tmp_path / "plot") == []
    assert draw(swept(Load(concurrency=2), Load(rate=1.0)), tmp_path / "plot") == []
    files = draw(swept(Load(concurrency=2), Load(concurrency=4), Load(rate=1.0)), tmp_path / "plot")
    assert [file.name for file in files] == ["plot-throughput.png", "plot-throughput.svg"]
    assert sorted(tmp_path.iterdir()) == files


def test_the_same_benchmark_gives_the_same_picture(tmp_path: Path) -> None:
    one = swept(Load(concurrency=2), Load(concurrency=8))
    (_, first), (_, second) = draw(one, tmp_path / "a"), draw(one, tmp_path / "b")
    assert first.read_bytes() == second.read_bytes()


def test_where_every_request_failed_there_is_no_latency_to_draw(tmp_path: Path) -> None:
    failed = [request(failed="gone")]
    runs = [
        run(Setting(System("plain"), Load(rate=rate)), 1, requests=[*failed, request(0)])
        for rate in (1.0, 2.0)
    ]
    for made in runs:
        made.seconds = 1.0
    assert len(draw(benchmark(*runs), tmp_path / "plot")) == 2


def test_every_system_has_its_own_colour_and_marker() -> None:
    for looks in (COLOURS, MARKERS):
        assert set(looks) == set(get_args(Name))
        assert len(set(looks.values())) == len(looks)
    assert len(set(LINES.values())) == 2


def test_a_folder_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="plot-throughput.png: No such file"):
        draw(swept(Load(concurrency=2), Load(concurrency=8)), tmp_path / "none" / "plot")


def test_without_matplotlib_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        draw(swept(Load(concurrency=2), Load(concurrency=8)), tmp_path / "plot")
    assert draw(swept(), tmp_path / "plot") == []


def test_matplotlib_is_imported_only_to_draw() -> None:
    code = "import sys, minedraft.bench.plots; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0

"""`minedraft bench` as a user types it: real engines of every kind, tiny models."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from commands import DRAFTER_FLAGS, FLAGS, run

from minedraft.bench import records

K = 2


@pytest.mark.parametrize(
    "systems",
    [
        ("plain", "overlap"),
        pytest.param((*records.OURS, "plain", "ngram", "draft_model"), marks=pytest.mark.slow),
    ],
    ids=len,
)
def test_every_system_is_measured_and_says_the_same(
    tiny: Any, tmp_path: Path, systems: tuple[str, ...]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"prompt": f"prompt {i} " * (i + 1), "output_tokens": 12 + i} for i in range(4)]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    done = run(
        *("bench", tiny.target, "--draft-model", tiny.perturbed, "--workload", prompts),
        *("--conversations", 4, "--concurrency", 4, "--num-speculative-tokens", K),
        *("--repetitions", 1, "--settle", 1, "--out", tmp_path / "out"),
        *("--systems", *systems),
        f"--drafter-args={DRAFTER_FLAGS} --kv-cache-memory-bytes 64M",
        *(*FLAGS, "--kv-cache-memory-bytes", "64M"),
    )
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
    benchmark = records.read(tmp_path / "out/result.json")
    runs = {run.setting.system: run for run in benchmark.runs}
    assert {system.name for system in runs} == set(systems)
    plain = runs[records.System("plain", "target")]
    for system, found in runs.items():
        assert [request.token_ids for request in found.requests] == [
            request.token_ids for request in plain.requests
        ], system
        assert sorted(request.tokens for request in found.requests) == [12, 13, 14, 15]
        assert found.engine.steps
        assert found.engine.verify_s
        if system.name in {"draft_model", "overlap"}:
            assert found.engine.accepted
            assert sum(found.engine.accepted_by_position) == found.engine.accepted
    free = runs[records.System("overlap", "all", K, free=True)]
    drafted = runs[records.System("overlap", "all", K)]
    assert free.engine.accepted == drafted.engine.accepted
    assert drafted.engine.draft_s
    assert drafted.engine.peak_bytes.keys() == {"engine", "drafter"}
    report = (tmp_path / "out/report.md").read_text()
    assert "Every system has the same devices" in report
    assert "here ours uses more hardware" in report
    for kind in ("png", "svg"):
        assert (tmp_path / f"out/plot-timeline.{kind}").stat().st_size > 1000


def test_a_result_is_reported_again_and_a_broken_one_is_refused(tmp_path: Path) -> None:
    benchmark = records.Benchmark(
        records.VERSION,
        "a pair",
        {},
        {"all": "CPU 0-1", "target": "CPU 0"},
        [
            records.Run(
                records.Setting(records.System("plain"), records.Load(concurrency=1)),
                0,
                2.0,
                [records.Request(3, 0.0, [1.0, 2.0], [1, 1])],
                records.Engine(),
                0.0,
            )
        ],
    )
    first, broken = tmp_path / "a.json", tmp_path / "b.json"
    benchmark.write(first)
    assert run("bench", "report", first).returncode == 0
    assert "1.00" in (tmp_path / "report.md").read_text()
    done = run("bench", "report", first, first)
    assert (done.returncode, "1.00" in done.stdout) == (0, True)
    wrong = msgspec.to_builtins(benchmark) | {"version": 99}
    broken.write_bytes(msgspec.json.encode(wrong))
    done = run("bench", "report", broken)
    assert done.returncode == 2
    assert done.stderr.startswith(f"minedraft: {broken}: format 99")

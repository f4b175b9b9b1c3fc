"""The demo as a user sees it: real models, real processes, plain, sequential and overlapped."""

import os
import re
import subprocess
import sys
from pathlib import Path


def test_the_demo_answers_three_ways_with_the_same_tokens(tmp_path: Path) -> None:
    picture = tmp_path / "timeline.svg"
    ours = ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS")
    clean = {name: value for name, value in os.environ.items() if name not in ours}
    done = subprocess.run(
        [sys.executable, "-m", "minedraft", "demo", "--timeline", picture],
        env=clean | {"COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = {
        cells[0]: cells[1:]
        for line in done.stdout.splitlines()
        if len(cells := [cell.strip() for cell in re.split("[│┃]", line)][1:-1]) == 6
    }
    assert {"plain vLLM", "sequential", "overlapped"} <= set(rows)
    for way in ("sequential", "overlapped"):
        _, tokens_per_s, per_verification, hidden, identical = rows[way]
        assert identical == "yes"
        assert float(tokens_per_s) > 0
        assert float(per_verification) > 1.2
        assert hidden.endswith("%")
    shapes = picture.read_text()
    assert 'class="A"' in shapes
    assert 'class="B"' in shapes
    # Sequential drafting hides nothing but what the drafter does before it is asked.
    assert int(rows["overlapped"][3][:-1]) > int(rows["sequential"][3][:-1]) + 20

"""`minedraft doctor` as a user types it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def doctor(*words: object) -> tuple[int, dict[str, Any]]:
    """The exit code, and the findings by their check."""
    done = subprocess.run(
        [sys.executable, "-m", "minedraft", "doctor", "--json", *map(str, words)],
        env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, {finding["check"]: finding for finding in json.loads(done.stdout)}


def test_two_models_and_a_drafter_that_is_not_there(tiny: Any, tmp_path: Path) -> None:
    code, findings = doctor(tiny.target, tiny.perturbed)
    assert {name for name, finding in findings.items() if finding["state"] != "ok"} == set()
    assert findings.keys() >= {
        "vllm",
        "placement",
        "target",
        "draft_model",
        "runner",
        "tokens",
        "memory",
    }
    assert code == 0
    address = f"ipc://{tmp_path}/drafter"
    code, findings = doctor(tiny.target, "--drafter", address)
    assert code == 1
    assert findings["running_drafter"]["state"] == "problem"
    assert address in findings["running_drafter"]["found"]

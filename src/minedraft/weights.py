"""How much memory a model's weights take, and how much there is; in bytes."""

import json
import os
from pathlib import Path
from typing import Any

MAX_HEADER = 100 << 20
"""More than any safetensors header is allowed to have."""
_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def num_bytes(model: str) -> int | None:
    """Of the checkpoint, or by the configuration where it has no weights; None if it is not here.

    ``model`` is a folder, a file, or a name whose files are in Hugging Face's cache.
    """
    path = _local(model)
    if path is None:
        return None
    if path.is_file():
        return path.stat().st_size
    if files := safetensors(path):
        return sum(map(_tensor_bytes, files))
    for kind in ("*.gguf", "*.bin"):
        if files := list(path.glob(kind)):
            return sum(file.stat().st_size for file in files)
    return _bytes_by_configuration(path) if (path / "config.json").exists() else None


def safetensors(folder: Path) -> list[Path]:
    """The checkpoint's files of this kind, in order."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = set(json.loads(index.read_text())["weight_map"].values())
        return sorted(folder / name for name in names)
    found = sorted(folder.glob("*.safetensors"))
    # Mistral's checkpoints hold everything twice.
    return [file for file in found if not file.name.startswith("consolidated")] or found


def _local(model: str) -> Path | None:
    if os.path.exists(model):
        return Path(model)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (OSError, ValueError):
        return None


def _tensor_bytes(file: Path) -> int:
    """Bytes of all tensors in a safetensors file, by its header."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > MAX_HEADER:
            raise ValueError(f"{file} is no safetensors file")
        header: dict[str, Any] = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    return sum(end - start for start, end in (t["data_offsets"] for t in header.values()))


def _bytes_by_configuration(folder: Path) -> int:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return sum(weight.numel() * weight.element_size() for weight in model.parameters())


def available(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Of this machine's memory, or of what a container may have of it."""
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    free = int(lines["MemAvailable"].split()[0]) << 10
    try:
        limit, used = ((cgroup / f"memory.{name}").read_text() for name in ("max", "current"))
    except OSError:
        return free
    return free if limit.strip() == "max" else min(free, int(limit) - int(used))


def free_on_gpu(number: int) -> int:
    """Of a visible GPU."""
    import torch

    return int(torch.cuda.mem_get_info(number)[0])

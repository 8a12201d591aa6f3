"""Models of the Hugging Face hub, through its own client, which caches and resumes by itself."""

from __future__ import annotations

import io
import json
import os
import sys
from contextlib import nullcontext, redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tenure.errors import DownloadError, ModelError
from tenure.models.catalog import CATALOG
from tenure.models.progress import Progress, ProgressEvent

if TYPE_CHECKING:
    from tenure.models.store import Store

_WANTED = ["*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model"]
_UNWANTED = ["*/*", "consolidated*"]  # other formats of the same weights


def fetch_from_hub(hub_id: str, store: Store, progress: Progress, *, offline: bool = False) -> Path:
    """The local snapshot folder of ``hub_id``, fetched if needed. A model once fetched needs no network.

    Raises:
        DownloadError: no network, or offline and not fetched before.
        ModelError: the hub has no such model, or it needs a login.
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
        with store.disk_errors():
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(json.dumps({"path": str(path)}), encoding="utf-8")
    return path


def _noted(note: Path) -> Path | None:
    try:
        path = Path(json.loads(note.read_text(encoding="utf-8"))["path"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return path if (path / "config.json").is_file() else None

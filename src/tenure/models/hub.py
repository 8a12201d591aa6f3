"""Models of the Hugging Face hub, through its own client, which caches and resumes by itself."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from tenure.errors import DownloadError, ModelError
from tenure.models.catalog import CATALOG
from tenure.models.progress import Progress, ProgressEvent

_WANTED = ["*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model"]
_UNWANTED = ["*/*", "consolidated*"]  # other formats of the same weights


def fetch_from_hub(hub_id: str, progress: Progress, *, offline: bool = False) -> Path:
    """The local snapshot folder of ``hub_id``, fetched if needed.

    Raises:
        DownloadError: no network, or offline and not in the hub's cache.
        ModelError: the hub has no such model, or it needs a login.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    options: dict[str, Any] = {"allow_patterns": _WANTED, "ignore_patterns": _UNWANTED}
    try:  # no request, and no word to the user, for what is already here
        return Path(snapshot_download(hub_id, local_files_only=True, **options))
    except LocalEntryNotFoundError:
        if offline or os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
            raise _unreachable(hub_id, "it is not in the hub's cache and downloads are switched off") from None
    progress(ProgressEvent("hub", f"{hub_id}: fetching from the hub", 0, None, "steps"))
    try:
        return Path(snapshot_download(hub_id, tqdm_class=_tqdm(), **options))
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
        raise _unreachable(hub_id, f"the hub does not answer ({type(error).__name__})") from error


def _unreachable(hub_id: str, cause: str) -> DownloadError:
    return DownloadError(
        f"{cause}: {hub_id} was not fetched",
        option="model",
        way_out=f"Try again with a network, use a local folder or .gguf file, or a named model: {', '.join(CATALOG)}",
    )


def _tqdm() -> Any:
    from tqdm.auto import tqdm

    class Bar(tqdm):  # type: ignore[type-arg, misc]
        """The client's own bars, and none where stderr is not a terminal."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs["disable"] = not sys.stderr.isatty()
            kwargs.pop("name", None)
            super().__init__(*args, **kwargs)

    return Bar

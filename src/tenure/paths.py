"""Where Tenure keeps files of its own."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_cache_path


def cache_folder() -> Path:
    """``$TENURE_CACHE``, else the platform's cache folder for the user. It need not exist."""
    named = os.environ.get("TENURE_CACHE")
    return (Path(named) if named else user_cache_path("tenure")).expanduser().absolute()

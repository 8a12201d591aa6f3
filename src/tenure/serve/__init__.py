"""The OpenAI-compatible server: sessions that never outgrow their budget, many at a time."""

from __future__ import annotations

from typing import Any


def create_app(*args: Any, **options: Any) -> Any:
    """The ASGI application; see :func:`tenure.serve.app.create_app`."""
    from tenure.serve.app import create_app as create

    return create(*args, **options)

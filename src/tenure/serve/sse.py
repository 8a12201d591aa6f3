"""Server-sent events of JSON, safe for every line splitter."""

from __future__ import annotations

import json
from typing import Any

DONE = b"data: [DONE]\n\n"


def event(data: Any, name: str | None = None) -> bytes:
    """One event. Non-ASCII is escaped: line separators (U+2028, U+0085) in a text cannot end a line."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, separators=(',', ':'))}\n\n".encode("ascii")

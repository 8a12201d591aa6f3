"""Transcripts to calibrate on: OpenAI message lists as JSON or JSONL, and Tenure's session files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tenure import sessionfile
from tenure.errors import MessageError, SessionFileError
from tenure.messages import Message


def load(path: Path) -> list[list[Message]]:
    """The conversations of a file.

    - JSON: a list of messages, an object with ``messages``, or a list of either.
    - JSONL: a conversation a line (a list, or an object with ``messages``), or one message a line; a session file is
      the latter, and its probes are left out.

    Raises:
        SessionFileError: unreadable, or of another form.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SessionFileError(f"cannot be read: {error}", path=str(path)) from None
    try:
        return _conversations(json.loads(text), path, 1)
    except ValueError:
        pass  # not one JSON value: lines
    first = next((line for line in text.splitlines() if line.strip()), "")
    try:
        head = json.loads(first)
    except ValueError as error:
        raise SessionFileError(
            f"neither JSON nor JSON lines: {error}", path=str(path), line=1, way_out="Give a list of messages"
        ) from None
    if isinstance(head, dict) and "messages" not in head:
        return [sessionfile.load(path).messages]
    found: list[list[Message]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                value = json.loads(line)
            except ValueError as error:
                raise SessionFileError(f"broken JSON: {error}", path=str(path), line=number) from None
            found += _conversations(value, path, number)
    return found


def _conversations(value: Any, path: Path, line: int) -> list[list[Message]]:
    if isinstance(value, dict) and "messages" in value:
        value = value["messages"]
    elif isinstance(value, dict):
        value = [value]
    if not isinstance(value, list) or not value:
        raise SessionFileError(
            "no messages", path=str(path), line=line, way_out="Give a list of messages in OpenAI's form"
        )
    if all(isinstance(item, list) or (isinstance(item, dict) and "messages" in item) for item in value):
        return [one for item in value for one in _conversations(item, path, line)]
    try:
        return [[Message.parse(message, index) for index, message in enumerate(value)]]
    except MessageError as error:
        raise SessionFileError(str(error), path=str(path), line=line) from None

"""What a tool's output shows: two outputs that show the same thing are an older and a newer reading of it.

A thing is told from the call that asked for it (JSON with ``name`` and ``arguments``, a shell command behind ``$`` or
in a fence), else from a first line that names a file. Reading a whole file is one thing however it is done. Only what is
exactly the same counts: another line range is another thing.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

_CALL = re.compile(r'\{\s*"(?:name|function|type|id)"\s*:')
_FENCE = re.compile(r"```(?:bash|sh|shell|console)\s*\n(.*?)```", re.DOTALL)
_PROMPT = re.compile(r"^\s*[$>]\s+(\S.*)$", re.MULTILINE)
_READERS = {
    "cat",
    "less",
    "more",
    "bat",
    "type",
    "nl",
    "read",
    "read_file",
    "view",
    "open",
    "open_file",
    "get_file",
}
_PATHS = ("path", "file", "file_path", "filepath", "filename", "file_name")
_TITLE = re.compile(
    r"(?:[#/;*=\-\s]|<!--)*(?:file(?:name)?|path|source)?\s*[:=]?\s*[`\"']?"
    r"(?P<path>[\w./\\-]*[\w-]\.[A-Za-z]\w{0,7})[`\"']?\s*(?:[=\-*>:]|--)*",
    re.IGNORECASE,
)


def things_asked(text: str) -> list[str]:
    """The things that an assistant's message asks tools for, in order."""
    calls = [_of_call(name, arguments) for name, arguments in _calls(text)]
    commands = list(_commands(text))
    if calls or not commands:
        return calls
    # Several commands have one output, as far as can be told.
    return [_of_command(commands[0])] if len(commands) == 1 else ["run " + "; ".join(commands)]


def thing_shown(text: str) -> str | None:
    """The thing that an output's first line names: a command behind ``$``, or a file as a title."""
    first = next((line for line in text.splitlines() if line.strip()), "")
    prompt = _PROMPT.match(first)
    if prompt:
        return _of_command(prompt.group(1))
    document = re.match(r"\s*<\w+\s[^>]*?(?:path|name|source)=[\"']([^\"']+)", first)
    if document:
        return f"read {document.group(1)}"
    title = _TITLE.fullmatch(first.strip())
    return f"read {title.group('path')}" if title else None


def _calls(text: str) -> Iterator[tuple[str, Any]]:
    decoder, place = json.JSONDecoder(), 0
    while match := _CALL.search(text, place):
        try:
            found, place = decoder.raw_decode(text, match.start())
        except (ValueError, RecursionError):
            place = match.end()
            continue
        call = found.get("function", found) if isinstance(found.get("function"), Mapping) else found
        name, arguments = call.get("name"), call.get("arguments", call.get("parameters"))
        if isinstance(name, str) and arguments is not None:
            yield name, arguments


def _commands(text: str) -> Iterator[str]:
    for block in _FENCE.findall(text):
        for line in block.splitlines():
            bare = line.strip().removeprefix("$").strip()
            if bare and not bare.startswith("#"):
                yield bare
    yield from _PROMPT.findall(_FENCE.sub("", text))


def _of_call(name: str, arguments: object) -> str:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return f"{name} {arguments}"
    if isinstance(arguments, Mapping):
        if name in _READERS and len(arguments) == 1:
            path = next((arguments[key] for key in _PATHS if isinstance(arguments.get(key), str)), None)
            if path:
                return f"read {path}"
        if len(arguments) == 1 and isinstance(arguments.get("command"), str):
            return _of_command(arguments["command"])
    return f"{name} {json.dumps(arguments, sort_keys=True)}"


def _of_command(command: str) -> str:
    try:
        words = shlex.split(command)
    except ValueError:
        words = command.split()
    if len(words) == 2 and words[0] in _READERS and not words[1].startswith("-"):
        return f"read {words[1].removeprefix('./')}"
    return "run " + " ".join(words)

"""Calls of tools in a model's text: the text and the calls told apart while they are being written.

Two forms are read, whichever the model's chat template writes: Hermes' (``<tool_call>`` around a JSON object; Qwen and
many others) and a bare JSON object with ``parameters`` (Llama 3). For a template that knows no tools, :func:`fold`
writes tools, calls and results into the messages' texts, in Hermes' form.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from tenure.grammar import Grammar

OPEN, CLOSE = "<tool_call>", "</tool_call>"

_NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
"""A function without parameters takes none."""

CallForm = Literal["hermes", "bare"]


@dataclass(frozen=True)
class ToolCall:
    """A call that a model has written.

    Args:
        id: unique; the tool's result names it.
        name: of the function.
        arguments: JSON text.
    """

    id: str
    name: str
    arguments: str

    def to_openai(self) -> dict[str, Any]:
        """OpenAI's form."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


class CallStream:
    """Splits a text, given piece by piece, into plain text and calls.

    Text that cannot be a call is given out at once, but for white space, which is held until it is known not to stand
    before a call. What looks like a call and is none is text.

    Args:
        form: how the model writes calls.
    """

    def __init__(self, form: CallForm = "hermes") -> None:
        self._bare = form == "bare"
        self._buffer = ""
        self._begun = False
        self.calls: list[ToolCall] = []

    def push(self, text: str) -> list[str | ToolCall]:
        """Take a piece; returns what it settles, in order."""
        self._buffer += text
        return self._settle(final=False)

    def finish(self) -> list[str | ToolCall]:
        """What was held back."""
        return self._settle(final=True)

    def _settle(self, *, final: bool) -> list[str | ToolCall]:
        parts: list[str | ToolCall] = []
        while self._buffer:
            start = self._opening()
            if start is None:
                held = 0 if final else self._undecided()
                text, self._buffer = (
                    self._buffer[: len(self._buffer) - held],
                    self._buffer[len(self._buffer) - held :],
                )
                self._text(parts, text.rstrip() if final and self.calls else text)
                break
            found = self._call(start, final)
            if found is None:
                if not final:
                    before = self._buffer[:start]
                    kept = before.rstrip()
                    self._text(parts, kept)
                    self._buffer = self._buffer[len(kept) :]
                    break
                end = self._buffer.find(CLOSE, start)
                end = len(self._buffer) if end < 0 or self._bare else end + len(CLOSE)
                self._text(parts, self._buffer[:end])
                self._buffer = self._buffer[end:]
                continue
            call, end = found
            self._text(parts, self._buffer[:start].rstrip())
            parts.append(call)
            self.calls.append(call)
            self._begun = True
            self._buffer = self._buffer[end:]
        return parts

    def _text(self, parts: list[str | ToolCall], text: str) -> None:
        if text and (text.strip() or not self.calls):
            self._begun = self._begun or bool(text.strip())
            if parts and isinstance(parts[-1], str):
                parts[-1] += text
            else:
                parts.append(text)

    def _opening(self) -> int | None:
        if not self._bare:
            start = self._buffer.find(OPEN)
            return None if start < 0 else start
        start = len(self._buffer) - len(self._buffer.lstrip(" \n;"))
        return start if self._buffer[start : start + 1] == "{" and (self.calls or not self._begun) else None

    def _call(self, start: int, final: bool) -> tuple[ToolCall, int] | None:
        """The call that opens at a place, and where it ends; None while it is not complete."""
        if not final and ("}" if self._bare else CLOSE) not in self._buffer[start:]:
            return None
        begin = start if self._bare else start + len(OPEN)
        begin += len(self._buffer[begin:]) - len(self._buffer[begin:].lstrip())
        try:
            data, end = json.JSONDecoder(strict=False).raw_decode(self._buffer, begin)
        except (ValueError, RecursionError):
            return None
        call = _as_call(data)
        if call is None or self._bare:
            return None if call is None else (call, end)
        rest = self._buffer[end:].lstrip()
        if rest.startswith(CLOSE):
            return call, len(self._buffer) - len(rest) + len(CLOSE)
        return (call, len(self._buffer)) if final and CLOSE.startswith(rest) else None

    def _undecided(self) -> int:
        """Characters at the end that may open a call, or stand before one."""
        text = self._buffer
        if self._bare:
            return len(text) if not text.strip(" \n;") and (self.calls or not self._begun) else 0
        held = next((size for size in range(len(OPEN) - 1, 0, -1) if text.endswith(OPEN[:size])), 0)
        body = text[: len(text) - held]
        return held + len(body) - len(body.rstrip())


def _as_call(data: object) -> ToolCall | None:
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        return None
    arguments = data.get("arguments", data.get("parameters", {}))
    if not isinstance(arguments, (dict, str)):
        return None
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(f"call_{secrets.token_hex(12)}", data["name"], text)


def form_of(template: str) -> CallForm | None:
    """How a chat template writes calls; None where it knows no tools, and :func:`fold` is needed."""
    if OPEN in template:
        return "hermes"
    if "tools" in template and '"parameters"' in template and "tool_calls" in template:
        return "bare"
    return None


_RULES = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def fold(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> tuple[list[dict[str, Any]], int]:
    """Messages for a template that knows no tools: schemas, calls and results as texts, in Hermes' form.

    Args:
        messages: in OpenAI's form; marks stay on them.
        tools: schemas, in OpenAI's form; written into the system message.

    Returns:
        As many messages, or one more at the start; and how many more.
    """
    folded = [_folded(message) for message in messages]
    if not tools:
        return folded, 0
    rules = _RULES.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    first = folded[0] if folded else {}
    if first.get("role") in ("system", "developer") and isinstance(first.get("content"), str):
        folded[0] = {**first, "content": f"{first['content']}\n\n{rules}"}
        return folded, 0
    return [{"role": "system", "content": rules, "region": "tools"}, *folded], 1


def _folded(message: Mapping[str, Any]) -> dict[str, Any]:
    plain = dict(message)
    if plain.get("role") == "tool":
        content = _plain(plain.get("content"))
        plain |= {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
        plain.setdefault("region", "tool_output")
        plain.pop("tool_call_id", None)
    elif calls := plain.pop("tool_calls", None):
        parts = [_plain(plain.get("content"))] if plain.get("content") else []
        plain["content"] = "\n".join([*parts, *(_written(call) for call in calls)])
    return plain


def _plain(content: object) -> str:
    if isinstance(content, (list, tuple)):
        return "".join(part.get("text", "") if isinstance(part, dict) else str(part) for part in content)
    return content if isinstance(content, str) else ""


def _written(call: Mapping[str, Any]) -> str:
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'{OPEN}\n{{"name": {json.dumps(function.get("name"))}, "arguments": {text or "{}"}}}\n{CLOSE}'


def call_rules(
    tokenizer: Any, tools: Sequence[Mapping[str, Any]], form: CallForm, *, many: bool = True
) -> str:
    """Lark rules for a text that is nothing but calls of the tools; the rule ``calls`` is the whole.

    Args:
        tokenizer: the model's.
        tools: those that may be called, in OpenAI's form.
        form: how the model writes calls.
        many: whether several calls may follow each other.
    """
    from tenure.grammar import Grammar, lark_json

    lines = ['calls: call ("\\n" call)*' if many and form == "hermes" else "calls: call"]
    key = '"arguments"' if form == "hermes" else '"parameters"'
    bodies = []
    for number, tool in enumerate(tools):
        function = tool["function"]
        head = json.dumps(f'{{"name": {json.dumps(function["name"])}, {key}: ')
        lines.append(f"body_{number}: {head} args_{number} " + json.dumps("}"))
        lines.append(f"args_{number}: " + lark_json(function.get("parameters") or _NOTHING))
        bodies.append(f"body_{number}")
    body = "(" + " | ".join(bodies) + ")"
    if form == "hermes":
        opening, closing = Grammar.term(tokenizer, OPEN), Grammar.term(tokenizer, CLOSE)
        lines.append(f'call: {opening} "\\n" {body} "\\n" {closing}')
    else:
        lines.append(f"call: {body}")
    return "\n".join(lines)


def call_grammar(
    tokenizer: Any, tools: Sequence[Mapping[str, Any]], form: CallForm, *, many: bool = True
) -> Grammar:
    """A grammar of nothing but calls of the tools."""
    from tenure.grammar import Grammar

    return Grammar.lark(tokenizer, "start: calls\n" + call_rules(tokenizer, tools, form, many=many))

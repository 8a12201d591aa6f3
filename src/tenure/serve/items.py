"""Items of the Responses interface as chat messages, and answers as items."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tenure.serve.errors import ApiError

_MARKS = ("span", "region", "pin", "step", "reads", "cache_control")


def messages_of(items: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Input items as chat messages: calls join the assistant's message before them.

    Raises:
        ApiError: an item of a kind that is not read, named by its number.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []
    for number, item in enumerate(items):
        kind = item.get("type", "message")
        marks = {name: item[name] for name in _MARKS if item.get(name) is not None}
        if kind == "message":
            messages.append({"role": item.get("role"), "content": _content(item, number), **marks})
        elif kind == "function_call":
            if not isinstance(item.get("name"), str) or not isinstance(item.get("call_id"), str):
                raise _broken(number, "a function_call has a name and a call_id")
            function = {"name": item["name"], "arguments": item.get("arguments") or "{}"}
            call = {"id": item["call_id"], "type": "function", "function": function}
            if messages and messages[-1]["role"] == "assistant":
                messages[-1].setdefault("tool_calls", []).append(call)
            else:
                messages.append({"role": "assistant", "content": None, "tool_calls": [call], **marks})
        elif kind == "function_call_output":
            output = item.get("output")
            if not isinstance(item.get("call_id"), str) or not isinstance(output, (str, list)):
                raise _broken(number, "a function_call_output has a call_id and an output")
            messages.append({"role": "tool", "content": output, "tool_call_id": item["call_id"], **marks})
        elif (
            kind != "reasoning"
        ):  # what a model has thought comes back from some clients; it is theirs to drop
            raise _broken(number, f"items of type {kind!r} are not read")
    return messages


def _content(item: Mapping[str, Any], number: int) -> Any:
    content = item.get("content")
    if content is None:
        raise _broken(number, "a message has content")
    return content


def _broken(number: int, cause: str) -> ApiError:
    return ApiError(400, "invalid_item", f"input[{number}]: {cause}", param=f"input[{number}]")


def tools_of(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tools of the Responses form in the chat form.

    Raises:
        ApiError: a tool that is no function.
    """
    found = []
    for number, tool in enumerate(tools):
        if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
            raise ApiError(
                400,
                "invalid_value",
                f"tools[{number}]: only functions can be called",
                param=f"tools[{number}]",
            )
        names = ("name", "description", "parameters", "strict")
        function = {name: tool[name] for name in names if tool.get(name) is not None}
        found.append({"type": "function", "function": function})
    return found


def message_item(name: str, text: str, status: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    """An answer's text as an item."""
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
    return {"id": name, "type": "message", "role": "assistant", "status": status, "content": [part]}


def call_item(name: str, call: Mapping[str, Any], status: str = "completed") -> dict[str, Any]:
    """A call as an item."""
    function = call["function"]
    return {
        "id": name,
        "type": "function_call",
        "call_id": call["id"],
        "name": function["name"],
        "arguments": function["arguments"],
        "status": status,
    }


def answer_message(text: str, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """An answer as the chat message that stands for it in the next request."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message |= {"content": text or None, "tool_calls": json.loads(json.dumps(list(calls)))}
    return message

"""Chat messages as callers send them, checked once and then trusted.

The fields of the OpenAI chat format, and Tenure's optional marks: `span` (an id for the message), `region`,
`pin`, `step` and `reads`. Marks are hints; they never change the ids that the model reads.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any, Literal

from tenure.errors import ConfigError, MessageError, PlanError
from tenure.regions import AnyRegion, CustomRegion, Region, infer_region, parse_region
from tenure.steps import Read, parse_read

Pin = Literal["hard", "soft"]

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message.

    Args:
        role: `system`, `developer` (rendered as `system`), `user`, `assistant` or `tool`.
        content: the text; may be empty.
        tool_calls: an assistant's calls in the OpenAI form, `{"id", "type", "function": {"name",
            "arguments"}}`.
        tool_call_id: on a tool message, the call that it answers.
        name: of the speaker or the tool, for templates that show it.
        reasoning_content: an assistant's reasoning, kept apart from the text. Whether it becomes part of the
            history is up to the model's template; `Transcript.export` tells.
        span: id of the message's span; unique in the session.
        region: its role for memory; None lets `infer_region` decide.
        pin: `hard` is never evicted, `soft` is evicted last.
        step: id of the plan's step that this message belongs to.
        reads: the spans that this step reads: ids, ``{"message": NUMBER}`` or ``{"quote": TEXT}``.
        ignored: names of fields that were sent and have no meaning here.
    """

    role: str
    content: str = ""
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    span: str | None = None
    region: AnyRegion | None = None
    pin: Pin | None = None
    step: str | None = None
    reads: tuple[Read, ...] = ()
    ignored: tuple[str, ...] = ()

    @property
    def call_names(self) -> tuple[tuple[str, str], ...]:
        """Id and function name of each call."""
        return tuple((call["id"], call["function"]["name"]) for call in self.tool_calls)

    @property
    def memory_region(self) -> AnyRegion:
        """The region given, or the one inferred from role and text."""
        return self.region if self.region is not None else infer_region(self)

    @property
    def empty(self) -> bool:
        """Whether it brings no text of its own: then hints on it have nothing to act on."""
        return not (self.content.strip() or self.tool_calls or (self.reasoning_content or "").strip())

    @classmethod
    def parse(cls, obj: object, index: int = 0, regions: Iterable[str] | None = None) -> Message:
        """Check and convert one message.

        Args:
            obj: a string (a user message), a mapping or a `Message`.
            index: its place in the caller's list, for errors.
            regions: names of the regions that are known; those of `Region` if None.

        Raises:
            MessageError: names the index and the field.
        """
        if isinstance(obj, str):
            obj = {"role": "user", "content": obj}
        elif isinstance(obj, Message):
            return _parse({name: getattr(obj, name) for name in _FIELDS}, index, obj.ignored, regions)
        if not isinstance(obj, Mapping):
            raise MessageError(
                f"expected an object or a text, got {type(obj).__name__}",
                index=index,
                way_out='Send {"role": ..., "content": ...}',
            )
        ignored = tuple(sorted(str(name) for name in obj if name not in _FIELDS))
        return _parse(obj, index, ignored, regions)

    def as_chat(self) -> dict[str, Any]:
        """The form that chat templates read, without marks."""
        chat: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content,
        }
        if self.tool_calls:
            chat["tool_calls"] = [_with_arguments_as_data(call) for call in self.tool_calls]
        for name in ("tool_call_id", "name", "reasoning_content"):
            value = getattr(self, name)
            if value is not None:
                chat[name] = value
        return chat


_FIELDS = tuple(field.name for field in fields(Message) if field.name != "ignored")


def _parse(
    obj: Mapping[str, Any], index: int, ignored: tuple[str, ...], regions: Iterable[str] | None
) -> Message:
    role = obj.get("role")
    if role not in ROLES:
        raise MessageError(
            f"role: unknown role {role!r}", index=index, way_out=f"Known roles: {', '.join(ROLES)}"
        )
    calls = tool_calls(obj.get("tool_calls"), index)
    if calls and role != "assistant":
        raise MessageError(f"tool_calls: a {role} message cannot call tools", index=index)
    reasoning = _text(obj.get("reasoning_content"), "reasoning_content", index)
    content = _content(obj.get("content"), index)
    if content is None:
        if not calls and not reasoning:
            raise MessageError(
                "content: no text",
                index=index,
                way_out="Only an assistant message with tool_calls may lack it",
            )
        content = ""
    return Message(
        role=role,
        content=content,
        tool_calls=calls,
        tool_call_id=_text(obj.get("tool_call_id"), "tool_call_id", index),
        name=_text(obj.get("name"), "name", index),
        reasoning_content=reasoning,
        span=_id(obj.get("span"), "span", index),
        region=_region(obj.get("region"), index, regions),
        pin=_pin(obj.get("pin"), index),
        step=_id(obj.get("step"), "step", index),
        reads=_reads(obj.get("reads"), index),
        ignored=ignored,
    )


def _text(value: object, field: str, index: int) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise MessageError(f"{field}: expected a text, got {type(value).__name__}", index=index)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise MessageError(
            f"{field}: half a surrogate pair (U+{ord(value[error.start]):04X}) at character {error.start}; "
            "this is not Unicode text and no tokenizer takes it",
            index=index,
            way_out="Decode the source with errors='replace'",
        ) from None
    return value


def _content(value: object, index: int) -> str | None:
    if not isinstance(value, (list, tuple)):
        return _text(value, "content", index)
    texts = []
    for number, part in enumerate(value):
        place = f"content[{number}]"
        text = part if isinstance(part, str) else None
        if isinstance(part, dict):
            kind = part.get("type", "text")
            if kind not in ("text", "input_text", "output_text", "refusal"):
                raise MessageError(
                    f"{place}: parts of type {kind!r} are not read",
                    index=index,
                    way_out="Send text parts",
                )
            text = part.get("refusal" if kind == "refusal" else "text")
        if text is None:
            raise MessageError(f"{place}: no text", index=index)
        texts.append(_text(text, place, index) or "")
    return "".join(texts)


def tool_calls(value: object, index: int) -> tuple[Mapping[str, Any], ...]:
    """The calls of an assistant's message, in OpenAI's form.

    Args:
        value: what the message says of them; None for none.
        index: number of the message, for errors.

    Raises:
        MessageError: one cannot be read.
    """
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)):
        raise MessageError(f"tool_calls: expected a list, got {type(value).__name__}", index=index)
    calls = []
    for number, call in enumerate(value):
        place = f"tool_calls[{number}]"
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise MessageError(f"{place}: expected an object with function.name", index=index)
        arguments = function.get("arguments", {})
        if not isinstance(arguments, (str, dict)):
            raise MessageError(f"{place}: arguments must be JSON text or an object", index=index)
        try:
            shown = json.dumps([function["name"], arguments, call.get("id")], ensure_ascii=False)
        except (TypeError, ValueError) as error:
            raise MessageError(f"{place}: not JSON: {error}", index=index) from None
        _text(shown, place, index)
        calls.append(
            {
                "id": _text(call.get("id"), f"{place}.id", index) or f"call_{number}",
                "type": "function",
                "function": {"name": function["name"], "arguments": arguments},
            }
        )
    return tuple(calls)


def _with_arguments_as_data(call: Mapping[str, Any]) -> dict[str, Any]:
    # Templates write arguments as JSON: JSON text would be quoted a second time.
    function = dict(call["function"])
    if isinstance(function["arguments"], str):
        with suppress(ValueError):  # a broken call is history too: it is shown as the text that it was
            function["arguments"] = json.loads(function["arguments"])
    return {**call, "function": function}


def _id(value: object, field: str, index: int) -> str | None:
    text = _text(value, field, index)
    if text is not None and (not text or "\0" in text):
        raise MessageError(f"{field}: an id is a non-empty text without NUL", index=index)
    return text


def _region(value: object, index: int, names: Iterable[str] | None) -> AnyRegion | None:
    if value is None or isinstance(value, (Region, CustomRegion)):
        return value
    try:
        return parse_region(value if isinstance(value, Mapping) else _text(value, "region", index), names)
    except ConfigError as error:
        raise MessageError(f"region: {error.cause}", index=index, way_out=error.way_out) from None


def _pin(value: object, index: int) -> Pin | None:
    if value is None or value is False:
        return None
    if value is True or value == "hard":
        return "hard"
    if value == "soft":
        return "soft"
    raise MessageError(f"pin: {value!r} is not a pin", index=index, way_out="Known: true, 'hard', 'soft'")


def _reads(value: object, index: int) -> tuple[Read, ...]:
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)):
        raise MessageError(f"reads: expected a list of span ids, got {type(value).__name__}", index=index)
    return tuple(dict.fromkeys(_read(read, number, index) for number, read in enumerate(value)))


def _read(value: object, number: int, index: int) -> Read:
    place = f"reads[{number}]"
    if isinstance(value, str):
        return _id(value, place, index) or ""
    try:
        return parse_read(value, place)
    except PlanError as error:
        raise MessageError(str(error), index=index) from None

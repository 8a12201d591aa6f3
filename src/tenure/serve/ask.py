"""A request for an answer, made ready for the engine: hints, tools, grammar, prompt. No HTTP and no wire format here."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tenure.conversation import Conversation, render
from tenure.errors import ConfigError, MessageError, ModelError
from tenure.messages import tool_calls
from tenure.sampling import SamplingOptions
from tenure.serve.errors import ApiError
from tenure.serve.hints import Hints, fit_pins, read_hints, read_marks
from tenure.toolcalls import CallForm, call_rules, fold, form_of

if TYPE_CHECKING:
    from tenure.engine import Engine
    from tenure.grammar import Grammar
    from tenure.serve.config import ServeConfig

_RESERVED = frozenset(
    (
        "self",
        "conversation",
        "conversations",
        "messages",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "tokenizer_kwargs",
        "sanitize_control_tokens",
        "padding",
        "truncation",
        "max_length",
    )
)
"""What ``apply_chat_template`` takes, or gives to the template itself."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What a client wants, whatever the form it came in.

    Args:
        messages: the whole conversation, in OpenAI's chat form, marks on them.
        hints: the request's body, for hints of the request as a whole.
        tools: in the chat form.
        tool_choice: ``none``, ``auto``, ``required`` or ``{"type": "function", "function": {"name": ...}}``.
        many_calls: whether one answer may call several times.
        response_format: ``{"type": "json_schema", ...}`` and the like.
        format_param: what the client calls that.
        template_options: variables of the chat template.
        sampling: fields of ``SamplingOptions``; None keeps a default.
    """

    messages: Sequence[Mapping[str, Any]]
    hints: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] | None = None
    many_calls: bool = True
    response_format: Mapping[str, Any] | None = None
    format_param: str = "response_format"
    template_options: Mapping[str, Any] | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Ready:
    """An ask, rendered and checked. ``chain`` see :class:`~tenure.serve.jobs.Job`."""

    conversation: Conversation
    options: SamplingOptions
    hints: Hints
    calls: CallForm | None


def make_ready(ask: Ask, engine: Engine, config: ServeConfig) -> Ready:
    """Render a request and check all of it. For a rendering thread: it may take long.

    Raises:
        ApiError: something cannot be done, or is too long.
        TenureError: a message or an option is wrong.
    """
    _check_variables(ask.template_options or {})
    hints = read_hints(ask.hints)
    messages = read_marks(ask.messages, ask.hints.get("hints"), hints)
    order = result_order(messages)
    messages = [messages[number] for number in order]
    tools = _allowed(ask)
    form = form_of_engine(engine)
    more = 0
    if form is None:
        for number, message in zip(order, messages, strict=True):
            tool_calls(message.get("tool_calls"), number)
        messages, more = fold(messages, tools)
    transcript = engine.transcript(
        tools=(tools or None) if form else None, template_options=ask.template_options
    )
    if transcript is None:
        raise ModelError("the model has no tokenizer", option="model", way_out="Serve another model")
    try:
        whole = render(transcript, messages)
    except MessageError as error:
        if error.index is None:
            raise
        index = order[max(0, error.index - more)]
        raise MessageError(error.cause, index=index, way_out=error.way_out) from None
    if len(whole.ids) > config.max_prompt:
        raise ApiError(
            400,
            "context_length_exceeded",
            f"the request has {len(whole.ids)} tokens, the limit is {config.max_prompt}; nothing was cut away",
            param="messages",
        )
    calls = (form or "hermes") if tools else None
    grammar = _compiled(ask, tools, calls, engine, transcript.stop_ids)
    return Ready(
        fit_pins(whole, config.session, hints, [-1] * more + order),
        _options(ask, config, grammar),
        hints,
        calls,
    )


def _check_variables(options: Mapping[str, Any]) -> None:
    """Refuse variables that would be read as arguments of the rendering, another template among them."""
    for name in options:
        if name in _RESERVED or name.startswith("return_"):
            raise ApiError(
                400,
                "invalid_value",
                f"chat_template_kwargs sets variables of the template; {name} is none",
                param="chat_template_kwargs",
            )


def form_of_engine(engine: Engine) -> CallForm | None:
    """How the model's template writes calls; None where tools have to be folded into texts."""
    template = getattr(engine.tokenizer, "chat_template", None) or ""
    if isinstance(template, dict):
        template = template.get("tool_use") or template.get("default") or ""
    return form_of(template)


def _options(ask: Ask, config: ServeConfig, grammar: Grammar | None) -> SamplingOptions:
    values = {name: value for name, value in ask.sampling.items() if value is not None}
    values["max_tokens"] = min(values.get("max_tokens", config.default_tokens), config.max_tokens)
    return SamplingOptions(**values, grammar=grammar, one_call=not ask.many_calls)


def _allowed(ask: Ask) -> list[dict[str, Any]]:
    """The tools that the model is shown; of a named choice, all, so that the prompt does not change with it."""
    tools = [dict(tool) for tool in ask.tools]
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        raise ApiError(400, "invalid_value", "two tools have the same name", param="tools")
    if not tools and ask.tool_choice not in (None, "none", "auto"):
        raise ApiError(400, "invalid_value", "tool_choice needs tools", param="tool_choice")
    return tools if ask.tool_choice != "none" else []


def _compiled(
    ask: Ask, tools: list[dict[str, Any]], form: CallForm | None, engine: Engine, stop_ids: Collection[int]
) -> Grammar | None:
    """The grammar of a request, compiled here and not on the engine's thread; refused by the field it comes from."""
    from tenure.grammar import Grammar

    schema = _schema(ask)
    try:
        grammar = _grammar(ask, schema, tools, form, engine)
        if grammar is not None:
            grammar.matcher(stop_ids)
    except ConfigError as error:
        param = "tools"
        if schema is not None:
            try:
                Grammar.json_schema(engine.tokenizer, schema).matcher(stop_ids)
            except ConfigError:
                param = ask.format_param
        raise ApiError(400, "invalid_value", f"{param}: {error.cause}", param=param) from error
    return grammar


def _grammar(
    ask: Ask,
    schema: Mapping[str, Any] | None,
    tools: list[dict[str, Any]],
    form: CallForm | None,
    engine: Engine,
) -> Grammar | None:
    from tenure.grammar import Grammar, lark_json

    choice = ask.tool_choice
    if not tools or form is None or (choice in (None, "auto") and schema is None):
        return None if schema is None else Grammar.json_schema(engine.tokenizer, schema)
    if isinstance(choice, Mapping):
        if (kind := choice.get("type", "function")) != "function":
            raise ApiError(
                400,
                "invalid_value",
                f"a tool_choice of type {kind!r} is not read; send none, auto, required, or one function",
                param="tool_choice",
            )
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else choice.get("name")
        tools = [tool for tool in tools if tool["function"]["name"] == name]
        if not tools:
            raise ApiError(
                400,
                "invalid_value",
                "tool_choice names a function that is not among the tools",
                param="tool_choice",
            )
    named = isinstance(choice, Mapping)
    rules = call_rules(engine.tokenizer, tools, form, many=ask.many_calls and not named)
    free = choice in (None, "auto") and schema is not None
    start = "start: calls | reply\nreply: " + lark_json(schema or {}) if free else "start: calls"
    return Grammar.lark(engine.tokenizer, f"{start}\n{rules}")


def _schema(ask: Ask) -> Mapping[str, Any] | None:
    form, param = ask.response_format, ask.format_param
    kind = None if form is None else form.get("type")
    if form is None or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind == "json_schema":
        inner = form.get("json_schema", form)
        schema = inner.get("schema") if isinstance(inner, Mapping) else None
        if isinstance(schema, Mapping):
            return schema
        raise ApiError(400, "invalid_value", f"{param}: the schema must be an object", param=param)
    raise ApiError(
        400, "invalid_value", f"{param}.type must be text, json_object or json_schema", param=param
    )


def result_order(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Numbers of the messages, with results of tools in the order of the calls that they answer.

    Many templates tell results apart by their order alone, and clients send them in any.
    """
    order = list(range(len(messages)))
    place = 0
    while place < len(order):
        calls = messages[place].get("tool_calls") or ()
        place += 1
        stop = place
        while stop < len(order) and messages[stop].get("role") == "tool":
            stop += 1
        ranks = {
            call["id"]: rank
            for rank, call in enumerate(calls)
            if isinstance(call, Mapping) and isinstance(call.get("id"), str)
        }
        answered = [one.get("tool_call_id") for one in messages[place:stop]]
        if all(isinstance(call, str) and call in ranks for call in answered):
            order[place:stop] = sorted(
                order[place:stop], key=lambda number: ranks[str(answered[number - place])]
            )
        place = max(place, stop)
    return order

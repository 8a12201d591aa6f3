"""Requests as clients send them: the fields that are read, typed; unknown ones are let through.

Hints are typed loosely on purpose: a strange one is reported in the response and changes nothing else.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

_Strict = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

Temperature = Annotated[float, Field(ge=0, le=10)]
Share = Annotated[float, Field(ge=0, le=1)]
Stops = (
    Annotated[str, Field(min_length=1)]
    | Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=16)]
)


class Function(BaseModel):
    """A tool."""

    model_config = _Strict
    name: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_-]+$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """A tool in the chat form."""

    model_config = _Strict
    type: Literal["function"]
    function: Function


class StreamOptions(BaseModel):
    """What a stream holds."""

    model_config = _Strict
    include_usage: bool = False


class Sampling(BaseModel):
    """What all requests for text have."""

    model_config = _Strict
    model: Annotated[str, Field(min_length=1)]
    temperature: Temperature | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
    seed: int | None = None
    stop: Stops | None = None
    n: Annotated[int, Field(ge=1, le=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    ignore_eos: bool | None = None
    session_id: Any = None
    priority: Any = None
    cache_salt: Any = None
    prompt_cache_key: Any = None
    cache_control: Any = None
    nvext: Any = None
    hints: Any = None


class ChatMessage(BaseModel):
    """One message; marks for memory (``span``, ``region``, ``pin``, ``step``, ``reads``) may ride on it."""

    model_config = _Strict
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class ChatRequest(Sampling):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(Sampling):
    """``POST /v1/completions``."""

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    echo: Literal[False] | None = None
    suffix: None = None
    best_of: Literal[1] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


class ResponsesRequest(Sampling):
    """``POST /v1/responses``."""

    input: str | Annotated[list[dict[str, Any]], Field(min_length=1)]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    n: Literal[1] | None = None
    stop: None = None
    truncation: Literal["disabled"] | None = None

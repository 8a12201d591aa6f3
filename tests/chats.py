"""Chat sessions on tiny random models: a tokenizer and an engine for each template."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from tests import templates

if TYPE_CHECKING:
    from collections.abc import Callable

    from tenure import Engine, Session

SHAPE = {"vocab_size": 448, "layers": 2}
"""Options of the tiny model behind every chat; the tokenizers have 440 ids."""


@cache
def tokenizer(template: str, **options: Any) -> Any:
    """One tokenizer a template, the same for a whole test run."""
    return templates.tokenizer(template, **options)


def chat_engine(engines: Callable[..., Engine], template: str = "chatml", **options: Any) -> Engine:
    """A tiny Qwen2 that speaks a template."""
    return engines("qwen2", tokenizer=tokenizer(template, **options), **SHAPE)


def chat_session(engines: Callable[..., Engine], template: str = "chatml", **options: Any) -> Session:
    """A session with the full cache, unless a policy or a budget is given."""
    if "policy" not in options and "budget" not in options:
        options |= {"policy": "full", "positions": "logical"}
    return chat_engine(engines, template).session(**options)


def encode(template: str, text: str) -> list[int]:
    """Ids of a plain text."""
    ids: list[int] = tokenizer(template)(text, add_special_tokens=False)["input_ids"]
    return ids


def joint(template: str, messages: list[dict[str, Any]], prompt: bool = False) -> list[int]:
    """The template's own rendering of a conversation, encoded in one go."""
    return templates.joint(tokenizer(template), messages, prompt)


def user(text: str, **marks: Any) -> dict[str, Any]:
    return {"role": "user", "content": text, **marks}


def assistant(text: str, **marks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **marks}


def system(text: str, **marks: Any) -> dict[str, Any]:
    return {"role": "system", "content": text, **marks}


def tool(text: str, **marks: Any) -> dict[str, Any]:
    return {"role": "tool", "content": text, **marks}

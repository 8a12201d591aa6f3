"""A model folder that the commands can be given, and a way to call them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from tenure.cli import app
from tests.conftest import tiny_model
from tests.templates import tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Llama with a small tokenizer and a ChatML template, as a folder."""
    folder = tmp_path_factory.mktemp("tiny")
    fast = tokenizer("chatml")
    tiny_model("llama", vocab_size=len(fast)).save_pretrained(folder)
    fast.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def tenure() -> Callable[..., Any]:
    """``tenure("run", path, ...)`` in this process; a failure with a traceback is a failed test."""

    def call(*arguments: object, code: int = 0, stdin: str = "") -> Any:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        assert result.exit_code == code, result.stderr
        assert "Traceback" not in result.stderr
        return result

    return call


@pytest.fixture
def session_file(tmp_path: Path) -> Callable[..., Path]:
    """Writes a session file from objects; texts are written as they are."""

    def write(*lines: object) -> Path:
        path = tmp_path / "session.jsonl"
        path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines))
        return path

    return write


@pytest.fixture
def story(session_file: Callable[..., Path]) -> Path:
    """A short session: two steps, a probe in a fork and one that stays."""
    return session_file(
        {"session": {"title": "story"}},
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "The pump has the number 417. " * 4, "span": "pump", "step": "tell"},
        {"role": "assistant", "content": "Noted."},
        {
            "role": "user",
            "content": "The valve is blue. " * 4,
            "span": "valve",
            "step": "more",
            "reads": ["pump"],
        },
        {"probe": "Which number has the pump?", "expect": ["417"], "reads": ["pump"], "max_tokens": 8},
        {"role": "user", "content": "Go on. " * 10, "span": "rest"},
        {
            "probe": "Which colour has the valve?",
            "expect": ["blue"],
            "reads": ["valve"],
            "keep": True,
            "max_tokens": 6,
        },
        {"role": "user", "content": "Thank you."},
    )

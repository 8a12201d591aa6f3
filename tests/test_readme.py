"""The README's library lines run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tenure import Engine

README = Path(__file__).parent.parent / "README.md"


def block(number):
    code = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)[number]
    return compile(code, str(README), "exec")


@pytest.mark.model
def test_library_lines(capsys):
    exec(block(0), {})
    answer, counts = capsys.readouterr().out.strip().rsplit("\n", 1)
    assert answer
    slots, tokens, resident = re.fullmatch(r"(\d+) slots of (\d+) tokens; ([\d.]+)", counts).groups()
    assert int(slots) <= 512 + 128 < int(tokens)
    assert float(resident) == 1.0


@pytest.mark.model
def test_lines_of_tiers_planners_compression_and_saving(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"Engine": Engine}
    exec(block(1), names)
    session = names["session"]
    stats = session.stats()
    assert (tmp_path / "agent.tenure").stat().st_size > 0
    assert stats.tokens > 1000
    assert stats.resident < stats.tokens / 2, "a quarter of the entries stands for the report"

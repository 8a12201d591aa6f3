"""The README's library lines run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


@pytest.mark.model
def test_library_lines(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(code, str(README), "exec"), {})
    answer, counts = capsys.readouterr().out.strip().rsplit("\n", 1)
    assert answer
    slots, tokens, resident = re.fullmatch(r"(\d+) slots of (\d+) tokens; ([\d.]+)", counts).groups()
    assert int(slots) <= 512 + 128 < int(tokens)
    assert float(resident) == 1.0

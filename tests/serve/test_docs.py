"""The clients' lines of the docs and the examples run as they stand, against a server."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.serve.live import serving, tiny_engine

ROOT = Path(__file__).parents[2]
URL = "http://127.0.0.1:8000"
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs/server.md").read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture(scope="module")
def url():
    engine = tiny_engine()
    engine.name = "qwen2.5-coder-0.5b"
    with serving(engine) as live:
        yield live.url


@pytest.mark.parametrize("code", BLOCKS, ids=["history", "hints"])
def test_the_pages_clients(url, capsys, code):
    assert URL in code
    exec(compile(code.replace(URL, url), "docs/server.md", "exec"), {})
    said = capsys.readouterr().out
    if "cached_tokens" in code:
        assert int(said.split()[0]) > 0
    else:
        assert "'accepted'" in said
        assert "rejected" not in said


def test_the_page_lists_every_code():
    page = (ROOT / "docs/server.md").read_text(encoding="utf-8")
    sources = [file.read_text(encoding="utf-8") for file in (ROOT / "src/tenure/serve").glob("*.py")]
    codes = {code for text in sources for code in re.findall(r'ApiError\(\s*\d+,\s*"([a-z_]+)"', text)}
    assert len(codes) > 25
    missing = {code for code in codes if f"`{code}`" not in page}
    assert missing == {"client_closed_request"}, "which nobody is there to read"


def test_the_tool_loop(url, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["agent_loop.py", "--base-url", f"{url}/v1", "--days", "2"])
    runpy.run_path(str(ROOT / "examples/agent_loop.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert said.count("read_log({'day': ") == 2
    sent, cached, kept = zip(
        *re.findall(r"(\d+) tokens sent, +(\d+) of them cached, +(\d+) slots", said), strict=True
    )
    assert len(sent) == 5
    assert all(map(int.__ge__, map(int, cached[1:]), map(int, sent[:-1])))
    assert max(map(int, kept)) <= 256 + 16


def test_the_agents_sdk(url, capsys, monkeypatch):
    pytest.importorskip("agents", reason="the OpenAI Agents SDK is not installed")
    monkeypatch.setattr(sys, "argv", ["agents_sdk.py", "--base-url", f"{url}/v1"])
    runpy.run_path(str(ROOT / "examples/agents_sdk.py"), run_name="__main__")
    cached = re.findall(r"(\d+) tokens in, (\d+) cached", capsys.readouterr().out)
    assert len(cached) >= 2
    assert int(cached[-1][1]) > 0

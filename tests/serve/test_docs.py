"""The clients' lines of the docs and the examples run as they stand, against a server."""

from __future__ import annotations

import json
import re
import runpy
import sys
import urllib.request
from pathlib import Path

import pytest
from openai import OpenAI

from tenure.report import SpanReport
from tenure.serve.chat import HINTS
from tenure.serve.hints import MARKS
from tenure.serve.metrics import Metrics, Reading
from tests.serve.live import serving, tiny_engine

ROOT = Path(__file__).parents[2]
URL = "http://127.0.0.1:8000"
PAGE = (ROOT / "docs/server.md").read_text(encoding="utf-8")
AGENTS = (ROOT / "docs/agents.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE + AGENTS, re.DOTALL)


@pytest.fixture(scope="module")
def url():
    engine = tiny_engine()
    engine.name = "qwen2.5-coder-0.5b"
    with serving(engine) as live:
        yield live.url


@pytest.mark.parametrize("code", BLOCKS, ids=["history", "hints", "agents"])
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
    sources = [file.read_text(encoding="utf-8") for file in (ROOT / "src/tenure/serve").glob("*.py")]
    codes = {code for text in sources for code in re.findall(r'ApiError\(\s*\d+,\s*"([a-z_]+)"', text)}
    assert len(codes) > 25
    missing = {code for code in codes if f"`{code}`" not in PAGE}
    assert missing == {"client_closed_request"}, "which nobody is there to read"


def get(url):
    with urllib.request.urlopen(url) as reply:
        return json.load(reply)


def missing(names, page=PAGE):
    return {name for name in names if not re.search(rf"`{re.escape(name)}`", page)}


def test_the_page_lists_every_route(url):
    for path in get(f"{url}/openapi.json")["paths"]:
        plain = re.sub(r"\{\w+\}", "{id}", path)
        assert plain in PAGE or f"`/{plain.rpartition('/')[2]}`" in PAGE, path
    for path in re.findall(r"`(?:GET|POST|DELETE) (/[\w./{}]*)", PAGE):
        assert path == "/openapi.json" or path in re.sub(
            r"\{\w+\}", "{id}", str(get(f"{url}/openapi.json"))
        ), path


def test_the_page_lists_every_hint_and_field(url):
    assert missing([*MARKS, *HINTS - {"nvext", "hints"}]) == set()
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    client.chat.completions.create(
        model="qwen2.5-coder-0.5b",
        messages=[{"role": "user", "content": "The limit is 48.", "span": "limit"}],
        max_tokens=4,
        extra_body={"session_id": "fields"},
    )
    assert missing(set(get(f"{url}/v1/sessions/fields")) - {"object"}) == set()
    view = get(f"{url}/v1/sessions/fields/memory")
    assert missing({*view, *view["blocks"][0], *view["plan"], *view["planned"]}) == set()
    whole = get(f"{url}/v1/sessions/fields/memory?most=1")["blocks"][0]
    assert missing(whole) == set()
    assert set(get(f"{url}/v1/sessions/fields/explain?span=limit")) == set(SpanReport.__dataclass_fields__)


def test_the_page_of_deployment_lists_every_metric():
    text = Metrics("tiny").render(
        [Reading("a", "idle", 1, 2, 3)], tiers=[{"tier": "host", "nbytes": 1, "hits": 1}]
    )
    lines = re.findall(r"^# TYPE (tenure_\w+) (\w+)$", text.decode(), re.MULTILINE)
    known = {name for name, _ in lines if not name.endswith("_created")}
    assert len(known) > 20
    page = (ROOT / "docs/deployment.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`(tenure_\w+)(?:\{[\w,]+\})?`", page)) == known


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

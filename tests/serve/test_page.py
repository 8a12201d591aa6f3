"""The page's files over HTTP: what they may load, and what they never do."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from tenure.report import REASONS
from tenure.serve.page import page_router

STATIC = files("tenure.serve").joinpath("static")
NAMES = sorted(file.name for file in STATIC.iterdir())


@pytest.fixture(scope="module")
def client():
    app = FastAPI()
    app.include_router(page_router())
    return TestClient(app)


@pytest.mark.parametrize("path", ["/", *(f"/static/{name}" for name in NAMES)])
def test_each_file_comes_with_its_type_and_a_strict_policy(client, path):
    reply = client.get(path)
    assert reply.status_code == 200
    name = path.rsplit("/", 1)[1] or "index.html"
    assert reply.content == STATIC.joinpath(name).read_bytes()
    kind = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    assert reply.headers["content-type"].split(";")[0] == kind[name.rsplit(".", 1)[1]]
    policy = dict(part.strip().split(" ", 1) for part in reply.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["frame-ancestors"] == "'none'"
    assert set(policy.values()) <= {"'none'", "'self'"}
    assert reply.headers["x-content-type-options"] == "nosniff"


def test_what_has_not_changed_is_not_sent_again(client):
    tag = client.get("/static/app.js").headers["etag"]
    again = client.get("/static/app.js", headers={"If-None-Match": tag})
    assert (again.status_code, again.content) == (304, b"")
    assert client.get("/static/app.js", headers={"If-None-Match": '"other"'}).status_code == 200


@pytest.mark.parametrize(
    "name", ["nothing.js", "..%2fview.py", "%2e%2e%2fview.py", "%2e%2e/view.py", "%00", "app.js/x"]
)
def test_no_other_file_is_served(client, name):
    reply = client.get(f"/static/{name}")
    assert reply.status_code == 404
    assert b"import" not in reply.content


@pytest.mark.parametrize("name", NAMES)
def test_nothing_comes_from_elsewhere_and_nothing_is_written_as_markup(name):
    text = STATIC.joinpath(name).read_text(encoding="utf-8")
    elsewhere = re.findall(r"(?:https?:)?//[\w.-]+\.\w{2,}", text)
    assert set(elsewhere) <= {"http://www.w3.org"}  # the name of the SVG namespace, never loaded
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
        assert word not in text
    if name.endswith(".html"):
        assert not re.search(r"\son\w+=|\sstyle=|<style|<script(?![^>]*\ssrc=)|javascript:", text)


def test_the_page_explains_evictions_as_the_command_line_does():
    text = STATIC.joinpath("dom.js").read_text(encoding="utf-8")
    table = re.search(r"export const REASONS = \{\n(.*?)\};", text, re.DOTALL)
    assert dict(re.findall(r'  (\w+): "([^"]+)",', table[1])) == REASONS

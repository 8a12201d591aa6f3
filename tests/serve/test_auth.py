"""Keys, tenants, limits."""

from __future__ import annotations

import json
import stat

import httpx
import pytest

from tenure.errors import ConfigError
from tenure.serve.auth import Keys
from tenure.serve.config import ServeConfig
from tenure.serve.errors import ApiError
from tests.chats import user
from tests.serve.live import serving


def test_a_key_is_kept_as_a_digest_only(tmp_path):
    keys = Keys(tmp_path / "keys.json")
    key = keys.add("team-a")
    text = keys.path.read_text()
    assert key.rpartition("-")[2] not in text
    assert stat.S_IMODE(keys.path.stat().st_mode) == 0o600
    assert keys.tenant(f"Bearer {key}") == "team-a"
    for wrong in (
        None,
        "",
        key,
        f"Basic {key}",
        f"Bearer {key[:-1]}{'B' if key.endswith('A') else 'A'}",
        "Bearer tenure-000000000000-" + "a" * 43,
    ):
        with pytest.raises(ApiError) as caught:
            keys.tenant(wrong)
        assert caught.value.status == 401


def test_a_removed_key_is_refused_at_once_elsewhere(tmp_path):
    keys, other = Keys(tmp_path / "keys.json"), Keys(tmp_path / "keys.json")
    key = keys.add("a")
    assert other.tenant(f"Bearer {key}") == "a"
    keys.remove(keys.list()[0].id)
    with pytest.raises(ApiError):
        other.tenant(f"Bearer {key}")
    with pytest.raises(ConfigError, match="no key"):
        keys.remove("nope")
    with pytest.raises(ConfigError, match="tenant"):
        keys.add("../x")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org"])
def test_other_machines_need_a_key(host, tmp_path):
    with pytest.raises(ConfigError, match="keys"):
        ServeConfig(host=host)
    ServeConfig(host=host, keys=tmp_path / "keys.json")


@pytest.fixture(scope="module")
def tenants(tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    keys = {name: Keys(path).add(name) for name in ("a", "b")}
    with serving(keys=path, max_body=200_000, max_messages=20, max_prompt=2_000, streams_per_key=2) as live:
        yield (
            live,
            {
                name: httpx.Client(base_url=live.url, headers={"Authorization": f"Bearer {key}"}, timeout=30)
                for name, key in keys.items()
            },
        )


def ask(http, messages, **fields):
    body = {"model": "tiny", "messages": messages, "max_tokens": 4, **fields}
    return http.post("/v1/chat/completions", json=body)


def test_without_a_key_only_health_is_told(tenants):
    live, _ = tenants
    with httpx.Client(base_url=live.url) as http:
        assert http.get("/healthz").status_code == 200
        assert http.get("/readyz").status_code == 200
        for path in ("/v1/models", "/v1/sessions", "/openapi.json", "/v1/sessions/x"):
            reply = http.get(path)
            assert reply.status_code == 401, path
            assert reply.json()["error"]["code"] == "invalid_api_key"
            assert reply.headers["www-authenticate"] == "Bearer"
        assert ask(http, [user("Hi")]).status_code == 401


def test_two_tenants_see_nothing_of_each_other(tenants):
    _, https = tenants
    messages = [user("The same words of two tenants, long enough to be worth a fork of a session.")] * 1
    first = ask(https["a"], messages, session_id="mine").json()
    second = ask(https["b"], messages).json()
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    third = ask(https["b"], messages, session_id="mine").json()
    assert third["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "a name is the tenant's own"
    assert {one["id"] for one in https["a"].get("/v1/sessions").json()["data"]} == {"mine"}
    shown = https["b"].get(f"/v1/sessions/{first['tenure']['session_id']}")
    assert shown.json()["turns"] == 1, "its own of that name"
    other = second["tenure"]["session_id"]
    for path in (
        f"/v1/sessions/{other}",
        f"/v1/sessions/{other}/explain?span=user-2",
        f"/v1/sessions/{other}/memory",
    ):
        assert https["a"].get(path).status_code == 404


def test_limits_are_told_with_numbers_and_change_nothing(tenants):
    _, https = tenants
    before = https["a"].get("/v1/sessions").json()
    large = ask(https["a"], [user("x" * 300_000)])
    assert large.status_code == 413
    many = ask(https["a"], [user("x")] * 21)
    assert (many.status_code, many.json()["error"]["code"]) == (400, "too_many_messages")
    long = ask(https["a"], [user("fox " * 5_000)])
    assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "2000" in long.json()["error"]["message"]
    assert https["a"].get("/v1/sessions").json()["data"] == before["data"]
    assert ask(https["a"], [user("short")]).status_code == 200


def test_a_body_without_a_length_is_limited_too(tenants):
    _, https = tenants
    reply = https["a"].post("/v1/chat/completions", content=(b"x" * 50_000 for _ in range(10)))
    assert reply.status_code == 413


def test_only_local_names_reach_a_server_without_keys():
    with serving() as live, httpx.Client(base_url=live.url) as http:
        assert http.get("/v1/models").status_code == 200
        reply = http.get("/v1/models", headers={"Host": "evil.example:80"})
        assert reply.status_code == 403


def test_no_text_of_a_user_reaches_the_log(caplog):
    secret = "zanzibar-4711"
    with caplog.at_level("DEBUG"), serving() as live, httpx.Client(base_url=live.url, timeout=30) as http:
        ask(http, [user(secret)], session_id=secret)
        ask(http, [{"role": "tool", "content": secret, "pin": secret}])
        http.post("/v1/chat/completions", content=json.dumps({"messages": secret}))
        http.get(f"/v1/sessions/{secret}?x={secret}")
        http.get(f"/{secret}")
    ours = [record.getMessage() for record in caplog.records if record.name.startswith(("tenure", "uvicorn"))]
    assert any("/v1/chat/completions" in line for line in ours)
    assert not any(secret in line for line in ours)


def test_keys_that_cannot_be_read_let_nobody_in_and_tell_nobody_where_they_are(tmp_path, caplog):
    file = tmp_path / "keys.json"
    key = Keys(file).add("a")
    with serving(keys=file) as live, httpx.Client(base_url=live.url, timeout=30) as http:
        headers = {"Authorization": f"Bearer {key}"}
        assert http.get("/v1/models", headers=headers).status_code == 200
        good = file.read_text()
        file.write_text("{")
        for given in ({}, headers):
            reply = http.get("/v1/models", headers=given)
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "keys_unreadable")
            assert str(tmp_path) not in reply.text
        assert str(file) in caplog.text
        assert http.get("/healthz").status_code == 200
        file.write_text(good)
        assert http.get("/v1/models", headers=headers).status_code == 200


def test_without_keys_every_name_of_this_machine_is_answered_to():
    with serving() as live, httpx.Client(base_url=live.url, timeout=30) as http:
        for host in ("localhost", "LOCALHOST:80", "127.0.0.1:8000", "127.0.0.2:8000", "[::1]:8000", "[::1]"):
            assert http.get("/v1/models", headers={"Host": host}).status_code == 200, host
        for host in ("example.org", "127.0.0.1.example.org:8000", "10.0.0.1:8000", "localhost.example.org"):
            assert http.get("/v1/models", headers={"Host": host}).status_code == 403, host

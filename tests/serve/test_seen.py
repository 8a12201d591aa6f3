"""Memory, explanations, readiness and metrics of a running server."""

from __future__ import annotations

import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tenure.serve.auth import Keys
from tenure.serve.traces import Traces
from tenure.serve.view import memory_view
from tests.serve.live import serving
from tests.serve.test_metrics import parse


@pytest.fixture(scope="module")
def live():
    with serving() as live:
        yield live


@pytest.fixture(scope="module")
def http(live):
    with httpx.Client(base_url=live.url, timeout=30) as http:
        yield http


@pytest.fixture(scope="module")
def session(http):
    long = "INFO shard check passed and the next shard is checked in its turn. " * 12
    messages = [
        {"role": "user", "content": "Note: the limit is 48.", "span": "limits/a?b#c"},
        {"role": "user", "content": long},
        {"role": "user", "content": "What is the limit?"},
    ]
    body = {"model": "tiny", "messages": messages, "max_tokens": 4}
    return http.post("/v1/chat/completions", json=body).json()["usage"]["tenure"]["session_id"]


def test_memory_is_the_sessions_own_view(live, http, session):
    held = live.state.store.get("", session)
    expected = live.call(lambda: memory_view(held.session))
    reply = http.get(f"/v1/sessions/{session}/memory")
    assert reply.json() == expected
    assert expected["evicted"] > 0
    part = http.get(f"/v1/sessions/{session}/memory", params={"start": 10, "stop": 12, "most": 5}).json()
    assert part["window"] == [10, 12]
    assert part["blocks"] == live.call(lambda: memory_view(held.session, start=10, stop=12))["blocks"]


def test_a_view_that_has_not_changed_is_not_sent_again(http, session):
    tag = http.get(f"/v1/sessions/{session}/memory").headers["etag"]
    again = http.get(f"/v1/sessions/{session}/memory", headers={"If-None-Match": tag})
    assert (again.status_code, again.content) == (304, b"")
    assert "private" in again.headers["cache-control"]


def test_a_span_of_any_name_is_explained(http, session):
    said = http.get(f"/v1/sessions/{session}/explain", params={"span": "limits/a?b#c"}).json()
    assert "the limit is 48." in said["text"]


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/v1/sessions/none/memory", 404, "session_not_found"),
        ("/v1/sessions/none/explain?span=x", 404, "session_not_found"),
        ("/v1/sessions/{}/explain?span=x", 404, "span_not_found"),
        ("/v1/sessions/{}/explain", 400, "invalid_request"),
        ("/v1/sessions/{}/memory?most=0", 400, "invalid_request"),
        ("/v1/sessions/{}/memory?start=-1", 400, "invalid_request"),
        ("/v1/sessions/{}/memory?stop=x", 400, "invalid_request"),
    ],
)
def test_errors_have_openais_form(http, session, path, status, code):
    reply = http.get(path.format(session))
    assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)


def test_ready_and_healthy(http):
    assert http.get("/healthz").json()["status"] == "ok"
    ready = http.get("/readyz")
    assert (ready.status_code, ready.json()["status"]) == (200, "ready")


def test_metrics_count_what_was_asked(live, http, session):
    reply = http.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=")
    before = parse(reply.content)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Count me."}], "max_tokens": 3}
    usage = http.post("/v1/chat/completions", json=body).json()["usage"]
    after = parse(http.get("/metrics").content)

    def more(name: str, *labels: str) -> float:
        key = (f"tenure_{name}", frozenset(labels))
        return after.get(key, 0.0) - before.get(key, 0.0)

    assert more("tokens_total", "", "completion") == usage["completion_tokens"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert more("tokens_total", "", "cached") == cached
    assert more("tokens_total", "", "prompt") == usage["prompt_tokens"] - cached
    assert more("turn_seconds_count", "") == 1
    held = live.state.store.get("", session).session.memory
    assert after["tenure_evicted_slots_total", frozenset({"", "budget"})] > 0
    assert after["tenure_resident_slots", frozenset({""})] >= held.ledger.rows
    assert after["tenure_queue", frozenset()] == 0


def test_a_key_sees_its_own_sessions_and_series(tmp_path):
    path = tmp_path / "keys.json"
    heads = {
        name: {"Authorization": f"Bearer {Keys(path).add(name)}"} for name in ("alice", "bert", "operator")
    }
    with serving(keys=path, operator="operator") as live, httpx.Client(base_url=live.url, timeout=30) as http:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 2}
        made = {
            name: http.post("/v1/chat/completions", json=body, headers=heads[name]).json()["usage"]["tenure"]
            for name in ("alice", "bert")
        }
        alices = f"/v1/sessions/{made['alice']['session_id']}"
        assert http.get(f"{alices}/memory", headers=heads["alice"]).status_code == 200
        for path in ("memory", "explain?span=user-1"):
            assert http.get(f"{alices}/{path}", headers=heads["bert"]).status_code == 404
            assert http.get(f"{alices}/{path}").status_code == 401
        assert http.get("/metrics").status_code == 401
        bert = http.get("/metrics", headers=heads["bert"]).text
        assert 'tenant="bert"' in bert
        assert "alice" not in bert
        assert "process_" not in bert
        everything = http.get("/metrics", headers=heads["operator"]).text
        assert 'tenant="bert"' in everything
        assert 'tenant="alice"' in everything
        assert "process_resident_memory_bytes" in everything
        # The page holds nothing of anyone and needs no key; readiness says no more than that.
        assert http.get("/").status_code == http.get("/static/app.js").status_code == 200
        assert http.get("/readyz").status_code == 200


def test_turns_of_a_server_are_traced_under_their_requests(monkeypatch):
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(Traces, "exporting", lambda model: Traces(provider, model))
    with serving(traces=True) as live:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Trace me."}], "max_tokens": 4}
        reply = httpx.post(f"{live.url}/v1/chat/completions", json=body, timeout=30).json()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    request, turn = spans["POST /v1/chat/completions"], spans["tenure.turn"]
    assert turn.parent.span_id == request.context.span_id
    assert dict(turn.attributes)["gen_ai.usage.output_tokens"] == reply["usage"]["completion_tokens"]
    assert spans["tenure.decode"].end_time <= turn.end_time <= request.end_time + 50_000_000
    assert not any("Trace me" in span.to_json() for span in spans.values())


def test_every_refusal_is_counted_once():
    with serving(resident=2, streams_per_key=1) as live, httpx.Client(base_url=live.url, timeout=30) as http:

        def refused():
            counts = parse(http.get("/metrics").content)
            return {
                tuple(sorted(labels - {""})): value
                for (name, labels), value in counts.items()
                if name == "tenure_refused_total"
            }

        body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
        path = "/v1/chat/completions"
        assert http.post(path, json={**body, "model": "other"}).status_code == 404
        assert http.post(path, json={**body, "max_tokens": 0}).status_code == 400
        assert http.post(path, json={**body, "n": 3}).status_code == 400
        assert http.get("/v1/sessions/none").status_code == 404
        assert http.get("/none").status_code == 404
        long = {**body, "max_tokens": 3000, "ignore_eos": True, "stream": True}
        with http.stream("POST", path, json=long), httpx.Client(base_url=live.url) as other:
            assert other.post(path, json=body).status_code == 429
        assert refused() == {
            ("404", "model_not_found"): 1,
            ("400", "invalid_request"): 1,
            ("400", "invalid_value"): 1,
            ("404", "session_not_found"): 1,
            ("404", "http_404"): 1,
            ("429", "too_many_requests"): 1,
        }


def test_a_prompt_is_counted_once_for_many_answers():
    with serving(resident=4) as live, httpx.Client(base_url=live.url, timeout=30) as http:
        messages = [{"role": "user", "content": "Count the tokens of this prompt, please."}]
        body = {"model": "tiny", "messages": messages, "max_tokens": 2, "n": 3}
        usage = http.post("/v1/chat/completions", json=body).json()["usage"]
        counts = parse(http.get("/metrics").content)
        assert counts["tenure_tokens_total", frozenset({"", "prompt"})] == usage["prompt_tokens"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def test_methods_of_a_clients_own_making_make_no_series(tmp_path):
    key = Keys(tmp_path / "keys.json").add("op")
    file = tmp_path / "keys.json"
    with serving(keys=file, operator="op") as live, httpx.Client(base_url=live.url, timeout=30) as http:
        for number in range(5):
            assert http.request(f"MADE{number}", "/v1/models").status_code == 401
        shown = http.get("/metrics", headers={"Authorization": f"Bearer {key}"}).text
    assert "MADE" not in shown
    assert 'method="other"' in shown

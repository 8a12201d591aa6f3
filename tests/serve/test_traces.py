"""Traces as an exporter of OpenTelemetry's own SDK gets them."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
from fastapi import FastAPI
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.testclient import TestClient

from tenure.serve.events import Bus, Queued, TurnEnded, TurnStarted
from tenure.serve.traces import Traces

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def exporter():
    return InMemorySpanExporter()


@pytest.fixture
def traces(exporter):
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Traces(provider, "tiny")


def listened(traces: Traces) -> Bus:
    bus = Bus()
    bus.listen(traces)
    return bus


def report_turn(bus: Bus, request: str, **changes: object) -> None:
    bus.report(TurnStarted(request=request, prompt_tokens=100, cached_tokens=90, queued=0.5, how="continued"))
    facts = {
        "tenant": "t",
        "session": "s",
        "request": request,
        "reason": "stop",
        "prompt_tokens": 100,
        "cached_tokens": 90,
        "completion_tokens": 7,
        "first_token": 1.5,
        "seconds": 4.0,
        "time": 1_000_000.0,
    }
    bus.report(TurnEnded(**{**facts, **changes}))


def test_a_turn_goes_on_with_the_clients_trace(traces, exporter):
    bus = listened(traces)
    app = FastAPI()

    @app.post("/v1/sessions/{session_id}/x")
    async def handle(session_id: str) -> None:
        bus.report(Queued(tenant="t", request="r1", waiting=1))

    client = TestClient(traces.middleware(app))
    reply = client.post("/v1/sessions/secret/x", headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
    assert reply.status_code == 200
    report_turn(bus, "r1")
    spans = {span.name: span for span in exporter.get_finished_spans()}
    server, turn = spans["POST /v1/sessions/{session_id}/x"], spans["tenure.turn"]
    assert {f"{span.context.trace_id:032x}" for span in spans.values()} == {TRACE}
    assert f"{server.parent.span_id:016x}" == PARENT
    assert turn.parent.span_id == server.context.span_id
    assert dict(turn.attributes)["gen_ai.usage.input_tokens"] == 100
    assert dict(turn.attributes)["tenure.usage.cached_tokens"] == 90
    assert dict(server.attributes)["http.response.status_code"] == 200
    assert "secret" not in server.to_json()
    times = {
        name: [(at / 1e9 - 1_000_000.0) for at in (spans[name].start_time, spans[name].end_time)]
        for name in ("tenure.turn", "tenure.queue", "tenure.prefill", "tenure.decode")
    }
    assert times == {
        "tenure.turn": [-4.0, 0.0],
        "tenure.queue": [-4.0, -3.5],
        "tenure.prefill": [-3.5, -2.5],
        "tenure.decode": [-2.5, 0.0],
    }
    for name in ("queue", "prefill", "decode"):
        assert spans[f"tenure.{name}"].parent.span_id == turn.context.span_id


def test_a_turn_that_never_began_to_answer_still_ends(traces, exporter):
    report_turn(listened(traces), "r2", reason="error", first_token=None, completion_tokens=0)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert not spans["tenure.turn"].status.is_ok
    assert spans["tenure.turn"].parent is None
    assert spans["tenure.decode"].start_time == spans["tenure.decode"].end_time


def test_other_paths_are_not_traced(traces, exporter):
    app = FastAPI()

    @app.get("/healthz")
    async def healthz() -> None:
        return None

    assert TestClient(traces.middleware(app)).get("/healthz").status_code == 200
    assert exporter.get_finished_spans() == ()


def test_spans_are_exported_where_the_environment_says(monkeypatch):
    got: list[tuple[str, str, int]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            got.append((self.path, self.headers["Content-Type"], body.count(b"tenure.")))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        traces = Traces.exporting("tiny")
        report_turn(listened(traces), "r")
        traces.close()
        server.shutdown()
    ((path, kind, spans),) = got
    assert (path, kind) == ("/v1/traces", "application/x-protobuf")
    assert spans >= 4

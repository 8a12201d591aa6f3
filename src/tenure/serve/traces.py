"""Turns as OpenTelemetry traces, for servers that are started with ``--traces``; the extra ``tenure[otel]``.

A turn is one span with three parts, queue, prefill and decode, under the span of its HTTP request, which goes on with
the client's own trace where it sends ``traceparent``. Attributes hold counts and ids, never a text.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any

from tenure.errors import ConfigError
from tenure.serve.events import Event, Queued, TurnEnded, TurnStarted
from tenure.serve.guard import METHODS

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import TracerProvider

    Scope = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
    Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
    App = Callable[[Scope, Receive, Send], Awaitable[None]]

_OPEN = 10_000
"""Turns under way whose place in a trace is remembered; an older one becomes a trace of its own."""


class Traces:
    """A listener of a server's events, and the middleware that opens a span for each request.

    Args:
        provider: where spans go.
        model: name of the model, an attribute of every turn.
    """

    def __init__(self, provider: TracerProvider, model: str) -> None:
        self._tracer = provider.get_tracer("tenure")
        self._provider = provider
        self._model = model
        self._parents: OrderedDict[str, Context] = OrderedDict()
        self._queued: OrderedDict[str, float] = OrderedDict()
        self._lock = threading.Lock()

    @classmethod
    def exporting(cls, model: str) -> Traces:
        """Traces that are sent by OTLP over HTTP to where the ``OTEL_EXPORTER_OTLP_*`` variables say.

        Raises:
            ConfigError: the extra is not installed.
        """
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(
                f"OpenTelemetry is not installed ({error})",
                option="traces",
                way_out="pip install 'tenure[otel]'",
            ) from error
        provider = TracerProvider(resource=Resource.create({"service.name": "tenure"}))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        return cls(provider, model)

    def close(self) -> None:
        """Send what is still to be sent."""
        shutdown = getattr(self._provider, "shutdown", None)
        if shutdown is not None:
            shutdown()

    def __call__(self, event: Event) -> None:
        """Take note of an event."""
        match event:
            case Queued():
                from opentelemetry import context

                # Reported where the request is handled, so its span is the current one.
                self._remember(self._parents, event.request, context.get_current())
            case TurnStarted():
                self._remember(self._queued, event.request, event.queued)
            case TurnEnded():
                self._turn(event)

    def _remember(self, table: OrderedDict[str, Any], request: str, value: Any) -> None:
        with self._lock:
            table[request] = value
            while len(table) > _OPEN:
                table.popitem(last=False)

    def _turn(self, event: TurnEnded) -> None:
        from opentelemetry import trace

        with self._lock:
            # A request for several answers ends several turns, so its place stays for the others.
            parent, queued = self._parents.get(event.request), self._queued.get(event.request, 0.0)
        start = event.time - event.seconds
        turn = self._tracer.start_span(
            "tenure.turn",
            context=parent,
            start_time=_ns(start),
            attributes={
                "gen_ai.operation.name": "chat",
                "gen_ai.request.model": self._model,
                "gen_ai.response.finish_reasons": (event.reason,),
                "gen_ai.usage.input_tokens": event.prompt_tokens,
                "gen_ai.usage.output_tokens": event.completion_tokens,
                "tenure.usage.cached_tokens": event.cached_tokens,
                "tenure.session": event.session,
                "tenure.tenant": event.tenant,
            },
        )
        if event.reason == "error":
            turn.set_status(trace.StatusCode.ERROR)
        inside = trace.set_span_in_context(turn)
        first = event.time if event.first_token is None else start + event.first_token
        began = min(start + queued, first)
        for name, one, two in (
            ("queue", start, began),
            ("prefill", began, first),
            ("decode", first, event.time),
        ):
            part = self._tracer.start_span(f"tenure.{name}", context=inside, start_time=_ns(one))
            part.end(_ns(max(one, two)))
        turn.end(_ns(event.time))

    def middleware(self, app: App) -> App:
        """An ASGI application with a span around each request of the API."""
        from opentelemetry import propagate, trace

        async def traced(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
                await app(scope, receive, send)
                return
            carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            method = scope["method"] if scope["method"] in METHODS else "other"
            with self._tracer.start_as_current_span(
                method, context=propagate.extract(carrier), kind=trace.SpanKind.SERVER
            ) as span:

                async def note(message: MutableMapping[str, Any]) -> None:
                    if message["type"] == "http.response.start":
                        # The route is known by now; the path itself may hold an id.
                        route = getattr(scope.get("route"), "path", "other")
                        span.update_name(f"{method} {route}")
                        span.set_attribute("http.request.method", method)
                        span.set_attribute("http.route", route)
                        span.set_attribute("http.response.status_code", message["status"])
                        if message["status"] >= 500:
                            span.set_status(trace.StatusCode.ERROR)
                    await send(message)

                await app(scope, receive, note)

        return traced


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)

"""The OpenAPI document: FastAPI's, with the errors that every route can answer and the model that is served."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI

_ERRORS = {
    "400": "The request is malformed, or cannot be done.",
    "401": "No valid API key.",
    "403": "This host is not served.",
    "404": "There is no such thing, for this key.",
    "408": "The request did not arrive in time.",
    "409": "Not in this state.",
    "413": "The request is too large.",
    "429": "Too many requests of this key; see Retry-After.",
    "499": "The client left.",
    "500": "The server failed.",
    "503": "No room, or shutting down; see Retry-After.",
}

_STREAMS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")

_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}


def document(app: FastAPI, model: str) -> Callable[[], dict[str, Any]]:
    """What stands for ``app.openapi``.

    Args:
        app: all of whose routes are known.
        model: name of the model that is served.
    """
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is not None:
            return app.openapi_schema
        data = plain()
        schemas = data.setdefault("components", {}).setdefault("schemas", {})
        schemas["Error"] = _SCHEMA
        content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
        for place, path in data["paths"].items():
            for operation in path.values():
                if place in _STREAMS and "requestBody" in operation:
                    operation["responses"]["200"]["content"]["text/event-stream"] = {
                        "schema": {"type": "string"}
                    }
                responses = operation.setdefault("responses", {})
                responses.pop("422", None)
                for status, text in _ERRORS.items():
                    responses.setdefault(status, {"description": text, "content": content})
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        for schema in schemas.values():
            if (field := schema.get("properties", {}).get("model")) is not None:
                field["enum"] = [model]
        data["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        app.openapi_schema = data
        return data

    return openapi

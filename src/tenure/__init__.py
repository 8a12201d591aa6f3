"""LLM agent sessions that never outgrow a fixed KV-cache budget and still answer from their start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tenure.version import __version__

if TYPE_CHECKING:
    from tenure.config import EngineConfig, SessionConfig
    from tenure.engine import Engine
    from tenure.errors import TenureError
    from tenure.plan import Plan, Step
    from tenure.regions import Region
    from tenure.session import Session
    from tenure.transcript import Message

_PLACES = {
    "Engine": "engine",
    "EngineConfig": "config",
    "Message": "transcript",
    "Plan": "plan",
    "Region": "regions",
    "Session": "session",
    "SessionConfig": "config",
    "Step": "plan",
    "TenureError": "errors",
}


def __getattr__(name: str) -> Any:
    # torch and transformers take seconds to import: only those who use them wait.
    if name in _PLACES:
        from importlib import import_module

        return getattr(import_module(f"tenure.{_PLACES[name]}"), name)
    raise AttributeError(f"module 'tenure' has no attribute {name!r}")


__all__ = [
    "Engine",
    "EngineConfig",
    "Message",
    "Plan",
    "Region",
    "Session",
    "SessionConfig",
    "Step",
    "TenureError",
    "__version__",
]

"""What a server promises and what it refuses: one frozen dataclass, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from tenure.config import SessionConfig, read_table
from tenure.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Options of a server.

    Args:
        host: address to listen on; anything but loopback needs ``keys``.
        port: of the address; 0 takes a free one.
        session: what each session is promised.
        resident: sessions that are in memory at once; the others are parked in ``state``.
        memory: bytes of session memory, on the command line gigabytes; lowers ``resident`` to what fits. None takes half
            of what is free.
        state: folder of parked and saved sessions; None makes one that is removed at the end.
        keys: file of API keys, made by ``tenure serve keys add``; None lets everybody in.
        streams: answers that are generated at once, over all keys; others wait.
        streams_per_key: requests that one key has under way or waiting; more are refused with 429.
        waiting: requests that wait for their turn, over all keys; more are refused with 503.
        wait: seconds that a request waits for room before it is refused with 503.
        max_body: bytes of a request.
        max_messages: messages of a request.
        max_prompt: tokens of a request; longer ones are refused, nothing is cut away.
        max_tokens: tokens of an answer at most.
        default_tokens: tokens of an answer that names no limit; of a raw completion 16.
        max_sessions: sessions that one key may keep, parked ones too; beyond them those without a name go, the least
            recently used first.
        save_within: seconds after which a changed session is stored also while others are answered; while nobody waits,
            it is stored at once.
        grace: seconds that streams have to finish after SIGTERM.
        smooth: longest time between two tokens of a stream while another session's prompt is read, as a multiple
            of what it is otherwise.
        operator: tenant whose keys see the metrics of all tenants, of the tiers and of the process in ``/metrics``.
        traces: send OpenTelemetry traces to where the ``OTEL_EXPORTER_OTLP_*`` variables say.
        log_text: put users' texts into the log; off, no text ever gets there.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    session: SessionConfig = field(default_factory=SessionConfig)
    resident: int = 8
    memory: int | None = None
    state: Path | None = None
    keys: Path | None = None
    streams: int = 16
    streams_per_key: int = 16
    waiting: int = 64
    wait: float = 60.0
    max_body: int = 16 << 20
    max_messages: int = 10_000
    max_prompt: int = 1_000_000
    max_tokens: int = 16_384
    default_tokens: int = 1_024
    max_sessions: int = 1_000
    save_within: float = 5.0
    grace: float = 30.0
    smooth: float = 2.0
    operator: str | None = None
    traces: bool = False
    log_text: bool = False

    @classmethod
    def load(cls, path: Path | None = None, **overrides: Any) -> Self:
        """Options from the table ``[serve]`` of a TOML file, then arguments.

        Raises:
            ConfigError: an unknown key, or a value that cannot be used.
        """
        values: dict[str, Any] = {} if path is None else read_table(path, "serve")
        known = [item.name for item in fields(cls) if item.name != "session"]
        if unknown := sorted(set(values) - set(known)):
            raise ConfigError(
                f"unknown option {unknown[0]!r}", option=str(path), way_out="Known: " + ", ".join(known)
            )
        for item in fields(cls):
            kind = _KINDS.get(str(item.type).removesuffix(" | None"))
            value = values.get(item.name)
            if kind is None or value is None:
                continue
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                raise ConfigError(
                    f"{value!r} cannot be used", option=item.name, way_out=f"Give a {item.type}"
                )
            if str(item.type).startswith("Path"):
                values[item.name] = Path(value)
        return cls(**{**values, **overrides})

    def __post_init__(self) -> None:
        least = {item.name: 1 for item in fields(self) if item.type == "int"} | {"port": 0}
        for name, low in least.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise ConfigError(f"{value!r} cannot be used", option=name, way_out=f"Give {low} or more")
        for name, floor in (("wait", 0.0), ("save_within", 0.0), ("grace", 0.0), ("smooth", 1.0)):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not floor <= value < float("inf"):
                raise ConfigError(f"{value!r} cannot be used", option=name, way_out=f"Give {floor} or more")
        if self.port > 65535:
            raise ConfigError(f"{self.port} is no port", option="port", way_out="Give 0 to 65535")
        if self.session.budget is None:
            raise ConfigError(
                "a session without a budget has no size to admit it by",
                option="budget",
                way_out="Serve with a budget and an evicting policy",
            )
        if not is_loopback(self.host) and self.keys is None:
            raise ConfigError(
                f"{self.host} can be reached from other machines and there are no API keys",
                option="host",
                way_out="Make keys with `tenure serve keys add` and pass --keys, or listen on 127.0.0.1",
            )


_KINDS: dict[str, Any] = {"int": int, "float": (int, float), "bool": bool, "str": str, "Path": str}


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    import ipaddress

    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

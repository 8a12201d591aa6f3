"""Hints that ride on a request: what each asked for, and what became of it.

A hint never changes the ids of a prompt and never fails a request (only a name with a NUL is refused). Every hint
that came is answered with ``accepted``, ``clipped`` (taken with a smaller value), ``deferred`` (its effect comes
later) or ``rejected``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

from tenure.errors import TenureError
from tenure.messages import Message
from tenure.serve.errors import ApiError

if TYPE_CHECKING:
    from tenure.config import SessionConfig
    from tenure.conversation import Conversation

Outcome = Literal["accepted", "clipped", "deferred", "rejected"]

MARKS = ("region", "pin", "span", "step", "reads", "cache_control")
_NAME = 256
_PRIORITY = 100
_TTL = 24 * 3600.0
_PINNED = 0.75
"""Share of a budget that hard pins may take; our choice."""


@dataclass
class Hints:
    """Hints of one request, read.

    Args:
        session: the session that was named.
        priority: higher goes first.
        salt: sessions with another one are not shared.
        key: of requests that belong together.
        ttl: seconds that the session should stay in memory.
        report: one entry for each hint, for the response.
    """

    session: str | None = None
    priority: int = 0
    salt: str = ""
    key: str = ""
    ttl: float = 0.0
    report: list[dict[str, Any]] = field(default_factory=list)

    def note(
        self, hint: str, outcome: Outcome, reason: str = "", *, message: int | None = None, **more: Any
    ) -> dict[str, Any]:
        """Add an entry to the report."""
        entry = {
            "hint": hint.encode(errors="replace").decode(),  # a client's own name for it may be no text
            "message": message,
            "outcome": outcome,
            **({"reason": reason} if reason else {}),
        }
        self.report.append({**entry, **more})
        return self.report[-1]


def read_hints(body: Mapping[str, Any]) -> Hints:
    """Hints of the request as a whole.

    Args:
        body: with ``session_id``, ``priority``, ``cache_salt``, ``prompt_cache_key``, ``cache_control`` and ``nvext``.

    Raises:
        ApiError: a name has a NUL or control character, or is too long.
    """
    hints = Hints()
    if (value := body.get("session_id")) is not None:
        hints.session = check_name(value, "session_id")
        hints.note("session_id", "accepted")
    for name, target in (("cache_salt", "salt"), ("prompt_cache_key", "key")):
        if (value := body.get(name)) is None:
            continue
        if isinstance(value, str) and value and len(value) <= _NAME:
            setattr(hints, target, value)
            hints.note(name, "accepted")
        else:
            hints.note(name, "rejected", f"expected a text of 1 to {_NAME} characters")
    if (value := body.get("priority")) is not None:
        _priority(hints, value, "priority")
    if (value := body.get("cache_control")) is not None:
        _ttl(hints, value, "cache_control")
    if (value := body.get("nvext")) is not None:
        _agent_hints(hints, value)
    return hints


def check_name(value: object, option: str) -> str:
    """A name that a client gave.

    Raises:
        ApiError: it cannot be one.
    """
    if not isinstance(value, str) or not value or len(value) > _NAME or not value.isprintable():
        raise ApiError(
            400, "invalid_name", f"{option} must be a printable text of 1 to {_NAME} characters", param=option
        )
    if option == "session_id" and ("/" in value or value in (".", "..")):
        raise ApiError(400, "invalid_name", "a session_id has no slash and is not '.' or '..'", param=option)
    if option == "session_id" and value != value.strip():
        raise ApiError(400, "invalid_name", "a session_id has no space at its ends", param=option)
    return value


def _priority(hints: Hints, value: object, name: str) -> None:
    if not _is_number(value):
        hints.note(name, "rejected", "expected a number")
        return
    hints.priority = max(-_PRIORITY, min(_PRIORITY, int(value)))
    hints.note(name, "accepted" if hints.priority == value else "clipped", value=hints.priority)


def _is_number(value: object) -> TypeGuard[int | float]:
    """Whether it is a finite number; a whole one may be larger than any float."""
    if isinstance(value, bool):
        return False
    return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))


def _ttl(hints: Hints, value: object, name: str, message: int | None = None) -> bool:
    """Whether a cache mark could be read."""
    ttl = value.get("ttl", "5m") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or value.get("type", "ephemeral") != "ephemeral":
        hints.note(name, "rejected", "expected {'type': 'ephemeral'}", message=message)
        return False
    try:
        number, unit = (str(ttl)[:-1], str(ttl)[-1:]) if isinstance(ttl, str) else (str(ttl), "s")
        seconds = float(number) * {"s": 1, "m": 60, "h": 3600}[unit]
    except (ValueError, KeyError):
        seconds = math.nan
    if isinstance(ttl, bool) or not 0 < seconds < math.inf:
        hints.note(name, "rejected", "ttl must be a number of seconds, or like '5m' or '1h'", message=message)
        return False
    hints.ttl = max(hints.ttl, min(seconds, _TTL))
    hints.note(name, "accepted" if seconds <= _TTL else "clipped", message=message, ttl=min(seconds, _TTL))
    return True


def _agent_hints(hints: Hints, value: object) -> None:
    agent = value.get("agent_hints") if isinstance(value, Mapping) else None
    if not isinstance(agent, Mapping):
        hints.note("nvext", "rejected", "expected {'agent_hints': {...}}")
        return
    for name, one in list(agent.items()):
        label = f"nvext.agent_hints.{str(name)[:64]}"
        if name == "priority":
            _priority(hints, one, label)
        elif name == "latency_sensitivity" and _is_number(one):
            if "priority" not in agent:
                hints.priority = max(hints.priority, min(_PRIORITY, int(one)))
            hints.note(label, "accepted")
        else:
            hints.note(label, "rejected", "has no effect here")


def read_marks(messages: Sequence[Mapping[str, Any]], beside: object, hints: Hints) -> list[dict[str, Any]]:
    """Messages with only such marks left as can be used.

    Args:
        messages: as they came, with marks on them.
        beside: the second way to send marks, past relays that drop unknown fields of a message: a list of
            ``{"message": 3, "pin": true}``.
        hints: the report goes there.

    Raises:
        ApiError: a name has a NUL.
    """
    clean = [dict(message) for message in messages]
    entries: list[Any] = beside if isinstance(beside, list) else [] if beside is None else [beside]
    for number, entry in enumerate(entries):
        place = entry.get("message") if isinstance(entry, Mapping) else None
        if isinstance(place, bool) or not isinstance(place, int):
            hints.note("hints", "rejected", f"entry {number}: expected {{'message': number, ...}}")
            continue
        if not -len(clean) <= place < len(clean):
            cause = f"entry {number}: this request has no message {place}, it has {len(clean)}"
            hints.note("hints", "rejected", cause)
            continue
        for name, value in entry.items():
            if name in MARKS:
                clean[place].setdefault(name, value)
            elif name != "message":
                hints.note(str(name)[:64], "rejected", "is not known", message=place % len(clean))
    taken: set[str] = set()
    for place, message in enumerate(clean):
        _clean(message, place, taken, hints)
    return clean


def _clean(message: dict[str, Any], place: int, taken: set[str], hints: Hints) -> None:
    given = {name: message.pop(name, None) for name in MARKS}
    for part in message["content"] if isinstance(message.get("content"), list) else ():
        if isinstance(part, dict) and (mark := part.get("cache_control")) is not None:
            given["cache_control"] = mark
    given = {name: value for name, value in given.items() if value is not None}
    if given and not _has_text(message):
        for name in given:
            hints.note(name, "clipped", "the message has no text", message=place)
        return
    for name, value in given.items():
        if name == "cache_control":
            if _ttl(hints, value, name, place) and "pin" not in given:
                message["pin"] = "soft"
            continue
        why = _unusable(name, value, taken)
        if why:
            hints.note(name, "rejected", why, message=place)
            continue
        if name == "span":
            taken.add(value)
        if name == "pin" and value is False:
            hints.note(name, "accepted", message=place)
            continue
        message[name] = value
        alone = name == "reads" and "step" not in given
        hints.note(name, "deferred" if name in ("step", "reads") else "accepted", message=place)
        if alone:
            hints.report[-1] |= {"outcome": "rejected", "reason": "reads belong to a step"}
            del message[name]


def _unusable(name: str, value: object, taken: set[str]) -> str:
    """Why a mark cannot be used; "" if it can."""
    names = value if isinstance(value, list) else [value]
    for one in (inner for each in names for inner in (each.values() if isinstance(each, dict) else [each])):
        if name in ("span", "step") and isinstance(one, str) and len(one) > _NAME:
            return f"at most {_NAME} characters"
        if name in ("span", "step", "reads") and isinstance(one, str) and "\0" in one:
            raise ApiError(400, "invalid_name", f"{name} must not have a NUL", param=name)
    try:
        Message.parse({"role": "user", "content": "", "step": "s", name: value})
    except TenureError as error:
        return error.cause
    return "another message of this request has this id" if name == "span" and value in taken else ""


def _has_text(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    if isinstance(content, list):
        return any(isinstance(part, dict) and str(part.get("text") or "").strip() for part in content)
    return bool(str(content or "").strip())


def fit_pins(
    whole: Conversation, config: SessionConfig, hints: Hints, numbers: Sequence[int]
) -> Conversation:
    """Turn hard pins beyond what a budget can promise into soft ones, and say where each mark's tokens are.

    Args:
        whole: rendered with the marks.
        config: of the session.
        hints: the report is completed.
        numbers: the client's number of each message that was rendered.
    """
    room = int((config.budget or 0) * _PINNED) - config.sinks if config.budget is not None else 1 << 62
    pieces, ranges, at = [], {}, 0
    clipped = set()
    for piece in whole.pieces:
        if piece.message is not None:
            left, right = piece.text or (0, 0)
            ranges[numbers[piece.message]] = [at + left, at + right]
        if piece.pin == "hard":
            if len(piece.ids) <= room:
                room -= len(piece.ids)
            else:
                piece = replace(piece, pin="soft")
                clipped.add(-1 if piece.message is None else numbers[piece.message])
        pieces.append(piece)
        at += len(piece.ids)
    for entry in hints.report:
        place = entry["message"]
        if place is None or entry["outcome"] == "rejected":
            continue
        if place in ranges and entry.get("reason") != "the message has no text":
            entry["tokens"] = ranges[place]
        if entry["hint"] == "pin" and place in clipped:
            entry |= {"outcome": "clipped", "reason": "hard pins would fill the budget; it is a soft one"}
    return replace(whole, pieces=pieces)

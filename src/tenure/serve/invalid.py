"""What is said of a request whose data cannot be used: where it is wrong, in the client's own words for the place."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError

from tenure.serve.errors import ApiError

_DEEPEST = 100
"""Levels of a value; templates, schemas and stores go down them by recursion."""


def refusal_of(error: RequestValidationError) -> ApiError:
    """The refusal of a body or a query that is not what a route takes."""
    errors = error.errors()
    first: Mapping[str, Any] = errors[0] if errors else {"loc": (), "msg": "it cannot be used"}
    if first.get("type") == "json_invalid":
        cause = first.get("ctx", {}).get("error", "")
        return ApiError(
            400, "invalid_request", f"the body is not JSON at character {first['loc'][-1]}: {cause}"
        )
    begun = _path(first, error.body)
    paths = [(_path(one, error.body), str(one["msg"])) for one in errors]
    # Of a union the branch that came furthest is the one that was meant.
    path = max((path for path, _ in paths if path[: len(begun)] == begun), key=len, default=begun)
    if not path:
        return ApiError(
            400, "invalid_request", "a JSON object is needed, sent with Content-Type: application/json"
        )
    place = _shown(path)
    causes = " or ".join(dict.fromkeys(cause for other, cause in paths if other == path))
    return ApiError(400, "invalid_request", f"{place}: {causes}", param=place)


def check_data(value: object, param: str, *, texts: bool = True) -> None:
    """Refuse data that is nested without end, numbers that JSON does not have, and texts that no encoding can take.

    Args:
        value: as JSON gives it.
        param: named where it is refused.
        texts: whether texts are looked at.

    Raises:
        ApiError: 400.
    """
    level: list[object] = [value]
    for _ in range(_DEEPEST):
        deeper: list[object] = []
        for one in level:
            if isinstance(one, Mapping):
                deeper += one.values()
                if texts:
                    _check_texts(one, param)
            elif isinstance(one, (list, tuple)):
                deeper += one
            elif isinstance(one, float) and not math.isfinite(one):
                raise ApiError(400, "invalid_value", f"{param}: {one} is no number of JSON's", param=param)
            elif texts:
                _check_texts([one], param)
        if not deeper:
            return
        level = deeper
    raise ApiError(400, "invalid_value", f"{param}: nested deeper than {_DEEPEST} levels", param=param)


def _check_texts(values: Iterable[object], param: str) -> None:
    for value in values:
        if isinstance(value, str) and not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                raise ApiError(
                    400,
                    "invalid_value",
                    f"{param}: half a surrogate pair, which is no text",
                    param=param,
                ) from None


def _path(error: Mapping[str, Any], body: object) -> tuple[str | int, ...]:
    """Where an error is, without what pydantic adds: the source, and names of a union's branches."""
    source, *parts = error["loc"] or ("",)
    if source != "body":
        return tuple(parts)
    path: list[str | int] = []
    at = body
    for part in parts:
        if isinstance(part, str) and isinstance(at, Mapping) and (part in at or error["type"] == "missing"):
            at = at.get(part)
        elif (
            isinstance(part, int) and isinstance(at, Sequence) and not isinstance(at, str) and part < len(at)
        ):
            at = at[part]
        else:
            continue
        path.append(part)
    return tuple(path)


def _shown(path: Sequence[str | int]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")

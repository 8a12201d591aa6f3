"""Parts of one message that belong to another region: reasoning inside an answer, tool schemas inside the rules.

A message stays one span, because plans, tiers and reports deal in messages; only its slots carry regions of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tenure.regions import AnyRegion, Region, reasoning

Part = tuple[int, int, AnyRegion]
"""Start, stop and region of a range."""


def inner_parts(
    text: str,
    bounds: tuple[int, int],
    region: AnyRegion,
    foreign: Sequence[tuple[int, int]],
    tool_names: Sequence[str],
) -> list[Part]:
    """Ranges of a message's rendering whose region differs from the message's own.

    Args:
        text: what the template wrote.
        bounds: of the message in it.
        region: of the message.
        foreign: ranges of the text that messages brought along, ascending.
        tool_names: of the schemas that the template writes, where this rendering holds them.
    """
    start, stop = bounds
    if region == Region.ASSISTANT:
        return [(start + a, start + b, Region.SCRATCHPAD) for a, b in reasoning(text[start:stop])]
    if not tool_names or region in (Region.TOOLS, Region.ASSISTANT):
        return []
    return [
        (a, b, Region.TOOLS)
        for a, b in _between(foreign, start, stop)
        if any(name in text[a:b] for name in tool_names)
    ]


def _between(ranges: Sequence[tuple[int, int]], start: int, stop: int) -> Iterator[tuple[int, int]]:
    at = start
    for a, b in ranges:
        if b <= start or a >= stop:
            continue
        if a > at:
            yield at, a
        at = max(at, b)
    if at < stop:
        yield at, stop

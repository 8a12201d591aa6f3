"""A flame graph of a profile: callers above, callees below, width is time."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tenure.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NARROWEST = 0.004
"""Share of the whole below which a frame is not drawn."""
_LABELLED = 0.035
_COLOURS = {"tenure": "#e8a33d", "torch": "#d9603b"}


def record(path: Path, calls: dict[str, Callable[[], Any]]) -> None:
    """Profile some calls and draw them under one another.

    Args:
        path: of the picture; its suffix says which kind (``.svg``, ``.png``).
        calls: by their titles.

    Raises:
        ConfigError: the profiler or the plotting library is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from pyinstrument import Profiler
    except ImportError as error:
        raise ConfigError(
            "a flame graph needs pyinstrument and matplotlib",
            option="flame",
            way_out="pip install 'tenure[bench]'",
        ) from error
    roots: dict[str, _Frame] = {}
    for title, call in calls.items():
        profiler = Profiler(interval=0.0005)
        with profiler:
            call()
        session = profiler.last_session
        if session is not None and (root := session.root_frame()) is not None:
            roots[title] = _Frame.merged([root])
    figure = Figure(figsize=(12, 4 * len(roots)), layout="constrained")
    for axes, (title, frame) in zip(
        figure.subplots(len(roots), squeeze=False)[:, 0], roots.items(), strict=True
    ):
        axes.set_title(f"{title}: {frame.seconds:,.2f} s", loc="left", fontsize=10)
        axes.axis("off")
        deepest = _draw(axes, frame, 0.0, 0, frame.seconds)
        axes.set_xlim(0, 1)
        axes.set_ylim(deepest + 1, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


@dataclass
class _Frame:
    """A function under one line of callers, all its calls together."""

    name: str
    path: str
    seconds: float
    calls: list[_Frame]

    @classmethod
    def merged(cls, frames: list[Any]) -> _Frame:
        """Frames of one function as one."""
        below: dict[tuple[str, str], list[Any]] = {}
        for frame in frames:
            for child in frame.children:
                below.setdefault((child.function, child.file_path or ""), []).append(child)
        calls = sorted(map(cls.merged, below.values()), key=lambda call: -call.seconds)
        first = frames[0]
        return cls(first.function, first.file_path or "", sum(frame.time for frame in frames), calls)


def _draw(axes: Axes, frame: _Frame, left: float, depth: int, whole: float) -> int:
    """Draw a frame and what it calls; the deepest row that was used."""
    width = frame.seconds / whole
    if width < _NARROWEST:
        return depth - 1
    axes.add_patch(_box(frame, left, depth, width))
    if width > _LABELLED:
        axes.text(left + 0.002, depth + 0.5, frame.name[: int(140 * width)], va="center", fontsize=7)
    deepest = depth
    for call in frame.calls:
        deepest = max(deepest, _draw(axes, call, left, depth + 1, whole))
        left += call.seconds / whole
    return deepest


def _box(frame: _Frame, left: float, depth: int, width: float) -> Any:
    from matplotlib.patches import Rectangle

    package = next((name for name in _COLOURS if f"/{name}/" in frame.path), "")
    shade = 0.75 + 0.25 * (zlib.crc32(frame.name.encode()) % 8) / 8  # neighbours can be told apart
    return Rectangle(
        (left, depth),
        width,
        1,
        facecolor=_COLOURS.get(package, "#9db4c0"),
        alpha=shade,
        edgecolor="white",
        linewidth=0.5,
    )

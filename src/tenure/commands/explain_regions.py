"""The timeline of ``tenure explain``: how regions shared the cache, what left it, and a picture of both."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.console import Group

    from tenure.evictions import EvictedPage

Timeline = Sequence[tuple[int, dict[str, float]]]

_COLUMNS = 10
_PAGES = 40


def timeline_table(timeline: Timeline, pages: Sequence[EvictedPage]) -> Group:
    """Slots by region over the session, and the newest evicted pages with region, score, age and reason."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    if not timeline:
        return Group(Text("nothing was evicted", style="dim"))
    step = max(1, -(-len(timeline) // _COLUMNS))
    shown = [*timeline[:-1:step], timeline[-1]]
    slots = Table(
        box=None, pad_edge=False, title="slots by region, after so many tokens", title_justify="left"
    )
    slots.add_column("region", overflow="fold")
    for at, _ in shown:
        slots.add_column(f"{at:,}", justify="right", no_wrap=True)
    for name in dict.fromkeys(name for _, counts in timeline for name in counts):
        slots.add_row(Text(name), *(f"{counts.get(name, 0):,.0f}" for _, counts in shown))
    lost = Table(
        box=None, pad_edge=False, title=f"newest of {len(pages):,} evicted pages", title_justify="left"
    )
    for name in ("after", "span", "region", "from", "tokens", "layers", "score", "age", "reason"):
        justify: Literal["left", "right"] = "left" if name in ("span", "region", "reason") else "right"
        lost.add_column(name, justify=justify, overflow="fold")
    for page in pages[-_PAGES:]:
        lost.add_row(
            f"{page.at:,}",
            Text(page.span),
            Text(page.region),
            f"{page.start:,}",
            str(page.tokens),
            f"{page.layers:.0%}",
            f"{page.score:.3g}",
            f"{page.age:,.1f} {page.clock}",
            page.reason,
        )
    return Group(slots, Text(), lost)


def draw(timeline: Timeline, pages: Sequence[EvictedPage], path: Path) -> None:
    """Resident slots by region as a stack over the session, and evicted tokens by region below."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for _, counts in timeline for name in counts))
    figure = Figure(figsize=(8, 5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    times = [at for at, _ in timeline]
    if times:
        upper.stackplot(
            times, [[counts.get(name, 0.0) for _, counts in timeline] for name in names], labels=names
        )
        upper.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
    upper.set_ylabel("slots in the cache")
    lost: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for page in pages:
        lost[page.region.partition(":")[0]][page.at] += page.tokens * page.layers
    for name, counts in lost.items():
        color = f"C{names.index(name)}" if name in names else "k"
        lower.plot(list(counts), list(counts.values()), "o", markersize=3, color=color, label=name)
    lower.set_ylabel("tokens evicted")
    lower.set_xlabel("tokens of the session")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)

"""Results of ``tenure bench peers`` on the page of ``tenure bench report``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

Found = Mapping[str, Any]

PICTURE, TITLE, CAPTION = "peers", "Peers", "Seconds of each turn"
"""Of the picture: how its file's name begins, its title, and what it shows."""

_HEAD = (
    "peer",
    "turns",
    "seconds",
    "session ratio",
    "a turn, p50",
    "p95",
    "the last",
    "first token, p50",
    "of the last turn",
    "decode, tokens/s",
    "peak memory",
    "facts",
)


def heading(stem: str, found: Found) -> str:
    """Over the section of a file of this name."""
    return f"One agent session beside its peers, {found['result']['model']}"


def section(found: Found) -> str:
    """The table of one session, in Markdown, and what broke."""
    result = found["result"]
    base = next(iter(result["peers"]), "")
    lines = [
        f"Session ratio: seconds of {base} over those of the peer, for the turns that both have played. A peer that "
        "used up its minutes answered the questions where it stood.\n",
        "| " + " | ".join(_HEAD) + " |",
        "|---" * len(_HEAD) + "|",
    ]
    for name, one in result["peers"].items():
        cells = (
            *(name, f"{one['turns']} of {result['turns']}", f"{one['total_seconds']:,.0f}"),
            "" if one["session_ratio"] is None else f"{one['session_ratio']:.2f}",
            *(f"{one[key]:.1f}" for key in ("turn_p50", "turn_p95", "turn_last")),
            *(f"{one[key]:.1f}" for key in ("first_token_p50", "first_token_last", "decode_tokens_s")),
            *(f"{one['peak_bytes'] / 1e9:.2f} GB", f"{one['facts_found']} of {one['facts_total']}"),
        )
        lines.append("| " + " | ".join(cells) + " |")
    lines += [f"\n{name} broke: {why}" for name, why in result["failed"].items()]
    return "\n".join([*lines, ""])


def draw(found: Found, path: Path) -> None:
    """Seconds of each turn, a line a peer, as a picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for place, (name, one) in enumerate(found["result"]["peers"].items()):
        seconds = one["turn_seconds"]
        axes.plot(
            range(1, len(seconds) + 1),
            seconds,
            label=name,
            color=f"C{place}",
            linewidth=2.5 if place == 0 else 1.5,
            marker="x" if len(seconds) < found["result"]["turns"] else None,
            markevery=[-1],
        )
    config = found["config"]
    axes.set_yscale("log")
    for which in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        which("{x:g}")
    axes.set_xlabel(
        f"turn: {config['tokens']:,} tokens read, {config['write']} written; a cross: its minutes were used up"
    )
    axes.set_ylabel("seconds")
    axes.set_title(f"one agent session, {found['result']['model']}, {config['threads']} threads each")
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)

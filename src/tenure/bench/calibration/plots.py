"""The survival curves of a calibration as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tenure.bench.calibration.survival import Estimate, kaplan_meier
from tenure.bench.calibration.trace import Lifetimes


def draw(lives: Mapping[str, Lifetimes], found: Mapping[str, Estimate], clock: str, path: Path) -> None:
    """A curve for each region, with its half-life in the legend."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, one in lives.items():
        label = f"{name}: {found[name].half_life:,.3g}"
        if bool(one.died.any()):
            times, alive = kaplan_meier(one.time.double().numpy(), one.died.numpy())
            curve = [0.0, *times], [1.0, *alive]
        else:
            curve = [0.0, float(one.time.max())], [1.0, 1.0]
            label = f"{name}: none ended"
        axes.step(*curve, where="post", label=label)
    axes.axhline(0.5, color="0.7", linewidth=0.8)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"age in {clock}")
    axes.set_ylabel("share of tokens still looked at")
    axes.set_ylim(0, 1.02)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(
            title=f"half-life, {clock}", fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5)
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)

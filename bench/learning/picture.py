"""The picture of `make learn`: a small panel per algorithm, GRPO's curve in each of them to compare with."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.learning.curves import GOAL, WINDOW, Summary

COLUMNS = 4
WIDTH, HEIGHT = 10.0, 1.6
"""Inches: of the whole, and of one row of panels."""
OURS, OTHER, FAINT = "#1f5fa8", "#9a9a9a", "#c8c8c8"


def draw(found: Sequence[Summary], file: Path) -> None:
    """Writes it, as what the file's suffix says (.svg, .png). The same curves give the same file."""
    rows = -(-len(found) // COLUMNS)
    mpl.rcParams.update({"svg.hashsalt": "learn", "font.size": 8})
    figure = Figure(figsize=(WIDTH, 0.5 + HEIGHT * rows), layout="constrained", facecolor="white")
    panels = figure.subplots(rows, COLUMNS, sharex=True, sharey=True, squeeze=False).ravel()
    grpo = next((one for one in found if one.algorithm == "grpo"), None)
    for panel, one in zip(panels, found, strict=False):
        _panel(panel, one, grpo)
    for panel in panels[len(found) :]:
        panel.set_axis_off()
    for panel in panels[max(0, len(found) - COLUMNS) : len(found)]:
        panel.tick_params(labelbottom=True)
    said = f"reward by iteration, moving mean of {WINDOW}: mean of the seeds, lowest to highest; grey: grpo; dashed: {GOAL}"
    figure.suptitle(said, fontsize=9)
    figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else None)


def _panel(panel: Axes, one: Summary, grpo: Summary | None) -> None:
    iterations = range(1, len(one.mean) + 1)
    panel.axhline(GOAL, color=FAINT, linewidth=0.8, linestyle=(0, (4, 3)))
    if grpo is not None and one is not grpo:
        panel.plot(range(1, len(grpo.mean) + 1), grpo.mean, color=OTHER, linewidth=0.9)
    panel.fill_between(iterations, one.low, one.high, color=OURS, alpha=0.25, linewidth=0)
    panel.plot(iterations, one.mean, color=OURS, linewidth=1.3)
    panel.set_title(f"{one.algorithm}  {one.last:.3f}", fontsize=8.5, loc="left", pad=3)
    panel.set_ylim(0, 1.02)  # a line at 1 is whole
    panel.set_xlim(1, len(one.mean))
    panel.set_xticks([1, *(len(one.mean) * part // 4 for part in (1, 2, 3, 4))])
    panel.set_yticks([0, 0.5, 1])
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)

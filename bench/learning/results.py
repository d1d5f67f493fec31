"""Results of runs, each a JSON file in docs/results/: their table and their curves, as in the page docs/results.md."""

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import mean
from typing import Any

FOLDER, PAGE, PICTURE = Path("docs/results"), Path("docs/results.md"), Path("docs/results/curves.svg")
BEGIN, END = "<!-- table: made by `make learn-real` -->\n", "<!-- end of table -->\n"
WINDOW = 10
"""The picture shows a moving mean of so many iterations."""

PANELS = 3
"""The panels side by side in the picture."""

Result = Mapping[str, Any]


def write_page() -> None:
    """Put a table of all results between the page's two marks, and draw their curves."""
    found = load_results(FOLDER)
    fill(PAGE, BEGIN, table(found), END)
    if found:
        draw(found, PICTURE)


def load_results(folder: Path) -> list[Result]:
    """The results in a folder, by the names of their files."""
    return [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]


def fill(page: Path, begin: str, lines: Sequence[str], end: str) -> None:
    """Put lines between two marks of a page, in place of those that are there."""
    head, _, rest = page.read_text().partition(begin)
    page.write_text(head + begin + "\n".join(lines) + "\n" + end + rest.partition(end)[2])


def table(found: Sequence[Result], title: str = "cell") -> list[str]:
    """A Markdown table, one line for each result; the first column has this title."""
    lines = [
        f"| {title} | model | seed | iterations | held out before | after | n | machine | minutes | processor minutes"
        " | commit |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in found:
        before, after = (_interval(one["held_out"][when]) for when in ("before", "after"))
        minutes, spent = one["seconds"] / 60, one["processor_seconds"]
        processor = "unknown" if spent is None else f"{spent / 60:.1f}"
        machine = one["machine"].rpartition(", ")[2].replace("no GPU", "CPU")
        lines.append(
            f"| {one['cell']} | {one['model']} | {one['seed']} | {len(one['rewards'])} | {before} | {after} "
            f"| {one['held_out']['after']['n']} | {machine} | {minutes:.1f} | {processor} | {one['commit']} |"
        )
    return lines


def held_out_points(one: Result) -> list[tuple[int, float]]:
    """The iterations after which a result was measured on held-out tasks, and the means; empty if only before and after."""
    measured = one["held_out"]
    if "between" not in measured:
        return []
    return [(point["iteration"], point["mean"]) for point in (measured["before"], *measured["between"], measured["after"])]


def _interval(measured: Mapping[str, float]) -> str:
    return f"{measured['mean']:.3f} [{measured['low']:.3f}, {measured['high']:.3f}]"


def draw(found: Sequence[Result], file: Path, window: int = WINDOW) -> None:
    """Draw the reward of each iteration, a panel for each cell and a line for each seed; the same file for the same results.

    A dot is a measurement on held-out tasks, where a result has those during the run.

    Args:
        window: the lines show a moving mean of so many iterations.
    """
    import matplotlib as mpl  # here, because the tests have no matplotlib
    from matplotlib.figure import Figure

    cells = [(cell, list(seeds)) for cell, seeds in groupby(found, key=lambda one: one["cell"])]
    mpl.rcParams.update({"svg.hashsalt": "results", "svg.fonttype": "none", "font.size": 8})
    columns = min(len(cells), PANELS)
    rows = -(-len(cells) // columns)
    figure = Figure(figsize=(3.2 * columns, 2.4 * rows), layout="constrained", facecolor="white")
    panels = figure.subplots(rows, columns, sharey=True, squeeze=False).ravel()
    for panel in panels[len(cells) :]:
        panel.set_visible(False)
    for panel, (cell, seeds) in zip(panels, cells, strict=False):
        for one in seeds:
            rewards = one["rewards"]
            smooth = [mean(rewards[max(0, at - window + 1) : at + 1]) for at in range(len(rewards))]
            panel.plot(range(1, len(smooth) + 1), smooth, linewidth=1.2, label=f"seed {one['seed']}")
            if dots := held_out_points(one):
                panel.plot(*zip(*dots, strict=True), "o", color="#c2410c", markersize=4, label="held out")
        panel.set_title(cell, fontsize=9)
        panel.set_xlabel("iteration")
        panel.set_ylim(0, 1.02)  # a line at 1 is whole
        panel.legend(frameon=False, fontsize=7)
    for panel in panels[::columns]:
        panel.set_ylabel(f"reward, mean of {window}" if window > 1 else "reward")
    figure.savefig(file, metadata={"Date": None})

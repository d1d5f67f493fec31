"""`agentrl runs --tree`: shows each run under the run from which it was made. Long lines are cut; `--json` is complete."""

from collections.abc import Iterator, Mapping, Sequence
from shutil import get_terminal_size
from typing import Any

from agentrl.cli.console import say, show_json, show_lines
from agentrl.workflow.runtime.shown_text import cell, one_line

MIN_WIDTH, MAX_NAME_CHARS = 60, 32
TITLES = ("run", "status", "done", "reward", "from")

Relative = Any
Children = Mapping[int, Sequence[Relative]]
"""A mapping from the id of a run to the runs that were made from it. The key 0 has the runs without a source."""


def show_tree(db: Any, limit: int, as_json: bool) -> None:
    """Print the newest runs and the runs from which they were made. A run with several sources is printed under the first of
    them.
    """
    from agentrl.workflow.store.reads.lineage import load_family

    children: dict[int, list[Relative]] = {}
    for relative in load_family(db, limit):
        children.setdefault(relative.sources[0].id if relative.sources else 0, []).append(relative)
    roots = children.get(0, [])[::-1]  # newest first, as in the list
    if as_json:
        show_json([_run_document(root, children) for root in roots])
    elif roots:
        show_lines(_tree_lines([line for root in roots for line in _tree_rows(root, children)]))
    else:
        say("There is no run yet.")


def _run_document(relative: Relative, children: Children) -> dict[str, Any]:
    sources = [{"run": source.run, "what": source.what} for source in relative.sources]
    below = [_run_document(child, children) for child in children.get(relative.row["id"], ())]
    return {**relative.row, "from": sources, "children": below}


def _tree_rows(relative: Relative, children: Children, first: str = "", rest: str = "") -> Iterator[tuple[str, ...]]:
    """Yield the cells of the run, and of all runs below it.

    Args:
        relative: the run.
        children: the runs below each run, by the id of the upper run.
        first: the prefix of this run's name.
        rest: the prefix of the names below this run.
    """
    row, sources = relative.row, relative.sources
    origins = [f"{source.run}: {source.what}" if index else source.what for index, source in enumerate(sources)]
    done = f"{row['iterations_done']}/{row['iterations']}"
    name = one_line(row["run"], max(10, MAX_NAME_CHARS - len(first)))
    kind = [] if row["kind"] == "train" else [row["kind"]]
    yield f"{first}{name}", row["status"], done, cell(row["last_reward"]), ": ".join(filter(None, [*kind, "; ".join(origins)]))
    below = children.get(row["id"], ())
    for index, child in enumerate(below):
        last = index + 1 == len(below)
        yield from _tree_rows(child, children, f"{rest}{'`- ' if last else '|- '}", f"{rest}{'   ' if last else '|  '}")


def _tree_lines(cells: Sequence[Sequence[str]]) -> Iterator[tuple[str, str]]:
    """Yield the lines and their styles. Long names and sources are cut to the width of the screen."""
    width = max(MIN_WIDTH, get_terminal_size((80, 24)).columns)
    widths = [max(map(len, column)) for column in zip(TITLES, *cells, strict=True)][:-1]
    for index, (*columns, source) in enumerate((TITLES, *cells)):
        line = "  ".join(text.ljust(size) for text, size in zip(columns, widths, strict=True))
        yield f"{line}  {one_line(source, max(10, width - len(line) - 2))}".rstrip(), "" if index else "bold"

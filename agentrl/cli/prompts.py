"""`agentrl prompts`: lists the versions of the texts that a run uses; for a prompt search, also what the search gained, and the
tree of its versions.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl.cli.console import Json, say, show, show_cells, show_json, show_table, walk_tree
from agentrl.cli.follow import gain_lines
from agentrl.cli.resolve_targets import NewestRun, pick_run, stored_reader
from agentrl.workflow.errors import ConfigError, NotFoundError, did_you_mean
from agentrl.workflow.runtime.shown_text import cell, clean, format_count, one_line

if TYPE_CHECKING:
    from agentrl.workflow.store.reads.search_tree import SearchCandidate, SearchTree
    from agentrl.workflow.tables.views import ResourceRow

SHOWN = 60
QUESTIONS = """agentrl prompts RUN show VERSION
    agentrl prompts RUN diff A B"""


def prompts(
    run: NewestRun = None,
    question: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[show V | diff A B]", help="show VERSION prints a text; diff A B compares two.", show_default=False
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the text, if the run has several.", show_default=False)] = None,
    as_json: Json = False,
) -> None:
    """List the versions of a run's prompts and other texts, with the origin and the mean reward of each version.

    For a prompt search, also print what the search gained and the tree of the versions that it tried; `*` marks the path to the
    best version. A version is a number, or `best` for the version that a search chose. `show` prints a text and nothing else.
    """
    from agentrl.workflow.store.reads.paging import iterate_rows
    from agentrl.workflow.store.reads.resource_rows import ResourceFilter, list_resources

    db = stored_reader()
    picked = pick_run(db, run)
    stored = sorted(iterate_rows(list_resources, db, ResourceFilter(picked)), key=lambda row: (row.name, row.version))
    if not stored:
        raise NotFoundError(f"{picked} has no prompt.", "Add one to its config: resources: {prompt: ...}")
    rows = [row for row in stored if name in (None, row.name)]
    if not rows:
        raise NotFoundError(f"{picked} has no prompt {name!r:.60}.", did_you_mean(name or "", {row.name for row in stored}))
    match question or []:
        case []:
            _list(db, picked, rows, as_json)
        case ["show", version]:
            row = _version(rows, version)
            show_json(row) if as_json else typer.echo(clean(row.text))
        case ["diff", first, second]:
            one, other = _version(rows, first), _version(rows, second)
            if as_json:
                show_json({"a": one, "b": other})
                return
            for line in _diff_lines(one, other):
                show(line)
        case words:
            raise ConfigError(
                f"{' '.join(words)!r:.100} is not a subcommand of `agentrl prompts RUN`.", f"Type one of\n    {QUESTIONS}"
            )


def _version(rows: "list[ResourceRow]", word: str) -> "ResourceRow":
    matches = [row for row in rows if (row.chosen if word == "best" else str(row.version) == word)]
    names = sorted({row.name for row in rows})
    if len(matches) > 1:
        raise ConfigError(f"There are several texts: {', '.join(names)}.", f"Pass --name {names[0]}")
    if not matches:
        advice = "the search has not chosen one" if word == "best" else f"versions are 0 to {max(row.version for row in rows)}"
        raise NotFoundError(f"There is no version {word!r:.40}: {advice}.", f"agentrl prompts {rows[0].run}")
    return matches[0]


def _list(db: Any, run: str, rows: "list[ResourceRow]", as_json: bool) -> None:
    from agentrl.workflow.store.reads.run_rows import describe_run
    from agentrl.workflow.store.reads.search_tree import load_search_tree

    tree = load_search_tree(db, run) if describe_run(db, run).kind == "search" else None
    if as_json:
        measures = ("first", "second", "difference", "low", "high", "p_value", "tasks", "won", "lost", "tied")
        gain = tree.gain if tree and tree.gain_on == "held_out" else None
        held_out = gain and {name: getattr(gain, name) for name in measures}
        show_json({"run": rows[0].run, "versions": rows, "held_out": held_out, "gained": tree and tree.sentences})
        return
    if tree is None:
        heads = ("name", "version", "from", "how", "episodes", "reward", "text")
        names = ("name", "version", "parent_version", "note", "episodes_done", "mean_reward")
        show_table(heads, [(*(row[name] for name in names), one_line(row.text, SHOWN)) for row in rows])
        return
    for line in gain_lines(tree):
        show(line)
    _show_tree(tree)
    if len(tree.candidates) == 1:
        say(f"The critic's answers: agentrl sql \"SELECT answer FROM v_critic_calls WHERE run = '{run}'\"")
    if any(row.chosen and row.version for row in rows):
        say(f"Show the text: agentrl prompts {run} show best")


def _show_tree(tree: "SearchTree") -> None:
    children: dict[int | None, list[SearchCandidate]] = {}
    for one in tree.candidates:
        children.setdefault(one.parent, []).append(one)
    cells = []
    for branch, one in walk_tree(children.get(None, ()), lambda one: children.get(one.number, ())):
        score, tasks = one.score(one.scored_on)
        numbers = (score, tasks, one.score("held_out")[0], one.episodes, one.status, one.note)
        label = f"{branch}{one_line(one.label)}{' *' if one.on_path else ''}"
        cells.append([label, *map(cell, numbers), one_line(one.difference, SHOWN)])
    show_cells(("version", "score", "tasks", "held out", "episodes", "status", "how", "new text"), cells)
    if tree.left_out:
        say(f"Left out: {format_count(tree.left_out, 'version')} tried later.")


def _diff_lines(one: "ResourceRow", other: "ResourceRow") -> Iterator[str]:
    from agentrl.workflow.store.reads.search_tree import diff_lines

    title, other_title = (f"{row.name}@{row.version}  reward {cell(row.mean_reward)}" for row in (one, other))
    yield from diff_lines(one.text, other.text, title, other_title)

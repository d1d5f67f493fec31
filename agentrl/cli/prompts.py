"""`agentrl prompts`: lists the versions of the texts that a run uses, and the gain of a prompt search."""

from collections.abc import Iterator
from difflib import unified_diff
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl.cli.console import Json, say, show, show_json, show_table
from agentrl.cli.follow import gain_lines, gain_of
from agentrl.cli.resolve_targets import NewestRun, pick_run, stored_reader
from agentrl.workflow.errors import ConfigError, NotFoundError
from agentrl.workflow.runtime.shown_text import cell, clean, one_line

if TYPE_CHECKING:
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

    A version is a number, or `best` for the version that a search chose. `show` prints a text and nothing else.
    """
    from agentrl.workflow.store.reads.paging import iterate_rows
    from agentrl.workflow.store.reads.resource_rows import ResourceFilter, list_resources

    db = stored_reader()
    picked = pick_run(db, run)
    rows = sorted(iterate_rows(list_resources, db, ResourceFilter(picked, name)), key=lambda row: (row.name, row.version))
    if not rows:
        suffix = f" called {name!r}" if name else ""
        raise NotFoundError(f"{picked} has no prompt{suffix}.", "Add one to its config: resources: {prompt: ...}")
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
    from agentrl.workflow.store.reads.resource_rows import count_critic_calls

    gain = gain_of(db, run)
    if as_json:
        measures = ("first", "second", "difference", "low", "high", "p_value", "tasks", "won", "lost", "tied")
        show_json({"run": rows[0].run, "versions": rows, "held_out": gain and {name: getattr(gain, name) for name in measures}})
        return
    heads = ("name", "version", "from", "how", "episodes", "reward", "choosing", "", "text")
    show_table(
        heads,
        [
            (
                *(row.name, row.version, row.parent_version, row.note, row.episodes_done, row.mean_reward, row.choose_reward),
                *("chosen" if row.chosen else "", one_line(row.text, SHOWN)),
            )
            for row in rows
        ],
    )
    for line in gain_lines(gain):
        show(line)
    if gain is None and all(row.version == 0 for row in rows) and (calls := count_critic_calls(db, run)):
        say(f"The critic was called {calls} times, and none of its edits could be used. Its answers:")
        say(f"  agentrl sql \"SELECT answer FROM v_critic_calls WHERE run = '{run}'\"")
    if any(row.chosen and row.version for row in rows):
        say(f"Show the text: agentrl prompts {run} show best")


def _diff_lines(one: "ResourceRow", other: "ResourceRow") -> Iterator[str]:
    title, other_title = (f"{row.name}@{row.version}  reward {cell(row.mean_reward)}" for row in (one, other))
    before, after = clean(one.text).splitlines(), clean(other.text).splitlines()
    yield from unified_diff(before, after, title, other_title, lineterm="", n=2)

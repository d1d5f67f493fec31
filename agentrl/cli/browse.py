"""`agentrl runs`, `episodes`, `tasks`, `replay` and `events`: database rows as lists, trees and transcripts."""

from collections.abc import Iterator, Mapping, Sequence
from shutil import get_terminal_size
from typing import Annotated, Any

import typer

from agentrl.cli.console import (
    Csv,
    Json,
    check_formats,
    say,
    show,
    show_json,
    show_lines,
    show_list,
    show_rows,
    walk_tree,
)
from agentrl.cli.follow import trained_on_query
from agentrl.cli.options import MAX_INTEGER
from agentrl.cli.replay_diff import diff as compared
from agentrl.cli.replay_tokens import find_decoder, show_tokens
from agentrl.cli.resolve_targets import (
    LastEpisode,
    NewestRun,
    existing_database,
    existing_reader,
    first_run_hint,
    pick_episode,
    pick_run,
    stored_reader,
)
from agentrl.cli.verify import verify as verified
from agentrl.workflow.analysis.transcript import as_document, transcript_lines
from agentrl.workflow.errors import ConfigError
from agentrl.workflow.runtime.shown_text import cell, format_count, one_line
from agentrl.workflow.tables.column_values import EPISODE_STATUS, RUN_KINDS, STOP_REASONS

RUN_COLUMNS = (
    "id", "run", "kind", "status", "dataset", "model", "done=iterations", "episodes_done=episodes", "last_reward=reward",
    "best", "seconds", "tags",
)  # fmt: skip
RUN_MINOR_COLUMNS = ("best", "tags", "kind", "seconds", "dataset", "model", "episodes_done")
"""The columns that may be left out on a narrow terminal, the most important column first."""
EPISODE_COLUMNS = (
    "id", "iteration", "task", "sample", "status", "stop_reason", "reward", "advantage", "steps", "tool_calls=calls",
    "tool_errors=errors", "sampled_tokens=tokens", "seconds", "final_answer=answer", "question", "reference", "fate",
)  # fmt: skip
EPISODE_MINOR_COLUMNS = (
    "iteration", "final_answer", "tool_calls", "tool_errors", "sampled_tokens", "steps", "seconds", "sample", "advantage",
    "question", "reference", "fate",
)  # fmt: skip
TASK_COLUMNS = (
    "task_id=id", "task", "question", "reference", "right=episodes right", "solved=groups solved",
    "mean_reward=mean reward", "last_reward=last reward", "first_solved=first solved", "last_solved=last solved",
    "worst=worst episode",
)  # fmt: skip
TASK_MINOR_COLUMNS = ("solved", "first_solved", "last_solved", "question", "last_reward", "reference", "worst")
QUESTION_CHARS = 48
ANSWER_CHARS = 18
"""The most characters of an answer in a list. `replay` shows the complete answer."""


def _filter_option(text: str) -> Any:
    return typer.Option(help=text, show_default=False)


def _integer_filter(text: str, least: int | None = None) -> Any:
    return typer.Option(help=text, show_default=False, min=least, max=MAX_INTEGER)


Limit = Annotated[int, typer.Option(min=1, max=100_000, help="Show at most this many.")]


def _sort_option(default: str) -> Any:
    text = f"Sort by this column; -COLUMN: descending [{default}]."
    return typer.Option(metavar="COLUMN", help=text, show_default=False)


ORDER_OF_TITLE = {
    "episodes": {"task": "question"},
    "tasks": {
        "mean reward": "reward", "last reward": "last", "groups solved": "solved", "first solved": "first_solved",
        "last solved": "last_solved", "worst episode": "worst",
    },
}  # fmt: skip
"""The order by a printed column, for each column whose order has another name. In a title, `_` may replace a space."""


def _find_order(sort: str, orders: Mapping[str, str], titles: Mapping[str, str] | None = None) -> str:
    """Return the order that `sort` names, with its minus sign. Raise ConfigError if there is no such order."""
    from agentrl.workflow.errors import did_you_mean

    word = sort.removeprefix("-")
    order = (titles or {}).get(word.replace("_", " "), word)
    if order not in orders:
        raise ConfigError(f"--sort does not know {sort!r:.60}.", did_you_mean(word, orders))
    return f"{'-' * sort.startswith('-')}{order}"


def runs(
    limit: Limit = 50,
    sort: Annotated[str, _sort_option("-id")] = "-id",
    kind: Annotated[str | None, _filter_option(f"Only this kind: {', '.join(RUN_KINDS)}.")] = None,
    tree: Annotated[bool, typer.Option("--tree", help="Indent each run under its parent run.")] = False,
    as_csv: Csv = False,
    as_json: Json = False,
) -> None:
    """List the newest runs. `best` is the highest mean reward on the held-out split; the version RUN@best reached it.

    The evaluations that a run planned itself are listed only with --kind eval.
    """
    from agentrl.workflow.store.reads import label_rows, run_rows
    from agentrl.workflow.store.reads.paging import Paging
    from agentrl.workflow.tables.views import RunRow

    sort = _find_order(sort, run_rows.RUN_ORDERS)
    check_formats(as_csv, as_json)
    if tree and (as_csv or kind):
        raise ConfigError("--tree excludes --csv and --kind.", "Leave --tree out.")
    if tree and (whole := existing_database()):
        show_tree(whole, limit, as_json)
        return
    db = existing_reader()
    rows = run_rows.list_runs(db, run_rows.RunFilter(kind=kind), Paging(limit, sort=sort)).rows if db else ()
    if as_json or as_csv:
        show_list(RunRow.COLUMNS, rows, as_csv)
    elif db and rows:
        tags = label_rows.load_tags(db, [row.id for row in rows])
        show_rows([_run_row(row, tags.get(row.id, ())) for row in rows], RUN_COLUMNS, RUN_MINOR_COLUMNS, below=("reason",))
        if kind is None and (left_out := run_rows.count_planned_evals(db)):
            say(f"Left out: {format_count(left_out, 'evaluation')} that runs planned. List them: agentrl runs --kind eval")
    elif db and kind:
        say(f"No run is of the kind {kind!r:.60}.")
    else:
        say(f"There is no run yet. {first_run_hint()}")


def _run_row(run: Any, tags: Sequence[str]) -> dict[str, Any]:
    done = f"{run['iterations_done']}/{run['iterations']}"
    best = None if run["best_version"] is None else f"{cell(run['best_reward'])} @{run['best_version']}"
    short = {"model": run["model"].rstrip("/").rpartition("/")[2], "tags": ", ".join(tags)}
    return {**run, **short, "done": done, "best": best}


def episodes(
    run: NewestRun = None,
    iteration: Annotated[int | None, _integer_filter("Only this iteration (from 1).", least=1)] = None,
    status: Annotated[str | None, _filter_option(f"Only this status: {', '.join(EPISODE_STATUS)}.")] = None,
    stop_reason: Annotated[str | None, _filter_option(f"Only this reason: {', '.join(STOP_REASONS)}.")] = None,
    task: Annotated[str | None, _filter_option("Only the task with this key.")] = None,
    min_reward: Annotated[float | None, _filter_option("Only with at least this reward.")] = None,
    max_reward: Annotated[float | None, _filter_option("Only with at most this reward.")] = None,
    tool_errors: Annotated[int | None, _integer_filter("Only with at least this many failed tool calls.")] = None,
    error: Annotated[
        str | None, _filter_option("Only with an error of this class, of the episode or of a failed call.")
    ] = None,
    outcome: Annotated[
        str | None, _filter_option("Only solved, unsolved, never_solved (tasks) or no_longer_solved (groups).")
    ] = None,
    truncated: Annotated[
        bool | None, typer.Option("--truncated/--not-truncated", help="Only those cut off at a limit.", show_default=False)
    ] = None,
    fate: Annotated[
        str | None, _filter_option("Only with this fate: trained, no_variance, truncated, too_few, surplus, ...")
    ] = None,
    texts_of: Annotated[int | None, _integer_filter("Only with the same versions of the prompt texts as this group.")] = None,
    search: Annotated[
        str | None, typer.Option(help="Only with this text in a message, an argument or a result.", show_default=False)
    ] = None,
    sort: Annotated[str, _sort_option("id")] = "id",
    limit: Limit = 50,
    offset: Annotated[int, typer.Option(min=0, max=MAX_INTEGER, help="Skip this many.")] = 0,
    as_csv: Csv = False,
    as_json: Json = False,
) -> None:
    """List a run's episodes."""
    from agentrl.workflow.store.reads import episode_rows, run_rows
    from agentrl.workflow.store.reads.evidence_rows import EVIDENCE_FIELDS

    check_formats(as_csv, as_json)
    sort = _find_order(sort, episode_rows.EPISODE_ORDERS, ORDER_OF_TITLE["episodes"])
    db = stored_reader()
    run = pick_run(db, run)
    chosen = episode_rows.EpisodeFilter(
        run, iteration, status=status, stop_reason=stop_reason, task=task, min_reward=min_reward, max_reward=max_reward,
        tool_errors=tool_errors, text=search, error_class=error, outcome=outcome, truncated=truncated, fate=fate,
        texts_of=texts_of,
    )  # fmt: skip
    rows, more = _find_evidence(db, chosen, sort, limit, offset)
    if as_json or as_csv:
        show_list(EVIDENCE_FIELDS, rows, as_csv)
    elif rows:
        show_rows([_episode_row(row) for row in rows], EPISODE_COLUMNS, EPISODE_MINOR_COLUMNS, below=("error",))
        say(f"Transcript: agentrl replay {rows[0]['id']}")
    else:
        say("No episode matches these filters.")
        if not offset and chosen == episode_rows.EpisodeFilter(run) and run_rows.describe_run(db, run).iterations_done:
            say(f"It trained on stored episodes: {trained_on_query(run)}")
    if more:
        say(f"There are more: --offset {offset + limit}")


def _find_evidence(db: Any, chosen: Any, sort: str, limit: int, offset: int) -> tuple[list[Any], bool]:
    """Return the rows from `offset` on, at most `limit`, and whether there are more. A long search reports its progress."""
    from agentrl.workflow.store.reads.evidence_rows import list_evidence
    from agentrl.workflow.store.reads.paging import Paging

    page = list_evidence(db, chosen, Paging(limit, offset=offset, sort=sort))
    rows, searched = [*page.rows], page.searched or 0
    while page.searched is not None and page.next and len(rows) < limit:
        say(f"Searched {searched:,} of {page.total:,} episodes so far.")
        page = list_evidence(db, chosen, Paging(limit - len(rows), page.next, sort=sort))
        rows, searched = [*rows, *page.rows], searched + (page.searched or 0)
    return rows, bool(page.next)


def _episode_row(row: Any) -> dict[str, Any]:
    call, more = row["failed_call"], f" (+{row['more_errors']})" if row["more_errors"] else ""
    failure = f"{call['tool'] or 'unreadable call'}: {call['error_class']}{more}: {call['result'] or ''}" if call else ""
    if row["error"]:
        failure = f"{row['error']}{more}"
    short = {"final_answer": one_line(row["final_answer"], ANSWER_CHARS), "question": one_line(row["question"], QUESTION_CHARS)}
    return {**row, **short, "reference": one_line(row["reference"], ANSWER_CHARS), "error": failure}


def tasks(
    run: NewestRun = None,
    outcome: Annotated[str | None, _filter_option("Only solved, never_solved or no_longer_solved tasks.")] = None,
    search: Annotated[
        str | None, typer.Option(help="Only with this text in the question, the key or the reference.", show_default=False)
    ] = None,
    sort: Annotated[str, _sort_option("their first group")] = "",
    limit: Limit = 50,
    as_csv: Csv = False,
    as_json: Json = False,
) -> None:
    """List the tasks of a run: how many of its episodes were right, in how many groups each was solved, and its rewards.

    A group is the episodes of one task in one iteration. A task is solved in a group if one of its episodes is right. It is no
    longer solved if it was solved once, but not in its newest group.
    """
    from agentrl.workflow.store.reads import run_rows, task_rows

    check_formats(as_csv, as_json)
    if sort:
        sort = _find_order(sort, task_rows.TASK_ORDERS, ORDER_OF_TITLE["tasks"])
    db = stored_reader()
    run = pick_run(db, run)
    rows: list[Any] = []
    page = None
    while (page is None or page.next) and len(rows) <= limit:
        cursor = page.next if page else ""
        page = task_rows.list_tasks(db, run, search or "", sort, task_rows.MAX_TASKS, cursor, outcome or "")
        rows += page.rows
    counts = task_rows.count_right_episodes(db, run, [row["task_id"] for row in rows[:limit]])
    listed = [_add_counts(row, counts.get(row["task_id"], task_rows.SolvedCount())) for row in rows[:limit]]
    if as_json or as_csv:
        show_list((*task_rows.TASK_FIELDS, "right_episodes", "episodes"), listed, as_csv)
    elif listed:
        show_rows([_task_row(row) for row in listed], TASK_COLUMNS, TASK_MINOR_COLUMNS)
        solved, judged = listed[0]["solved_groups"], listed[0]["judged_groups"]
        counted = f"Groups solved `{solved} of {judged}`: the task has {format_count(judged, 'group')} with a reward."
        say(f"{counted} In {solved} of them, {page.solved_means if page else ''}.")
        say("`first solved` and `last solved` are iterations.")
        say(f"The episodes of a task: agentrl episodes {run} --task KEY")
    else:
        row = run_rows.describe_run(db, run)
        say(f"No task matches these filters. {row.run} has {format_count(task_rows.count_tasks(db, row.id), 'task')}.")
    if len(rows) > limit:
        if sort and _sort_value(rows[limit - 1], sort) == _sort_value(rows[limit], sort):
            say(f"Tasks that are not shown have the same `{sort.removeprefix('-')}` as the last one.")
        say(f"There are more: --limit {2 * limit}")


def _add_counts(row: Any, count: Any) -> dict[str, Any]:
    return {**row, "right_episodes": count.right, "episodes": count.episodes}


_SORT_FIELDS = {"id": "task_id", "solved": "solved_groups", "reward": "mean_reward", "last": "last_reward"}
"""The fields of a task's row by which tasks are sorted, if the order has another name than the field."""


def _sort_value(row: Any, sort: str) -> Any:
    """Return the value of a task by which the list is sorted."""
    order = sort.removeprefix("-")
    value = row[_SORT_FIELDS.get(order, order)]
    return value["reward"] if isinstance(value, Mapping) else value


def _task_row(row: Any) -> dict[str, Any]:
    worst = row["worst"] and f"{row['worst']['episode']} ({cell(row['worst']['reward'])})"
    first = row["first_solved"] or "never"
    short = {"question": one_line(row["question"], QUESTION_CHARS), "reference": one_line(row["reference"], ANSWER_CHARS)}
    solved, right = f"{row['solved_groups']} of {row['judged_groups']}", f"{row['right_episodes']} of {row['episodes']}"
    return {**row, **short, "right": right, "solved": solved, "worst": worst, "first_solved": first}


def replay(
    episode: LastEpisode = None,
    step: Annotated[int | None, typer.Option(min=0, help="Only this step.", show_default=False)] = None,
    verify: Annotated[
        str | None,
        typer.Option(
            metavar="tools|tokens|rewards|all",
            help="Repeat the episode, with tools in this process; exit 1 if it differs.",
            show_default=False,
        ),
    ] = None,
    diff: Annotated[
        int | None,
        typer.Option(metavar="OTHER", help="Compare with another episode; exit 1 if they differ.", show_default=False),
    ] = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Show each sampled token with its text, logprob and advantage.")
    ] = False,
    limit: Annotated[
        int | None,
        typer.Option(
            min=1, max=MAX_INTEGER, help="With --tokens: show at most this many [200; with --json all].", show_default=False
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show an episode's transcript or its tokens, compare it with another one, or verify it.

    The transcript has messages, thoughts, tool calls with results and times, reward parts, logprobs and the policy version.

    With --tokens, a line says where the advantages come from, and why a step does not train.

    With --diff, the report shows the first token that differs with the text around it, then the tool calls, results and rewards
    that differ.

    With --verify, the tools run again in this process, with the files and the network of this machine (except tools that must
    run only once). The messages that the model read are compared with the results. The tokens are scored and drawn again with
    the stored weights, and the rewards are computed again. The report names the first difference.
    """
    if sum((tokens or step is not None, verify is not None, diff is not None)) > 1:
        raise ConfigError("--verify and --diff exclude each other, --step and --tokens.", "Pass one of them.")
    if limit is not None and not tokens:
        raise ConfigError("--limit has no effect without --tokens.", "Add --tokens.")
    db = stored_reader()
    episode = pick_episode(db, episode)
    if verify is not None:
        raise typer.Exit(verified(episode, verify, as_json))
    if diff is not None:
        raise typer.Exit(compared(episode, diff, as_json))
    if tokens:
        show_tokens(db, episode, step, limit, as_json)
        return

    from agentrl.workflow.store.reads import episode_rows
    from agentrl.workflow.store.row_codecs import no_step_error

    record = episode_rows.find_episode(db, episode)
    if step is not None and step >= len(record.steps):
        raise no_step_error(episode, step, len(record.steps))
    if as_json:
        show_json(as_document(record, step))
    else:
        show_lines(transcript_lines(record, step, None if record.removed else find_decoder(db, episode)))


def events(
    run: NewestRun = None,
    limit: Annotated[
        int | None, typer.Option(min=1, max=MAX_INTEGER, help="Show at most this many, the newest.", show_default=False)
    ] = None,
    as_csv: Csv = False,
    as_json: Json = False,
) -> None:
    """List the events of a run, oldest first."""
    from agentrl.workflow.store.reads.event_rows import EventFilter, EventRow, list_events
    from agentrl.workflow.store.reads.paging import iterate_rows

    check_formats(as_csv, as_json)
    db = stored_reader()
    name = pick_run(db, run)
    rows = [*iterate_rows(list_events, db, EventFilter(name))][-limit if limit else 0 :]
    if as_json or as_csv:
        show_list(EventRow.COLUMNS, rows, as_csv)
    else:
        if not rows:
            say(f"{name} has no events.")
        for row in rows:
            show("  ".join(part for part in (cell(row["created_at"]), row["kind"], row["subject"], row["detail"]) if part))


MIN_WIDTH, MAX_NAME_CHARS = 60, 32
TITLES = ("run", "status", "done", "reward", "from")

Relative = Any
Children = Mapping[int, Sequence[Relative]]
"""A mapping from the id of a run to the runs that were made from it. The key 0 has the runs without a source."""


def show_tree(db: Any, limit: int, as_json: bool) -> None:
    """Print the newest runs and the runs from which they were made. A run that was made from several runs is printed below the
    first of them.
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


def _tree_rows(root: Relative, children: Children) -> Iterator[tuple[str, ...]]:
    """Yield the cells of the run, and of all runs below it."""
    for branch, relative in walk_tree([root], lambda relative: children.get(relative.row["id"], ())):
        row, sources = relative.row, relative.sources
        origins = [f"{source.run}: {source.what}" if index else source.what for index, source in enumerate(sources)]
        done = f"{row['iterations_done']}/{row['iterations']}"
        name = one_line(row["run"], max(10, MAX_NAME_CHARS - len(branch)))
        kind = [] if row["kind"] == "train" else [row["kind"]]
        origin = ": ".join(filter(None, [*kind, "; ".join(origins)]))
        yield f"{branch}{name}", row["status"], done, cell(row["last_reward"]), origin


def _tree_lines(cells: Sequence[Sequence[str]]) -> Iterator[tuple[str, str]]:
    """Yield the lines and their styles. Long names and sources are cut to the width of the screen."""
    width = max(MIN_WIDTH, get_terminal_size((80, 24)).columns)
    widths = [max(map(len, column)) for column in zip(TITLES, *cells, strict=True)][:-1]
    for index, (*columns, source) in enumerate((TITLES, *cells)):
        line = "  ".join(text.ljust(size) for text, size in zip(columns, widths, strict=True))
        yield f"{line}  {one_line(source, max(10, width - len(line) - 2))}".rstrip(), "" if index else "bold"

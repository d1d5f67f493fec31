"""`agentrl sql`: runs a user's SELECT, read-only and with a time limit. `--schema` explains the views."""

from typing import Annotated, Any

import typer

from agentrl.cli.console import Csv, Json, check_formats, say, show, show_csv, show_json, show_table
from agentrl.cli.resolve_targets import stored_database

MAX_ROWS = 10_000


def sql(
    query: Annotated[
        str | None,
        typer.Argument(
            metavar="SELECT", help="One SELECT over the tables and views; with --schema: a view.", show_default=False
        ),
    ] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Describe the views, or one: agentrl sql --schema v_episodes.")
    ] = False,
    as_csv: Csv = False,
    as_json: Json = False,
) -> None:
    """Query the database: read-only, at most 5 s and 10,000 rows.

    The views begin with v_; --schema explains them and their columns. rl_i4(blob) and rl_f4(blob) return the token ids and
    logprobs of step_tokens as JSON.

    The view v_ledger has the fate of an episode: that an update trained on it, or why none did. Example: SELECT e.id, l.fate
    FROM v_episodes e JOIN v_ledger l ON l.episode_id = e.id AND l.run = e.run WHERE e.run = 'RUN'
    """
    from agentrl.workflow.errors import ConfigError
    from agentrl.workflow.settings import settings
    from agentrl.workflow.store.reads import user_sql as store

    check_formats(as_csv, as_json)
    if query is None and not schema:
        raise ConfigError("No SELECT was given.", 'For example: agentrl sql "SELECT * FROM v_runs"; agentrl sql --schema')
    file = store.sqlite_file(settings())
    if file is not None and not file.exists():
        stored_database()  # raises if there is no database
    if schema or query is None:
        _explain_views(query, as_csv, as_json)
        return
    columns, rows = store.run_query(settings(), query, MAX_ROWS)
    if as_json:
        show_json([dict(zip(columns, row, strict=True)) for row in rows])
    elif as_csv:
        show_csv(columns, rows)
    else:
        show_table(columns, rows)
    if len(rows) == MAX_ROWS:
        say(f"Only the first {MAX_ROWS} rows are shown; there may be more.")


def _explain_views(view: str | None, as_csv: bool, as_json: bool) -> None:
    from agentrl.workflow.errors import NotFoundError, did_you_mean
    from agentrl.workflow.tables.views import VIEWS

    if view is not None and view not in VIEWS:
        raise NotFoundError(f"There is no view {view!r:.100}.", did_you_mean(view[:100], VIEWS))
    views: list[dict[str, Any]] = [
        {
            "view": name,
            "meaning": VIEWS[name].meaning(),
            "columns": [
                {"column": column_name, "meaning": column.meaning} for column_name, column in VIEWS[name].COLUMNS.items()
            ],
        }
        for name in ([view] if view else VIEWS)
    ]
    lines = [(view_row["view"], column["column"], column["meaning"]) for view_row in views for column in view_row["columns"]]
    if as_json:
        show_json(views)
    elif as_csv:
        show_csv(("view", "column", "meaning"), lines)
    elif view:
        show(f"{view}: {VIEWS[view].meaning()}\n")
        show_table(("column", "meaning"), [line[1:] for line in lines])
    else:
        for view_row in views:
            _show_view(view_row)
        say("Meanings of the columns: agentrl sql --schema VIEW")


def _show_view(view: dict[str, Any]) -> None:
    from textwrap import fill

    show(f"{view['view']}: {view['meaning']}")
    names = ", ".join(column["column"] for column in view["columns"])
    show(fill(names, 78, initial_indent="    ", subsequent_indent="    ") + "\n")

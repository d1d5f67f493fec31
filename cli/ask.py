"""`agentrl sql`: a researcher's own SELECT, read-only, with a deadline."""

from typing import Annotated

import typer

from cli.find import stored_database
from cli.output import Json, say, show_csv, show_json, show_table

LIMIT = 10_000


def sql(
    query: Annotated[str, typer.Argument(metavar="SELECT", help="One SELECT over the tables and views.", show_default=False)],
    as_csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values.")] = False,
    as_json: Json = False,
) -> None:
    """Ask the database: read-only, 5 s, 10,000 rows.

    Views: v_runs, v_iterations, v_groups, v_episodes, v_steps, v_tool_calls, v_rewards, v_updates, v_ledger. rl_i4(blob)
    and rl_f4(blob) give the token ids and logprobs of step_tokens as JSON.
    """
    from workflow.errors import ConfigError
    from workflow.settings import settings
    from workflow.store import query as store

    if as_csv and as_json:
        raise ConfigError("--csv and --json exclude each other.", "Choose one.")
    file = store.sqlite_file(settings())
    if file is not None and not file.exists():
        stored_database()  # says so
    columns, rows = store.query(settings(), query, LIMIT)
    if as_json:
        show_json([dict(zip(columns, row, strict=True)) for row in rows])
    elif as_csv:
        show_csv(columns, rows)
    else:
        show_table(columns, rows)
    if len(rows) == LIMIT:
        say(f"Stopped at {LIMIT} rows; there may be more.")

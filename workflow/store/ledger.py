"""The ledger: what became of every planned episode. Facts only; `v_ledger` has one fate for each episode of each run."""

from typing import Any

from sqlalchemy import Connection, select, text

from workflow import db
from workflow.store.connect import reading
from workflow.store.rows import episode_row

FATES = (
    "trained", "no_variance", "strayed", "too_few", "surplus", "skipped", "tainted", "no_reward", "failed", "infra_error",
    "cancelled", "evaluated", "forked", "waiting", "open",
)  # fmt: skip
"""How a planned episode may end for a run: the first was read by an update, the others say why not, or not yet."""


@reading
def why(tx: Connection, episode: int) -> dict[str, Any]:
    """The episode's fate in its own run, in other runs that trained on it, and the table of its run's iterations.

    Raises:
        NotFoundError: there is no such episode.
    """
    row = episode_row(tx, episode)
    found = tx.execute(text("SELECT * FROM v_ledger WHERE episode_id = :id ORDER BY run"), {"id": episode}).mappings().all()
    home = tx.execute(db.runs.select().where(db.runs.c.id == row["run_id"])).mappings().one()["name"]
    (own,) = (dict(fate) for fate in found if fate["run"] == home)
    kept = ("status", "stop_reason", "reward", "error_class", "error", "attempt", "parent_id", "fork_step")
    return {
        "id": episode,
        **{name: own[name] for name in ("run", "iteration", "task", "fate", "advantage", "dropped", "skipped")},
        **{name: row[name] for name in kept},
        "elsewhere": [dict(fate) for fate in found if fate["run"] != home],
        "iterations": fates(tx, home),
    }


def fates(tx: Connection, run: str) -> list[dict[str, Any]]:
    """Each iteration of the run: how many episodes were planned, and how many of them have each fate."""
    counts = ", ".join(f"count(*) FILTER (WHERE fate = '{fate}') AS {fate}" for fate in FATES)
    ended = text(f"SELECT iteration, {counts} FROM v_ledger WHERE run = :run GROUP BY iteration")
    found = {row["iteration"]: row for row in tx.execute(ended, {"run": run}).mappings()}
    planned = select(db.iterations.c.number, db.iterations.c.episodes).join(db.runs, db.runs.c.id == db.iterations.c.run_id)
    rows = tx.execute(planned.where(db.runs.c.name == run).order_by(db.iterations.c.number))
    counted = ((row.number + 1, row.episodes) for row in rows)  # as the view counts
    return [{**found[number], "planned": episodes} for number, episodes in counted if number in found]

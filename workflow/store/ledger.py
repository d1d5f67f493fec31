"""The ledger: what became of every planned episode. Facts only; `v_ledger` has one fate for each episode of each run."""

from typing import Any

from sqlalchemy import Connection, text

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
    counts = ", ".join(f"count(*) FILTER (WHERE l.fate = '{fate}') AS {fate}" for fate in FATES)
    query = f"""
        SELECT i.number AS iteration, i.episodes AS planned, {counts}
        FROM iterations i JOIN runs r ON r.id = i.run_id JOIN v_ledger l ON l.run = r.name AND l.iteration = i.number
        WHERE r.name = :run AND l.run = :run GROUP BY i.number, i.episodes ORDER BY i.number"""
    return [dict(row) for row in tx.execute(text(query), {"run": run}).mappings()]

"""The ledger: the outcome of every planned episode, in code called its "fate". The view `v_ledger` has one outcome for each
episode and run.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from agentrl.workflow.store.driver_reader import select_rows, sql_read_transaction
from agentrl.workflow.store.reads.episode_rows import load_episode
from agentrl.workflow.store.reads.paging import select_values, storable_value
from agentrl.workflow.store.reads.run_rows import run_id_and_name
from agentrl.workflow.store.row_codecs import MAX_ID, no_episode_error
from agentrl.workflow.tables.views import FATES, FateRow
from agentrl.workflow.token_chains import EQUAL, reasons_not_to_train

WINDOW_EPISODES = 2500
"""The approximate number of episodes that one query counts."""


@sql_read_transaction
def list_fates(tx: Any, run: str, iteration: int) -> list[FateRow]:
    """Return the outcome of each episode of an iteration (counted from 1), stored groups included."""
    name = run_id_and_name(tx, run)["name"]
    rest = "WHERE run = :run AND iteration = :iteration ORDER BY slot, sample"
    return select_values(tx, FateRow, rest, run=name, iteration=storable_value(iteration))


@sql_read_transaction
def count_fates(tx: Any, run: str) -> list[dict[str, Any]]:
    """Return for each iteration of the run the number of planned episodes, and the number of episodes with each outcome."""
    return _count_fates(tx, run_id_and_name(tx, run)["name"])


@sql_read_transaction
def count_fates_after(tx: Any, run: str, after: int, size: int, episodes: int = WINDOW_EPISODES) -> list[dict[str, Any]]:
    """Return the counts of `count_fates` for the iterations with a number above `after`. Iterations are counted from 1. `size`
    is the maximum number of iterations. `episodes` is the approximate maximum number of episodes. At least one iteration is
    returned, even if that iteration has more episodes.
    """
    run_row = run_id_and_name(tx, run)
    planned = """
        SELECT number + 1 AS iteration, episodes FROM iterations WHERE run_id = :id AND number >= :after
        ORDER BY number LIMIT :size"""
    after = storable_value(after)
    last, counted = after, 0
    for row in select_rows(tx, planned, id=run_row["id"], after=after, size=size):
        counted += row["episodes"]
        if counted > episodes and last > after:
            break
        last = row["iteration"]
    return _count_fates(tx, run_row["name"], "AND iteration > :after AND iteration <= :last", {"after": after, "last": last})


@sql_read_transaction
def explain_fate(tx: Any, episode: int) -> dict[str, Any]:
    """Return the episode's outcome in its own run and in other runs that trained on it.

    The result also has the counts of `count_fates` for the iterations of the episode's run. Raise NotFoundError if there is no
    such episode.
    """
    one = select_rows(tx, "SELECT * FROM episodes WHERE id = :id", id=episode) if abs(episode) <= MAX_ID else []
    if not one:
        raise no_episode_error(episode)
    (row,) = one
    fates = select_values(tx, FateRow, "WHERE episode_id = :id ORDER BY run", id=episode)
    home = select_rows(tx, "SELECT name FROM runs WHERE id = :id", id=row["run_id"])[0]["name"]
    (own,) = (fate for fate in fates if fate.run == home)
    columns = ("status", "stop_reason", "reward", "error_class", "error", "attempt", "parent_id", "fork_step")
    return {
        "id": episode,
        "run_id": row["run_id"],
        "group_id": row["group_id"],
        **{name: own[name] for name in ("run", "iteration", "task", "fate", "advantage", "dropped", "skipped")},
        **{name: row[name] for name in columns},
        "untrained": _untrained_steps(tx, row),
        "chains": _begun_chains(tx, row),
        "ambiguous": _ambiguous_steps(tx, row),
        "elsewhere": [dict(fate) for fate in fates if fate.run != home],
        "iterations": _count_fates(tx, home),
    }


def _untrained_steps(tx: Any, episode: Any) -> list[dict[str, Any]]:
    unread = "SELECT count(*) AS n FROM steps WHERE episode_id = :id AND attempt = :attempt AND (NOT delivered OR side_call)"
    if not select_rows(tx, unread, id=episode["id"], attempt=episode["attempt"])[0]["n"]:
        return []
    reasons = reasons_not_to_train(load_episode(tx, episode["id"], with_tokens=False))
    return [{"step": step, "reason": reason} for step, reason in sorted(reasons.items())]


def _begun_chains(tx: Any, episode: Any) -> list[dict[str, Any]]:
    begun = """
        SELECT number AS step, chain, new_row AS reason FROM steps
        WHERE episode_id = :id AND attempt = :attempt AND new_row IS NOT NULL ORDER BY number"""
    return [dict(row) for row in select_rows(tx, begun, id=episode["id"], attempt=episode["attempt"])]


def _ambiguous_steps(tx: Any, episode: Any) -> list[dict[str, Any]]:
    """Return the steps that could continue several turns: the turn that each continues, and the number of turns."""
    query = f"""
        SELECT number AS step, parent_step AS after, asked FROM steps WHERE episode_id = :id AND attempt = :attempt
        AND parent_step IS NOT NULL AND CAST(asked AS TEXT) LIKE '%"{EQUAL}"%' ORDER BY number"""
    rows = select_rows(tx, query, id=episode["id"], attempt=episode["attempt"])
    return [{"step": row["step"], "after": row["after"], "equal": row["asked"].get(EQUAL)} for row in rows]


def _count_fates(tx: Any, run: str, among: str = "", numbers: Mapping[str, Any] = MappingProxyType({})) -> list[dict[str, Any]]:
    counts = ", ".join(f"count(*) FILTER (WHERE fate = '{fate}') AS of_{fate}" for fate in FATES)  # `tainted` is a flag
    ended = f"SELECT iteration, {counts} FROM v_ledger WHERE run = :run {among} GROUP BY iteration"
    by_iteration = {
        row["iteration"]: {fate: row[f"of_{fate}"] for fate in FATES} for row in select_rows(tx, ended, run=run, **numbers)
    }
    planned = """
        SELECT i.number + 1 AS iteration, i.episodes AS planned FROM iterations i JOIN runs r ON r.id = i.run_id
        WHERE r.name = :run ORDER BY i.number"""  # as the view counts
    iterations = select_rows(tx, planned, run=run)
    return [{**row, **by_iteration[row["iteration"]]} for row in iterations if row["iteration"] in by_iteration]

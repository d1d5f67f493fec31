"""Every fate's necessary condition holds for all episodes of the fate, and a search by fate finds exactly these episodes."""

from itertools import count, product
from random import Random
from typing import Any

from sqlalchemy import Connection

from agentrl.workflow.stats.group_variance import CUT_OFF, DIFFERENT, NO_VARIANCE, SURPLUS
from agentrl.workflow.store import planning
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.driver_reader import select_rows
from agentrl.workflow.store.reads.episode_rows import EpisodeFilter, list_episodes
from agentrl.workflow.store.reads.paging import iterate_rows
from agentrl.workflow.tables import schema
from agentrl.workflow.tables.column_values import EPISODE_STATUS, RUN_KINDS, WORK_STATUS
from agentrl.workflow.tables.views import FATE_CONDITIONS, FATES
from tests.support.played_runs import submission

DROPPED = ("", NO_VARIANCE, SURPLUS, f"1 {CUT_OFF}", f"1 {DIFFERENT}", "too few")
ADVANTAGES = (None, 0.0, 0.5)
ENDS = [(status, None, False, None) for status in EPISODE_STATUS if status != "done"]
ENDS += [("done", *more) for more in product(("answered", "max_tokens"), (False, True), ADVANTAGES)]


def fill(tx: Connection, run: int, kind: str, random: Random) -> None:
    """Give the run iterations of each status, with groups dropped for each reason, with episodes of each end."""
    policy = tx.execute(schema.policies.select().where(schema.policies.c.run_id == run)).one().id
    numbers = count(1_000_000 * run)
    rows: dict[Any, list[dict[str, Any]]] = {
        schema.iterations: [],
        schema.groups: [],
        schema.episodes: [],
        schema.consumptions: [],
    }
    for status, skipped in product(WORK_STATUS, ("", "no step")):
        iteration = next(numbers)
        of_run = {"run_id": run, "iteration_id": iteration, "task_id": 1}
        row = {"id": iteration, "run_id": run, "number": iteration, "epoch": 0, "policy_id": policy}
        rows[schema.iterations].append({**row, "status": status, "skipped": skipped})
        for dropped in DROPPED:
            group = next(numbers)
            rewards = {"mean_reward": 0.5, "std_reward": random.choice((0.0, 0.5))}
            row = {**of_run, "id": group, "slot": group, "kind": kind, "status": "done"}
            rows[schema.groups].append({**row, "dropped": dropped, **rewards})
            for ended, stop_reason, tainted, advantage in ENDS:
                episode = next(numbers)
                row = {**of_run, "id": episode, "group_id": group, "sample": episode, "error": "error", "reward": 0.5}
                rows[schema.episodes].append({**row, "status": ended, "stop_reason": stop_reason, "tainted": tainted})
                if advantage is not None:
                    row = {"run_id": run, "iteration_id": iteration, "episode_id": episode}
                    rows[schema.consumptions].append({**row, "advantage": advantage})
    for table, its in rows.items():
        tx.execute(table.insert(), its)


def test_fate_conditions_hold_for_all_episodes_of_fate(database: Database) -> None:
    assert {*FATE_CONDITIONS} == {*FATES}
    random, seen = Random(0), set[str]()
    for number, kind in enumerate(RUN_KINDS, 1):
        planning.submit(database, submission(kind))
        with database.engine.begin() as tx:
            tx.execute(schema.runs.update().where(schema.runs.c.id == number).values(kind=kind))
            fill(tx, number, kind, random)
            fates = select_rows(tx, "SELECT episode_id, fate FROM v_ledger WHERE run = :run", run=kind)
        for fate in FATES:
            ids = {row["episode_id"] for row in fates if row["fate"] == fate}
            with database.read() as tx:
                query = f"SELECT id FROM episodes WHERE run_id = :run_id AND {FATE_CONDITIONS[fate]}"
                necessary = {row["id"] for row in select_rows(tx, query, run_id=number)}
            assert ids <= necessary, (kind, fate)
            found = iterate_rows(list_episodes, database, EpisodeFilter(kind, fate=fate))
            assert {row.id for row in found} == ids, (kind, fate)
            seen |= {fate} if ids else set()
    assert seen == {*FATES}

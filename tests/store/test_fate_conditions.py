"""Every fate's necessary condition holds for all episodes of the fate, and a search by fate finds exactly these episodes."""

from itertools import product
from random import Random
from typing import Any

from sqlalchemy import Connection

from agentrl.workflow.stats.group_variance import CUT_OFF, DIFFERENT, NO_VARIANCE, SURPLUS
from agentrl.workflow.store import planning
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.driver_reader import select_rows
from agentrl.workflow.store.reads.episode_rows import EpisodeFilter, list_episodes
from agentrl.workflow.store.reads.paging import Paging
from agentrl.workflow.tables import schema
from agentrl.workflow.tables.schema import EPISODE_STATUS, RUN_KINDS, WORK_STATUS
from agentrl.workflow.tables.views import FATES, NECESSARY
from tests.support.played_runs import submission

DROPPED = ("", NO_VARIANCE, SURPLUS, f"1 {CUT_OFF}", f"1 {DIFFERENT}", "too few")
ADVANTAGES = (None, 0.0, 0.5)
ENDS = [(status, None, False, None) for status in EPISODE_STATUS if status != "done"]
ENDS += [("done", *more) for more in product(("answered", "max_tokens"), (False, True), ADVANTAGES)]


def fill(tx: Connection, run: int, kind: str, random: Random) -> None:
    """Give the run iterations of each status, with groups dropped for each reason, with episodes of each end."""
    policy = tx.execute(schema.policies.select().where(schema.policies.c.run_id == run)).one().id
    for number, (status, skipped) in enumerate(product(WORK_STATUS, ("", "no step"))):
        row = {"run_id": run, "number": number + 100, "epoch": 0, "policy_id": policy, "status": status, "skipped": skipped}
        iteration = tx.execute(schema.iterations.insert().values(row)).inserted_primary_key[0]
        for slot, dropped in enumerate(DROPPED):
            group_row = {"run_id": run, "iteration_id": iteration, "task_id": 1, "slot": slot, "kind": kind, "status": "done"}
            group_row |= {"dropped": dropped, "mean_reward": 0.5, "std_reward": random.choice((0.0, 0.5))}
            group = tx.execute(schema.groups.insert().values(group_row)).inserted_primary_key[0]
            for sample, end in enumerate(ENDS):
                insert_episode(tx, {**row, "iteration_id": iteration, "group_id": group, "sample": sample}, end)


def insert_episode(tx: Connection, row: dict[str, Any], end: tuple[str, str | None, bool, float | None]) -> None:
    status, stop_reason, tainted, advantage = end
    names = ("run_id", "iteration_id", "group_id", "sample")
    ended = {"status": status, "stop_reason": stop_reason, "tainted": tainted, "error": "error", "reward": 0.5}
    values = {**{name: row[name] for name in names}, "task_id": 1, **ended}
    episode = tx.execute(schema.episodes.insert().values(values)).inserted_primary_key[0]
    if advantage is not None:
        read = {"run_id": row["run_id"], "iteration_id": row["iteration_id"], "episode_id": episode, "advantage": advantage}
        tx.execute(schema.consumptions.insert().values(read))


def test_fate_conditions_hold_for_all_episodes_of_fate(database: Database) -> None:
    assert {*NECESSARY} == {*FATES}
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
                query = f"SELECT id FROM episodes WHERE run_id = :run_id AND {NECESSARY[fate]}"
                necessary = {row["id"] for row in select_rows(tx, query, run_id=number)}
            assert ids <= necessary, (kind, fate)
            assert {row.id for row in list_episodes(database, EpisodeFilter(kind, fate=fate), Paging(10_000)).rows} == ids
            seen |= {fate} if ids else set()
    assert seen == {*FATES}

"""Rescoring: rewards are computed again for a run's done episodes. One transaction adds the new rewards as a new reward set."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime

from sqlalchemy import Connection, select

from agentrl.workflow.errors import ConflictError
from agentrl.workflow.rewards import Part
from agentrl.workflow.runtime.shown_text import format_count
from agentrl.workflow.store.connect import Database, insert, read_transaction, transaction
from agentrl.workflow.store.episode_annotations import annotations_of
from agentrl.workflow.store.episode_loader import load_episodes, reward_rows, task_value
from agentrl.workflow.store.planning import log
from agentrl.workflow.tables import schema
from agentrl.workflow.trajectory import Episode

PAGE_SIZE = 500
"""The maximum number of episodes in memory at once."""


def iterate_done_episodes(db_: Database, run_id: int) -> Iterator[Episode]:
    """Yield the run's done episodes with their steps, ordered by id."""
    last = 0
    while page := _load_page(db_, run_id, last):
        yield from page
        last = page[-1].id


@read_transaction
def _load_page(tx: Connection, run_id: int, after: int) -> list[Episode]:
    episodes = schema.episodes.c
    mine = select(episodes.id, episodes.task_id).where(
        episodes.run_id == run_id, episodes.status == "done", episodes.id > after
    )
    chosen = tx.execute(mine.order_by(episodes.id).limit(PAGE_SIZE)).all()
    rows = tx.execute(select(schema.tasks).where(schema.tasks.c.id.in_({row.task_id for row in chosen}))).mappings()
    tasks = {row["id"]: task_value(row) for row in rows}
    ids = [row.id for row in chosen]
    annotations = annotations_of(tx, ids)
    loaded = load_episodes(tx, episodes.id.in_(ids), tasks)
    return [
        replace(episode, annotations=annotations.get(episode.id, ()))
        for episode in sorted(loaded, key=lambda episode: episode.id)
    ]


@transaction
def add_reward_set(
    tx: Connection,
    run_id: int,
    name: str,
    code_hash: str,
    weights: Mapping[str, float],
    scored: Mapping[int, Mapping[str, Part]],
) -> None:
    """Write the reward set with the reward parts of each episode. If the set exists, episodes that it does not have yet are
    added. `scored` has the parts by episode id. Raise ConflictError if the run has a reward set of that name with other code or
    weights.
    """
    statement = (
        insert(tx, schema.reward_sets)
        .values(run_id=run_id, name=name, code_hash=code_hash, weights=dict(weights), created_at=datetime.now(UTC))
        .on_conflict_do_nothing(index_elements=["run_id", "name"])
        .returning(schema.reward_sets.c.id)
    )
    set_id = tx.execute(statement).scalar_one_or_none()
    if set_id is None:
        set_id = _same_set(tx, run_id, name, code_hash, weights)
    rows = [
        {"reward_set_id": set_id, "episode_id": episode, "weight": weights[row["part"]], **row}
        for episode, parts in scored.items()
        for row in reward_rows(parts)
    ]
    if rows:
        # Episodes that were done since the set was made join it; those that are there stay as they are.
        keys = ["reward_set_id", "episode_id", "part", "step"]
        run = select(schema.runs.c.name).where(schema.runs.c.id == run_id).scalar_subquery()
        tx.execute(insert(tx, schema.rewards).values(run=run).on_conflict_do_nothing(index_elements=keys), rows)
    log(tx, run_id, "rescored", name, format_count(len(scored), "episode"))


def _same_set(tx: Connection, run_id: int, name: str, code_hash: str, weights: Mapping[str, float]) -> int:
    sets = schema.reward_sets.c
    row = tx.execute(select(schema.reward_sets).where(sets.run_id == run_id, sets.name == name)).mappings().one()
    if row["code_hash"] != code_hash or row["weights"] != dict(weights):
        raise ConflictError(f"The run has a reward set {name!r} with other code or weights.", "Choose another --name.")
    return int(row["id"])

"""Runs that come from each other: forks, runs on stored episodes, and those that train another's policy on or measure it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, func, select

from agentrl.workflow.store.connect import read_transaction
from agentrl.workflow.store.reads.paging import Paging
from agentrl.workflow.store.reads.run_rows import RunFilter, RunRow, run_by_id, runs_page
from agentrl.workflow.tables import schema


@dataclass(frozen=True, slots=True)
class Source:
    """A run that another one comes from, by its number and name, and what the other took from it."""

    id: int
    run: str
    what: str


@dataclass(frozen=True, slots=True)
class Relative:
    """A run and what it comes from; the first is what it stands under in a tree."""

    row: RunRow
    sources: tuple[Source, ...]


@read_transaction
def load_family(tx: Connection, limit: int) -> list[Relative]:
    """The newest runs and all that they come from, oldest first; without the evaluations that runs make of themselves."""
    found: dict[int, Relative] = {}
    wanted = list(runs_page(tx, RunFilter(), Paging(limit)).rows)
    while wanted:
        found |= {row.id: Relative(row, tuple(_find_sources(tx, row.id))) for row in wanted}
        missing = {source.id for row in wanted for source in found[row.id].sources} - found.keys()
        wanted = [run_by_id(tx, each) for each in missing]
    return [found[each] for each in sorted(found)]


def _find_sources(tx: Connection, run_id: int) -> Iterator[Source]:
    """The runs that the run comes from; each is older, so that a tree has an end."""
    run = tx.execute(select(schema.runs).where(schema.runs.c.id == run_id)).mappings().one()
    seen: set[tuple[int, str]] = set()
    for find in (_fork_sources, _group_sources, _checkpoint_sources, _model_sources):
        for number, what in find(tx, run):
            if number < run_id and (number, what) not in seen:
                seen.add((number, what))
                name = tx.execute(select(schema.runs.c.name).where(schema.runs.c.id == number)).scalar_one()
                yield Source(number, name, what)


SourceIds = Iterator[tuple[int, str]]
"""Numbers of runs, and what the run that is looked at has of each."""


def _fork_sources(tx: Connection, run: Mapping[Any, Any]) -> SourceIds:
    fork = run["manifest"].get("fork")
    if fork:
        parent = tx.execute(
            select(schema.episodes.c.run_id).where(schema.episodes.c.id == fork["episode"])
        ).scalar_one_or_none()
        if parent is not None:
            yield parent, f"episode {fork['episode']}, step {fork['step']}"


def _group_sources(tx: Connection, run: Mapping[Any, Any]) -> SourceIds:
    lent = select(schema.groups.c.run_id, func.count().label("groups"))
    lent = lent.join(schema.run_groups, schema.run_groups.c.group_id == schema.groups.c.id).where(
        schema.run_groups.c.run_id == run["id"]
    )
    for row in tx.execute(lent.group_by(schema.groups.c.run_id).order_by(schema.groups.c.run_id)):
        yield row.run_id, f"{row.groups} {'group' if row.groups == 1 else 'groups'}"


def _checkpoint_sources(tx: Connection, run: Mapping[Any, Any]) -> SourceIds:
    """The run that made the checkpoint which this one begins with."""
    policies = schema.policies.c
    first = select(policies.path).where(policies.run_id == run["id"]).order_by(policies.version).limit(1)
    path = tx.execute(first).scalar_one_or_none()
    if path:
        made = select(policies.run_id, policies.version).where(policies.path == path).order_by(policies.id).limit(1)
        row = tx.execute(made).one()
        yield row.run_id, f"version {row.version}"


def _model_sources(tx: Connection, run: Mapping[Any, Any]) -> SourceIds:
    """The run that the model is named after: `RUN@VERSION`."""
    name, at, version = str(run["config"].get("model", {}).get("path", "")).partition("@")
    number = tx.execute(select(schema.runs.c.id).where(schema.runs.c.name == name)).scalar_one_or_none() if at else None
    if number is not None:
        yield number, f"version {version}"

"""Runs that are derived from other runs: forks, runs on stored episodes, and runs that train or evaluate a policy of another
run.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.workflow.store.driver_reader import Row, select_rows, sql_read_transaction
from agentrl.workflow.store.reads.paging import Paging
from agentrl.workflow.store.reads.run_rows import RunFilter, list_runs, run_by_id
from agentrl.workflow.tables.views import RunRow


@dataclass(frozen=True, slots=True)
class Source:
    """A run from which another run is derived: its id and name, and the part that the derived run uses."""

    id: int
    run: str
    what: str


@dataclass(frozen=True, slots=True)
class Relative:
    """A run and its sources. In a tree of runs, the first source is the run's parent."""

    row: RunRow
    sources: tuple[Source, ...]


@dataclass(frozen=True, slots=True)
class Child:
    """A run that is derived from another run: its id, name and kind, and the part of the other run that it uses."""

    id: int
    run: str
    kind: str
    what: str


@sql_read_transaction
def load_family(tx: Any, limit: int) -> list[Relative]:
    """Return the newest `limit` runs and their sources, oldest first. The evaluations that a run planned itself are left
    out.
    """
    relatives: dict[int, Relative] = {}
    rows = list(list_runs(tx, RunFilter(), Paging(limit)).rows)
    while rows:
        relatives |= {row.id: Relative(row, tuple(find_sources(tx, row.id))) for row in rows}
        missing = {source.id for row in rows for source in relatives[row.id].sources} - relatives.keys()
        rows = [run_by_id(tx, run_id) for run_id in missing]
    return [relatives[run_id] for run_id in sorted(relatives)]


def find_sources(tx: Any, run_id: int) -> Iterator[Source]:
    """Yield the older runs from which this run is derived. Call this inside a transaction."""
    (run,) = select_rows(tx, "SELECT id, config, manifest FROM runs WHERE id = :id", id=run_id)
    seen: set[tuple[int, str]] = set()
    for find in (_fork_sources, _group_sources, _evaluated_sources, _checkpoint_sources, _model_sources):
        for number, what in find(tx, run):
            if number < run_id and (number, what) not in seen:
                seen.add((number, what))
                (row,) = select_rows(tx, "SELECT name FROM runs WHERE id = :id", id=number)
                yield Source(number, row["name"], what)


SourceIds = Iterator[tuple[int, str]]
"""The ids of source runs, each with a text that says what the derived run uses of the source."""


def _fork_sources(tx: Any, run: Row) -> SourceIds:
    fork = run["manifest"].get("fork")
    if fork:
        for parent in select_rows(tx, "SELECT run_id FROM episodes WHERE id = :id", id=fork["episode"]):
            yield parent["run_id"], _fork_words(fork)


def _fork_words(fork: Mapping[str, Any]) -> str:
    return f"episode {fork['episode']}, step {fork['step']}"


def _group_sources(tx: Any, run: Row) -> SourceIds:
    query = """
        SELECT g.run_id, count(*) AS groups FROM run_groups l JOIN groups g ON g.id = l.group_id
        WHERE l.run_id = :id GROUP BY g.run_id ORDER BY g.run_id"""
    for row in select_rows(tx, query, id=run["id"]):
        yield row["run_id"], _group_words(row["groups"])


def _group_words(groups: int) -> str:
    return f"{groups} {'group' if groups == 1 else 'groups'}"


def _evaluated_sources(tx: Any, run: Row) -> SourceIds:
    """Yield the run whose policy this run evaluates."""
    query = "SELECT measures_id, measures_version FROM runs WHERE id = :id AND measures_id IS NOT NULL"
    for row in select_rows(tx, query, id=run["id"]):
        yield row["measures_id"], f"version {row['measures_version']}"


def _checkpoint_sources(tx: Any, run: Row) -> SourceIds:
    """Yield the run that made the checkpoint with which this run starts."""
    query = """
        SELECT run_id, version FROM policies WHERE path <> '' AND path =
          (SELECT path FROM policies WHERE run_id = :id ORDER BY version LIMIT 1) ORDER BY id LIMIT 1"""
    for row in select_rows(tx, query, id=run["id"]):
        yield row["run_id"], f"version {row['version']}"


def _model_sources(tx: Any, run: Row) -> SourceIds:
    """Yield the run that the config's model `RUN@VERSION` names."""
    name, at, version = str(run["config"].get("model", {}).get("path", "")).partition("@")
    for row in select_rows(tx, "SELECT id FROM runs WHERE name = :name", name=name) if at else ():
        yield row["id"], f"version {version}"


def find_children(tx: Any, run_id: int, limit: int) -> list[Child]:
    """Return at most `limit` runs that are derived from the run, oldest first. Call this inside a transaction.

    These are forks of the run's episodes, runs on its groups, and runs that start with its policies or evaluate them.
    """
    children: dict[int, Child] = {}
    for query, describe in (
        (_POLICY_CHILDREN, _policy_words),
        (_MEASURING_CHILDREN, _policy_words),
        (_GROUP_CHILDREN, _group_child_words),
        (_FORK_CHILDREN, _fork_child),
    ):
        for row in select_rows(tx, query, id=run_id, limit=limit):
            children[row["id"]] = Child(row["id"], row["name"], row["kind"], describe(row))
    return [children[child_id] for child_id in sorted(children)[:limit]]


_POLICY_CHILDREN = """
    SELECT r.id, r.name, r.kind, min(mine.version) AS version FROM policies mine
    JOIN policies theirs ON theirs.path = mine.path JOIN runs r ON r.id = theirs.run_id
    WHERE mine.run_id = :id AND mine.path <> '' AND theirs.run_id > :id
    GROUP BY r.id, r.name, r.kind ORDER BY r.id LIMIT :limit"""
_MEASURING_CHILDREN = """
    SELECT id, name, kind, measures_version AS version FROM runs WHERE measures_id = :id ORDER BY id LIMIT :limit"""
_GROUP_CHILDREN = """
    SELECT r.id, r.name, r.kind, count(*) AS groups FROM run_groups l JOIN groups g ON g.id = l.group_id
    JOIN runs r ON r.id = l.run_id WHERE g.run_id = :id AND r.id > :id
    GROUP BY r.id, r.name, r.kind ORDER BY r.id LIMIT :limit"""
_FORK_CHILDREN = """
    SELECT r.id, r.name, r.kind, r.manifest -> 'fork' ->> 'episode' AS episode, r.manifest -> 'fork' ->> 'step' AS step
    FROM runs r
    JOIN episodes e ON e.id = CAST(r.manifest -> 'fork' ->> 'episode' AS BIGINT)
    WHERE r.kind = 'fork' AND r.id > :id AND e.run_id = :id ORDER BY r.id LIMIT :limit"""


def _policy_words(row: Row) -> str:
    return f"{'measures' if row['kind'] == 'eval' else 'begins with'} version {row['version']}"


def _group_child_words(row: Row) -> str:
    return f"trains on {_group_words(row['groups'])}"


def _fork_child(row: Row) -> str:
    return f"forks {_fork_words(row)}"

"""Versions of the texts that runs work with, and what a search gained by its choice."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.workflow.store.driver_reader import select_rows, sql_read_transaction
from agentrl.workflow.store.reads.paging import BY_NUMBER, Page, Paging, choose_conditions, select_page
from agentrl.workflow.store.reads.run_rows import run_id_and_name
from agentrl.workflow.tables.views import CriticCallRow, ResourceRow


@dataclass(frozen=True, slots=True)
class ResourceFilter:
    """A filter of texts: by run (name or number), by name, by whether a search chose them."""

    run: str | None = None
    name: str | None = None
    chosen: bool | None = None


_CONDITIONS = {"name": "name = :name", "chosen": "chosen = :chosen"}


@sql_read_transaction
def list_resources(tx: Any, chosen: ResourceFilter, paging: Paging | None = None) -> Page[ResourceRow]:
    """Versions in the order in which they were first tried."""
    conditions, values = choose_conditions(chosen, _CONDITIONS)
    if chosen.run is not None:
        conditions, values["run"] = ["run = :run", *conditions], run_id_and_name(tx, chosen.run)["name"]
    return select_page(tx, ResourceRow, conditions, values, paging or Paging(), BY_NUMBER, "id")


@dataclass(frozen=True, slots=True)
class CriticCallFilter:
    """A filter of critics' answers: by run (name or number)."""

    run: str | None = None


@sql_read_transaction
def list_critic_calls(tx: Any, chosen: CriticCallFilter, paging: Paging | None = None) -> Page[CriticCallRow]:
    """Return the requests of searches to their critics, in order."""
    conditions, values = choose_conditions(chosen, {})
    if chosen.run is not None:
        conditions, values["run"] = ["run = :run", *conditions], run_id_and_name(tx, chosen.run)["name"]
    return select_page(tx, CriticCallRow, conditions, values, paging or Paging(), BY_NUMBER, "id")


@sql_read_transaction
def count_critic_calls(tx: Any, run: str) -> int:
    """Return the number of requests of a search to its critic."""
    (row,) = select_rows(tx, "SELECT count(*) AS count FROM critic_calls WHERE run_id = :id", id=run_id_and_name(tx, run)["id"])
    return int(row["count"])


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Task -> mean reward on the held-out tasks, with the texts that a search began with, and with those that it chose."""

    seed: Mapping[int, float]
    chosen: Mapping[int, float]


@sql_read_transaction
def find_held_out(tx: Any, run: str) -> HeldOut:
    """Return what a search measured on tasks that no choice has read; empty where it has not, or chose what it began with."""
    query = """
        SELECT e.task_id, w.seed, avg(CASE WHEN e.status = 'failed' THEN 0.0 ELSE e.reward END) AS mean
        FROM (SELECT l.group_id, min(CASE WHEN v.version = 0 THEN 1 ELSE 0 END) AS seed,
                     min(CASE WHEN v.chosen THEN 1 ELSE 0 END) AS chosen
              FROM group_resources l JOIN resources v ON v.id = l.resource_id WHERE v.run_id = :id GROUP BY l.group_id) w
        JOIN episodes e ON e.group_id = w.group_id
        JOIN run_tasks m ON m.run_id = e.run_id AND m.task_id = e.task_id
        WHERE m.role = 'held_out' AND e.status IN ('done', 'failed') AND (w.seed = 1 OR w.chosen = 1)
        GROUP BY e.task_id, w.seed"""
    rows = select_rows(tx, query, id=run_id_and_name(tx, run)["id"])
    means = {seed: {row["task_id"]: row["mean"] for row in rows if row["seed"] == seed} for seed in (0, 1)}
    return HeldOut(seed=means[1], chosen=means[0])

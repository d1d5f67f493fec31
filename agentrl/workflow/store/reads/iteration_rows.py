"""Iterations: lists of iterations and of optimizer steps, and one iteration with its groups (sampled or stored) and their
episodes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.workflow.errors import NotFoundError
from agentrl.workflow.stats.group_variance import mean_and_deviation
from agentrl.workflow.store.driver_reader import Row, among, select_rows, sql_read_transaction
from agentrl.workflow.store.reads.changes import OF_RUN, since_values
from agentrl.workflow.store.reads.credit_rows import load_algorithm, load_rewards_in
from agentrl.workflow.store.reads.paging import (
    BY_NUMBER,
    Page,
    Paging,
    choose_conditions,
    select_page,
    select_values,
    storable_value,
)
from agentrl.workflow.store.reads.run_rows import run_id_and_name
from agentrl.workflow.store.solved_rule import MEMBERS, load_rule
from agentrl.workflow.tables.column_values import WORK_STATUS
from agentrl.workflow.tables.views import IterationRow, UpdateRow

ITERATION_ORDERS = {"iteration": "number"}


@dataclass(frozen=True, slots=True)
class IterationFilter:
    """A filter of a run's iterations. `run` is the run's name or number.

    Args:
        after: select only iterations with a greater number, counted from 1.
        since: a cursor of `mark_changes`, to select only iterations that may have changed since then.
    """

    run: str
    status: str | None = None
    after: int | None = None
    since: str | None = None


_CONDITIONS = {"status": "status = :status", "after": "number >= :after"}


@sql_read_transaction
def list_iterations(tx: Any, chosen: IterationFilter, paging: Paging | None = None) -> Page[IterationRow]:
    """Return the run's iterations in order. Raise ConfigError if there is no such status."""
    run = run_id_and_name(tx, chosen.run)
    conditions, values = choose_conditions(chosen, _CONDITIONS, {"status": WORK_STATUS})
    conditions, values = [OF_RUN, *conditions], {"run_id": run["id"], **values}
    if chosen.since is not None:
        conditions = [*conditions, "number >= :first_open"]
        values["first_open"] = since_values(chosen.since, run["id"])["first_open"]
    return select_page(tx, IterationRow, conditions, values, paging or Paging(), ITERATION_ORDERS, "iteration", "iterations")


@dataclass(frozen=True, slots=True)
class UpdateFilter:
    """A filter of a run's optimizer steps. `iteration` selects one iteration, counted from 1; None for all iterations."""

    run: str
    iteration: int | None = None


@sql_read_transaction
def list_updates(tx: Any, chosen: UpdateFilter, paging: Paging | None = None) -> Page[UpdateRow]:
    """Return the run's optimizer steps in order."""
    conditions, values = choose_conditions(chosen, {"iteration": "iteration = :iteration"})
    values["run"] = run_id_and_name(tx, chosen.run)["name"]
    return select_page(tx, UpdateRow, ["run = :run", *conditions], values, paging or Paging(), BY_NUMBER, "id")


MAX_EPISODES = 4096
"""The maximum number of episodes in a response. Groups are returned completely or not at all; the first group is always
returned.
"""


@dataclass(frozen=True, slots=True)
class IterationDetails:
    """An iteration with its optimizer steps and groups. `left_out` is the number of groups that are missing because of the
    limit MAX_EPISODES. `flat` is the number of all groups with equal rewards, and `right` the number of these in which an
    episode is right. `algorithm` is that of the run's config; None if the run does not train.
    """

    iteration: IterationRow
    updates: Sequence[UpdateRow]
    groups: Sequence[Mapping[str, Any]]
    left_out: int
    flat: int
    right: int
    algorithm: str | None


@sql_read_transaction
def load_iteration(tx: Any, run: str, number: int) -> IterationDetails:
    """Return an iteration by its number, counted from 1. Raise NotFoundError if there is no such run or iteration."""
    run_row = run_id_and_name(tx, run)
    iteration = find_iteration(tx, run_row, number)
    number_id, is_training = iteration["id"], iteration["kind"] == "train"
    groups = [dict(row) for row in select_rows(tx, _GROUPS, iteration=number_id, run=run_row["id"])]
    chosen_groups = _choose_groups(groups)
    episodes = _load_episodes(tx, run_row["id"], [group["id"] for group in chosen_groups])
    borrowed = [group for group in chosen_groups if group["run_id"] != run_row["id"]]
    if borrowed and iteration["reward_set"] != "default":
        _score_again(tx, iteration["reward_set"], borrowed, episodes)
    fates = _load_fates(tx, run_row["name"], number)
    solved = load_solved_groups(tx, run_row["id"], number)
    for group in chosen_groups:
        group["solved"] = group["id"] in solved
        group["flat"] = group["std_reward"] == 0
        group["borrowed"] = group["run_id"] != run_row["id"]
        group["episodes"] = [{**row, "fate": fates.get(row["id"])} for row in episodes.get(group["id"], ())]
    flat = [group["id"] for group in groups if group["std_reward"] == 0]
    return IterationDetails(
        iteration=select_values(tx, IterationRow, "WHERE id = :id", id=number_id)[0],
        updates=select_values(
            tx, UpdateRow, "WHERE id IN (SELECT id FROM updates WHERE iteration_id = :id) ORDER BY minibatch", id=number_id
        ),
        groups=chosen_groups,
        left_out=len(groups) - len(chosen_groups),
        flat=len(flat),
        right=len(solved.intersection(flat)),
        algorithm=load_algorithm(iteration["config"])[0] if is_training else None,
    )


def find_iteration(tx: Any, run_row: Row, number: int) -> Row:
    """Return the id of an iteration, and the kind, the reward set and the config of its run. `run_row` has the run's id and
    name. Call this inside a transaction. Raise NotFoundError if there is no such iteration.
    """
    query = """
        SELECT i.id, r.kind, r.reward_set, r.config FROM iterations i JOIN runs r ON r.id = i.run_id
        WHERE i.run_id = :run AND i.number = :number"""
    iterations = select_rows(tx, query, run=run_row["id"], number=storable_value(number) - 1)
    if not iterations:
        newest = select_rows(tx, "SELECT max(number) + 1 AS number FROM iterations WHERE run_id = :run", run=run_row["id"])
        its = f"its iterations are 1 to {newest[0]['number']}" if newest[0]["number"] else "none has begun"
        raise NotFoundError(f"{run_row['name']!r} has no iteration {number}: {its}.", f"agentrl watch {run_row['name']}")
    return iterations[0]


_GROUP = """
    SELECT g.id, {slot} AS slot, g.kind, t.key AS task, g.task_id, t.reference, g.status, {dropped} AS dropped, g.mean_reward,
           g.std_reward, g.run_id, (SELECT count(*) FROM episodes e WHERE e.group_id = g.id) AS count"""
_GROUPS = f"""
    {_GROUP.format(slot="g.slot", dropped="g.dropped")}
    FROM groups g JOIN tasks t ON t.id = g.task_id WHERE g.iteration_id = :iteration
    UNION ALL
    {_GROUP.format(slot="l.slot", dropped="l.dropped")}
    FROM iteration_groups l JOIN groups g ON g.id = l.group_id JOIN tasks t ON t.id = g.task_id
    WHERE l.iteration_id = :iteration
    ORDER BY 2"""


def _choose_groups(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    chosen: list[dict[str, Any]] = []
    episodes = 0
    for group in groups:
        episodes += group.pop("count")
        if chosen and episodes > MAX_EPISODES:
            break
        chosen.append(group)
    return chosen


def _score_again(
    tx: Any, reward_set: str, groups: Sequence[dict[str, Any]], episodes: Mapping[int, Sequence[dict[str, Any]]]
) -> None:
    """Replace the `default` rewards of the groups and their episodes by the rewards of `reward_set`, in place."""
    rows = [{**row, "run_id": group["run_id"]} for group in groups for row in episodes.get(group["id"], ())]
    rewards = load_rewards_in(tx, rows, reward_set)
    for group in groups:
        mine = episodes.get(group["id"], ())
        for row in mine:
            row["reward"] = rewards[row["id"]]
        done_rewards = [row["reward"] for row in mine if row["reward"] is not None and row["status"] == "done"]
        group["mean_reward"], group["std_reward"] = mean_and_deviation(done_rewards)


_ADVANTAGE = """
    (SELECT c.advantage FROM consumptions c WHERE c.run_id = :run AND c.episode_id = e.id AND c.stage = 'train')"""
"""The SQL subquery for an episode's advantage. With a join instead, a Postgres without statistics would read all rows of
`consumptions` of the run.
"""


def _load_episodes(tx: Any, run_id: int, groups: Sequence[int]) -> dict[int, list[dict[str, Any]]]:
    query = f"""
        SELECT e.id, e.group_id, e.sample, e.status, e.stop_reason, e.reward, {_ADVANTAGE} AS advantage, e.steps,
               e.sampled_tokens, e.prompt_tokens, e.tool_calls, e.tool_errors, e.started_at, e.finished_at
        FROM episodes e WHERE e.group_id IN ({among(groups)}) ORDER BY e.group_id, e.sample"""
    by_group: dict[int, list[dict[str, Any]]] = {}
    for row in select_rows(tx, query, run=run_id):
        start, end = row["started_at"], row["finished_at"]
        seconds = (end - start).total_seconds() if start and end else None
        columns = {name: value for name, value in row.items() if name not in ("group_id", "started_at", "finished_at")}
        by_group.setdefault(row["group_id"], []).append({**columns, "seconds": seconds})
    return by_group


def load_solved_groups(tx: Any, run_id: int, number: int, *, only_flat: bool = False) -> set[int]:
    """Return the ids of the groups of an iteration in which an episode is right. Call this inside a transaction.

    Args:
        number: the number of the iteration, counted from 1.
        only_flat: look only at groups with equal rewards.
    """
    rule = load_rule(tx, run_id)
    query = rule.judged_groups("m.iteration = :number" + " AND m.std_reward = 0" * only_flat)
    return {row["id"] for row in select_rows(tx, query, run_id=run_id, number=number, **rule.parameters) if row["solved"]}


def count_groups(tx: Any, run_id: int) -> dict[int, tuple[int, int, int]]:
    """Return by iteration, counted from 1, the number of groups, of those with equal rewards, and of those of these in which an
    episode is right. Call this inside a transaction.

    The result is empty for a run that trains on rewards of another reward set than `default`: groups do not know these rewards.
    """
    rule = load_rule(tx, run_id)
    if rule.reward_set != "default":
        return {}
    query = f"""
        SELECT a.iteration, a.groups, coalesce(f.flat, 0) AS flat, coalesce(f.rights, 0) AS rights
        FROM (SELECT iteration, count(*) AS groups FROM ({MEMBERS}) members GROUP BY iteration) a
        LEFT JOIN (SELECT iteration, count(*) AS flat, sum(solved) AS rights
                   FROM ({rule.judged_groups("m.std_reward = 0")}) judged GROUP BY iteration) f ON f.iteration = a.iteration"""
    rows = select_rows(tx, query, run_id=run_id, **rule.parameters)
    return {row["iteration"]: (row["groups"], row["flat"], int(row["rights"])) for row in rows}


def _load_fates(tx: Any, run: str, number: int) -> dict[int, str]:
    query = "SELECT episode_id, fate FROM v_ledger WHERE run = :run AND iteration = :iteration"
    return {row["episode_id"]: row["fate"] for row in select_rows(tx, query, run=run, iteration=number)}

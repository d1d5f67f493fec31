"""Runs: lists of runs, one run by its name or number, and a run's progress."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.workflow.errors import NotFoundError
from agentrl.workflow.store.driver_reader import Row, select_rows, sql_read_transaction
from agentrl.workflow.store.reads.paging import (
    Page,
    Paging,
    choose_conditions,
    escape_like,
    select_page,
    select_values,
)
from agentrl.workflow.store.row_codecs import MAX_ID
from agentrl.workflow.store.run_names import find_run
from agentrl.workflow.store.solved_rule import load_rule
from agentrl.workflow.tables.column_values import LOSS_EVENTS, RUN_KINDS, RUN_STATUS, list_in_sql
from agentrl.workflow.tables.step_values import FINAL_ANSWER
from agentrl.workflow.tables.views import RunRow
from agentrl.workflow.trajectory import storable

RUN_ORDERS = {
    "id": "id", "run": "run", "status": "status", "reward": "last_reward", "best": "best_reward", "episodes": "episodes_done",
    "seconds": "seconds",
}  # fmt: skip
"""The names by which the list can be sorted, each with its column."""


@dataclass(frozen=True, slots=True)
class RunFilter:
    """A filter of runs. Lists leave out the evaluations that a run planned itself, unless `kind` is `eval`.

    Args:
        text: a text that the run's name contains.
        algorithm: the algorithm's name in the config.
        tag: a tag of the run.
    """

    status: str | None = None
    kind: str | None = None
    dataset: str | None = None
    model: str | None = None
    text: str | None = None
    algorithm: str | None = None
    tag: str | None = None


_CONDITIONS = {
    "status": "status = :status",
    "kind": "kind = :kind",
    "dataset": "dataset = :dataset",
    "model": "model = :model",
    "text": "lower(run) LIKE lower(:text) ESCAPE '!'",
    "algorithm": "id IN (SELECT id FROM runs WHERE config -> 'algorithm' ->> 'name' = :algorithm)",
    "tag": "id IN (SELECT run_id FROM run_tags WHERE tag = :tag)",
}


@sql_read_transaction
def list_runs(tx: Any, chosen: RunFilter | None = None, paging: Paging | None = None) -> Page[RunRow]:
    """Return runs, newest first or ordered by one of RUN_ORDERS. Raise ConfigError if there is no such order, status or
    kind.
    """
    conditions, values = choose_conditions(chosen or RunFilter(), _CONDITIONS, {"status": RUN_STATUS, "kind": RUN_KINDS})
    own = [] if chosen is not None and chosen.kind == "eval" else ["measures IS NULL"]
    return select_page(tx, RunRow, [*own, *conditions], values, paging or Paging(), RUN_ORDERS, "-id")


@sql_read_transaction
def count_planned_evals(tx: Any) -> int:
    """Return the number of evaluations that runs planned themselves. `list_runs` leaves them out."""
    count: int = select_rows(tx, "SELECT count(*) AS n FROM runs WHERE measures_id IS NOT NULL")[0]["n"]
    return count


@sql_read_transaction
def list_run_names(tx: Any, begin: str, limit: int) -> list[Row]:
    """Return the name, kind and status of the newest runs whose name begins with `begin`. Evaluations are included."""
    query = "SELECT name, kind, status FROM runs WHERE name LIKE :begin ESCAPE '!' ORDER BY id DESC LIMIT :limit"
    return select_rows(tx, query, begin=f"{escape_like(storable(begin))}%", limit=limit)


@sql_read_transaction
def find_newest_run(tx: Any) -> str | None:
    """Return the name of the newest run that is not an evaluation; None if there is no run.

    If there are only evaluations, return the newest one. Evaluations that a run planned itself are ignored.
    """
    rows = select_rows(tx, "SELECT name FROM runs WHERE measures_id IS NULL ORDER BY kind = 'eval', id DESC LIMIT 1")
    return rows[0]["name"] if rows else None


@sql_read_transaction
def describe_run(tx: Any, run: str) -> RunRow:
    """Return the row of one run, by its name or number. Raise NotFoundError if there is no such run."""
    return run_by_id(tx, run_id_and_name(tx, run)["id"])


def run_name(tx: Any, run_id: int) -> str:
    """Return the name of the run with this id. Call this inside a transaction. Raise NotFoundError if there is no such run."""
    rows = select_rows(tx, "SELECT name FROM runs WHERE id = :id", id=run_id) if abs(run_id) <= MAX_ID else []
    if not rows:
        raise NotFoundError(f"There is no run {run_id}.", "List them with `agentrl runs`.")
    return str(rows[0]["name"])


def run_by_id(tx: Any, run_id: int) -> RunRow:
    """Return the row of the run with this id. The run must exist."""
    return select_values(tx, RunRow, "WHERE id = :id", id=run_id)[0]


SAME_WORK = (
    *("env", "agent", "tools", "dataset.name", "model.lora_r", "model.load_in_4bit", "model.load_in_8bit", "model.numerics"),
    *("rollout.engine", "rollout.group_size", "rollout.tasks_per_iteration", "rollout.max_new_tokens", "rollout.max_steps"),
    *("update.epochs", "update.trainer"),
)
"""The config keys, besides the model, that decide how long an iteration takes."""


@sql_read_transaction
def find_similar_iterations(tx: Any, model: str, config: Mapping[str, Any]) -> tuple[str, list[float]] | None:
    """Find the newest training run whose iterations should take as long as iterations with this config.

    That run has the same model, the same values of the keys SAME_WORK, and done iterations. Only the last 50 training runs with
    this model are searched. Return the run's name and the durations of its last 20 done iterations, in seconds; None if there
    is no such run. `model` is the base model's path or name. `config` is a run's full config, as it is stored.
    """
    runs = select_rows(
        tx, "SELECT name, config FROM runs WHERE kind = 'train' AND base = :base ORDER BY id DESC LIMIT 50", base=model
    )
    for run in runs:
        if all(_at(run["config"], key) == _at(config, key) for key in SAME_WORK):
            query = "SELECT seconds FROM v_iterations WHERE run = :run AND status = 'done' ORDER BY iteration DESC LIMIT 20"
            seconds = [float(row["seconds"]) for row in select_rows(tx, query, run=run["name"]) if row["seconds"] is not None]
            if seconds:
                return str(run["name"]), seconds
    return None


def _at(config: Mapping[str, Any], key: str) -> Any:
    section, _, leaf = key.rpartition(".")
    parent = config.get(section) if section else config
    return parent.get(leaf) if isinstance(parent, Mapping) else None


@sql_read_transaction
def count_progress(tx: Any, run: str) -> Row:
    """Return the numbers of episodes, tokens and tool calls of the run's open iterations; empty if no iteration is open.

    The numbers cover the iterations from `iteration` to `through`, counted from 1. There is more than one open iteration only
    if the run samples during updates.
    """
    run_id = run_id_and_name(tx, run)["id"]
    query = """
        SELECT min(i.number) + 1 AS iteration, max(i.number) + 1 AS through, count(*) AS episodes,
               count(*) FILTER (WHERE e.status NOT IN ('planned', 'running')) AS finished,
               count(*) FILTER (WHERE e.status = 'running') AS running,
               count(*) FILTER (WHERE e.status = 'done') AS done,
               CAST(coalesce(sum(e.sampled_tokens), 0) AS BIGINT) AS sampled_tokens,
               CAST(coalesce(sum(e.tool_calls), 0) AS BIGINT) AS tool_calls
        FROM iterations i JOIN episodes e ON e.iteration_id = i.id
        WHERE i.run_id = :id AND i.status IN ('planned', 'running')"""
    (counts,) = select_rows(tx, query, id=run_id)
    return counts if counts["episodes"] else {}


@sql_read_transaction
def why_sampling_on(tx: Any, run: str) -> str:
    """Return a text that gives the number of further groups that an open iteration samples, and the reason; empty if no open
    iteration samples further groups.
    """
    query = """
        SELECT detail FROM events WHERE run_id = :id AND kind = 'sampling_on' AND subject IN (
          SELECT 'iteration ' || (i.number + 1) FROM iterations i JOIN groups g ON g.iteration_id = i.id
          WHERE i.run_id = :id AND i.status IN ('planned', 'running') AND i.more_groups > 0
          AND g.status IN ('planned', 'running'))
        ORDER BY id DESC LIMIT 1"""
    rows = select_rows(tx, query, id=run_id_and_name(tx, run)["id"])
    return str(rows[0]["detail"]) if rows else ""


@sql_read_transaction
def find_most_frequent_failure(tx: Any, run: str) -> Row:
    """Return the most frequent error of failed and infra_error episodes: `error`, `status`, `episodes` (how many have this
    error), and `failed` (how many have any error). Return an empty mapping if there is none.
    """
    query = """
        SELECT status, error, count(*) AS episodes, CAST(sum(count(*)) OVER () AS BIGINT) AS failed FROM episodes
        WHERE run_id = :id AND status IN ('failed', 'infra_error')
        GROUP BY status, error ORDER BY count(*) DESC, min(id) LIMIT 1"""
    rows = select_rows(tx, query, id=run_id_and_name(tx, run)["id"])
    return rows[0] if rows else {}


@sql_read_transaction
def find_most_frequent_agent_error(tx: Any, run: str) -> Row:
    """Return the most frequent error of episodes that ended as agent_error: `error`, `episodes` (how many have this error), and
    `ended` (how many ended as agent_error). Return an empty mapping if there is none.
    """
    query = """
        SELECT a.error, count(*) AS episodes, CAST(sum(count(*)) OVER () AS BIGINT) AS ended FROM episodes e
        JOIN agent_attempts a ON a.episode_id = e.id AND a.attempt = e.attempt
        WHERE e.run_id = :id AND e.status = 'done' AND e.stop_reason = 'agent_error'
        GROUP BY a.error ORDER BY count(*) DESC, min(e.id) LIMIT 1"""
    rows = select_rows(tx, query, id=run_id_and_name(tx, run)["id"])
    return rows[0] if rows else {}


@sql_read_transaction
def count_lost_workers(tx: Any, run: str) -> int:
    """Return how many workers were lost while the run was at work. A worker that was lost twice counts twice."""
    query = f"SELECT count(*) AS count FROM events WHERE run_id = :id AND kind IN ({list_in_sql(LOSS_EVENTS)})"
    return int(select_rows(tx, query, id=run_id_and_name(tx, run)["id"])[0]["count"])


@sql_read_transaction
def describe_flat_rewards(tx: Any, run: str, since: int) -> Row:
    """Return figures that may explain why all rewards are equal.

    The figures cover the done episodes of the run's done iterations, from the iteration `since` (counted from 1) on.

    Returns:
        episodes: the number of these episodes.
        called: the number of episodes with a tool call that could be parsed.
        unreadable: the number of episodes with a tool call that could not be parsed.
        right_episodes: the number of episodes that are right (see `solved_rule`).
        parts: each reward part: its name (`part`), its smallest value (`least`) and its largest value (`most`).
        example: `id` and `final_answer` of the newest episode.
        algorithm: the run's algorithm.
    """
    chosen = """
        FROM episodes e JOIN iterations i ON i.id = e.iteration_id
        WHERE i.run_id = :id AND i.number >= :since AND i.status = 'done' AND e.status = 'done'"""
    calls = "SELECT 1 FROM tool_calls c WHERE c.episode_id = e.id AND c.attempt = e.attempt AND c.kind <> 'grade'"
    args = {"id": run_id_and_name(tx, run)["id"], "since": since - 1}
    rule = load_rule(tx, args["id"])
    counts = f"""
        SELECT count(*) AS episodes,
               count(*) FILTER (WHERE EXISTS ({calls} AND coalesce(c.error_class, '') <> 'parse_error')) AS called,
               count(*) FILTER (WHERE EXISTS ({calls} AND c.error_class = 'parse_error')) AS unreadable,
               count(*) FILTER (WHERE {rule.condition("e")}) AS right_episodes {chosen}"""
    parts = f"""
        SELECT r.part, min(r.value) AS least, max(r.value) AS most FROM rewards r JOIN reward_sets s ON s.id = r.reward_set_id
        WHERE s.name = 'default' AND r.episode_id IN (SELECT e.id {chosen}) GROUP BY r.part ORDER BY r.part"""
    example = f"SELECT e.id, {FINAL_ANSWER} AS final_answer {chosen} ORDER BY e.id DESC LIMIT 1"
    algorithm = "SELECT config -> 'algorithm' ->> 'name' AS algorithm FROM runs WHERE id = :id"
    return {
        **select_rows(tx, counts, **args, **rule.parameters)[0],
        **select_rows(tx, algorithm, id=args["id"])[0],
        "parts": select_rows(tx, parts, **args),
        "example": next(iter(select_rows(tx, example, **args)), {}),
    }


def run_id_and_name(tx: Any, run: str) -> Row:
    """Return the id and the name of a run. Raise NotFoundError if there is no such run."""
    return find_run(tx, run, "id, name")

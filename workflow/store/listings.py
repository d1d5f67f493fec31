"""What people want to know: lists, one episode whole. Lists read no blob, no long text, by plain SQL (see `driver_reader`)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.workflow.errors import NotFoundError
from agentrl.workflow.store.driver_reader import Row, select_rows, sql_read_transaction
from agentrl.workflow.store.row_values import MAX_ID, episode_value, no_episode_error, step_value, task_value
from agentrl.workflow.store.run_names import run_row
from agentrl.workflow.trajectory import Episode, Step

RUN_ORDERS = {
    "id": "id", "run": "run", "status": "status", "reward": "last_reward", "best": "best_reward", "episodes": "episodes_done",
    "seconds": "seconds",
}  # fmt: skip
EPISODE_ORDERS = {
    "id": "id", "iteration": "iteration_id", "reward": "reward", "steps": "steps", "calls": "tool_calls",
    "errors": "tool_errors", "tokens": "sampled_tokens",
}  # fmt: skip
"""What lists may be sorted by -> the column."""


def _order_by(orders: Mapping[str, str], sort: str) -> str:
    """ORDER BY: `reward` is the greatest first, `-reward` the least."""
    column, way = orders[sort.removeprefix("-")], "ASC" if sort.startswith("-") else "DESC"
    return f"{column} {way} NULLS LAST, id {way}"


@sql_read_transaction
def list_runs(tx: Any, limit: int = 50, sort: str = "id") -> list[Row]:
    """Runs from `v_runs`, the newest first; without the evaluations that runs make of themselves (`list_evals`).

    Args:
        sort: a key of RUN_ORDERS, with a `-` before it the least first.
    """
    return newest_runs(tx, limit, sort)


def newest_runs(tx: Any, limit: int, sort: str = "id") -> list[Row]:
    """As list_runs, inside a transaction."""
    order = _order_by(RUN_ORDERS, sort)
    return select_rows(tx, f"SELECT * FROM v_runs WHERE measures IS NULL ORDER BY {order} LIMIT :limit", limit=limit)


@sql_read_transaction
def find_newest_run(tx: Any) -> str | None:
    """The name of the run that was submitted last, by whoever."""
    found = select_rows(tx, "SELECT name FROM runs WHERE measures_id IS NULL ORDER BY id DESC LIMIT 1")
    return found[0]["name"] if found else None


@sql_read_transaction
def find_last_episode(tx: Any) -> int | None:
    """The newest episode that is done."""
    found = select_rows(tx, "SELECT id FROM episodes WHERE status = 'done' ORDER BY id DESC LIMIT 1")
    return found[0]["id"] if found else None


@sql_read_transaction
def describe_run(tx: Any, run: str) -> Row:
    """One run, from `v_runs`.

    Raises:
        NotFoundError: there is none.
    """
    return run_by_id(tx, _run_id_and_name(tx, run)["id"])


def run_by_id(tx: Any, run_id: int) -> Row:
    """The run of that number, which there is, from `v_runs`."""
    return select_rows(tx, "SELECT * FROM v_runs WHERE id = :id", id=run_id)[0]


@sql_read_transaction
def list_iterations(tx: Any, run: str, after: int = 0) -> list[Row]:
    """The run's iterations after number `after`, counted from 1, from `v_iterations`."""
    query = "SELECT * FROM v_iterations WHERE run = :run AND iteration > :after ORDER BY iteration"
    return select_rows(tx, query, run=_run_id_and_name(tx, run)["name"], after=after)


@sql_read_transaction
def list_evals(tx: Any, run: str) -> list[Row]:
    """The evaluations that the run makes of its own policies, by version, from `v_evals`."""
    mine = "SELECT id FROM runs WHERE measures_id = :id"
    return select_rows(
        tx, f"SELECT * FROM v_evals WHERE id IN ({mine}) ORDER BY policy_version", id=_run_id_and_name(tx, run)["id"]
    )


@sql_read_transaction
def count_progress(tx: Any, run: str) -> Row:
    """Counts of the episodes, tokens and tool calls of the run's open iterations; empty if none is open.

    From `iteration` up to `through`: one, unless the rollouts of some go on during the updates of others.
    """
    run_id = _run_id_and_name(tx, run)["id"]
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
    """Why the newest open iteration is sampled on, and with how many groups; empty where dynamic sampling has added none."""
    query = """
        SELECT detail FROM events WHERE run_id = :id AND kind = 'sampling_on' AND subject IN (
          SELECT 'iteration ' || (i.number + 1) FROM iterations i JOIN groups g ON g.iteration_id = i.id
          WHERE i.run_id = :id AND i.status IN ('planned', 'running') AND i.more_groups > 0
          AND g.status IN ('planned', 'running'))
        ORDER BY id DESC LIMIT 1"""
    found = select_rows(tx, query, id=_run_id_and_name(tx, run)["id"])
    return str(found[0]["detail"]) if found else ""


@sql_read_transaction
def find_most_frequent_failure(tx: Any, run: str) -> Row:
    """How many of the run's episodes ended as failed or infra_error (`failed`), and the `error` of most of them with its
    `status` and count (`episodes`); empty where none did."""
    query = """
        SELECT status, error, count(*) AS episodes, CAST(sum(count(*)) OVER () AS BIGINT) AS failed FROM episodes
        WHERE run_id = :id AND status IN ('failed', 'infra_error')
        GROUP BY status, error ORDER BY count(*) DESC, min(id) LIMIT 1"""
    found = select_rows(tx, query, id=_run_id_and_name(tx, run)["id"])
    return found[0] if found else {}


EPISODE_FILTERS = {
    "iteration": "iteration_id = (SELECT id FROM iterations WHERE run_id = :run_id AND number = :iteration - 1)",
    "status": "status = :status",
    "stop_reason": "stop_reason = :stop_reason",
    "task": "task_id IN (SELECT id FROM tasks WHERE key = :task)",
    "min_reward": "reward >= :min_reward",
    "max_reward": "reward <= :max_reward",
    "tool_errors": "tool_errors >= :tool_errors",
}
"""Filter of `list_episodes` -> its condition on the episodes of run `:run_id`."""


@sql_read_transaction
def list_episodes(
    tx: Any, run: str, filters: Mapping[str, Any], limit: int = 50, offset: int = 0, sort: str = "-id"
) -> list[Row]:
    """The run's episodes that meet all filters (keys of EPISODE_FILTERS), in order of their ids, from `v_episodes`.

    Args:
        sort: a key of EPISODE_ORDERS, with a `-` before it the least first.
    """
    conditions = " AND ".join(["run_id = :run_id", *(EPISODE_FILTERS[name] for name in filters)])
    # The page first, from one table: the view would join all the rows that are passed over.
    page = f"SELECT id FROM episodes WHERE {conditions} ORDER BY {_order_by(EPISODE_ORDERS, sort)} LIMIT :limit OFFSET :offset"
    found = select_rows(
        tx,
        f"SELECT v.* FROM ({page}) page JOIN v_episodes v ON v.id = page.id ORDER BY page.id",
        run_id=_run_id_and_name(tx, run)["id"], limit=limit, offset=offset, **filters,
    )  # fmt: skip
    if sort == "-id":
        return found
    shown = {row["id"]: row for row in found}
    return [
        shown[row["id"]]
        for row in select_rows(tx, page, run_id=_run_id_and_name(tx, run)["id"], limit=limit, offset=offset, **filters)
    ]


@sql_read_transaction
def list_events(tx: Any, run: str) -> list[Row]:
    """What happened to the run, oldest first."""
    return select_rows(tx, "SELECT * FROM events WHERE run_id = :id ORDER BY id", id=_run_id_and_name(tx, run)["id"])


@sql_read_transaction
def evaluation(tx: Any, run: str) -> Row:
    """The result of an eval run.

    Raises:
        NotFoundError: the run is no evaluation, or not done.
    """
    found = select_rows(tx, "SELECT * FROM evals WHERE run_id = :id", id=_run_id_and_name(tx, run)["id"])
    if not found:
        raise NotFoundError(f"Run {run!r} has no evaluation result.", f"agentrl watch {run}")
    return found[0]


@dataclass(frozen=True)
class EpisodeRecord:
    """One episode whole: its row of `v_episodes`, its value with every step, its step, call and reward rows.

    `grades` are the calls that judged it: the env made them when it was over, and the model saw nothing of them.
    """

    row: Row
    episode: Episode
    steps: Sequence[Row]
    calls: Sequence[Row]
    grades: Sequence[Row]
    rewards: Sequence[Row]


@sql_read_transaction
def find_episode(tx: Any, episode: int) -> EpisodeRecord:
    """The episode with all its steps.

    Raises:
        NotFoundError: there is none.
    """
    return episode_record(tx, episode)


_CALLS_OF = "SELECT * FROM v_tool_calls WHERE episode_id = :id AND kind = '{kind}' ORDER BY step, call"


def episode_record(tx: Any, episode: int) -> EpisodeRecord:
    """As find_episode, inside a transaction."""
    found = select_rows(tx, "SELECT * FROM v_episodes WHERE id = :id", id=episode) if abs(episode) <= MAX_ID else []
    if not found:
        raise no_episode_error(episode)
    (row,) = found
    return EpisodeRecord(
        row=row,
        episode=_load_episode(tx, episode),
        steps=_select_with_inherited(tx, "SELECT * FROM v_steps WHERE episode_id = :id ORDER BY step", row),
        calls=_select_with_inherited(tx, _CALLS_OF.format(kind="call"), row),
        grades=_select_with_inherited(tx, _CALLS_OF.format(kind="grade"), row),
        rewards=select_rows(tx, "SELECT * FROM v_rewards WHERE episode_id = :id ORDER BY id", id=episode),
    )


def _load_episode(tx: Any, episode: int) -> Episode:
    """The episode with the steps of its current attempt, its first ones read through its parent."""
    (row,) = select_rows(tx, "SELECT * FROM episodes WHERE id = :id", ("opening",), id=episode)
    (task,) = select_rows(tx, "SELECT * FROM tasks WHERE id = :id", ("messages", "metadata"), id=row["task_id"])
    before = () if row["parent_id"] is None else _load_episode(tx, row["parent_id"]).steps[: row["inherited_steps"]]
    return episode_value(row, task_value(task), (*before, *_load_steps(tx, row)))


_STEPS = """
    SELECT s.*, t.prompt_ids, t.sampled_ids, t.behavior_logprobs, p.version FROM steps s
    JOIN step_tokens t ON t.step_id = s.id JOIN policies p ON p.id = s.policy_id
    WHERE s.episode_id = :id AND s.attempt = :attempt ORDER BY s.number"""


def _load_steps(tx: Any, episode: Row) -> Iterator[Step]:
    calls: dict[int, list[Row]] = {}
    made = "SELECT * FROM tool_calls WHERE episode_id = :id AND kind <> 'grade' ORDER BY step_id, call"
    for call in select_rows(tx, made, id=episode["id"]):
        calls.setdefault(call["step_id"], []).append(call)
    for row in select_rows(tx, _STEPS, ("prompt",), id=episode["id"], attempt=episode["attempt"]):
        yield step_value(row, row["version"], calls.get(row["id"], ()))


def _select_with_inherited(tx: Any, query: str, episode: Row) -> list[Row]:
    """The query's rows of the episode, after those of the steps that it has from its parent."""
    own = select_rows(tx, query, id=episode["id"])
    if episode["parent_id"] is None:
        return own
    (parent,) = select_rows(tx, "SELECT * FROM v_episodes WHERE id = :id", id=episode["parent_id"])
    return [*(row for row in _select_with_inherited(tx, query, parent) if row["step"] < episode["inherited_steps"]), *own]


def _run_id_and_name(tx: Any, run: str) -> Row:
    """Id and name of a run. Raises as `run_row`."""
    return run_row(tx, run, "id, name")

"""Lists of episodes in pages, and one complete episode for a transcript. A list reads neither blobs nor long texts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from agentrl.workflow.store.driver_reader import Row, select_rows, sql_read_transaction
from agentrl.workflow.store.reads.changes import OF_RUN, run_conditions
from agentrl.workflow.store.reads.paging import Page, Paging, choose_conditions, select_page, select_values
from agentrl.workflow.store.row_codecs import MAX_ID, annotation_value, episode_value, no_episode_error, step_value, task_value
from agentrl.workflow.tables.views import CallRow, EpisodeRow, RewardRow, StepRow
from agentrl.workflow.trajectory import Episode, Step

EPISODE_ORDERS = {
    "id": "id", "iteration": "iteration_id", "reward": "reward", "steps": "steps", "calls": "tool_calls",
    "errors": "tool_errors", "tokens": "sampled_tokens",
}  # fmt: skip
"""The names by which the list can be sorted, each with its column of `episodes`."""


@dataclass(frozen=True, slots=True)
class EpisodeFilter:
    """A filter of a run's episodes. `run` is the run's name or number.

    Args:
        iteration: the iteration's number, counted from 1.
        since: a cursor of `mark_changes`, to select only episodes that may have changed since then.
        task: the task's key.
        tool_errors: the minimum number of failed tool calls.
        text: a text that the final answer, the error or the result of a failed tool call contains.
    """

    run: str
    iteration: int | None = None
    since: str | None = None
    group: int | None = None
    status: str | None = None
    stop_reason: str | None = None
    task: str | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    tool_errors: int | None = None
    text: str | None = None


_CONDITIONS = {
    "group": "group_id = (SELECT id FROM groups WHERE id = :group AND run_id = :run_id)",
    "status": "status = :status",
    "stop_reason": "stop_reason = :stop_reason",
    "task": "task_id IN (SELECT id FROM tasks WHERE key = :task)",
    "min_reward": "reward >= :min_reward",
    "max_reward": "reward <= :max_reward",
    "tool_errors": "tool_errors >= :tool_errors",
    "text": """
        (lower(final_answer) LIKE lower(:text) ESCAPE '!' OR lower(error) LIKE lower(:text) ESCAPE '!'
         OR EXISTS (SELECT 1 FROM tool_calls c WHERE c.episode_id = episodes.id AND c.attempt = episodes.attempt
                    AND c.error_class IS NOT NULL AND lower(c.result) LIKE lower(:text) ESCAPE '!'))""",
}


@sql_read_transaction
def list_episodes(tx: Any, chosen: EpisodeFilter, paging: Paging | None = None) -> Page[EpisodeRow]:
    """Return the episodes that the run sampled, ordered by id or by one of EPISODE_ORDERS."""
    of_run, of_it = run_conditions(tx, chosen)
    conditions, values = choose_conditions(chosen, _CONDITIONS)
    if "group" in values and of_run == [OF_RUN]:
        of_run = []  # SQLite would walk through the run
    paging = paging or Paging()
    return select_page(tx, EpisodeRow, of_run + conditions, of_it | values, paging, EPISODE_ORDERS, "id", "episodes")


@sql_read_transaction
def list_newest_episodes(tx: Any, begin: str, limit: int) -> list[Row]:
    """Return id, run, status and reward of the newest episodes whose id begins with the digits `begin`."""
    query = """
        SELECT e.id, r.name, e.status, e.reward FROM episodes e JOIN runs r ON r.id = e.run_id
        WHERE e.status <> 'planned' AND CAST(e.id AS TEXT) LIKE :begin ORDER BY e.id DESC LIMIT :limit"""
    return select_rows(tx, query, begin=f"{begin}%", limit=limit)


@sql_read_transaction
def find_last_episode(tx: Any) -> int | None:
    """Return the id of the newest episode that is done; None if there is none."""
    rows = select_rows(tx, "SELECT id FROM episodes WHERE status = 'done' ORDER BY id DESC LIMIT 1")
    return rows[0]["id"] if rows else None


_CALLS_OF = "WHERE episode_id = :id AND kind {kind} 'grade' ORDER BY step, call"
T = TypeVar("T", StepRow, CallRow)


@dataclass(frozen=True)
class EpisodeRecord:
    """A complete episode: its row, its value with every step, and the rows of its steps, calls and rewards.

    `grades` are the calls that judged the episode. The env made them after the end of the episode, and the model did not see
    them. `agent_error` is the error of the external agent, and `agent_output` is the end of its output. Both are empty if no
    external agent ran the episode.
    """

    row: EpisodeRow
    episode: Episode
    steps: Sequence[StepRow]
    calls: Sequence[CallRow]
    grades: Sequence[CallRow]
    rewards: Sequence[RewardRow]
    agent_error: str = ""
    agent_output: str = ""


@sql_read_transaction
def find_episode(tx: Any, episode: int) -> EpisodeRecord:
    """Return the episode with all of its steps. Raise NotFoundError if there is no such episode."""
    row = _find_row(tx, episode) if abs(episode) <= MAX_ID else None
    if row is None:
        raise no_episode_error(episode)
    agent = _find_agent_words(tx, row)
    return EpisodeRecord(
        row=row,
        episode=load_episode(tx, episode),
        steps=_select_with_inherited(tx, StepRow, "WHERE episode_id = :id ORDER BY step", row),
        calls=_select_with_inherited(tx, CallRow, _CALLS_OF.format(kind="<>"), row),
        grades=_select_with_inherited(tx, CallRow, _CALLS_OF.format(kind="="), row),
        rewards=select_values(tx, RewardRow, "WHERE episode_id = :id ORDER BY id", id=episode),
        agent_error=agent["error"],
        agent_output=agent["output"],
    )


def _find_agent_words(tx: Any, row: EpisodeRow) -> Row:
    query = "SELECT error, output FROM agent_attempts WHERE episode_id = :id AND attempt = :attempt ORDER BY id DESC LIMIT 1"
    rows = select_rows(tx, query, id=row["id"], attempt=row["attempt"])
    return rows[0] if rows else {"error": "", "output": ""}


def _find_row(tx: Any, episode: int) -> EpisodeRow | None:
    rows = select_values(tx, EpisodeRow, "WHERE id = :id", id=episode)
    return rows[0] if rows else None


def load_episode(tx: Any, episode: int) -> Episode:
    """Return the episode with annotations and the steps of its current attempt; a fork's first are its parent's."""
    (row,) = select_rows(tx, "SELECT * FROM episodes WHERE id = :id", id=episode)
    (task,) = select_rows(tx, "SELECT * FROM tasks WHERE id = :id", id=row["task_id"])
    before = () if row["parent_id"] is None else load_episode(tx, row["parent_id"]).steps[: row["inherited_steps"]]
    loaded = episode_value(row, task_value(task), _load_steps(tx, row, before))
    annotations = select_rows(tx, _ANNOTATIONS, id=episode, attempt=row["attempt"])
    return replace(loaded, annotations=tuple(annotation_value(one) for one in annotations))


_ANNOTATIONS = "SELECT * FROM annotations WHERE episode_id = :id AND attempt = :attempt ORDER BY id"


_STEPS = """
    SELECT s.*, t.prompt_ids, t.sampled_ids, t.behavior_logprobs, p.version FROM steps s
    JOIN step_tokens t ON t.step_id = s.id JOIN policies p ON p.id = s.policy_id
    WHERE s.episode_id = :id AND s.attempt = :attempt ORDER BY s.number"""


def _load_steps(tx: Any, episode: Row, inherited: Sequence[Step]) -> list[Step]:
    """Return the inherited steps and those of the episode's current attempt, whose messages may be those of inherited ones."""
    steps = list(inherited)
    calls: dict[int, list[Row]] = {}
    query = "SELECT * FROM tool_calls WHERE episode_id = :id AND kind <> 'grade' ORDER BY step_id, call"
    for call in select_rows(tx, query, id=episode["id"]):
        calls.setdefault(call["step_id"], []).append(call)
    for row in select_rows(tx, _STEPS, id=episode["id"], attempt=episode["attempt"]):
        steps.append(step_value(row, row["version"], calls.get(row["id"], ()), steps))
    return steps


def _select_with_inherited(tx: Any, kind: type[T], rest: str, episode: EpisodeRow) -> list[T]:
    """Return the rows of the steps inherited from the parent, then those of the episode's own steps."""
    own = select_values(tx, kind, rest, id=episode.id)
    parent = None if episode.parent_id is None else _find_row(tx, episode.parent_id)
    if parent is None:
        return own
    before: list[T] = _select_with_inherited(tx, kind, rest, parent)
    return [row for row in before if row.step < episode.inherited_steps] + own

"""Groups: lists of groups, and the episodes of one group with their rows, shortened texts, rewards and outcomes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.workflow.errors import NotFoundError
from agentrl.workflow.store.driver_reader import Row, among, select_rows, sql_read_transaction
from agentrl.workflow.store.reads.changes import run_conditions
from agentrl.workflow.store.reads.episode_shape import EpisodeShape, in_parts, load_shape, shape_value, step_columns
from agentrl.workflow.store.reads.paging import Page, Paging, choose_conditions, select_page, select_values, storable_value
from agentrl.workflow.store.reads.turn_rows import cut_column
from agentrl.workflow.tables.column_values import WORK_STATUS
from agentrl.workflow.tables.step_values import JOIN_PROMPT, PROMPT
from agentrl.workflow.tables.views import EpisodeRow, GroupRow

GROUP_ORDERS = {"id": "id", "reward": "mean_reward", "deviation": "std_reward"}


@dataclass(frozen=True, slots=True)
class GroupFilter:
    """A filter of a run's groups. `run` is the run's name or number.

    Args:
        iteration: the iteration's number, counted from 1.
        since: a cursor of `mark_changes`, to select only groups that may have changed since then.
        task: the task's key.
    """

    run: str
    iteration: int | None = None
    since: str | None = None
    status: str | None = None
    task: str | None = None
    worker: str | None = None


_CONDITIONS = {
    "status": "status = :status",
    "task": "task_id IN (SELECT id FROM tasks WHERE key = :task)",
    "worker": "worker = :worker",
}


@sql_read_transaction
def list_groups(tx: Any, chosen: GroupFilter, paging: Paging | None = None) -> Page[GroupRow]:
    """Return the groups that the run sampled, ordered by id or by one of GROUP_ORDERS. Raise ConfigError if there is no such
    order or status.
    """
    of_run, of_it = run_conditions(tx, chosen)
    conditions, values = choose_conditions(chosen, _CONDITIONS, {"status": WORK_STATUS})
    paging = paging or Paging()
    return select_page(tx, GroupRow, of_run + conditions, of_it | values, paging, GROUP_ORDERS, "id", "groups")


SHORT_CHARS = 4001
"""The maximum number of characters that are read of an episode's text. It is one more than is shown, so the caller can see that
the text is longer.
"""
MAX_SIBLINGS = 64
MAX_PARTS = 5000
"""The maximum numbers of episodes (MAX_SIBLINGS) and of their reward rows (MAX_PARTS) in a response."""


@dataclass(frozen=True, slots=True)
class GroupOf:
    """A group: its row, the ids of its run and task, and its first MAX_SIBLINGS episodes. `left_out` is the number of further
    episodes.
    """

    row: GroupRow
    run_id: int
    task_id: int
    episodes: Sequence[EpisodeRow]
    left_out: int


def load_group(tx: Any, group: int) -> GroupOf:
    """Return a group with its first MAX_SIBLINGS episodes. Raise NotFoundError if there is no such group."""
    number = storable_value(group)
    groups = select_rows(tx, "SELECT run_id, task_id FROM groups WHERE id = :id", id=number)
    if not groups:
        raise NotFoundError(f"There is no group {group}.", "List a run's episodes with `agentrl episodes RUN`.")
    (row,) = select_values(tx, GroupRow, "WHERE id = :id", id=number)
    query = f"SELECT id FROM episodes WHERE group_id = :id ORDER BY sample LIMIT {MAX_SIBLINGS}"
    ids = [sibling["id"] for sibling in select_rows(tx, query, id=number)]
    (count,) = select_rows(tx, "SELECT count(*) AS n FROM episodes WHERE group_id = :id", id=number)
    episodes = select_values(tx, EpisodeRow, f"WHERE id IN ({among(ids)})")
    by_sample = sorted(episodes, key=lambda episode: episode.sample)
    return GroupOf(row, groups[0]["run_id"], groups[0]["task_id"], by_sample, count["n"] - len(ids))


def load_sibling_shapes(tx: Any, group: GroupOf) -> dict[int, EpisodeShape]:
    """Return the shape of each of the group's episodes, by episode id."""
    plain = [episode for episode in group.episodes if episode.parent_id is None]
    steps: dict[int, list[Row]] = {episode.id: [] for episode in plain}
    for some in in_parts([*steps]):
        query = f"""
            SELECT {step_columns(tx)} FROM episodes e JOIN steps s ON s.episode_id = e.id AND s.attempt = e.attempt
            WHERE e.id IN ({among(some)}) ORDER BY s.episode_id, s.number"""
        for row in select_rows(tx, query):
            steps[row["episode_id"]].append(row)
    shapes = {}
    for episode in group.episodes:
        if episode.id in steps:
            numbers = (episode.id, group.run_id, group.task_id, episode.group_id, episode.attempt)
            rows = steps[episode.id]
            shapes[episode.id] = EpisodeShape(*numbers, shape_value(episode, rows), rows)
        else:
            shapes[episode.id] = load_shape(tx, episode.id)
    return shapes


def load_short_steps(tx: Any, ids: Sequence[int]) -> dict[int, Row]:
    """Return the shortened text and the prompt of each step, by the id of the step's row."""
    steps: dict[int, Row] = {}
    for some in in_parts(ids):
        query = f"""
            SELECT s.id, {cut_column("s.text", max_chars=SHORT_CHARS)}, {PROMPT} AS prompt FROM steps s {JOIN_PROMPT}
            WHERE s.id IN ({among(some)})"""
        steps |= {row["id"]: row for row in select_rows(tx, query)}
    return steps


def load_short_results(tx: Any, ids: Sequence[int]) -> dict[int, list[Row]]:
    """Return the shortened results of each step's calls, by the id of the step's row."""
    results: dict[int, list[Row]] = {}
    for some in in_parts(ids):
        query = f"""
            SELECT id, step_id, tool, status, error_class, {cut_column("result", max_chars=SHORT_CHARS)} FROM tool_calls
            WHERE step_id IN ({among(some)}) AND kind <> 'grade' ORDER BY step_id, call"""
        for row in select_rows(tx, query):
            results.setdefault(row["step_id"], []).append(row)
    return results


def load_sibling_parts(tx: Any, episodes: Sequence[int]) -> dict[int, list[Row]]:
    """Return the reward parts of these episodes, by episode id: those of the whole episode and of single steps, of all reward
    sets.

    At most `MAX_PARTS` parts are returned in total.
    """
    query = f"""
        SELECT w.episode_id, s.name AS reward_set, w.part, CASE WHEN w.step >= 0 THEN w.step END AS step, w.value, w.weight
        FROM rewards w JOIN reward_sets s ON s.id = w.reward_set_id WHERE w.episode_id IN ({among(episodes)})
        ORDER BY w.id + 0 LIMIT {MAX_PARTS}"""
    parts: dict[int, list[Mapping[str, Any]]] = {}
    for row in select_rows(tx, query):
        parts.setdefault(row["episode_id"], []).append({name: row[name] for name in row if name != "episode_id"})
    return parts


def load_sibling_fates(tx: Any, run: str, episodes: Sequence[int]) -> dict[int, str]:
    """Return each episode's outcome in the run, by episode id."""
    query = f"SELECT id, {fate_in_run('e.id', ':run')} AS fate FROM episodes e WHERE id IN ({among(episodes)})"
    return {row["id"]: row["fate"] for row in select_rows(tx, query, run=run)}


def fate_in_run(episode: str, run: str) -> str:
    """Return the SQL of an episode's outcome in a run, NULL if it has none there. `episode` and `run` are the SQL of the
    episode's id and of the run's name.

    It is a subquery for each episode. In a join with the episodes, Postgres without statistics would begin with the run, and
    read all of its groups.
    """
    return f"(SELECT l.fate FROM v_ledger l WHERE l.episode_id = {episode} AND l.run = {run} LIMIT 1)"


def load_sibling_readers(tx: Any, episodes: Sequence[int], run_id: int) -> list[Row]:
    """Return the updates that trained on these episodes, all from one run.

    If updates of the run `run_id` trained on one of the episodes, these updates are returned; otherwise those of the first run
    that trained on one of the episodes.
    """
    query = f"""
        SELECT run_id, iteration_id, episode_id, advantage FROM consumptions
        WHERE episode_id IN ({among(episodes)}) AND stage = 'train' ORDER BY id LIMIT {MAX_PARTS}"""
    consumptions = select_rows(tx, query)
    chosen = (
        run_id if any(row["run_id"] == run_id for row in consumptions) else next((row["run_id"] for row in consumptions), None)
    )
    return [row for row in consumptions if row["run_id"] == chosen]

"""The tasks of a run over its iterations: their rewards, when each task was first solved, and its best and its worst episode.

A group counts as solved if its best episode is correct. An episode is correct if all decisive parts of its reward have their
full value. `stats.evaluation.is_right`, which evaluations use too, says which parts are decisive. If none is, an episode is
correct if its reward is 1 or more. The number of times that a task was solved in all runs is counted in the same way.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2s
from typing import Any

from agentrl.workflow.errors import ConfigError, NotFoundError, did_you_mean
from agentrl.workflow.stats.evaluation import FULL_VALUE, is_right
from agentrl.workflow.store.driver_reader import Row, among, select_rows, sql_read_transaction
from agentrl.workflow.store.reads.paging import cursor_error, decode_cursor, encode_cursor, escape_like, is_id, storable_value
from agentrl.workflow.store.reads.run_rows import run_id_and_name
from agentrl.workflow.trajectory import storable

TASK_ORDERS = {"id": "s.task_id", "task": "t.key", "groups": "groups", "reward": "mean_reward", "last": "last_reward"}
"""The names by which the list can be sorted, each with its column."""
MAX_TASKS = 40
MAX_EPISODES = 20_000
"""The maximum number of episodes that are read for a page. If there are more, those of the first groups are read."""
POINTS = 60
MAX_GROUPS = 1000
"""The maximum number of a task's groups in a response. If there are more, the newest are returned."""
KIND = "tasks"


@dataclass(frozen=True, slots=True)
class TasksPage:
    """A page of a run's tasks.

    Args:
        next: the cursor of the following page.
        solved_means: a sentence that says when a group counts as solved.
        left_out: the number of newest groups of these tasks whose episodes were not read, because there are too many episodes.
    """

    rows: Sequence[Mapping[str, Any]]
    next: str
    solved_means: str
    left_out: int


@sql_read_transaction
def list_tasks(tx: Any, run: str, text: str = "", sort: str = "", size: int = 25, cursor: str = "") -> TasksPage:
    """Return at most MAX_TASKS tasks that have groups in the run, ordered by their first group or by one of TASK_ORDERS. `text`
    is a text that the task's key or reference contains. Raise NotFoundError if there is no such run. Raise ConfigError if there
    is no such order, or the cursor does not belong to this list.
    """
    size = min(size, MAX_TASKS)
    run_id = run_id_and_name(tx, run)["id"]
    digest = blake2s(f"{run_id} {sort} {text}".encode("utf-8", "replace"), digest_size=6).hexdigest()
    offset = _parse_cursor(cursor, digest)
    where = "WHERE lower(t.key) LIKE lower(:text) ESCAPE '!' OR lower(t.reference) LIKE lower(:text) ESCAPE '!'" if text else ""
    query = _TASKS.format(where=where, order=_order(sort))
    args: dict[str, Any] = {"id": run_id, "limit": size + 1, "offset": offset}
    args |= {"text": f"%{escape_like(storable(text))}%"} if text else {}
    selected = select_rows(tx, query, **args)
    rows, more = selected[:size], len(selected) > size
    groups = _load_groups(tx, run_id, [row["task_id"] for row in rows])
    rule = load_rule(tx, run_id)
    tasks, left_out = _describe(tx, rule, rows, groups)
    following = encode_cursor(KIND, digest, offset + size) if more else ""
    return TasksPage(tasks, following, rule.words, left_out)


_MEMBERS = """
    SELECT g.id, g.task_id, i.number + 1 AS iteration, g.mean_reward, g.std_reward FROM iterations i
    JOIN groups g ON g.iteration_id = i.id WHERE i.run_id = :id
    UNION ALL
    SELECT g.id, g.task_id, i.number + 1, g.mean_reward, g.std_reward FROM iterations i
    JOIN iteration_groups l ON l.iteration_id = i.id JOIN groups g ON g.id = l.group_id WHERE i.run_id = :id"""
_TASKS = f"""
    SELECT s.task_id, t.key AS task, t.reference, m.role, s.groups, s.mean_reward, s.last_reward FROM
      (SELECT task_id, count(*) AS groups, sum(mean_reward) / count(mean_reward) AS mean_reward, min(id) AS first_group,
              max(CASE WHEN newest = 1 THEN mean_reward END) AS last_reward
       FROM (SELECT task_id, id, mean_reward,
                    row_number() OVER (PARTITION BY task_id ORDER BY mean_reward IS NULL, iteration DESC, id DESC) AS newest
             FROM ({_MEMBERS}) members) ranked GROUP BY task_id) s
    JOIN tasks t ON t.id = s.task_id LEFT JOIN run_tasks m ON m.run_id = :id AND m.task_id = s.task_id
    {{where}} ORDER BY {{order}} LIMIT :limit OFFSET :offset"""


@sql_read_transaction
def count_tasks(tx: Any, run_id: int) -> int:
    """Return the number of tasks that have groups in the run with this id."""
    query = f"SELECT count(DISTINCT task_id) AS tasks FROM ({_MEMBERS}) members"
    count: int = select_rows(tx, query, id=run_id)[0]["tasks"]
    return count


def _order(sort: str) -> str:
    word = sort.removeprefix("-")
    if not sort:
        return "first_group"
    if word not in TASK_ORDERS:
        raise ConfigError(f"The list is not sorted by {word!r:.60}.", did_you_mean(word[:60], TASK_ORDERS))
    return f"{TASK_ORDERS[word]} {'DESC' if sort.startswith('-') else 'ASC'} NULLS LAST, first_group"


def _parse_cursor(cursor: str, digest: str) -> int:
    """Return the number of tasks on the previous pages. The order of these tasks may have changed meanwhile."""
    if not cursor:
        return 0
    match decode_cursor(cursor, KIND):
        case [known, int(offset)] if known == digest and is_id(offset) and offset >= 0:
            return offset
    raise cursor_error(cursor)


def _load_groups(tx: Any, run_id: int, tasks: Iterable[int]) -> dict[int, list[Row]]:
    chosen = among(tasks)
    query = f"SELECT * FROM ({_MEMBERS}) members WHERE task_id IN ({chosen}) ORDER BY iteration, id"
    by_task: dict[int, list[Row]] = {}
    for row in select_rows(tx, query, id=run_id):
        by_task.setdefault(row["task_id"], []).append(row)
    return by_task


@dataclass(frozen=True, slots=True)
class _Rule:
    """The rule that decides whether an episode is correct."""

    reward_set: str
    weights: Mapping[str, float]
    correct: Sequence[str]
    gives: bool
    own: Mapping[str, float]

    def judge(self, reward: float, parts: Mapping[str, float]) -> bool:
        env_parts = parts.keys() - self.own.keys() if self.gives else ()
        verdict = is_right(parts, self.weights, self.correct, env_parts)
        return reward >= FULL_VALUE if verdict is None else verdict

    @property
    def words(self) -> str:
        """A phrase for users that says when a group counts as solved."""
        if not self.gives and is_right({}, self.weights, self.correct) is None:
            return "its best episode's reward is 1 or more"
        max_weight = max(self.weights.values(), default=0.0)
        names = self.correct or [name for name, weight in self.weights.items() if weight == max_weight > 0]
        right = f"its best episode is right: {', '.join(sorted(names)) or 'what the env gives'} at full value"
        return right if self.reward_set == "default" else f"{right} in {self.reward_set}; the rewards here are the first ones"


def load_rule(tx: Any, run_id: int) -> _Rule:
    """Return the rule that decides whether an episode of the run is correct."""
    query = """
        SELECT r.reward_set, r.manifest, coalesce(own.weights, theirs.weights) AS weights FROM runs r
        LEFT JOIN reward_sets own ON own.run_id = r.id AND own.name = r.reward_set
        LEFT JOIN reward_sets theirs ON theirs.name = r.reward_set AND theirs.run_id =
          (SELECT g.run_id FROM run_groups l JOIN groups g ON g.id = l.group_id WHERE l.run_id = r.id ORDER BY g.id LIMIT 1)
        WHERE r.id = :id"""
    row = select_rows(tx, query, id=run_id)[0]
    right_by: Mapping[str, Any] = row["manifest"].get("right_by", {})
    own = row["weights"] or {}
    return _Rule(row["reward_set"], right_by.get("weights", own), right_by.get("correct", ()), bool(right_by.get("gives")), own)


def _describe(
    tx: Any, rule: _Rule, rows: Sequence[Row], groups: Mapping[int, Sequence[Row]]
) -> tuple[list[dict[str, Any]], int]:
    """Return the tasks with values of their groups and episodes, and the number of groups whose episodes were not read."""
    ids = sorted(group["id"] for its in groups.values() for group in its)
    ends = _load_ends(tx, ids)
    right = _find_right(tx, rule, [*ends.values()])
    described = []
    for row in rows:
        mine = groups.get(row["task_id"], ())
        its = [ends[group["id"]] for group in mine if group["id"] in ends]
        solved = [group["iteration"] for group in mine if group["id"] in right]
        outcome = {"first_solved": solved[0] if solved else None, "never_solved": not solved, "points": _thin(mine)}
        described.append({**row, **outcome, "best": _chosen(its, max, "best"), "worst": _chosen(its, min, "worst")})
    return described, len(ids) - len(ends)


def _load_ends(tx: Any, groups: Sequence[int]) -> dict[int, Row]:
    if not groups:
        return {}
    (first,) = select_rows(tx, "SELECT count(*) AS size FROM episodes WHERE group_id = :id", id=groups[0])
    read = groups[: max(1, MAX_EPISODES // max(1, first["size"]))]
    done = "FROM episodes WHERE group_id = g.id AND status = 'done' ORDER BY reward"
    ends = {"best": f"{done} DESC, id LIMIT 1", "worst": f"{done}, id LIMIT 1"}
    columns = ", ".join(f"(SELECT id {end}) AS {name}, (SELECT reward {end}) AS {name}_reward" for name, end in ends.items())
    query = f"SELECT g.id, {columns} FROM groups g WHERE g.id IN ({among(read)})"
    return {row["id"]: row for row in select_rows(tx, query)}


def _find_right(tx: Any, rule: _Rule, groups: Sequence[Row]) -> set[int]:
    chosen = among(group["best"] for group in groups if group["best"] is not None)
    query = f"""
        SELECT w.episode_id, w.part, sum(w.value) AS value FROM rewards w JOIN reward_sets s ON s.id = w.reward_set_id
        WHERE s.name = :reward_set AND w.episode_id IN ({chosen}) GROUP BY w.episode_id, w.part"""
    parts: dict[int, dict[str, float]] = {}
    for row in select_rows(tx, query, reward_set=rule.reward_set):
        parts.setdefault(row["episode_id"], {})[row["part"]] = row["value"]
    judged = (group for group in groups if group["best"] is not None)
    return {group["id"] for group in judged if rule.judge(group["best_reward"], parts.get(group["best"], {}))}


def _chosen(groups: Sequence[Row], choose: Any, which: str) -> dict[str, Any] | None:
    some = [group for group in groups if group[which] is not None]
    if not some:
        return None
    chosen = choose(some, key=lambda group: group[f"{which}_reward"])
    return {"episode": chosen[which], "reward": chosen[f"{which}_reward"]}


def _thin(groups: Sequence[Row]) -> list[list[Any]]:
    """Return [iteration, mean reward] of at most POINTS groups: of every Nth group that has a reward, and of the newest."""
    points = [[group["iteration"], group["mean_reward"]] for group in groups if group["mean_reward"] is not None]
    stride = -(-len(points) // (POINTS - 1))
    return points if len(points) <= POINTS else [*points[:-1:stride], points[-1]]


@sql_read_transaction
def load_task(tx: Any, run: str, task: int) -> dict[str, Any]:
    """Return a task of a run with its newest MAX_GROUPS groups (oldest first) and the rewards of their episodes. Raise
    NotFoundError if there is no such run, or the run does not have this task.
    """
    run_row = run_id_and_name(tx, run)
    query = "SELECT id AS task_id, key AS task, messages, reference, metadata FROM tasks WHERE id = :task"
    tasks = select_rows(tx, query, task=storable_value(task))
    role = select_rows(
        tx, "SELECT role FROM run_tasks WHERE run_id = :id AND task_id = :task", id=run_row["id"], task=storable_value(task)
    )
    groups = _load_groups(tx, run_row["id"], [task]).get(task, ()) if tasks else ()
    if not (role or groups):
        raise NotFoundError(f"{run_row['name']!r} has no task {task}.", f"agentrl episodes {run_row['name']}")
    newest_groups = groups[-MAX_GROUPS:]
    rule = load_rule(tx, run_row["id"])
    (described,), left_out = _describe(tx, rule, tasks, {task: newest_groups})
    episodes = _load_group_episodes(tx, [group["id"] for group in newest_groups])
    return {
        **described,
        "role": role[0]["role"] if role else None,
        "solved_means": rule.words,
        "groups": [{**group, "episodes": episodes.get(group["id"], ())} for group in newest_groups],
        "left_out": len(groups) - len(newest_groups) + left_out,
    }


def _load_group_episodes(tx: Any, groups: Sequence[int]) -> dict[int, list[dict[str, Any]]]:
    query = f"""
        SELECT id, group_id, sample, status, stop_reason, reward FROM episodes
        WHERE group_id IN ({among(groups)}) ORDER BY group_id, sample LIMIT {MAX_EPISODES}"""
    by_group: dict[int, list[dict[str, Any]]] = {}
    for row in select_rows(tx, query):
        by_group.setdefault(row["group_id"], []).append({name: value for name, value in row.items() if name != "group_id"})
    return by_group


@dataclass(frozen=True, slots=True)
class SolvedCount:
    """The number of a task's done episodes (`episodes`), and the number of its correct episodes (`right`)."""

    episodes: int = 0
    right: int = 0

    @property
    def share(self) -> float:
        """The share of correct episodes, from 0 to 1."""
        return self.right / self.episodes


@dataclass(frozen=True, slots=True)
class SampledGroups:
    """The numbers of a run's groups with done episodes, and of those whose rewards are all equal."""

    groups: int
    equal: int


@sql_read_transaction
def load_solved(tx: Any, run: str = "") -> dict[str, SolvedCount]:
    """Return for each task how many of its done episodes are correct, by the task's content hash. `run` is the name or number
    of the run to count; empty for all runs. Forks are not counted, because their prompts were edited. Raise NotFoundError if
    there is no such run.
    """
    chosen = "AND r.id = :id" if run else ""
    args = {"id": run_id_and_name(tx, run)["id"]} if run else {}
    query = f"SELECT r.id FROM runs r WHERE r.kind IN ('train', 'eval', 'search') {chosen} ORDER BY r.id"
    counts: dict[str, SolvedCount] = {}
    for row in select_rows(tx, query, **args):
        _add_run(tx, row["id"], counts)
    return counts


def _add_run(tx: Any, run_id: int, counts: dict[str, SolvedCount]) -> None:
    rule = load_rule(tx, run_id)
    parts: dict[int, dict[str, float]] = {}
    query = """
        SELECT w.episode_id, w.part, sum(w.value) AS value FROM rewards w
        JOIN reward_sets s ON s.id = w.reward_set_id AND s.run_id = :id AND s.name = 'default'
        GROUP BY w.episode_id, w.part"""
    for row in select_rows(tx, query, id=run_id):
        parts.setdefault(row["episode_id"], {})[row["part"]] = row["value"]
    query = """
        SELECT e.id, e.reward, t.content_hash FROM episodes e JOIN tasks t ON t.id = e.task_id
        WHERE e.run_id = :id AND e.status = 'done' AND e.reward IS NOT NULL"""
    for row in select_rows(tx, query, id=run_id):
        right = rule.judge(row["reward"], parts.get(row["id"], {}))
        before = counts.get(row["content_hash"], SolvedCount())
        counts[row["content_hash"]] = SolvedCount(before.episodes + 1, before.right + right)


@sql_read_transaction
def count_equal_groups(tx: Any, run: str) -> SampledGroups:
    """Count the run's groups with done episodes, and those with equal rewards. Raise NotFoundError if there is no such run."""
    query = """
        SELECT count(*) AS groups, coalesce(sum(CASE WHEN low = high THEN 1 ELSE 0 END), 0) AS equal FROM
          (SELECT min(reward) AS low, max(reward) AS high FROM episodes
           WHERE run_id = :id AND status = 'done' AND reward IS NOT NULL GROUP BY group_id) ends"""
    (row,) = select_rows(tx, query, id=run_id_and_name(tx, run)["id"])
    return SampledGroups(row["groups"], row["equal"])

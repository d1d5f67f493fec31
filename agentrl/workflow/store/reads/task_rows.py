"""The tasks of a run over its iterations: their rewards, when each task was first solved, and its best and its worst episode.

`solved_rule` says which groups count as solved. A task is no longer solved if one of its groups was solved, but its newest
group is not. The number of times that a task was solved in all runs is counted in the same way.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2s
from typing import Any

from agentrl.workflow.errors import ConfigError, NotFoundError, did_you_mean
from agentrl.workflow.store.driver_reader import Row, among, select_rows, sql_read_transaction
from agentrl.workflow.store.reads.eval_results import load_questions
from agentrl.workflow.store.reads.paging import (
    check_choice,
    cursor_error,
    decode_cursor,
    encode_cursor,
    escape_like,
    is_id,
    storable_value,
)
from agentrl.workflow.store.reads.run_rows import run_id_and_name
from agentrl.workflow.store.solved_rule import ID_RANGE, MEMBERS, SolvedRule, load_rule
from agentrl.workflow.trajectory import storable

_NEWEST, _OLDEST = (
    f"(SELECT g.mean_reward FROM groups g WHERE g.id = s.{place} % {ID_RANGE})" for place in ("newest", "oldest")
)
TASK_ORDERS = {
    "id": "s.task_id", "task": "t.key", "reference": "t.reference", "role": "m.role", "groups": "s.groups",
    "solved": "coalesce(s.solved, 0)", "reward": "s.mean_reward", "change": f"{_NEWEST} - {_OLDEST}", "last": _NEWEST,
    "first_solved": "s.first_solved", "last_solved": "s.last_solved", "best": "s.best", "worst": "s.worst",
}  # fmt: skip
"""The names by which the list can be sorted, each with its column. `change` is the last mean reward less the first one."""
TASK_FIELDS = (
    "task_id", "task", "reference", "role", "groups", "mean_reward", "question", "points", "last_reward", "judged_groups",
    "solved_groups", "change", "first_solved", "last_solved", "never_solved", "no_longer_solved", "best", "worst",
)  # fmt: skip
"""The fields of a task in the list."""
TASK_OUTCOMES = {
    "solved": "s.solved > 0",
    "never_solved": "s.solved = 0",
    "no_longer_solved": "s.last_solved < s.last_judged",
}
"""The outcomes by which the list can be filtered, each with its condition."""
MAX_TASKS = 40
MAX_EPISODES = 20_000
"""The maximum number of episodes in a response about one task."""
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
    """

    rows: Sequence[Mapping[str, Any]]
    next: str
    solved_means: str


@sql_read_transaction
def list_tasks(
    tx: Any, run: str, text: str = "", sort: str = "", size: int = 25, cursor: str = "", outcome: str = ""
) -> TasksPage:
    """Return at most MAX_TASKS tasks that have groups in the run, ordered by their first group or by one of TASK_ORDERS. `text`
    is a text that the task's key, reference or messages contain. `outcome` is one of TASK_OUTCOMES, or empty for all tasks.
    Raise NotFoundError if there is no such run. Raise ConfigError if there is no such order or outcome, or the cursor does not
    belong to this list.
    """
    size = min(size, MAX_TASKS)
    run_id = run_id_and_name(tx, run)["id"]
    if outcome:
        check_choice(outcome, [*TASK_OUTCOMES], "outcome")
    digest = blake2s(f"{run_id} {sort} {text} {outcome}".encode("utf-8", "replace"), digest_size=6).hexdigest()
    offset, rule, order = _parse_cursor(cursor, digest), load_rule(tx, run_id), _order(sort)
    texts = ("t.key", "t.reference", "CAST(t.messages AS TEXT)")
    matches = " OR ".join(f"lower({column}) LIKE lower(:text) ESCAPE '!'" for column in texts)
    conditions = [*([f"({matches})"] if text else []), *([TASK_OUTCOMES[outcome]] if outcome else [])]
    needs_outcome = bool(outcome) or "solved" in order
    query = _TASKS.format(
        groups=rule.judged_groups() if needs_outcome else MEMBERS,
        sums=_OUTCOMES * needs_outcome + _ENDS * (_NEWEST in order),
        where=f"WHERE {' AND '.join(conditions)}" * bool(conditions),
        order=order,
    )
    args: dict[str, Any] = {"run_id": run_id, "limit": size + 1, "offset": offset}
    args |= {"text": f"%{escape_like(storable(text))}%"} if text else {}
    selected = select_rows(tx, query, **args | (rule.parameters if needs_outcome else {}))
    rows, more = selected[:size], len(selected) > size
    groups = _load_groups(tx, run_id, rule, [row["task_id"] for row in rows])
    following = encode_cursor(KIND, digest, offset + size) if more else ""
    return TasksPage(_describe(tx, rows, groups), following, rule.words)


_OUTCOMES = """,
    sum(solved) AS solved, min(CASE WHEN solved = 1 THEN iteration END) AS first_solved,
    max(CASE WHEN solved = 1 THEN iteration END) AS last_solved,
    max(CASE WHEN solved IS NOT NULL THEN iteration END) AS last_judged"""
_ENDS = """,
    max(CASE WHEN mean_reward IS NOT NULL THEN place END) AS newest,
    min(CASE WHEN mean_reward IS NOT NULL THEN place END) AS oldest"""
_TASKS = """
    SELECT s.task_id, t.key AS task, t.reference, m.role, s.groups, s.mean_reward FROM
      (SELECT task_id, count(*) AS groups, sum(mean_reward) / count(mean_reward) AS mean_reward, min(id) AS first_group,
              max(best_reward) AS best, min(worst_reward) AS worst {sums} FROM ({groups}) members GROUP BY task_id) s
    JOIN tasks t ON t.id = s.task_id LEFT JOIN run_tasks m ON m.run_id = :run_id AND m.task_id = s.task_id
    {where} ORDER BY {order} LIMIT :limit OFFSET :offset"""


@sql_read_transaction
def count_tasks(tx: Any, run_id: int) -> int:
    """Return the number of tasks that have groups in the run with this id."""
    query = f"SELECT count(DISTINCT task_id) AS tasks FROM ({MEMBERS}) members"
    count: int = select_rows(tx, query, run_id=run_id)[0]["tasks"]
    return count


def _order(sort: str) -> str:
    word = sort.removeprefix("-")
    if not sort:
        return "first_group"
    if word not in TASK_ORDERS:
        raise ConfigError(f"The list cannot be sorted by {word!r:.60}.", did_you_mean(word[:60], TASK_ORDERS))
    return f"{TASK_ORDERS[word]} {'DESC' if sort.startswith('-') else 'ASC'} NULLS LAST, first_group"


def _parse_cursor(cursor: str, digest: str) -> int:
    """Return the number of tasks on the previous pages. The order of these tasks may have changed meanwhile."""
    if not cursor:
        return 0
    match decode_cursor(cursor, KIND):
        case [known, int(offset)] if known == digest and is_id(offset) and offset >= 0:
            return offset
    raise cursor_error(cursor)


def _load_groups(tx: Any, run_id: int, rule: SolvedRule, tasks: Iterable[int]) -> dict[int, list[Row]]:
    """Return the judged groups of these tasks, oldest first, by task."""
    judged = rule.judged_groups(f"m.task_id IN ({among(tasks)})")
    columns = "id, task_id, iteration, mean_reward, std_reward, best_reward, worst_reward, solved"
    query = f"SELECT {columns} FROM ({judged}) judged ORDER BY iteration, id"
    by_task: dict[int, list[Row]] = {}
    for row in select_rows(tx, query, run_id=run_id, **rule.parameters):
        by_task.setdefault(row["task_id"], []).append(row)
    return by_task


def _describe(tx: Any, rows: Sequence[Row], groups: Mapping[int, Sequence[Row]]) -> list[dict[str, Any]]:
    """Return the tasks with the values of their groups."""
    rewarded = {task: [group for group in its if group["mean_reward"] is not None] for task, its in groups.items()}
    best = {task: _choose_group(its, "best_reward", max) for task, its in rewarded.items()}
    worst = {task: _choose_group(its, "worst_reward", min) for task, its in rewarded.items()}
    extremes = _load_extremes(tx, [group["id"] for chosen in (best, worst) for group in chosen.values() if group])
    questions = load_questions(tx, [row["task_id"] for row in rows])
    described = []
    for row in rows:
        task = row["task_id"]
        its = rewarded.get(task, ())
        judged = [group["iteration"] for group in its if group["solved"] is not None]
        solved = [group["iteration"] for group in its if group["solved"]]
        described.append(
            {
                **row,
                "question": questions.get(task, ""),
                "points": _thin(its),
                "last_reward": its[-1]["mean_reward"] if its else None,
                "judged_groups": len(judged),
                "solved_groups": len(solved),
                "change": its[-1]["mean_reward"] - its[0]["mean_reward"] if its else None,
                "first_solved": solved[0] if solved else None,
                "last_solved": solved[-1] if solved else None,
                "never_solved": not solved,
                "no_longer_solved": bool(solved) and solved[-1] < judged[-1],
                "best": _extreme(best.get(task), "best", extremes),
                "worst": _extreme(worst.get(task), "worst", extremes),
            }
        )
    return described


def _choose_group(groups: Sequence[Row], column: str, choose: Any) -> Row | None:
    """Return the first group with the extreme value of a column; None if no group has a value."""
    some = [group for group in groups if group[column] is not None]
    group: Row | None = choose(some, key=lambda one: one[column], default=None)
    return group


def _load_extremes(tx: Any, groups: Iterable[int]) -> dict[int, Row]:
    """Return the ids of the `best` and the `worst` episode of each group."""
    done = "SELECT e.id FROM episodes e WHERE e.group_id = g.id AND e.status = 'done' ORDER BY e.reward"
    query = f"""
        SELECT g.id, ({done} DESC, e.id LIMIT 1) AS best, ({done}, e.id LIMIT 1) AS worst
        FROM groups g WHERE g.id IN ({among(groups)})"""
    return {row["id"]: row for row in select_rows(tx, query)}


def _extreme(group: Row | None, which: str, extremes: Mapping[int, Row]) -> dict[str, Any] | None:
    return None if group is None else {"episode": extremes[group["id"]][which], "reward": group[f"{which}_reward"]}


def _thin(groups: Sequence[Row]) -> list[list[Any]]:
    """Return [iteration, mean reward] of at most POINTS groups: of every Nth group, and of the newest."""
    points = [[group["iteration"], group["mean_reward"]] for group in groups]
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
    rule = load_rule(tx, run_row["id"])
    groups = _load_groups(tx, run_row["id"], rule, [task]) if tasks else {}
    if not (role or groups):
        raise NotFoundError(f"{run_row['name']!r} has no task {task}.", f"agentrl episodes {run_row['name']}")
    (described,) = _describe(tx, tasks, groups)
    newest_groups = groups.get(task, [])[-MAX_GROUPS:]
    episodes = _load_group_episodes(tx, [group["id"] for group in newest_groups])
    return {
        **described,
        "role": role[0]["role"] if role else None,
        "solved_means": rule.words,
        "groups": [{**group, "episodes": episodes.get(group["id"], ())} for group in newest_groups],
        "left_out": len(groups.get(task, ())) - len(newest_groups),
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
    """The number of a run's groups with done episodes, and how many of these groups have equal rewards."""

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
    rule = load_rule(tx, run_id, "default")
    query = f"""
        SELECT t.content_hash, {_count_right(rule)} FROM episodes e JOIN tasks t ON t.id = e.task_id
        WHERE e.run_id = :id AND {_JUDGED} GROUP BY t.content_hash"""
    for row in select_rows(tx, query, id=run_id, **rule.parameters):
        before = counts.get(row["content_hash"], SolvedCount())
        counts[row["content_hash"]] = SolvedCount(before.episodes + row["episodes"], before.right + int(row["rights"]))


_JUDGED = "e.status = 'done' AND e.reward IS NOT NULL"


def _count_right(rule: SolvedRule) -> str:
    return f"count(*) AS episodes, sum(CASE WHEN {rule.condition('e')} THEN 1 ELSE 0 END) AS rights"


@sql_read_transaction
def count_right_episodes(tx: Any, run: str, tasks: Iterable[int]) -> dict[int, SolvedCount]:
    """Return how many done episodes of the run's groups each task has, and how many of them are correct, by the task's id. A
    task without done episodes is left out. Raise NotFoundError if there is no such run.
    """
    run_id = run_id_and_name(tx, run)["id"]
    rule = load_rule(tx, run_id)
    query = f"""
        SELECT m.task_id, {_count_right(rule)} FROM ({MEMBERS}) m JOIN episodes e ON e.group_id = m.id
        WHERE m.task_id IN ({among(tasks)}) AND {_JUDGED} GROUP BY m.task_id"""
    rows = select_rows(tx, query, run_id=run_id, **rule.parameters)
    return {row["task_id"]: SolvedCount(row["episodes"], int(row["rights"])) for row in rows}


@sql_read_transaction
def count_equal_groups(tx: Any, run: str) -> SampledGroups:
    """Count the run's groups with done episodes, and those of them whose rewards are all equal. Raise NotFoundError if there is
    no such run.
    """
    query = """
        SELECT count(*) AS groups, coalesce(sum(CASE WHEN low = high THEN 1 ELSE 0 END), 0) AS equal FROM
          (SELECT min(reward) AS low, max(reward) AS high FROM episodes
           WHERE run_id = :id AND status = 'done' AND reward IS NOT NULL GROUP BY group_id) ends"""
    (row,) = select_rows(tx, query, id=run_id_and_name(tx, run)["id"])
    return SampledGroups(row["groups"], row["equal"])

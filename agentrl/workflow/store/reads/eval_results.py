"""Results of evaluations: lists, the evaluations of a policy, mean rewards by task, and the correct episodes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.workflow.errors import NotFoundError, StateError
from agentrl.workflow.stats.evaluation import is_right
from agentrl.workflow.store.driver_reader import Row, among, select_rows, sql_read_transaction
from agentrl.workflow.store.reads.paging import Page, Paging, choose_conditions, select_page
from agentrl.workflow.store.reads.run_rows import run_id_and_name
from agentrl.workflow.store.run_names import find_run
from agentrl.workflow.tables.column_values import RUN_STATUS
from agentrl.workflow.tables.step_values import FINAL_ANSWER
from agentrl.workflow.tables.views import EvalRow
from agentrl.workflow.trajectory import PolicyRef

MEASURED = """
    SELECT m.id AS run_id, m.measures_version AS version FROM runs m WHERE m.measures_id = :id
    UNION ALL
    SELECT m.id, min(mine.version) FROM runs m JOIN policies theirs ON theirs.run_id = m.id
    JOIN policies mine ON mine.path = theirs.path AND mine.run_id = :id
    WHERE m.kind = 'eval' AND m.measures_id IS NULL AND theirs.path <> '' GROUP BY m.id"""
"""The SQL for the evaluations of the policies of the run `:id`, with the evaluated version. They include evaluations that the
run planned, and evaluations that a person started.
"""

EVAL_ORDERS = {"id": "id", "version": "policy_version", "reward": "mean_reward"}


@dataclass(frozen=True, slots=True)
class EvalFilter:
    """A filter of evaluations. Without arguments it selects all evaluations. `measures` is the name or number of a run, to
    select only the evaluations that this run planned itself. `of_policies` is the name or number of a run, to select only
    evaluations of its policies, no matter who started them.
    """

    measures: str | None = None
    of_policies: str | None = None
    dataset: str | None = None
    split: str | None = None
    status: str | None = None


_CONDITIONS = {"dataset": "dataset = :dataset", "split": "split = :split", "status": "status = :status"}


@sql_read_transaction
def list_evals(tx: Any, chosen: EvalFilter | None = None, paging: Paging | None = None) -> Page[EvalRow]:
    """Return evaluations, ordered by the evaluated version or by one of EVAL_ORDERS. Raise ConfigError if there is no such
    order or status.
    """
    chosen = chosen or EvalFilter()
    conditions, values = choose_conditions(chosen, _CONDITIONS, {"status": RUN_STATUS})
    if chosen.measures is not None:
        conditions = ["id IN (SELECT id FROM runs WHERE measures_id = :measures)", *conditions]
        values["measures"] = run_id_and_name(tx, chosen.measures)["id"]
    if chosen.of_policies is not None:
        conditions = [f"id IN (SELECT run_id FROM ({MEASURED}) measured)", *conditions]
        values["id"] = run_id_and_name(tx, chosen.of_policies)["id"]
    return select_page(tx, EvalRow, conditions, values, paging or Paging(), EVAL_ORDERS, "version")


def count_evals(tx: Any, run_id: int) -> int:
    """Return the number of finished evaluations of the run's policies. Call this inside a transaction."""
    query = f"SELECT count(*) AS n FROM ({MEASURED}) m JOIN evals v ON v.run_id = m.run_id"
    count: int = select_rows(tx, query, id=run_id)[0]["n"]
    return count


@sql_read_transaction
def find_result(tx: Any, run: str) -> Row:
    """Return the result of an eval run. Raise NotFoundError if there is no such run, or if the run is not a finished
    evaluation.
    """
    evals = select_rows(tx, "SELECT * FROM evals WHERE run_id = :id", id=run_id_and_name(tx, run)["id"])
    if not evals:
        raise NotFoundError(f"Run {run!r} has no evaluation result.", f"agentrl watch {run}")
    return evals[0]


@sql_read_transaction
def find_evals(tx: Any, run: str) -> list[Row]:
    """Return a list with the evaluation of that name or number. The list is empty if the run is not an evaluation. Raise
    NotFoundError if there is no such run. Raise StateError if the evaluation is not done.
    """
    row = find_run(tx, run)
    evals = _load_evals(tx, "r.id = :id", id=row["id"])
    if row["kind"] == "eval" and not evals:
        raise StateError(
            f"The evaluation {row['name']!r} has no result: it is {row['status']}.", f"agentrl watch {row['name']}"
        )
    return evals


@sql_read_transaction
def find_evals_of_policy(tx: Any, policy: PolicyRef) -> list[Row]:
    """Return all evaluations of exactly these weights, newest first."""
    base = "r.base_hash = :base_hash" if policy.base_hash else "r.base = :base"
    base_args = {"base_hash": policy.base_hash} if policy.base_hash else {"base": policy.base}
    return _load_evals(tx, f"{base} AND p.sha256 = :sha256", sha256=policy.sha256, **base_args)


def _load_evals(tx: Any, condition: str, **parameters: Any) -> list[Row]:
    query = f"""
        SELECT r.id, r.name AS run, v.dataset, v.split, v.tasks, v.episodes, v.errors, v.mean_reward, v.policy, s.code_hash,
               s.weights, r.config, r.manifest, m.name AS measures, v.created_at,
               (SELECT min(i.id) FROM iterations i WHERE i.run_id = r.id) AS iteration
        FROM evals v
        JOIN runs r ON r.id = v.run_id
        LEFT JOIN runs m ON m.id = r.measures_id
        JOIN policies p ON p.run_id = r.id
        JOIN reward_sets s ON s.run_id = r.id AND s.name = 'default'
        WHERE {condition} ORDER BY r.id DESC"""
    return select_rows(tx, query, **parameters)


@sql_read_transaction
def load_measured_tasks(tx: Any, run: int) -> frozenset[int]:
    """Return the ids of an evaluation's tasks."""
    return frozenset(row["task_id"] for row in select_rows(tx, "SELECT task_id FROM run_tasks WHERE run_id = :run", run=run))


@sql_read_transaction
def load_task_means(tx: Any, run: int) -> dict[int, float | None]:
    """Return, by task id, the mean reward of the task's done, untainted episodes in an evaluation; None if it has none."""
    query = """
        SELECT t.task_id, avg(e.reward) FILTER (WHERE e.status = 'done' AND NOT e.tainted) AS mean
        FROM run_tasks t LEFT JOIN episodes e ON e.run_id = t.run_id AND e.task_id = t.task_id
        WHERE t.run_id = :run GROUP BY t.task_id"""
    return {row["task_id"]: row["mean"] for row in select_rows(tx, query, run=run)}


@sql_read_transaction
def load_done_episodes(tx: Any, run: int) -> dict[int, list[int]]:
    """Return the ids of each task's done, untainted episodes in an evaluation, by task id."""
    query = "SELECT task_id, id FROM episodes WHERE run_id = :run AND status = 'done' AND NOT tainted ORDER BY id"
    episodes: dict[int, list[int]] = {}
    for row in select_rows(tx, query, run=run):
        episodes.setdefault(row["task_id"], []).append(row["id"])
    return episodes


@sql_read_transaction
def list_measured_datasets(tx: Any) -> list[str]:
    """Return the names of all datasets that were used in a finished evaluation."""
    return [row["dataset"] for row in select_rows(tx, "SELECT DISTINCT dataset FROM evals ORDER BY 1")]


@sql_read_transaction
def find_right_episodes(tx: Any, iteration: int) -> set[int] | None:
    """Return the ids of an evaluation's correct episodes, as decided by the rewards of the set `default`.

    Return None if no reward decides whether an episode is correct. `iteration` is the id of the evaluation's iteration.
    """
    query = """
        SELECT s.id, s.weights, r.manifest FROM iterations i JOIN runs r ON r.id = i.run_id
        JOIN reward_sets s ON s.run_id = r.id AND s.name = 'default' WHERE i.id = :iteration"""
    (scored_by,) = select_rows(tx, query, iteration=iteration)
    query = """
        SELECT w.episode_id, w.part, sum(w.value) AS value FROM rewards w JOIN episodes e ON e.id = w.episode_id
        WHERE w.reward_set_id = :reward_set AND e.iteration_id = :iteration GROUP BY w.episode_id, w.part"""
    parts: dict[int, dict[str, float]] = {}
    for row in select_rows(tx, query, reward_set=scored_by["id"], iteration=iteration):
        parts.setdefault(row["episode_id"], {})[row["part"]] = row["value"]
    right_by: Mapping[str, Any] = scored_by["manifest"].get("right_by", {})
    weights, correct = right_by.get("weights", scored_by["weights"]), right_by.get("correct", ())
    verdicts = {}
    for episode, its in parts.items():
        env_parts = its.keys() - scored_by["weights"].keys() if right_by.get("gives") else ()
        verdicts[episode] = is_right(its, weights, correct, env_parts)
    judged = {episode for episode, right in verdicts.items() if right is not None}
    return {episode for episode in judged if verdicts[episode]} if judged else None


KEY_CHARS = 200
"""The maximum length of a task's key and of its question, in characters. Longer texts are cut."""


@sql_read_transaction
def list_first_episodes(tx: Any, first: int, second: int) -> list[Mapping[str, Any]]:
    """Return the tasks that both evaluations (run ids) tried: the key, and the first episode's id in each evaluation."""
    query = f"""
        SELECT t.id AS task_id, substr(t.key, 1, {KEY_CHARS}) AS task, a.episode AS a_episode, b.episode AS b_episode
        FROM (SELECT task_id, min(id) AS episode FROM episodes WHERE run_id = :first GROUP BY task_id) a
        JOIN (SELECT task_id, min(id) AS episode FROM episodes WHERE run_id = :second GROUP BY task_id) b
          ON b.task_id = a.task_id
        JOIN tasks t ON t.id = a.task_id ORDER BY t.id"""
    return list(select_rows(tx, query, first=first, second=second))


@sql_read_transaction
def load_questions(tx: Any, tasks: Iterable[int]) -> dict[int, str]:
    """Return the first KEY_CHARS characters of each task's last message, by task id."""
    query = f"SELECT id, messages FROM tasks WHERE id IN ({among(tasks)})"
    return {row["id"]: _question(row["messages"]) for row in select_rows(tx, query)}


def load_task_texts(tx: Any, tasks: Iterable[int]) -> dict[int, dict[str, str]]:
    """Return the first KEY_CHARS characters of each task's key (`task`) and of its last message (`question`), by task id. Call
    this inside a transaction.
    """
    query = f"SELECT id, substr(key, 1, {KEY_CHARS}) AS key, messages FROM tasks WHERE id IN ({among(tasks)})"
    return {row["id"]: {"task": row["key"], "question": _question(row["messages"])} for row in select_rows(tx, query)}


@sql_read_transaction
def load_answers(tx: Any, episodes: Iterable[int | None]) -> dict[int, str]:
    """Return the first KEY_CHARS characters of each episode's final answer, by the episode's id."""
    ids = among(id for id in episodes if id is not None)
    query = f"SELECT e.id, substr({FINAL_ANSWER}, 1, {KEY_CHARS}) AS answer FROM episodes e WHERE e.id IN ({ids})"
    return {row["id"]: row["answer"] for row in select_rows(tx, query)}


def _question(messages: Any) -> str:
    last = messages[-1] if isinstance(messages, list) and messages else {}
    content = last.get("content") if isinstance(last, dict) else ""
    return content[:KEY_CHARS] if isinstance(content, str) else ""

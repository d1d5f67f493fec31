"""Lists of episodes in pages, and one complete episode for a transcript. A list reads neither blobs nor long texts."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from agentrl.workflow.errors import NotFoundError
from agentrl.workflow.store.driver_reader import Row, is_sqlite, select_rows, sql_read_transaction
from agentrl.workflow.store.reads.changes import OF_RUN, run_conditions
from agentrl.workflow.store.reads.group_rows import fate_in_run
from agentrl.workflow.store.reads.iteration_rows import find_iteration
from agentrl.workflow.store.reads.paging import (
    BY_NUMBER,
    FEW_BY_NUMBER,
    Page,
    Paging,
    choose_conditions,
    escape_like,
    find_beside,
    find_order,
    search_page,
    select_page,
    select_values,
    storable_value,
    text_order,
)
from agentrl.workflow.store.reads.run_rows import run_id_and_name
from agentrl.workflow.store.reads.turn_rows import find_removed_tokens
from agentrl.workflow.store.row_codecs import (
    MAX_ID,
    RemovedTokens,
    annotation_value,
    episode_value,
    no_episode_error,
    step_value,
    task_value,
)
from agentrl.workflow.store.solved_rule import MEMBERS, load_rule
from agentrl.workflow.tables.column_values import EPISODE_STATUS, STOP_REASONS, list_in_sql
from agentrl.workflow.tables.step_values import JOIN_PROMPT, JOIN_PROMPT_IDS, PROMPT, PROMPT_IDS
from agentrl.workflow.tables.views import FATE_CONDITIONS, FATES, CallRow, EpisodeRow, RewardRow, StepRow
from agentrl.workflow.trajectory import TRUNCATED, Episode, Step, storable

SECONDS = "{seconds}"
"""The order by seconds, for which the databases have different SQL."""
EPISODE_ORDERS = {
    "id": "id", "iteration": "iteration_id", "question": "task_id", "answer": text_order("final_answer"),
    "reference": text_order("reference"), "status": "status", "reward": "reward", "advantage": "advantage",
    "steps": "steps", "calls": "tool_calls", "errors": "tool_errors", "tokens": "sampled_tokens", "seconds": SECONDS,
}  # fmt: skip
"""The names by which the list can be sorted, each with its column of `episodes` or of a table of _SORT_TABLES."""
_SORT_TABLES = {
    "reference": "(SELECT e.*, t.reference FROM episodes e JOIN tasks t ON t.id = e.task_id) episodes",
    "advantage": """
        (SELECT e.*, (SELECT c.advantage FROM consumptions c
                      WHERE c.run_id = e.run_id AND c.episode_id = e.id AND c.stage = 'train') AS advantage
         FROM episodes e) episodes""",
}
"""The tables for the orders by a column that `episodes` does not have."""
OUTCOMES = ("solved", "unsolved", "never_solved", "no_longer_solved")
"""The outcomes by which the list can be filtered: the episode is right; it is not; no episode of its task is; its group is not
solved, but the task's group before was.
"""


@dataclass(frozen=True, slots=True)
class EpisodeFilter:
    """A filter of a run's episodes. `run` is the run's name or number.

    Args:
        iteration: the iteration's number, counted from 1.
        since: a cursor of `mark_changes`, to select only episodes that may have changed since then.
        task: the task's key.
        task_id: the task's number.
        tool_errors: the minimum number of failed tool calls.
        error_class: the class of the episode's error, or of a failed tool call.
        text: a text to search for in messages, calls' arguments and results, final answers and errors.
        outcome: one of OUTCOMES.
        truncated: whether the episode was cut off at a limit.
        fate: one of `ledger.FATES`: the episode's outcome in this run.
        texts_of: a group's id, to select the episodes that used the same versions of the run's texts.
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
    task_id: int | None = None
    error_class: str | None = None
    outcome: str | None = None
    truncated: bool | None = None
    fate: str | None = None
    texts_of: int | None = None


_CONDITIONS = {
    "group": "group_id = (SELECT id FROM groups WHERE id = :group AND run_id = :run_id)",
    "status": "status = :status",
    "stop_reason": "stop_reason = :stop_reason",
    "task": "task_id IN (SELECT id FROM tasks WHERE key = :task)",
    "task_id": "task_id = :task_id",
    "min_reward": "reward >= :min_reward",
    "max_reward": "reward <= :max_reward",
    "tool_errors": "tool_errors >= :tool_errors",
    "texts_of": """
        group_id IN (SELECT l.group_id FROM group_resources l
                     WHERE l.resource_id IN (SELECT resource_id FROM group_resources WHERE group_id = :texts_of)
                     GROUP BY l.group_id
                     HAVING count(*) = (SELECT count(*) FROM group_resources WHERE group_id = :texts_of))""",
}
_CHOICES = {"status": EPISODE_STATUS, "stop_reason": STOP_REASONS, "outcome": OUTCOMES, "fate": FATES}
_CALLS = "FROM tool_calls c WHERE c.episode_id = episodes.id AND c.attempt = episodes.attempt"
_TEXTS = """
    (lower(final_answer) LIKE lower(:text) ESCAPE '!' OR lower(error) LIKE lower(:text) ESCAPE '!'
     OR EXISTS (SELECT 1 FROM steps s {join} WHERE s.episode_id = episodes.id AND s.attempt = episodes.attempt
                AND (lower(s.text) LIKE lower(:text) ESCAPE '!' OR {prompt}
                     OR s.number = answer_step AND s.content_start IS NULL AND lower(s.content) LIKE lower(:text) ESCAPE '!'))
     OR EXISTS (SELECT 1 FROM tool_calls c WHERE c.episode_id = episodes.id AND c.attempt = episodes.attempt
                AND (lower(c.result) LIKE lower(:text) ESCAPE '!' OR {arguments})))"""
_DOCUMENT = "lower(CAST({column} AS TEXT)) LIKE lower(:{word}) ESCAPE '!'"
_TESTS = {
    "error_class": f"""
        (error_class = :error_class OR tool_errors > 0 AND EXISTS (SELECT 1 {_CALLS} AND c.error_class = :error_class))""",
    "fate": f"{fate_in_run('episodes.id', ':run_name')} = :fate",
}
"""The conditions that are slow to check, so that a list with one of them is searched in pieces. `_conditions` adds faster
conditions that all rows of the list meet.
"""


@sql_read_transaction
def list_episodes(tx: Any, chosen: EpisodeFilter, paging: Paging | None = None) -> Page[EpisodeRow]:
    """Return the episodes that the run sampled, ordered by id or by one of EPISODE_ORDERS. Raise ConfigError if there is no
    such order, status, stop reason, outcome or fate.

    With one of the fields `text`, `outcome`, `error_class` and `fate`, the list is searched in pieces: a page may have few
    rows, or none, and still be followed by another page (see `paging.search_page`).
    """
    conditions, tests, values = _conditions(tx, chosen)
    paging, orders = paging or Paging(), _orders(tx, chosen)
    table = _table(paging.sort)
    if tests:
        return search_page(tx, EpisodeRow, conditions, tests, values, paging, orders, "id", table)
    return select_page(tx, EpisodeRow, conditions, values, paging, orders, "id", table, narrow=conditions == [OF_RUN])


@sql_read_transaction
def count_episodes(tx: Any, chosen: EpisodeFilter) -> int:
    """Return the number of episodes that a search with this filter checks in total."""
    conditions, _, values = _conditions(tx, chosen)
    count: int = select_rows(tx, f"SELECT count(*) AS n FROM episodes WHERE {' AND '.join(conditions)}", **values)[0]["n"]
    return count


@sql_read_transaction
def check_names(tx: Any, chosen: EpisodeFilter) -> None:
    """Raise NotFoundError if the run does not have the iteration, the task or the group that the filter names."""
    run_row = run_id_and_name(tx, chosen.run)
    if chosen.iteration is not None:
        find_iteration(tx, run_row, chosen.iteration)
    for field, (what, query, command) in _NAMES.items():
        value = getattr(chosen, field)
        if value is not None and not select_rows(tx, f"{query} LIMIT 1", run_id=run_row["id"], name=storable_value(value)):
            message = f"{run_row['name']!r} has sampled no {what} {value!r:.60}."
            raise NotFoundError(message, f"List its {command}: agentrl {command} {run_row['name']}")


_GROUP_OF_RUN = "SELECT id FROM groups WHERE id = :name AND run_id = :run_id"
_TASK_OF_RUN = f"SELECT m.id FROM ({MEMBERS}) m JOIN tasks t ON t.id = m.task_id WHERE t.key = :name"
_NAMES = {
    "task": ("task", _TASK_OF_RUN, "tasks"),
    "group": ("group", _GROUP_OF_RUN, "episodes"),
    "texts_of": ("group", _GROUP_OF_RUN, "episodes"),
}
"""For each field that names something of the run: what it names, the query that finds this, and the command that lists it."""


@sql_read_transaction
def find_episodes_beside(tx: Any, chosen: EpisodeFilter, sort: str, episode: int) -> tuple[int | None, int | None]:
    """Return the ids of the episodes before and after this one in the list. An id is None at an end of the list, or if the
    search for it took too long.
    """
    conditions, tests, values = _conditions(tx, chosen)
    order = find_order(_orders(tx, chosen), sort or "id")
    return find_beside(tx, conditions, tests, values, order, _table(sort), max(-MAX_ID, min(MAX_ID, episode)))


def _table(sort: str) -> str:
    return _SORT_TABLES.get(sort.removeprefix("-"), "episodes")


def _orders(tx: Any, chosen: EpisodeFilter) -> dict[str, str]:
    by_id = FEW_BY_NUMBER if chosen.outcome == "no_longer_solved" else BY_NUMBER
    if is_sqlite(tx):
        return {**EPISODE_ORDERS, **by_id, "seconds": "(julianday(finished_at) - julianday(started_at))"}
    return {**EPISODE_ORDERS, **by_id, "seconds": "date_part('epoch', finished_at - started_at)"}


def _conditions(tx: Any, chosen: EpisodeFilter) -> tuple[list[str], list[str], dict[str, Any]]:
    """Return the filter's conditions, those that are slow to check, and the values of the parameters of both."""
    of_run, of_it = run_conditions(tx, chosen)
    conditions, values = choose_conditions(chosen, _CONDITIONS, _CHOICES)
    if of_run == [OF_RUN] and ("group" in values or chosen.outcome == "no_longer_solved" or chosen.fate is not None):
        of_run = []  # these filters restrict the rows to the run; with this condition, a database would scan all its episodes
    tests, test_values = choose_conditions(chosen, _TESTS)
    if chosen.error_class is not None:
        conditions.append("(error_class = :error_class OR tool_errors > 0)")
    if chosen.fate is not None:
        conditions.append(FATE_CONDITIONS[chosen.fate])
        test_values["run_name"] = run_id_and_name(tx, chosen.run)["name"]
    if chosen.truncated is not None:
        reasons = list_in_sql(TRUNCATED)
        conditions.append(f"coalesce(stop_reason, '') {'IN' if chosen.truncated else 'NOT IN'} ({reasons})")
        values["truncated"] = int(chosen.truncated)
    if chosen.text is not None:
        test, texts = _text_test(chosen.text)
        tests, test_values = [*tests, test], test_values | texts
    if chosen.outcome is not None:
        outcome, is_test, its = _outcome_condition(tx, chosen, of_run, of_it)
        (tests if is_test else conditions).append(outcome)
        values |= its | {"outcome": chosen.outcome}
    return of_run + conditions, tests, of_it | values | test_values


def _text_test(text: str) -> tuple[str, dict[str, Any]]:
    """Return the test for a text. In a JSON column, a character may be escaped."""
    plain = storable(text)
    values = {"text": f"%{escape_like(plain)}%"}
    if (escaped := json.dumps(plain)[1:-1]) != plain:
        values["escaped_text"] = f"%{escape_like(escaped)}%"
    documents = {
        name: " OR ".join(_DOCUMENT.format(column=column, word=word) for word in values)
        for name, column in (("prompt", PROMPT), ("arguments", "c.arguments"))
    }
    return _TEXTS.format(**documents, join=JOIN_PROMPT), values


def _outcome_condition(
    tx: Any, chosen: EpisodeFilter, of_run: Sequence[str], of_it: Mapping[str, Any]
) -> tuple[str, bool, dict[str, Any]]:
    """Return the condition of the filter's outcome, whether it is slow to check, and the values of its parameters."""
    rule, outcome = load_rule(tx, of_it["run_id"]), chosen.outcome
    some = "1 = 1"
    if chosen.task_id is not None:
        some = "m.task_id = :task_id"
    elif chosen.iteration is not None:
        some = f"m.task_id IN (SELECT task_id FROM groups WHERE {' AND '.join(of_run)})"
    if outcome in ("solved", "unsolved"):
        return f"status = 'done' AND {'NOT ' * (outcome == 'unsolved')}{rule.condition('episodes')}", True, rule.parameters
    if outcome == "never_solved":
        never = f"SELECT task_id FROM ({rule.judged_groups(some)}) judged GROUP BY task_id HAVING max(solved) = 0"
        return f"task_id IN ({never})", False, rule.parameters
    return f"group_id IN ({rule.groups_no_longer_solved(some)})", False, rule.parameters


@sql_read_transaction
def list_newest_episodes(tx: Any, begin: str, limit: int) -> list[Row]:
    """Return id, run, status and reward of the newest episodes whose id begins with the digits `begin`."""
    query = """
        SELECT e.id, r.name, e.status, e.reward FROM episodes e JOIN runs r ON r.id = e.run_id
        WHERE e.status <> 'planned' AND CAST(e.id AS TEXT) LIKE :begin ORDER BY e.id DESC LIMIT :limit"""
    return select_rows(tx, query, begin=f"{begin}%", limit=limit)


@sql_read_transaction
def find_last_episode(tx: Any) -> tuple[int, str] | None:
    """Return the id and the run's name of the newest done episode that does not belong to an evaluation.

    If all done episodes belong to evaluations, return the newest one. Return None if no episode is done.
    """
    last = "(SELECT id FROM episodes WHERE run_id = r.id AND status = 'done' ORDER BY id DESC LIMIT 1)"
    query = f"SELECT r.name AS run, coalesce({last}, 0) AS last FROM runs r WHERE r.kind {{}} 'eval' ORDER BY last DESC LIMIT 1"
    for is_eval in ("<>", "="):
        for row in select_rows(tx, query.format(is_eval)):
            if row["last"]:
                return row["last"], row["run"]
    return None


_CALLS_OF = "WHERE episode_id = :id AND kind {kind} 'grade' ORDER BY step, call"
T = TypeVar("T", StepRow, CallRow)


@dataclass(frozen=True)
class EpisodeRecord:
    """A complete episode: its row, its value with every step, and the rows of its steps, calls and rewards.

    `grades` are the calls that judged the episode. The env made them after the end of the episode, and the model did not see
    them. `agent_error` is the error of the external agent, and `agent_output` is the end of its output. Both are empty if no
    external agent ran the episode. If `removed` is not None, the tokens of a step were removed, and all token ids and logprobs
    of `episode` are 0.
    """

    row: EpisodeRow
    episode: Episode
    steps: Sequence[StepRow]
    calls: Sequence[CallRow]
    grades: Sequence[CallRow]
    rewards: Sequence[RewardRow]
    agent_error: str = ""
    agent_output: str = ""
    removed: RemovedTokens | None = None


@sql_read_transaction
def find_episode(tx: Any, episode: int) -> EpisodeRecord:
    """Return the episode with all of its steps. Raise NotFoundError if there is no such episode."""
    row = _find_row(tx, episode) if abs(episode) <= MAX_ID else None
    if row is None:
        raise no_episode_error(episode)
    agent = _find_agent_words(tx, row)
    steps = _select_with_inherited(tx, StepRow, "WHERE episode_id = :id ORDER BY step", row)
    removed = find_removed_tokens(tx, [step.id for step in steps])
    return EpisodeRecord(
        row=row,
        episode=load_episode(tx, episode, with_tokens=removed is None),
        steps=steps,
        calls=_select_with_inherited(tx, CallRow, _CALLS_OF.format(kind="<>"), row),
        grades=_select_with_inherited(tx, CallRow, _CALLS_OF.format(kind="="), row),
        rewards=select_values(tx, RewardRow, "WHERE episode_id = :id ORDER BY id", id=episode),
        agent_error=agent["error"],
        agent_output=agent["output"],
        removed=removed,
    )


def _find_agent_words(tx: Any, row: EpisodeRow) -> Row:
    query = "SELECT error, output FROM agent_attempts WHERE episode_id = :id AND attempt = :attempt ORDER BY id DESC LIMIT 1"
    rows = select_rows(tx, query, id=row["id"], attempt=row["attempt"])
    return rows[0] if rows else {"error": "", "output": ""}


def _find_row(tx: Any, episode: int) -> EpisodeRow | None:
    rows = select_values(tx, EpisodeRow, "WHERE id = :id", id=episode)
    return rows[0] if rows else None


def load_episode(tx: Any, episode: int, with_tokens: bool = True) -> Episode:
    """Return the episode with the steps and annotations of its current attempt. The steps of a fork begin with those that it
    inherited from its parent. If `with_tokens` is False, all token ids and logprobs are 0.
    """
    (row,) = select_rows(tx, "SELECT * FROM episodes WHERE id = :id", id=episode)
    (task,) = select_rows(tx, "SELECT * FROM tasks WHERE id = :id", id=row["task_id"])
    before = () if row["parent_id"] is None else load_episode(tx, row["parent_id"], with_tokens).steps[: row["inherited_steps"]]
    loaded = episode_value(row, task_value(task), _load_steps(tx, row, before, with_tokens))
    annotations = select_rows(tx, _ANNOTATIONS, id=episode, attempt=row["attempt"])
    return replace(loaded, annotations=tuple(annotation_value(one) for one in annotations))


_ANNOTATIONS = "SELECT * FROM annotations WHERE episode_id = :id AND attempt = :attempt ORDER BY id"


_STEP_COLUMNS = f"s.*, {PROMPT} AS prompt, p.version"  # of two columns with one name, the row has the last
_OF_ATTEMPT = f"""
    {JOIN_PROMPT} JOIN policies p ON p.id = s.policy_id
    WHERE s.episode_id = :id AND s.attempt = :attempt ORDER BY s.number"""
_STEPS = f"""
    SELECT {_STEP_COLUMNS}, {PROMPT_IDS} AS prompt_ids, t.sampled_ids, t.behavior_logprobs FROM steps s
    JOIN step_tokens t ON t.step_id = s.id {JOIN_PROMPT_IDS} {_OF_ATTEMPT}"""
_STEPS_WITHOUT_TOKENS = f"""
    SELECT {_STEP_COLUMNS}, NULL AS prompt_ids, NULL AS sampled_ids, NULL AS behavior_logprobs FROM steps s {_OF_ATTEMPT}"""


def _load_steps(tx: Any, episode: Row, inherited: Sequence[Step], with_tokens: bool) -> list[Step]:
    """Return the inherited steps and those of the episode's current attempt, whose messages may be those of inherited ones."""
    steps = list(inherited)
    calls: dict[int, list[Row]] = {}
    query = "SELECT * FROM tool_calls WHERE episode_id = :id AND kind <> 'grade' ORDER BY step_id, call"
    for call in select_rows(tx, query, id=episode["id"]):
        calls.setdefault(call["step_id"], []).append(call)
    for row in select_rows(tx, _STEPS if with_tokens else _STEPS_WITHOUT_TOKENS, id=episode["id"], attempt=episode["attempt"]):
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

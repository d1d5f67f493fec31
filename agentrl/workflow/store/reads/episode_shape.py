"""The shape of an episode: the positions and lengths of its steps, without texts and tokens.

For a fork, the rows of the inherited steps are those of the parent. In the shape's value every step has the right number of
tokens, but each token id is 0.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.workflow.store.driver_reader import Row, is_sqlite, select_rows, sql_read_transaction
from agentrl.workflow.store.row_codecs import MAX_ID, no_episode_error
from agentrl.workflow.trajectory import ROOT, Episode, Message, Step, Task

IDS_AT_ONCE = 500
"""The maximum number of row ids in one query."""


@dataclass(frozen=True, slots=True)
class EpisodeShape:
    """An episode without its texts and tokens. `value` is an `Episode` in which every token id is 0, and the task and the
    messages are empty. `rows` are the rows of the episode's steps: id, episode_id, step, chain, parent_step, prompt_tokens,
    sampled_tokens.
    """

    id: int
    run_id: int
    task_id: int
    group_id: int
    attempt: int
    value: Episode
    rows: Sequence[Row]

    def step_ids(self, steps: Sequence[int]) -> list[int]:
        """Return the row ids of the steps with these numbers; unknown numbers are left out."""
        return [self.rows[step]["id"] for step in steps if 0 <= step < len(self.rows)]


@sql_read_transaction
def load_shape(tx: Any, episode: int) -> EpisodeShape:
    """Return the shape of an episode. Raise NotFoundError if there is no such episode."""
    episodes = select_rows(tx, _EPISODE, id=episode) if abs(episode) <= MAX_ID else []
    if not episodes:
        raise no_episode_error(episode)
    row = episodes[0]
    rows, child, inherited = list(_own_steps(tx, row)), row, row["inherited_steps"]
    while inherited and child["parent_id"] is not None and child["parent_id"] < child["id"]:
        (child,) = select_rows(tx, _EPISODE, id=child["parent_id"])
        rows = [step for step in _own_steps(tx, child) if step["step"] < inherited] + rows
        inherited = min(inherited, child["inherited_steps"])
    return EpisodeShape(
        *(row["id"], row["run_id"], row["task_id"], row["group_id"], row["attempt"], shape_value(row, rows), rows)
    )


_EPISODE = """
    SELECT id, run_id, task_id, group_id, sample, status, stop_reason, attempt, reward, parent_id, fork_step, inherited_steps,
           tainted FROM episodes WHERE id = :id"""


def _own_steps(tx: Any, episode: Row) -> list[Row]:
    query = f"SELECT {step_columns(tx)} FROM steps s WHERE s.episode_id = :id AND s.attempt = :attempt ORDER BY s.number"
    return select_rows(tx, query, id=episode["id"], attempt=episode["attempt"])


def step_columns(tx: Any) -> str:
    """Return the SQL of the columns of a step `s` that `shape_value` needs."""
    return f"""
        s.id, s.episode_id, s.number AS step, s.chain, s.parent_step, s.shared_tokens, s.delivered, s.side_call,
        s.prompt_tokens, s.sampled_tokens, CASE WHEN s.new_row IS NULL THEN 0 ELSE 1 END AS begins,
        {asked_column(tx)} -> 'grammar' ->> 'guided' AS guided"""


def asked_column(tx: Any) -> str:
    """Return the SQL of the JSON column `asked` of a step `s`. Damaged JSON, which only a SQLite database can contain, is read
    as NULL.
    """
    return "CASE WHEN json_valid(s.asked) THEN s.asked END" if is_sqlite(tx) else "s.asked"


def shape_value(row: Row, steps: Sequence[Row]) -> Episode:
    """Build an episode without texts. Its steps have the right numbers of tokens; each id is 0."""
    return Episode(
        task=Task("", (), ""),
        sample=row["sample"],
        steps=tuple(_step(step) for step in steps),
        status=row["status"],
        stop_reason=row["stop_reason"],
        reward=row["reward"],
        id=row["id"],
        parent_id=row["parent_id"],
        fork_step=row["fork_step"] or 0,
        inherited=row["inherited_steps"],
        tainted=row["tainted"],
    )


_NOTHING = Message("assistant", "")


def _step(row: Row) -> Step:
    return Step(
        index=row["step"],
        prompt=(),
        prompt_ids=(0,) * row["prompt_tokens"],
        sampled_ids=(0,) * row["sampled_tokens"],
        behavior_logprobs=(0.0,) * row["sampled_tokens"],
        finish_reason="stop",
        message=_NOTHING,
        policy_version=0,
        new_row="" if row["begins"] else None,
        chain=row["chain"],
        parent=ROOT if row["parent_step"] is None else row["parent_step"],
        shared=row["shared_tokens"],
        delivered=row["delivered"],
        side_call=row["side_call"],
        guided=tuple(json.loads(row["guided"] or "[]")),
    )


def in_parts(ids: Sequence[int]) -> list[Sequence[int]]:
    """Split the ids into parts of at most IDS_AT_ONCE."""
    return [ids[start : start + IDS_AT_ONCE] for start in range(0, len(ids), IDS_AT_ONCE)]

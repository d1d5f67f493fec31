"""Steps written one per transaction: through the store, and by the bare driver with the same statements and boundaries.

Both write the same rows into the same tables, with every check, index and trigger, at the same durability; the driver's side is
what one would write by hand: one connection, statements as text, values converted without checks.
"""

import json
import re
from array import array
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from agentrl.workflow.store import steps, tool_calls
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.rollout_claims import Fence
from agentrl.workflow.trajectory import CallRecord, Message, Step, StepRecord, ToolCall, ToolResult

TOKENS = 220
STEPS = 50
"""Steps of one repetition."""

CALL = CallRecord(ToolCall("calculator", {"expression": "6*7"}), "none", None)
RESULT = ToolResult("42", None, 0.01)
STEP = Step(
    index=0,
    prompt=(Message("tool", "42", name="calculator"),),
    prompt_ids=tuple(range(40)),
    sampled_ids=tuple(range(1000, 1000 + TOKENS)),
    behavior_logprobs=tuple(-1.0 / (n + 1) for n in range(TOKENS)),
    finish_reason="stop",
    message=Message("assistant", "The answer follows from the rule of three. " * 12, "Let me think about this again. " * 12),
    policy_version=0,
    seconds=1.5,
)
TEXT = f"<think>{STEP.message.thought}</think>{STEP.message.content}"


@dataclass(frozen=True)
class Target:
    """An episode that is being rolled out, and the claim under which its steps are written."""

    fence: Fence
    episode: int
    policy_id: int
    numbers: Iterator[int]


Write = Callable[[Target], None]


def through_store(database: Database, with_call: bool) -> Write:
    """Our way: T1, and with a call its result and T2."""
    made = (CALL,) if with_call else ()

    def write(target: Target) -> None:
        step = replace(STEP, index=next(target.numbers))
        ids = steps.commit_sampled(database, target.fence, [StepRecord(target.episode, step, target.policy_id, TEXT, made)])
        if with_call:
            tool_calls.record_result(database, ids[0][0], RESULT, datetime.now(UTC), "host:1")
            steps.commit_observed(database, target.fence, [(target.episode, replace(step, results=(RESULT,)))])

    return write


SQL = {
    "fence": """
        SELECT r.name, e.id, e.attempt FROM groups g JOIN runs r ON r.id = g.run_id JOIN episodes e ON e.group_id = g.id
        WHERE g.id = :group AND g.attempt = :held AND g.status = 'running'""",
    "step": """
        INSERT INTO steps (run, episode_id, attempt, number, policy_id, prompt, text, content_start, content_length,
                           thought_start, thought_length, new_row, finish_reason, prompt_tokens, sampled_tokens, logprob_sum,
                           generate_seconds, sampled_at)
        VALUES (:run, :episode, :attempt, :number, :policy, :prompt, :text, :content_start, :content_length,
                :thought_start, :thought_length, NULL, :finish_reason, :prompt_tokens, :sampled_tokens, :logprob_sum,
                :seconds, :now)
        ON CONFLICT (episode_id, attempt, number) DO NOTHING RETURNING id""",
    "tokens": """
        INSERT INTO step_tokens (step_id, prompt_ids, sampled_ids, behavior_logprobs)
        VALUES (:step, :prompt_ids, :sampled_ids, :behavior_logprobs)""",
    "count": """
        UPDATE episodes SET status = 'running', started_at = coalesce(started_at, :now), steps = steps + 1,
               prompt_tokens = prompt_tokens + :prompt_tokens, sampled_tokens = sampled_tokens + :sampled_tokens,
               tool_calls = tool_calls + :calls, generate_seconds = generate_seconds + :seconds
        WHERE id = :episode""",
    "call": """
        INSERT INTO tool_calls (run, episode_id, step_id, attempt, step, call, tool, arguments, effects, status, created_at)
        VALUES (:run, :episode, :step, :attempt, :number, 0, 'calculator', :arguments, 'none', 'pending', :now) RETURNING id""",
    "result": """
        UPDATE tool_calls SET status = 'done', result = '42', seconds = 0.01, worker = 'host', starts = starts + 1,
               started_at = coalesce(started_at, :now), finished_at = :now
        WHERE id = :call AND result IS NULL""",
    "observed": """
        UPDATE steps SET observed_at = :now
        WHERE episode_id = :episode AND attempt = :attempt AND number = :number AND observed_at IS NULL""",
    "tool_seconds": "UPDATE episodes SET tool_seconds = tool_seconds + 0.01 WHERE id = :episode",
}


@contextmanager
def by_driver(database: Database, with_call: bool) -> Iterator[Write]:
    """The bare driver: the same rows by the same statements, over a connection of its own."""
    connection = _connection(database)
    begin, prepared = "BEGIN IMMEDIATE", dict(SQL)
    if not database.is_sqlite:
        begin, prepared = "BEGIN", {name: re.sub(r":(\w+)", r"%(\1)s", query) for name, query in SQL.items()}
        prepared["fence"] += " FOR NO KEY UPDATE OF g"

    def do(name: str, values: dict[str, Any]) -> Any:
        return connection.execute(prepared[name], values)

    def write(target: Target) -> None:
        values = _values(target, with_call)
        connection.execute(begin)
        held = do("fence", values).fetchall()
        values["run"], values["attempt"] = held[0][0], {row[1]: row[2] for row in held}[target.episode]
        values["step"] = do("step", values).fetchone()[0]
        do("tokens", values)
        do("count", values)
        if with_call:
            values["call"] = do("call", values).fetchone()[0]
        connection.execute("COMMIT")
        if not with_call:
            return
        connection.execute(begin)
        do("result", values)
        connection.execute("COMMIT")
        connection.execute(begin)
        do("fence", values).fetchall()
        do("observed", values)
        do("tool_seconds", values)
        connection.execute("COMMIT")

    with closing(connection):
        yield write


def _values(target: Target, with_call: bool) -> dict[str, Any]:
    return {
        "group": target.fence.group,
        "held": target.fence.attempt,
        "episode": target.episode,
        "policy": target.policy_id,
        "number": next(target.numbers),
        "prompt": json.dumps([{"role": "tool", "content": "42", "name": "calculator"}]),
        "text": TEXT,
        "content_start": TEXT.index(STEP.message.content) + 1,
        "content_length": len(STEP.message.content),
        "thought_start": TEXT.index(STEP.message.thought) + 1,
        "thought_length": len(STEP.message.thought),
        "finish_reason": STEP.finish_reason,
        "prompt_tokens": len(STEP.prompt_ids),
        "sampled_tokens": len(STEP.sampled_ids),
        "logprob_sum": sum(STEP.behavior_logprobs),
        "prompt_ids": array("i", STEP.prompt_ids).tobytes(),
        "sampled_ids": array("i", STEP.sampled_ids).tobytes(),
        "behavior_logprobs": array("f", STEP.behavior_logprobs).tobytes(),
        "seconds": STEP.seconds,
        "arguments": json.dumps({"expression": "6*7"}),
        "calls": int(with_call),
        "now": datetime.now(UTC).isoformat(" "),
    }


def _connection(database: Database) -> Any:
    """A connection of the driver, set up as the store's are, that commits when it is told to."""
    fairy = database.engine.raw_connection()
    connection: Any = fairy.driver_connection
    fairy.detach()
    if not database.is_sqlite:
        connection.autocommit = True
    return connection

"""Conversion of single rows to values and back: packed tokens, messages, tasks and steps. No function here queries the
database.
"""

import hashlib
import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from agentrl.workflow.annotations import Annotation
from agentrl.workflow.errors import NotFoundError, StateError
from agentrl.workflow.runtime.shown_text import format_count
from agentrl.workflow.trajectory import (
    GRAMMAR,
    ROOT,
    WHOLE,
    CallRecord,
    Episode,
    Message,
    Step,
    StepRecord,
    Task,
    ToolCall,
    ToolResult,
    messages_of,
    storable,
)

if TYPE_CHECKING:
    from agentrl.workflow.rewards import Part

MAX_ID = 2**63 - 1
"""The largest integer that both databases can store."""
SORTED_CHARS = 40
"""The number of characters of a text by which lists are sorted."""


@dataclass(frozen=True, slots=True)
class RemovedTokens:
    """The name of a run whose tokens `agentrl gc --tokens` removed, and the time of the removal; None if its row is damaged."""

    run: str
    removed_at: datetime | None

    @property
    def sentence(self) -> str:
        when = f" on {self.removed_at:%Y-%m-%d}" if self.removed_at else ""
        return f"The tokens of run {self.run!r} were removed{when}."

    def error(self) -> StateError:
        """Return the error for a request that needs the tokens."""
        return StateError(self.sentence, f"Its texts, tool calls and rewards are still stored: agentrl episodes {self.run}")


def no_episode_error(episode: int) -> NotFoundError:
    """Return the error for an episode id that does not exist."""
    return NotFoundError(f"There is no episode {episode}.", "List them with `agentrl episodes RUN`.")


def no_step_error(episode: int, step: int, steps: int) -> NotFoundError:
    """Return the error for a step that does not exist in an episode with this number of steps."""
    return NotFoundError(
        f"Episode {episode} has {format_count(steps, 'step')}, counted from 0; there is no step {step}.",
        f"agentrl replay {episode}",
    )


def episode_value(row: Mapping[Any, Any], task: Task, steps: Sequence[Step]) -> Episode:
    """Build an episode from its row in `episodes`, its task and its steps."""
    episode = Episode(
        task=task,
        sample=row["sample"],
        steps=tuple(steps),
        status=row["status"],
        stop_reason=row["stop_reason"],
        reward=row["reward"],
        id=row["id"],
        error=row["error"],
        parent_id=row["parent_id"],
        fork_step=row["fork_step"] or 0,
        inherited=row["inherited_steps"],
        tainted=row["tainted"],
    )
    answer = next((step.message.content for step in steps if step.index == row["answer_step"]), row["final_answer"])
    if episode.status == "done" and storable(episode.final_answer) != answer:
        return replace(episode, answer=answer)
    return episode


SHARED = "shared"
"""A key in the stored prompt of a step. Its value is the number of messages that the prompt shares with its parent step and the
steps before it.
"""


def step_row(record: StepRecord, run: str, attempt: int, options: int | None = None) -> dict[str, Any]:
    """Return the row of a step for the table `steps`. `step_value` does the reverse. `attempt` is the attempt number of the
    step's episode. `options` is the id of the row in `request_options` with the request's tools and template options; None if
    the request has neither.
    """
    step, request, now, text = record.step, record.request, datetime.now(UTC), storable(record.text)
    answered = request is not None and bool(record.calls) and all(item.result for item in record.calls)
    return {
        "run": run,
        "episode_id": record.episode,
        "attempt": attempt,
        "number": step.index,
        "policy_id": record.policy_id,
        "prompt_step_id": None,
        "prompt": _prompt_rows(step, record.shared_messages),
        "text": text,
        **_part_columns("content", storable(step.message.content), text),
        **_part_columns("thought", storable(step.message.thought), text),
        "new_row": step.new_row,
        "chain": step.chain,
        "parent_step": None if step.parent == ROOT else step.parent,
        "shared_tokens": step.shared,
        "request_id": request.id if request else None,
        "request_hash": request.body_hash if request else None,
        "delivered": step.delivered,
        "replayed": record.replayed,
        "side_call": step.side_call,
        "asked": clean_tree(request.asked) or None if request else None,
        "options_id": options,
        "finish_reason": step.finish_reason,
        "prompt_tokens": len(step.prompt_ids),
        "sampled_tokens": len(step.sampled_ids),
        "logprob_sum": sum(value for value in step.behavior_logprobs if not math.isnan(value)),  # an import may not know them
        "generate_seconds": step.seconds,
        "sampled_at": now,
        "observed_at": now if answered else None,  # by an agent; the built-in loop observes in T2
    }


def _part_columns(name: str, part: str, text: str) -> dict[str, Any]:
    """Return the columns of a part of a step's text: its place in the text or, if the text does not contain it, the part."""
    start = text.find(part) if part else -1
    if start < 0:
        return {name: part, f"{name}_start": None, f"{name}_length": None}
    return {name: "", f"{name}_start": start + 1, f"{name}_length": len(part)}


def _part_of_text(row: Mapping[Any, Any], name: str) -> str:
    """Return a part of a step's text. `_part_columns` does the reverse."""
    start = row[f"{name}_start"]
    part: str = row[name] if start is None else row["text"][start - 1 : start - 1 + row[f"{name}_length"]]
    return part


def token_row(step: Step) -> dict[str, Any]:
    """Return the row of a step's tokens for the table `step_tokens`."""
    return {
        "prompt_ids": pack("i", step.prompt_ids),
        "sampled_ids": pack("i", step.sampled_ids),
        "behavior_logprobs": pack("f", step.behavior_logprobs),
    }


def hash_prompt(step: Mapping[str, Any], tokens: Mapping[str, Any]) -> str:
    """Return the hash of the prompt in a step's rows: of its messages and of their token ids."""
    return hashlib.sha256(json.dumps(step["prompt"]).encode() + b"\0" + tokens["prompt_ids"]).hexdigest()[:32]


def call_row(item: CallRecord, number: int, kind: str) -> dict[str, Any]:
    """Return the row of a tool call for the table `tool_calls`. A call of the kind `agent` is never sent to a worker. `number`
    is the position of the call in its step, counted from 0. `kind` is the kind of the call.
    """
    now = datetime.now(UTC)
    return {
        "call": number,
        "kind": kind,
        "tool": storable(item.call.name)[:128],
        "arguments": clean_tree(dict(item.call.arguments)),
        "loose": item.call.loose,
        "effects": item.effects,
        "status": "done" if item.result else "pending",
        "sends": 0 if item.result or kind == "agent" else 1,
        "result": storable(item.result.content) if item.result else None,
        "error_class": item.result.error_class if item.result else None,
        "created_at": now,
        "finished_at": now if item.result else None,
    }


def step_value(row: Mapping[Any, Any], version: int, calls: Sequence[Any], before: Sequence[Step] = ()) -> Step:
    """Build a step from its row in `steps` with its tokens, the version that sampled it, and the rows of its calls. `before` is
    the earlier steps of the same attempt, in order. The step's prompt may share their messages. If the columns of the tokens
    are NULL, the step has the right numbers of tokens, but each id and logprob is 0.
    """
    tool_calls = tuple(
        ToolCall(
            *(call["tool"], call["arguments"], call["result"] if call["error_class"] == "parse_error" else None),
            loose=bool(call["loose"]),
        )
        for call in calls
    )
    prompt_ids, sampled_ids, logprobs = _tokens(row)
    results = tuple(ToolResult(call["result"] or "", call["error_class"], call["seconds"]) for call in calls)
    return Step(
        index=row["number"],
        prompt=_prompt(row, before),
        prompt_ids=prompt_ids,
        sampled_ids=sampled_ids,
        behavior_logprobs=logprobs,
        finish_reason=row["finish_reason"],
        message=Message("assistant", _part_of_text(row, "content"), _part_of_text(row, "thought"), tool_calls),
        policy_version=version,
        seconds=row["generate_seconds"],
        results=results if row["observed_at"] is not None else None,
        new_row=row["new_row"],
        chain=row["chain"],
        parent=ROOT if row["parent_step"] is None else row["parent_step"],
        shared=row["shared_tokens"],
        delivered=row["delivered"],
        side_call=row["side_call"],
        grammar=(row["asked"] or {}).get(GRAMMAR, {}).get("sha256", ""),
        guided=tuple((row["asked"] or {}).get(GRAMMAR, {}).get("guided", ())),
        draw=(row["asked"] or {}).get("draw"),
    )


def _tokens(row: Mapping[Any, Any]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]:
    """Return the new prompt ids, the sampled ids and their logprobs."""
    if row["prompt_ids"] is None:
        return (0,) * row["prompt_tokens"], (0,) * row["sampled_tokens"], (0.0,) * row["sampled_tokens"]
    prompt_ids, sampled_ids = (tuple(unpack("i", row[name])) for name in ("prompt_ids", "sampled_ids"))
    return prompt_ids, sampled_ids, tuple(unpack("f", row["behavior_logprobs"]))


def _prompt(row: Mapping[Any, Any], before: Sequence[Step]) -> tuple[Message, ...]:
    """Return the messages of a step's prompt. Those shared with the parent are in the steps `before`."""
    messages = row["prompt"]
    if not messages or SHARED not in messages[0]:
        return tuple(message_value(message) for message in messages)
    shared = messages_of(before, row["parent_step"])[: messages[0][SHARED]]
    return (*shared, *(message_value(message) for message in messages[1:]))


def _prompt_rows(step: Step, shared: int = 0) -> list[dict[str, Any]]:
    """Return a step's prompt for its JSON column: the number of `shared` messages, then the others."""
    head: list[dict[str, Any]] = [{SHARED: shared}] if shared else []
    return head + [message_row(message) for message in step.prompt[shared:]]


def task_value(row: Mapping[Any, Any]) -> Task:
    """Build a task from a row with the columns of `tasks`."""
    return Task(row["key"], tuple(message_value(m) for m in row["messages"]), row["reference"], row["metadata"])


def message_value(row: Mapping[str, Any]) -> Message:
    """Build a message from its JSON value."""
    calls = tuple(
        ToolCall(call["name"], call["arguments"], call.get("error"), call.get("loose", False))
        for call in row.get("tool_calls", ())
    )
    return Message(row["role"], row["content"], row.get("thought", ""), calls, row.get("name", ""))


def message_row(message: Message) -> dict[str, Any]:
    """Return the JSON value of a message."""
    row: dict[str, Any] = {"role": message.role, "content": storable(message.content)}
    if message.thought:
        row["thought"] = storable(message.thought)
    if message.tool_calls:
        row["tool_calls"] = [
            {"name": storable(call.name), "arguments": clean_tree(call.arguments)}
            | ({"loose": True} if call.loose else {})
            | ({} if call.error is None else {"error": storable(call.error)})
            for call in message.tool_calls
        ]
    return row | {"name": message.name} if message.name else row


def annotation_value(row: Mapping[Any, Any]) -> Annotation:
    fields = (row["kind"], row["name"], row["data"], row["step"], row["seconds"], row["source"])
    return Annotation(row["emission"], *fields)


def reward_rows(parts: Mapping[str, "Part"]) -> list[dict[str, Any]]:
    """Return a row with the keys `part`, `step` and `value` for each value of the reward parts."""
    return [
        {"part": name, "step": step, "value": value}
        for name, part in parts.items()
        for step, value in ([(WHOLE, part)] if isinstance(part, float) else enumerate(part))
    ]


def part_values(rows: Iterable[Any]) -> dict[str, "Part"]:
    """Build the reward parts of an episode from its rows in one reward set. The parts have the order of the rows."""
    parts: dict[str, Part] = {}
    for row in rows:
        before = parts.get(row.part, ())
        parts[row.part] = row.value if row.step == WHOLE else (*(before if isinstance(before, tuple) else ()), row.value)
    return parts


def clean_tree(value: Any) -> Any:
    """Return a copy of the JSON value in which every database can store the strings and numbers."""
    if isinstance(value, str):
        return storable(value)
    if isinstance(value, Mapping):
        return {storable(str(key)): clean_tree(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, list | tuple):
        return [clean_tree(item) for item in value]
    return value


def pack(kind: str, values: Iterable[float]) -> bytes:
    """Pack values as little-endian int32 (`i`) or float32 (`f`), 4 bytes each."""
    numbers = tuple(values)
    return struct.pack(f"<{len(numbers)}{kind}", *numbers)


def unpack(kind: str, blob: bytes) -> list[Any]:
    """Return the values in a blob that `pack` made."""
    return list(struct.unpack(f"<{len(blob) // 4}{kind}", blob))

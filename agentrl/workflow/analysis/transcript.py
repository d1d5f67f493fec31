"""An episode as a transcript: its messages, tool calls with their durations, rewards, and the policy's logprobs."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import groupby, zip_longest
from math import isnan
from typing import Any

from agentrl.workflow.annotations import Annotation
from agentrl.workflow.runtime.shown_text import Line, cell, format_count, one_line
from agentrl.workflow.token_chains import SIDE_CALL, UNREAD, chains_of, reasons_not_to_train
from agentrl.workflow.trajectory import ROOT, Episode, Step, ToolCall, ToolResult

STYLES = {"system": "dim", "user": "green", "assistant": "", "tool": "blue", "prompt": "green", "prompt_ids": "dim"}

TokenDecoder = Callable[[Sequence[int]], Sequence[str]]
"""A function that returns the text of each of these tokens."""
MAX_TOKEN_CHARS = 80
_TOKEN_FIELDS = ("prompt_ids", "sampled_ids", "behavior_logprobs")


def transcript_lines(record: Any, only: int | None = None, decode: TokenDecoder | None = None) -> Iterator[Line]:
    """Yield the lines of an episode's transcript.

    Args:
        record: the episode, as `episode_rows.find_episode` returns it.
        only: the index of the step to yield; None: all steps.
        decode: returns the texts of tokens; None if their tokenizer is not available.
    """
    yield from _head_lines(record.row)
    if record.removed:
        yield f"  {record.removed.sentence}", "yellow"
    for name, meaning in (
        ("replayed", "copied from the record of a lost attempt"),
        ("side_call", "side calls, which do not train"),
    ):
        if number := sum(bool(step[name]) for step in record.steps):
            yield f"  {number} of {format_count(len(record.steps), 'step')} are {meaning}", "yellow"
    yield from _tree_lines(record.episode)
    if only is None:
        yield from said_lines([annotation for annotation in record.episode.annotations if annotation.step is None])
    idle = reasons_not_to_train(record.episode)
    for step in record.episode.steps:
        if only in (None, step.index):
            calls = [call for call in record.calls if call["step"] == step.index]
            before = record.episode.steps[step.parent].results if step.parent not in (None, ROOT) else None
            logprobs = _mean_text(record.steps[step.index]["mean_logprob"]) if record.removed else _logprob_text(step, decode)
            seen = {result.content for result in before or ()}
            yield from _step_lines(step, record.steps[step.index], calls, seen, logprobs)
            if (why := idle.get(step.index)) in (UNREAD, SIDE_CALL):
                yield f"  does not train: {why}", "yellow"
            yield from said_lines([annotation for annotation in record.episode.annotations if annotation.step == step.index])
            for part in record.rewards:
                if part["step"] == step.index and part["reward_set"] == "default":
                    yield f"  earned {part['part']}: {cell(part['value'])} x {cell(part['weight'])}", "green"
    yield from _end_lines(record)


def conversation_lines(steps: Sequence[Step], of_agent: bool = False) -> Iterator[Line]:
    """Yield the transcript of steps that are not in a database. `of_agent` is True if an agent ran the steps' tool calls
    itself.
    """
    earlier_results: set[str] = set()
    for step in steps:
        row = {"policy_version": step.policy_version, "generate_seconds": step.seconds}
        pairs = zip_longest(step.message.tool_calls, step.results or ())
        yield from _step_lines(
            step,
            row,
            [_call_row(index, *pair, "agent" if of_agent else "call") for index, pair in enumerate(pairs)],
            earlier_results,
            _logprob_text(step),
        )
        earlier_results = {result.content for result in step.results or ()}
    prompt, sampled = (sum(len(getattr(step, name)) for step in steps) for name in ("prompt_ids", "sampled_ids"))
    yield "", ""
    yield f"{format_count(len(steps), 'turn')}, {prompt} + {format_count(sampled, 'token')}", "dim"


def _call_row(index: int, call: ToolCall, result: ToolResult | None, kind: str) -> dict[str, Any]:
    """Return a call that was made in this process as a row in the format of the database."""
    outcome = result or ToolResult("")
    return {
        **{"call": index, "kind": kind, "tool": call.name, "arguments": call.arguments, "loose": call.loose},
        **{"attempts": 1, "queue_seconds": None},
        **{
            "status": "not made",
            "result": result and outcome.content,
            "error_class": outcome.error_class,
            "seconds": outcome.seconds,
        },
        **{"sandbox": outcome.exit and outcome.exit.sandbox, "exit_code": outcome.exit and outcome.exit.code},
        "cpu_seconds": outcome.cpu_seconds or 0.0,
    }


def as_document(record: Any, only: int | None = None) -> dict[str, Any]:
    """Return the episode as one value for JSON, with the exact token ids and logprobs; None instead of them if they were
    removed.
    """
    chosen = [step for step in record.episode.steps if only in (None, step.index)]
    return {
        "episode": record.row,
        "tokens_removed_at": record.removed.removed_at if record.removed else None,
        "agent_error": record.agent_error,
        "agent_output": record.agent_output,
        "rewards": [{key: row[key] for key in ("part", "step", "value", "weight", "reward_set")} for row in record.rewards],
        "annotations": [asdict(annotation) for annotation in record.episode.annotations if only in (None, annotation.step)],
        "grades": record.grades,
        "steps": [
            {
                **record.steps[step.index],
                "prompt": [{"role": m.role, "content": m.content, "name": m.name} for m in step.prompt],
                "calls": [call for call in record.calls if call["step"] == step.index],
                **{name: None if record.removed else getattr(step, name) for name in _TOKEN_FIELDS},
            }
            for step in chosen
        ],
    }


def _head_lines(row: Any) -> Iterator[Line]:
    yield (
        f"episode {row['id']}  of {row['run']}, iteration {row['iteration']}, task {row['task']}, sample {row['sample']}",
        "bold",
    )
    if row["attempt"]:
        yield f"  attempt {row['attempt']}: the episode was restarted; steps of earlier attempts are kept", "yellow"
    if row["parent_id"] is not None:
        yield (
            f"  forked from episode {row['parent_id']} at step {row['fork_step']}; earlier steps are its parent's",
            "yellow",
        )
    if row["tainted"]:
        yield "  tainted: a tool gave another output when its state was rebuilt", "yellow"


def _tree_lines(episode: Episode) -> Iterator[Line]:
    chains = chains_of(episode)
    if len(chains) < 2:
        return
    depths: dict[int, int] = {ROOT: 0}
    yield "", ""
    yield f"{len(chains)} chains", "bold"
    for steps in chains:
        first = steps[0]
        parent = ROOT if first.parent is None else first.parent
        depth = depths[parent]
        depths |= {step.index: depth + 1 for step in steps}
        begins = ""
        if parent != ROOT:
            begins = f", from step {parent}" + (
                "" if first.shared is None else f" ({format_count(first.shared, 'token')} shared)"
            )
        why = f": {one_line(first.new_row, 200)}" if first.new_row else ""
        numbers = ", ".join(f"{step.index}{'' if step.delivered else ' (not delivered)'}" for step in steps)
        word = "step" if len(steps) == 1 else "steps"
        yield f"  {'  ' * min(depth, 20)}chain {first.chain}: {word} {numbers}{begins}{why}", ""


def _step_lines(step: Step, row: Any, calls: list[Any], seen_results: set[str], logprobs: str) -> Iterator[Line]:
    yield "", ""
    yield (
        f"--- step {step.index}  policy v{row['policy_version']}, {cell(row['generate_seconds'])} s, {_token_text(step)}",
        "bold",
    )
    if not step.delivered:
        yield "  the agent did not receive all of it", "yellow"
    if step.new_row:
        yield f"  chain {step.chain} begins here: {one_line(step.new_row, 1000)}", "yellow"
    elif step.chain:
        yield f"  chain {step.chain}, after step {step.parent}", "dim"
    for message in step.prompt:
        if message.role != "tool":
            yield from _message_lines(message.role, message.content, STYLES[message.role])
        elif message.content not in seen_results:
            yield from _message_lines("tool (edited)", message.content, STYLES["tool"])
    if step.message.thought:
        yield from _message_lines("thought", step.message.thought, "italic dim")
    if step.message.content or not calls:
        yield from _message_lines("assistant", step.message.content, STYLES["assistant"])
    for call in calls:
        yield from _call_lines(call)
    yield f"  {logprobs}", "dim"


def said_lines(annotations: Sequence[Annotation]) -> Iterator[Line]:
    """Yield the annotations, one per line."""
    for annotation in annotations:
        took = "" if annotation.seconds is None else f" ({annotation.seconds:.3f} s)"
        data = json.dumps(dict(annotation.data), ensure_ascii=False) if annotation.data else ""
        name = f" {one_line(annotation.name, 100)}" if annotation.name else ""
        yield f"  {annotation.source} said: {annotation.kind}{name}{took}  {one_line(data, 1000)}".rstrip(), "magenta"


def _message_lines(who: str, text: str, style: str) -> Iterator[Line]:
    yield f"  {who}:", "bold"
    yield _indent(text or "(nothing)"), style


def _call_lines(call: Any) -> Iterator[Line]:
    loose = " (bare JSON)" if call["loose"] else ""
    yield f"  call {call['call']}: {call['tool'] or '(unreadable)'}{loose}", "bold blue"
    for name, value in call["arguments"].items():
        yield _indent(f"{name}: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"), "blue"
    error = f"{call['error_class']}, " if call["error_class"] else ""
    waited = f", {call['queue_seconds']:.3f} s in the queue" if call["queue_seconds"] is not None else ""
    agents = call["kind"] == "agent"
    seen = "as the agent reported it" if agents else f"{call['seconds']:.3f} s{_sandbox_note(call)}{waited}"
    if call["result"] is None:
        untold = "no later request has its result" if agents else f"{call['status']}: no result yet"
        yield f"    {untold}", "yellow"
        return
    yield f"  result ({error}{seen}):", "red" if error else "blue"
    yield _indent(call["result"]), "red" if error else "blue"


def _sandbox_note(call: Any) -> str:
    """Return, as text, the processor time and the exit code of a call in its sandbox, and how often the call was sent."""
    code = f", exit code {call['exit_code']}" if call["exit_code"] else ""
    seen = f", {call['cpu_seconds']:.3f} s of processor time in {call['sandbox']}{code}" if call["sandbox"] else ""
    return seen + (f", sent {call['attempts']} times" if call["attempts"] > 1 else "")


def _end_lines(record: Any) -> Iterator[Line]:
    row = record.row
    yield "", ""
    outcome = row["stop_reason"] or row["error_class"] or "has not ended"
    yield f"{row['status']} ({outcome})  reward {cell(row['reward'])}, advantage {cell(row['advantage'])}", "bold"
    if row["status"] == "done" and record.agent_error:
        yield f"  the agent ended with: {one_line(record.agent_error, 1000)}", "red"
    elif row["error"]:
        yield f"  {one_line(row['error'], 1000)}", "red"
    if record.agent_output.strip():
        yield "  the agent printed:", "bold"
        yield _indent(record.agent_output.strip()), "dim"
    for grade in record.grades:
        verdict = grade["status"] if grade["result"] is None else f"{one_line(grade['result'], 200)} ({grade['seconds']:.3f} s)"
        yield f"  judged by {grade['tool']}: {verdict}", "red" if grade["error_class"] else ""
    for (chosen, name), rows in groupby(record.rewards, lambda row: (row["reward_set"], row["part"])):
        yield f"  {name}: {_format_part(list(rows))}" + ("" if chosen == "default" else f" (reward set {chosen})"), ""
    if row["status"] == "done":  # only done episodes have a recorded final answer
        yield f"  answer:    {one_line(row['final_answer'], 400) or '(none)'}", ""
    yield f"  reference: {one_line(row['reference'], 400)}", ""
    calls = f"{format_count(row['tool_calls'], 'tool call')} ({format_count(row['tool_errors'], 'error')})"
    yield (
        f"  {format_count(row['steps'], 'step')}, {row['prompt_tokens']} + {format_count(row['sampled_tokens'], 'token')}, "
        f"{calls}, sampling {row['generate_seconds']:.2f} s, tools {row['tool_seconds']:.3f} s",
        "dim",
    )


def _format_part(rows: list[Any]) -> str:
    by_steps = "" if rows[0]["step"] is None else f" (over {format_count(len(rows), 'step')})"
    return f"{cell(sum(row['value'] for row in rows))} x {cell(rows[0]['weight'])}{by_steps}"


def _token_text(step: Step) -> str:
    cut = ", cut at the limit" if step.finish_reason == "length" else ""
    return f"{len(step.prompt_ids)} new + {len(step.sampled_ids)} sampled tokens{cut}"


def _mean_text(mean: float | None) -> str:
    return "logprobs: none" if mean is None else f"logprobs: mean {mean:.3f}"


def _logprob_text(step: Step, decode: TokenDecoder | None = None) -> str:
    if not step.behavior_logprobs:
        return "logprobs: none"
    values = step.behavior_logprobs
    if isnan(values[0]):
        return "logprobs: not known; the tokens come from the template"
    least = min(range(len(values)), key=values.__getitem__)
    mean = sum(values) / len(values)
    text = f", {one_line(repr(decode(step.sampled_ids)[least]), MAX_TOKEN_CHARS)}" if decode else ""
    return f"logprobs: mean {mean:.3f}, lowest {values[least]:.3f} at token {least} (id {step.sampled_ids[least]}{text})"


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())

"""The problems of a run or an update, as sentences, each with a command that helps. The web page and the terminal show the same
sentences.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.workflow.runtime.shown_text import cell, format_count, one_line

Row = Mapping[str, Any]
MAX_CLIPPED, MAX_OUTSIDE, LEAST_SAMPLE = 0.3, 0.1, 0.5
MAX_DIFFERENCE = 0.1
MAX_RATIO, LEAST_RATIO = 1.5, 0.67
MAX_FLAT, MAX_TRUNCATED, MAX_FAILED_CALLS = 0.5, 0.25, 0.25
MAX_ERROR_CHARS = 300
FLAT_ITERATIONS = 3
"""The number of successive iterations without different rewards in any group, after which a reason is shown."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """A problem: a sentence that describes it, and the command that helps; `command` is empty if no command helps."""

    text: str
    command: str = ""


def list_failures(failure: Row, agents: Row, run: str) -> list[Trouble]:
    """Return why episodes failed. `failure` and `agents` are the results of `find_most_frequent_failure` and of
    `find_most_frequent_agent_error`.
    """
    troubles = []
    if failure:
        failed, error = format_count(failure["failed"], "episode"), one_line(failure["error"], MAX_ERROR_CHARS)
        text = f"{failed} failed, {failure['episodes']} of them with: {error}"
        troubles.append(Trouble(text, f"agentrl episodes {run} --status {failure['status']}"))
    if agents:
        ended, error = format_count(agents["ended"], "episode"), one_line(agents["error"], MAX_ERROR_CHARS)
        text = f"{ended} ended with an agent error, {agents['episodes']} with: {error}"
        troubles.append(Trouble(text, f"agentrl episodes {run} --stop-reason agent_error"))
    return troubles


def has_no_signal(run: Row, iterations: Sequence[Row]) -> bool:
    """Return whether the newest FLAT_ITERATIONS of the run's finished `iterations` had only groups with equal rewards."""
    newest = iterations[-FLAT_ITERATIONS:]
    flat = len(newest) == FLAT_ITERATIONS and all(0 < row["groups"] <= row["flat_groups"] for row in newest)
    return run["kind"] == "train" and flat


def list_flat_lines(facts: Row) -> list[str]:
    """Return lines that say why there was no training signal. `facts` is the result of `describe_flat_rewards`."""
    from agentrl.workflow.algorithms import find_gradient

    if not facts["episodes"] or not find_gradient(facts["algorithm"]).needs_group:
        return []
    lines = [f"The last {FLAT_ITERATIONS} iterations had no training signal: all rewards are equal within each group."]
    for part in facts["parts"]:
        lowest, highest = cell(part["least"]), cell(part["most"])
        lines.append(f"  {part['part']}: {lowest if lowest == highest else f'{lowest} to {highest}'}")
    lines.append(
        f"  of {facts['episodes']} episodes {facts['called']} made a tool call, {facts['unreadable']} an unreadable one"
    )
    example = facts["example"]
    lines.append(f"  example answer: {one_line(example['final_answer'], 100)!r} (agentrl replay {example['id']})")
    tries = [_more_variance(facts["parts"]), "raise --group-size and --temperature"]
    tries += ["--tool-format, see the plan of `agentrl submit --dry-run`"] if facts["unreadable"] else []
    return [*lines, f"  Try: {'; '.join(tries)}"]


def _more_variance(parts: Sequence[Row]) -> str:
    """Return advice on how to get different rewards, based on the present values of the reward parts."""
    if all(part["most"] <= 0 for part in parts):
        return "train on demonstrations first (agentrl sft), or try easier tasks or another model"
    return "harder tasks" if all(part["least"] >= 1 for part in parts) else "a reward with more levels"


def list_update_troubles(run: str, iteration: Row, updates: Sequence[Row], groups: int, flat: int) -> list[Trouble]:
    """Return the problems of an iteration: those of its update (the ratio, clipped tokens, the mismatch of sampler and trainer,
    the effective sample size, the gradient) and those of its episodes (equal rewards, failed tool calls). `groups` is the
    number of groups, and `flat` the number of groups with equal rewards. `run` is the run's name in the commands.
    """
    troubles = []
    if iteration["skipped"]:
        troubles.append(Trouble(f"The update made no step: {iteration['skipped']}."))
    if groups and flat / groups > MAX_FLAT:
        text = f"{flat} of {groups} groups have equal rewards, so they teach nothing. Try other tasks, or larger groups."
        troubles.append(Trouble(text, f"agentrl episodes {run} --iteration {iteration['iteration']} --fate no_variance"))
    calls, errors = iteration["tool_calls"], iteration["tool_errors"]
    if calls and errors / calls > MAX_FAILED_CALLS:
        command = f"agentrl episodes {run} --iteration {iteration['iteration']} --tool-errors 1"
        troubles.append(Trouble(f"{errors} of {format_count(calls, 'tool call')} failed.", command))
    for name, (is_off, text) in _RULES.items():
        values = [row[name] for row in updates if row[name] is not None and is_off(row[name])]
        if values:
            troubles.append(Trouble(text.format(cell(max(values, key=lambda value: abs(value - 1))))))
    return troubles


def _over(limit: float) -> Any:
    return lambda value: value > limit


_RULES: Mapping[str, tuple[Any, str]] = {
    "clip_fraction": (
        _over(MAX_CLIPPED),
        "{} of the tokens were clipped: the steps are too large. Lower the learning rate, or make fewer epochs of an update.",
    ),
    "ratio": (
        lambda value: not LEAST_RATIO <= value <= MAX_RATIO,
        "The mean ratio of the new to the old policy is {}: the update left the policy that sampled far behind.",
    ),
    "sampler_difference_mean": (
        _over(MAX_DIFFERENCE),
        "The logprobs of the sampler and the trainer differ by {} on average: their numerics or weights differ.",
    ),
    "importance_outside": (
        _over(MAX_OUTSIDE),
        "For {} of the tokens, the ratio of trainer to sampler is outside of 0.9 to 1.1: the episodes are off-policy.",
    ),
    "effective_sample_size": (
        lambda value: value < LEAST_SAMPLE,
        "The effective sample size is {} of the tokens: few tokens carry the update.",
    ),
    "grad_norm": (
        lambda value: not 0 < value < float("inf"),
        "The gradient's norm is {}: the update learned nothing.",
    ),
}
"""The rules of an update's health, by the column of `updates`: whether a value is off, and the sentence."""

"""The health of a run and of an update: facts and problems as sentences, each problem with a command that helps. The web page
and the terminal show the same sentences. The limits are defined only here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.workflow.runtime.shown_text import cell, format_count, one_line

Row = Mapping[str, Any]
MAX_CLIPPED, MAX_OUTSIDE, LEAST_SAMPLE = 0.3, 0.1, 0.5
MAX_DIFFERENCE = 0.1
MAX_RATIO, LEAST_RATIO = 1.5, 0.67
MAX_FLAT, MAX_SOLVED, MAX_FAILED_CALLS = 0.5, 0.5, 0.25
MAX_STALENESS = 1
MAX_ERROR_CHARS = 300
HARDER_TASKS = "Harder tasks would teach more."
FLAT_ITERATIONS = 3
"""The number of successive iterations without different rewards in any group, after which a reason is shown."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """A remark about a run: a sentence, and the command that helps; `command` is empty if no command helps. `is_note` is True
    if nothing is wrong.
    """

    text: str
    command: str = ""
    is_note: bool = False


@dataclass(frozen=True, slots=True)
class HealthFact:
    """A short fact about an iteration. `is_off`: the value is outside the limits."""

    text: str
    is_off: bool = False


def compares_groups(algorithm: str | None) -> bool:
    """Return whether this is a built-in algorithm that compares the episodes of a group. Then a group with equal rewards
    teaches nothing.
    """
    from agentrl.workflow.algorithms import gradients

    built_in = gradients().get(algorithm or "")
    return built_in is not None and built_in.needs_group


def list_failures(failure: Row, agents: Row, run: str) -> list[Trouble]:
    """Return why episodes failed. `failure` and `agents` are the results of `find_most_frequent_failure` and of
    `find_most_frequent_agent_error`.
    """
    troubles = []
    if failure:
        failed, error = format_count(failure["failed"], "episode"), one_line(failure["error"], MAX_ERROR_CHARS)
        text = f"{failed} failed, {_part(failure['episodes'], failure['failed'])} with: {error}"
        troubles.append(Trouble(text, f"agentrl episodes {run} --status {failure['status']}"))
    if agents:
        ended, error = format_count(agents["ended"], "episode"), one_line(agents["error"], MAX_ERROR_CHARS)
        text = f"{ended} ended with an agent error, {_part(agents['episodes'], agents['ended'])} with: {error}"
        troubles.append(Trouble(text, f"agentrl episodes {run} --stop-reason agent_error"))
    return troubles


def _part(count: int, total: int) -> str:
    return "all" if count == total else f"{count} of them"


def has_no_signal(run: Row, iterations: Sequence[Row]) -> bool:
    """Return whether the newest FLAT_ITERATIONS of the run's finished `iterations` had only groups with equal rewards."""
    newest = iterations[-FLAT_ITERATIONS:]
    flat = len(newest) == FLAT_ITERATIONS and all(0 < row["groups"] <= row["flat_groups"] for row in newest)
    return run["kind"] == "train" and flat


def is_all_right(facts: Row) -> bool:
    """Return whether all episodes are right. `facts` is the result of `describe_flat_rewards`."""
    return bool(facts["right_episodes"] == facts["episodes"])


def list_flat_lines(facts: Row) -> list[str]:
    """Return lines that say why there was no training signal. `facts` is the result of `describe_flat_rewards`."""
    if not facts["episodes"] or not compares_groups(facts["algorithm"]):
        return []
    if is_all_right(facts):
        return [f"The last {FLAT_ITERATIONS} iterations had no training signal: every episode is right. {HARDER_TASKS}"]
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
    return "a reward with more levels"


def describe_groups(groups: int, flat: int, right: int, iteration: Row) -> str:
    """Return how many groups an iteration has, and how many of them teach nothing, as text.

    Args:
        groups: the number of all groups.
        flat, right: the number of groups with equal rewards, and the number of these in which an episode is right.
        iteration: a row of v_iterations.
    """
    others = ((iteration["dropped_groups"], "dropped"), (iteration["more_groups"], "additional"))
    return ", ".join([str(groups), *_equal_parts(flat, right), *(f"{count} {what}" for count, what in others if count)])


def _equal_parts(flat: int, right: int) -> list[str]:
    parts = ((right, "solved with equal rewards"), (flat - right, "with equal rewards"))
    return [f"{count} {what}" for count, what in parts if count]


def list_health_facts(iteration: Row, right_groups: int, algorithm: str | None) -> list[HealthFact]:
    """Return the facts about an iteration that show whether its run is healthy.

    Args:
        iteration: a row of v_iterations.
        right_groups: the number of groups with equal rewards in which an episode is right.
        algorithm: the run's algorithm; None for a run that does not train.
    """
    facts, groups = [], iteration["groups"]
    equal = iteration["flat_groups"] - right_groups
    if groups and compares_groups(algorithm):
        different = f"{groups - iteration['flat_groups']} of {format_count(groups, 'group')} with different rewards"
        parts = [different, *_equal_parts(iteration["flat_groups"], right_groups)]
        facts.append(HealthFact(", ".join(parts), equal / groups > MAX_FLAT))
    if calls := iteration["tool_calls"]:
        errors = iteration["tool_errors"]
        facts.append(HealthFact(f"{errors} of {format_count(calls, 'tool call')} failed", errors / calls > MAX_FAILED_CALLS))
    usable, episodes = iteration["trainable"], iteration["episodes"]
    facts.append(HealthFact(f"{usable} of {format_count(episodes, 'episode')} usable", usable < episodes))
    if (staleness := iteration["staleness"]) is not None:
        text = f"sampled {format_count(staleness, 'version')} behind" if staleness else "sampled by the newest version"
        facts.append(HealthFact(text, staleness > MAX_STALENESS))
    seconds = {name: iteration[f"{name}_seconds"] for name in ("rollout", "update")}
    if times := ", ".join(f"{name} {value:.3g} s" for name, value in seconds.items() if value):
        facts.append(HealthFact(times))
    if iteration["skipped"]:
        facts.append(HealthFact(f"update skipped: {iteration['skipped']}", is_off=True))
    return facts


def list_update_troubles(
    run: str, iteration: Row, updates: Sequence[Row], groups: Sequence[Row], algorithm: str | None
) -> list[Trouble]:
    """Return the problems of an iteration: those of its update (the ratio, clipped tokens, the mismatch of sampler and trainer,
    the effective sample size, the gradient) and those of its episodes (equal rewards, failed tool calls).

    Args:
        run: the run's name in the commands.
        groups: of each group whether its rewards are equal (`flat`), and whether an episode is right (`solved`).
        algorithm: the run's algorithm; None for a run that does not train.
    """
    troubles = []
    if iteration["skipped"]:
        troubles.append(Trouble(f"The update made no step: {iteration['skipped']}."))
    flat = [group for group in groups if group["flat"]] if compares_groups(algorithm) else []
    right = sum(group["solved"] for group in flat)
    if groups and (equal := len(flat) - right) / len(groups) > MAX_FLAT:
        text = f"{equal} of {len(groups)} groups have equal rewards and no right episode, so they teach nothing."
        command = f"agentrl episodes {run} --iteration {iteration['iteration']} --fate no_variance"
        troubles.append(Trouble(f"{text} Try easier tasks, or larger groups.", command))
    if groups and right / len(groups) > MAX_SOLVED:
        text = f"{right} of {len(groups)} groups are solved and have equal rewards, so they teach nothing more. {HARDER_TASKS}"
        troubles.append(Trouble(text, is_note=True))
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

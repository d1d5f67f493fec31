"""The health of a run and of an update: facts and problems as sentences, each problem with a command that helps. The web page
and the terminal show the same sentences. The limits are defined only here.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.workflow.runtime.shown_text import cell, format_count, one_line
from agentrl.workflow.stats.group_variance import NO_ADVANTAGE, NO_GROUP_VARIES, TOO_FEW_EPISODES

Row = Mapping[str, Any]
MAX_CLIPPED, MAX_OUTSIDE, LEAST_SAMPLE = 0.3, 0.1, 0.5
MAX_DIFFERENCE = 0.1
MAX_RATIO, LEAST_RATIO = 1.5, 0.67
MAX_FLAT, MAX_SOLVED, MAX_FAILED_CALLS = 0.5, 0.5, 0.25
MAX_UNUSABLE = 0.25
"""The largest usual share of unusable episodes. Single episodes fail in healthy runs, for example if a worker is lost. Above a
quarter, the cause is mostly the env, the agent or a reward, and the usable episodes no longer represent the tasks.
"""
MAX_ERROR_CHARS = 300
SAME_TASKS_SHARE = 0.5
"""The least share of a change of the mean reward that the same tasks must explain, to call it a change of the same tasks."""
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


@dataclass(frozen=True, slots=True)
class GroupCounts:
    """The number of groups of an iteration, of those with equal rewards (`flat`), and of those of these in which an episode is
    right (`right`).
    """

    groups: int = 0
    flat: int = 0
    right: int = 0


@dataclass(frozen=True, slots=True)
class IterationRecord:
    """A finished iteration: its row of v_iterations, its rows of v_updates, and the counts of its groups."""

    row: Row
    updates: Sequence[Row]
    counts: GroupCounts


def compares_groups(algorithm: str | None) -> bool:
    """Return whether this is a built-in algorithm that compares the episodes of a group. Then a group with equal rewards
    teaches nothing.
    """
    from agentrl.workflow.algorithms import gradients

    built_in = gradients().get(algorithm or "")
    return built_in is not None and built_in.needs_group


def find_failures(failure: Row, agents: Row, done: int, run: str) -> dict[str, Trouble]:
    """Return why episodes failed, by subject; as notes if so few failed that nothing is wrong.

    Args:
        failure, agents: the results of `find_most_frequent_failure` and of `find_most_frequent_agent_error`.
        done: the number of the run's done episodes. They include those that ended with an agent error.
        run: the run's name in the commands.
    """
    troubles = {}
    if failure:
        failed, error = format_count(failure["failed"], "episode"), one_line(failure["error"], MAX_ERROR_CHARS)
        text = f"{failed} failed, {_part(failure['episodes'], failure['failed'])} with: {error}"
        is_note = not _is_too_many(failure["failed"], failure["failed"] + done)
        troubles["episodes"] = Trouble(text, f"agentrl episodes {run} --status {failure['status']}", is_note)
    if agents:
        ended, error = format_count(agents["ended"], "episode"), one_line(agents["error"], MAX_ERROR_CHARS)
        text = f"{ended} ended with an agent error, {_part(agents['episodes'], agents['ended'])} with: {error}"
        is_note = not _is_too_many(agents["ended"], done)
        troubles["agents"] = Trouble(text, f"agentrl episodes {run} --stop-reason agent_error", is_note)
    return troubles


def _is_too_many(unusable: int, episodes: int) -> bool:
    return unusable > MAX_UNUSABLE * episodes


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
    episodes = format_count(facts["episodes"], "episode")
    lines.append(f"  of {episodes} {facts['called']} made a tool call, {facts['unreadable']} an unreadable one")
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


def describe_groups(counts: GroupCounts, iteration: Row) -> str:
    """Return how many groups an iteration has, and how many of them teach nothing, as text. `iteration` is a row of
    v_iterations.
    """
    others = ((iteration["dropped_groups"], "dropped"), (iteration["more_groups"], "additional"))
    more = (f"{count} {what}" for count, what in others if count)
    return ", ".join([str(counts.groups), *_equal_parts(counts.flat, counts.right), *more])


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
    return [*_iterate_facts(iteration, right_groups, algorithm)]


def _iterate_facts(iteration: Row, right_groups: int, algorithm: str | None) -> Iterator[HealthFact]:
    groups, equal = iteration["groups"], iteration["flat_groups"] - right_groups
    if groups and compares_groups(algorithm):
        different = f"{groups - iteration['flat_groups']} of {format_count(groups, 'group')} with different rewards"
        parts = [different, *_equal_parts(iteration["flat_groups"], right_groups)]
        yield HealthFact(", ".join(parts), equal / groups > MAX_FLAT)
    if calls := iteration["tool_calls"]:
        errors = iteration["tool_errors"]
        yield HealthFact(f"{errors} of {format_count(calls, 'tool call')} failed", errors / calls > MAX_FAILED_CALLS)
    if algorithm is not None:
        usable, episodes = iteration["trainable"], iteration["episodes"]
        yield HealthFact(f"{usable} of {format_count(episodes, 'episode')} usable", _is_too_many(episodes - usable, episodes))
    if (staleness := iteration["staleness"]) is not None:
        text = f"sampled {format_count(staleness, 'version')} behind" if staleness else "sampled by the newest version"
        yield HealthFact(text)
    seconds = {name: iteration[f"{name}_seconds"] for name in ("rollout", "update")}
    if times := ", ".join(f"{name} {value:.3g} s" for name, value in seconds.items() if value):
        yield HealthFact(times)
    if iteration["skipped"]:
        yield HealthFact(f"update skipped: {iteration['skipped']}", is_off=True)


def list_update_troubles(run: str, iteration: IterationRecord, algorithm: str | None) -> list[Trouble]:
    """Return the problems of an iteration: those of its update (the ratio, clipped tokens, the mismatch of sampler and trainer,
    the effective sample size, the gradient) and those of its episodes (equal rewards, failed tool calls, unusable episodes).

    Args:
        run: the run's name in the commands.
        algorithm: the run's algorithm; None for a run that does not train.
    """
    return [trouble for _, trouble in _iterate_troubles(run, iteration, algorithm)]


def _iterate_troubles(run: str, iteration: IterationRecord, algorithm: str | None) -> Iterator[tuple[str, Trouble]]:
    """Yield the problems of an iteration, each with its subject. No subject occurs twice."""
    troubles, counts = dict(_iterate_causes(run, iteration, algorithm)), iteration.counts
    if skipped := iteration.row["skipped"]:
        cause = _CAUSES_OF_SKIPPING.get(skipped, "step")
        is_solved = cause == "groups" and "solved" in troubles and counts.right == counts.groups
        if cause not in troubles and not is_solved:
            yield cause, Trouble(f"The update made no step: {skipped}.")
    yield from troubles.items()


def _iterate_causes(run: str, iteration: IterationRecord, algorithm: str | None) -> Iterator[tuple[str, Trouble]]:
    row, counts = iteration.row, iteration.counts
    listed = f"agentrl episodes {run} --iteration {row['iteration']}"
    if counts.groups and compares_groups(algorithm):
        groups = format_count(counts.groups, "group")
        if (equal := counts.flat - counts.right) / counts.groups > MAX_FLAT:
            text = f"{equal} of {groups} have equal rewards and no right episode, so they teach nothing."
            yield "groups", Trouble(f"{text} Try easier tasks, or larger groups.", f"{listed} --fate no_variance")
        if counts.right / counts.groups > MAX_SOLVED:
            text = f"{counts.right} of {groups} are solved and have equal rewards, so they teach nothing more."
            yield "solved", Trouble(f"{text} {HARDER_TASKS}", is_note=True)
    calls, errors = row["tool_calls"], row["tool_errors"]
    if calls and errors / calls > MAX_FAILED_CALLS:
        yield "calls", Trouble(f"{errors} of {format_count(calls, 'tool call')} failed.", f"{listed} --tool-errors 1")
    unusable, episodes = row["episodes"] - row["trainable"], row["episodes"]
    if algorithm is not None and row["status"] == "done" and _is_too_many(unusable, episodes):
        yield "episodes", Trouble(f"{unusable} of {format_count(episodes, 'episode')} cannot be used.", listed)
    for name, (is_off, text) in _RULES.items():
        values = [update[name] for update in iteration.updates if update[name] is not None and is_off(update[name])]
        if values:
            yield name, Trouble(text.format(cell(max(values, key=lambda value: abs(value - 1)))))


def find_iteration_troubles(run: str, iterations: Sequence[IterationRecord], algorithm: str | None) -> dict[str, Trouble]:
    """Return what was wrong in any of a run's finished iterations: for each subject the newest problem, and in how many
    iterations it occurred. See `list_update_troubles` for the arguments.
    """
    by_subject: dict[str, list[tuple[int, Trouble]]] = {}
    for iteration in iterations:
        for subject, trouble in _iterate_troubles(run, iteration, algorithm):
            by_subject.setdefault(subject, []).append((iteration.row["iteration"], trouble))
    summaries = {}
    for subject, its in by_subject.items():
        number, trouble = its[-1]
        where = f"In {len(its)} of {format_count(len(iterations), 'iteration')}, most recently in iteration {number}"
        command = f"agentrl changes {run} --iteration {number}"
        summaries[subject] = Trouble(f"{where}: {trouble.text}", command, trouble.is_note)
    return summaries


def join_troubles(of_run: Mapping[str, Trouble], of_iterations: Mapping[str, Trouble]) -> list[Trouble]:
    """Return the troubles of a run and of its iterations, one for each subject, the problems first. Where both have a trouble,
    the run's says more about the cause. The joined trouble is a problem if one of the two is a problem.
    """
    troubles = {**of_run}
    for subject, trouble in of_iterations.items():
        joined = troubles.get(subject, trouble)
        if joined.is_note and not trouble.is_note:
            joined = Trouble(f"{joined.text.rstrip('.')}. {trouble.text}", joined.command)
        troubles[subject] = joined
    return sorted(troubles.values(), key=lambda trouble: trouble.is_note)


def list_checked(iterations: Sequence[IterationRecord], algorithm: str | None) -> list[str]:
    """Return what `find_iteration_troubles` can judge in these iterations. Groups are judged only if the algorithm compares
    their episodes, and their rewards are known.
    """
    checked = {
        "episodes": any(one.row["episodes"] for one in iterations),
        "groups": compares_groups(algorithm) and any(one.counts.groups for one in iterations),
        "tool calls": any(one.row["tool_calls"] for one in iterations),
        "updates": any(one.updates for one in iterations),
    }
    return [what for what, is_checked in checked.items() if is_checked]


def describe_health(run: Row, iterations: int, checked: Sequence[str], troubles: Sequence[Trouble]) -> str:
    """Return a sentence that says whether something is wrong in a run, also if nothing is.

    Args:
        run: a row of v_runs.
        iterations: the number of the run's finished iterations.
        checked: the result of `list_checked`.
        troubles: all remarks about the run.
    """
    reason = one_line(run["reason"], MAX_ERROR_CHARS).rstrip(".")
    status = f"{run['run']} is {run['status']}{': ' * bool(reason)}{reason}."
    if problems := sum(not trouble.is_note for trouble in troubles):
        return f"{status} {format_count(problems, 'problem')}:"
    if not checked:
        why = "Its iterations have no episodes" if iterations else "No iteration has ended"
        return f"{status} {why}, so nothing can be said about its health."
    which = f"all {iterations} finished iterations" if iterations > 1 else "its finished iteration"
    what = " and ".join([", ".join(checked[:-1]), checked[-1]] if checked[1:] else checked)
    return f"{status} Nothing unusual: in {which}, {what} are in their usual ranges."


def describe_reward_change(change: Row) -> tuple[str, str]:
    """Return a change of the mean reward as text, and a sentence that says whether the same tasks or different tasks explain
    it. `change` has the fields of `iteration_changes.RewardChange`.
    """
    difference = change["now"] - change["before"]
    rewards = f"{cell(change['before'])} -> {cell(change['now'])} ({'+' * (difference > 0)}{cell(difference)})"
    text = f"{rewards}, iteration {change['previous']} to {change['iteration']}"
    tasks = f"the {format_count(change['tasks'], 'task')} of iteration {change['iteration']}"
    if not change["again"]:
        return text, f"The tasks are different ones: none of {tasks} was sampled before."
    same = change["again_now"] - change["again_before"]
    explains = same * difference > 0 and abs(same) >= SAME_TASKS_SHARE * abs(difference)
    became = "better" if difference > 0 else "worse"
    cause = (
        f"The same tasks became {became}"
        if explains
        else f"It comes mainly from tasks other than those of iteration {change['previous']}"
    )
    compared = f"{change['again']} of {tasks} {'was' if change['again'] == 1 else 'were'} sampled before"
    means = f"with a mean reward of {cell(change['again_before'])} then, {cell(change['again_now'])} now"
    return text, f"{cause}: {compared}, {means}."


def _over(limit: float) -> Any:
    return lambda value: value > limit


_CAUSES_OF_SKIPPING: Mapping[str, str] = {NO_GROUP_VARIES: "groups", NO_ADVANTAGE: "groups", TOO_FEW_EPISODES: "episodes"}
"""The subject of the trouble that explains why an update was skipped, by the reason in the iteration's row. If there is no such
trouble, the skipped update is reported under this subject.
"""
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

"""`agentrl fork`, `rescore` and `why`: continue an episode differently, score episodes with other rewards, and show the update
that used an episode.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer

from agentrl.cli.console import Json, say, show, show_json, show_lines, show_rows
from agentrl.cli.options import RunName
from agentrl.cli.resolve_targets import GivenEpisode, LastEpisode, pick_episode, stored_database, stored_reader
from agentrl.workflow.analysis.outcome_text import fate_sentence
from agentrl.workflow.runtime.shown_text import Line, cell, format_count, one_line


def fork(
    episode: GivenEpisode,
    step: Annotated[int, typer.Option(min=0, help="First step to sample again.", show_default=False)],
    n: Annotated[int, typer.Option("-n", min=1, max=1024, help="Number of forks.")] = 8,
    edit_message: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Replace the last message before the step with this text.", show_default=False),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="V",
            help="Policy: a version of the episode's run, or RUN@V [the one that sampled the step].",
            show_default=False,
        ),
    ] = None,
    with_parent: Annotated[bool, typer.Option("--with-parent", help="Add the episode itself to the group.")] = False,
    name: Annotated[str | None, typer.Option(help="Name of the fork run.", show_default=False)] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the forks to their end.")] = False,
    as_json: Json = False,
) -> None:
    """Continue an episode from one of its steps, several times; prints the fork run's name."""
    from agentrl.cli.ensure_workers import send_run
    from agentrl.workers.requests.fork_request import ForkRequest, prepare_fork

    request = ForkRequest(episode, step, n, edit_message, policy, with_parent, name)
    prepared = prepare_fork(stored_database(), request)
    for remark in prepared.remarks:
        say(remark)
    send_run(prepared, wait or None, as_json)
    say(f"Train on it: agentrl submit --from-groups {prepared.submission.name}")


def rescore(
    run: RunName,
    reward: Annotated[
        list[str],
        typer.Option(
            metavar="NAME[=WEIGHT]", help="Reward: a name or package.module:function; repeatable.", show_default=False
        ),
    ],
    name: Annotated[str | None, typer.Option(help="Name of the reward set [the first reward's].", show_default=False)] = None,
    as_json: Json = False,
) -> None:
    """Score a run's episodes with other rewards; the existing scores stay as they are."""
    from agentrl.workers.requests.rescoring import rescore as score_again

    result = score_again(stored_database(), run, reward, name)
    if as_json:
        show_json(result)
        return
    scored = format_count(result["episodes"], "episode")
    show(f"{result['run']}: reward set {result['reward_set']}, {scored} scored, {result['changed']} changed")
    show(f"  mean {cell(result['mean_before'])} -> {cell(result['mean'])}")
    for part in result["parts"]:
        show(f"  {part['part']}: mean {cell(part['mean'])} x {cell(part['weight'])}")
    how = "Train on it: agentrl submit" if result["trainable"] else "Train on its best episodes: agentrl sft"
    say(f"{how} --from-episodes {result['run']} --reward-set {result['reward_set']}")


def why(episode: LastEpisode = None, as_json: Json = False) -> None:
    """Show which update trained on an episode, or why none did. Also show its advantage's formula, with the numbers."""
    from agentrl.workers.page.shown.credit_answers import explain_training
    from agentrl.workflow.store.reads import ledger

    db = stored_reader()
    number = pick_episode(db, episode)

    def read(tx: Any) -> dict[str, Any]:
        fate = ledger.explain_fate(tx, number)
        return {**fate, **explain_training(tx, number, fate["run_id"], fate["group_id"])}

    fate = db.ask(read)
    if as_json:
        show_json(fate)
        return
    show_lines(_fate_lines(fate))
    show_rows(_iteration_rows(fate["iterations"], fate["iteration"]), COLUMNS)


MAX_REWARD_CHARS = 400
"""The most characters of the rewards of a group. The JSON document has all of them."""
NEIGHBOURS = 3
"""The number of iterations that are shown before and after the episode's iteration in a longer run."""

COLUMNS = (
    "iteration", "planned", "trained", "no_variance=no variance", "strayed", "truncated", "too_few=too few", "surplus",
    "skipped", "tainted",
    "no_reward=no reward", "failed", "infra_error", "cancelled", "evaluated", "forked", "searched", "served", "imported",
    "waiting", "open",
)  # fmt: skip
"""The columns of the table, which are the possible outcomes of an episode. A column without episodes is left out."""


def _fate_lines(fate: Any) -> Iterator[Line]:
    yield f"episode {fate['id']}  of {fate['run']}, iteration {fate['iteration']}, task {fate['task']}", "bold"
    yield f"  {fate_sentence(fate)}", ""
    yield from _credit_lines(fate)
    if fate["status"] == "done" and fate["error"]:
        yield f"  its agent failed: {one_line(fate['error'], 1000)}", "red"
    if fate["attempt"]:
        yield (
            f"  restarted {format_count(fate['attempt'], 'time')}: steps of earlier attempts are kept and marked superseded",
            "yellow",
        )
    if fate["parent_id"] is not None:
        yield f"  forked from episode {fate['parent_id']} at step {fate['fork_step']}", ""
    for step in fate["untrained"]:
        yield f"  step {step['step']} is not trained on: {step['reason']}", "yellow"
    for begun in fate["chains"]:
        yield f"  step {begun['step']} begins chain {begun['chain']}: {one_line(begun['reason'], 1000)}", ""
    for step in fate["ambiguous"]:
        alike = f"{step['equal']} turns have the same tokens; it is the first of them"
        yield f"  step {step['step']} continues step {step['after']}: {alike}", "yellow"
    for other in fate["elsewhere"]:
        yield f"  in run {other['run']}: {fate_sentence(fate | other)}", ""
    yield "", ""


def _credit_lines(fate: Any) -> Iterator[Line]:
    """Yield how the advantage follows from the rewards, the rewards of the group, and the updates that read the episode."""
    explanation = fate["explanation"]
    if explanation["value"] is not None:
        by = explanation["algorithm"] or "unknown"
        by += "" if explanation["run"] == fate["run"] else f" in {explanation['run']}"
        style = "yellow" if explanation["agrees"] is False else ""
        yield f"  advantage  by {by}: {explanation['formula']}", style
        if explanation["calculation"]:
            yield f"             {explanation['calculation']}", style
    own = next((_reward_text(member) for member in fate["group_rewards"] if member["id"] == fate["id"]), "-")
    others = [_reward_text(member) for member in fate["group_rewards"] if member["id"] != fate["id"]]
    chosen = "" if fate["reward_set"] == "default" else f" (reward set {fate['reward_set']})"
    alone = f"; of the other {len(others)} of its group: {', '.join(others)}" if others else "; its group has no other episode"
    yield f"  rewards    its own: {own}{one_line(alone, MAX_REWARD_CHARS)}{chosen}", ""
    updates = [
        f"iteration {update['iteration']} of {update['run']}"
        + (f" (skipped: {update['skipped']})" if update["skipped"] else "")
        for update in fate["read_by"]
    ]
    yield f"  read by    {'the update of ' if updates else 'no update'}{', '.join(updates)}", ""


def _reward_text(member: Mapping[str, Any]) -> str:
    reason = "" if member["trainable"] else " (tainted)" if member["tainted"] else f" ({member['status']})"
    return f"{cell(member['reward'])}{reason}"


def _iteration_rows(iterations: Sequence[Mapping[str, Any]], here: int) -> list[dict[str, Any]]:
    """Return one row per iteration, and a row with the sums over all iterations."""
    near = [row for row in iterations if abs(row["iteration"] - here) <= NEIGHBOURS]
    visible = iterations if len(iterations) <= 2 * len(near) else near
    marked = [{**row, "iteration": f"{row['iteration']}{' <-' if row['iteration'] == here else ''}"} for row in visible]
    names = [name for name in iterations[0] if name != "iteration"]
    whole = {name: sum(row[name] for row in iterations) for name in names} | {"iteration": f"all {len(iterations)}"}
    return [{**row, **{name: row[name] or None for name in names if name != "planned"}} for row in (*marked, whole)]

"""`agentrl import otlp FILE`: imports traces of other systems as episodes."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.cli.console import Json, show, show_json
from agentrl.cli.options import PolicyName, TemplateFile, ToolFormatName, chat_values
from agentrl.cli.resolve_targets import Trust, check_model_is_there, existing_database, find_trusted_policy
from agentrl.workflow.runtime.shown_text import cell, format_count

if TYPE_CHECKING:
    from agentrl.workers.requests.import_request import PreparedImport

imports = typer.Typer(no_args_is_help=True, help="Import episodes that another system recorded.", rich_markup_mode=None)


@imports.callback()
def of_imports() -> None:
    """Import episodes that another system recorded."""


@imports.command("otlp")
def otlp(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="OTLP traces: JSON, JSON lines or protobuf; .gz too.")],
    policy: PolicyName,
    adapter: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Adapter that reads turns from spans; repeatable [all].", show_default=False),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run [import-N].", show_default=False)] = None,
    exact_only: Annotated[
        bool, typer.Option("--exact-only", help="Leave out episodes whose turns lack token ids or logprobs.")
    ] = False,
    tool_format: ToolFormatName = None,
    chat_template: TemplateFile = None,
    trust_remote_code: Trust = False,
    as_json: Json = False,
) -> None:
    """Import OpenTelemetry traces as a run: each rollout, conversation or trace is an episode, and its model turns are steps.

    --policy names the policy that sampled the turns. Turns with token ids and logprobs are kept exactly and can be trained on.
    If any turn in the file lacks token ids or logprobs, all turns in the file are rendered with the model's template; they can
    then be imitated (sft) and scored. Rewards in the spans become the episodes' rewards.
    """
    from agentrl.workers.requests.import_request import prepare_import
    from agentrl.workers.stack.process import database
    from agentrl.workflow.config import build
    from agentrl.workflow.spans.traces import read_traces
    from agentrl.workflow.store.imported_runs import write_import

    spans = read_traces(file)
    base, ref = find_trusted_policy(policy, trust_remote_code)
    config = build(base.flat() | chat_values(tool_format, chat_template))
    if ref is None:
        check_model_is_there(policy, config)
    prepared = prepare_import(existing_database(), spans, config, ref, adapter or (), name, exact_only)
    run = write_import(database(), prepared.submission, prepared.episodes)
    if as_json:
        show_json(
            {
                "run": run,
                "episodes": len(prepared.episodes),
                "exact": prepared.exact,
                "without": prepared.without,
                "left_out": prepared.left_out,
            }
        )
        return
    for line in _lines(run, prepared):
        show(line)


def _lines(run: str, prepared: "PreparedImport") -> list[str]:
    episodes = prepared.episodes
    tasks, turns = len({episode.task.content_hash for episode in episodes}), sum(len(episode.steps) for episode in episodes)
    mean = sum(episode.reward for episode in episodes) / len(episodes)
    rewards = f"mean reward {cell(mean)}" if prepared.submission.weights else "no rewards"
    counts = f"{format_count(len(episodes), 'episode')} of {format_count(tasks, 'task')}, {format_count(turns, 'turn')}"
    lines = [f"{run}: {counts}, {rewards}"]
    lines += [f"  left out, {count}: {reason}" for reason, count in prepared.left_out.items()]
    if prepared.exact:
        lines.append("  Tokens and logprobs are those of the sampler. Train on them:")
        lines.append(f"    agentrl submit --from-episodes {run}")
    else:
        few = f"{prepared.without} of them have" if prepared.without < len(episodes) else "They have"
        rest = " (--exact-only leaves those out)" if prepared.without < len(episodes) else ""
        lines.append(
            f"  {few} turns without token ids or logprobs: all are rendered by the model's template{rest}. Imitate them with:"
        )
        lines.append(f"    agentrl sft --from-episodes {run}")
    unscored = sum(not episode.rewards for episode in episodes)
    if prepared.submission.weights and unscored:
        lines.append(f"  {format_count(unscored, 'episode')} without a reward count as 0.")
    if not prepared.submission.weights:
        lines.append(f"  Score them: agentrl rescore {run} --reward my_rewards:right")
    return [*lines, f"  Look at them: agentrl episodes {run}"]

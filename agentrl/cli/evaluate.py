"""`agentrl eval` and `agentrl chat`: measure a policy, and talk to it."""

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl.cli.config_options import AgentName, AgentNetwork, AgentSandbox, AgentUnsafe
from agentrl.cli.console import Json, format_interval, say, show, show_json
from agentrl.cli.eval_run import eval_run_of, run_to_end, with_policy_name
from agentrl.cli.options import (
    MinP,
    PolicyName,
    Stop,
    TemplateFile,
    ToolFormatName,
    TopK,
    TopP,
    chat_values,
)
from agentrl.cli.resolve_targets import Trust, existing_database, find_trusted_policy
from agentrl.workflow.config import RunConfig
from agentrl.workflow.errors import ConfigError
from agentrl.workflow.resolve import parse_weights
from agentrl.workflow.runtime.gc_pause import pause_gc
from agentrl.workflow.runtime.shown_text import cell, format_count, one_line

if TYPE_CHECKING:
    from agentrl.cli.conversation import Talk


SCORE_COLUMNS = (
    "tasks",
    "episodes",
    "errors",
    "mean_reward",
    "low",
    "high",
    "interval_by",
    "accuracy",
    "pass_at",
    "dataset",
    "split",
)
"""The fields of an evaluation in `eval --json`."""


def evaluate(
    policy: PolicyName,
    dataset: Annotated[
        str | None, typer.Option(help="Dataset to evaluate on [the run's, else gsm8k].", show_default=False)
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="Split of the dataset [test; for a file its only split].", show_default=False)
    ] = None,
    map: Annotated[str | None, typer.Option(help="Columns to read [the run's, for its dataset].", show_default=False)] = None,
    filter: Annotated[str | None, typer.Option(help="SQL condition on the columns of rows.", show_default=False)] = None,
    n: Annotated[int | None, typer.Option("-n", min=1, max=4096, help="Only the first N tasks.", show_default=False)] = None,
    group_size: Annotated[int, typer.Option(min=1, help="Episodes per task.")] = 1,
    env: Annotated[str | None, typer.Option(help="Env [the run's, else the dataset's own].", show_default=False)] = None,
    reward: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=WEIGHT]",
            help="Reward: a name or package.module:function; repeatable [the run's].",
            show_default=False,
        ),
    ] = None,
    agent: AgentName = None,
    agent_network: AgentNetwork = None,
    agent_unsafe: AgentUnsafe = None,
    agent_sandbox: AgentSandbox = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Maximum tokens sampled per turn [the run's, else 256].", show_default=False)
    ] = None,
    max_steps: Annotated[
        int | None, typer.Option(min=1, help="Maximum turns per episode [the run's, else 4].", show_default=False)
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Sampling temperature [the run's, else 1].", show_default=False)
    ] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Take the likeliest token each time instead of sampling.")] = False,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    stop: Stop = None,
    engine: Annotated[str | None, typer.Option(help="Sampling engine [the run's, else rolling].", show_default=False)] = None,
    trust_remote_code: Trust = False,
    tool_format: ToolFormatName = None,
    chat_template: TemplateFile = None,
    fail_under: Annotated[float | None, typer.Option(help="Exit 1 if the mean reward is lower.", show_default=False)] = None,
    as_json: Json = False,
) -> None:
    """Measure a policy: number of episodes, mean reward with its 95% interval, accuracy, pass@k; errors are counted separately.

    The interval is Wilson's if every reward is 0 or 1, else Student's.

    An episode is right if the reward part that decides correctness has its full value. pass@k is the probability that one of k
    episodes of a task is right, for k up to --group-size. Compare two policies: agentrl compare A B.
    """
    from agentrl.workers.requests import submit as submission
    from agentrl.workers.stack.process import database
    from agentrl.workflow.config import build
    from agentrl.workflow.store.reads import eval_results

    drawn = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "max_steps": max_steps, "engine": engine}
    options |= {"group_size": group_size, "stop": stop or None, **(_greedy_options(drawn, group_size) if greedy else drawn)}
    own = {"name": agent, "network": agent_network, "unsafe": agent_unsafe, "sandbox": agent_sandbox}
    rows, weights = {"map": map, "filter": filter}, parse_weights(reward or ())
    config, ref = eval_run_of(policy, dataset, split, n, options, env, trust_remote_code, own, weights, rows)
    config = build(config.flat() | chat_values(tool_format, chat_template))
    prepared = with_policy_name(submission.prepare(existing_database(), config, kind="eval", policy=ref), policy)
    for remark in prepared.remarks:
        say(remark)
    if n is not None and len(prepared.submission.tasks) < n:
        tasks = format_count(len(prepared.submission.tasks), "task")
        say(f"{config.dataset.name} ({config.dataset.split}) has {tasks}, fewer than -n {n}.")
    run = run_to_end(prepared, group_size)
    result = eval_results.find_result(database(), run.name)
    _show_score(run.name, policy, result, as_json)
    _exit_if_failed(run.name, result, fail_under)


def _exit_if_failed(run: str, result: Mapping[str, Any], fail_under: float | None) -> None:
    """Raise Exit if no episode has a reward, or the mean reward is too low."""
    from agentrl.workers.stack.process import database
    from agentrl.workflow.store.reads import run_rows

    if not result["episodes"]:
        failure = run_rows.find_most_frequent_failure(database(), run)
        why = f": {one_line(failure['error'])[:300]}" if failure else ""
        say(f"No episode could be scored{why}. See them: agentrl episodes {run}")
        raise typer.Exit(1)
    if fail_under is not None and (result["mean_reward"] is None or result["mean_reward"] < fail_under):
        say(f"The mean reward is below {fail_under:g}.")
        raise typer.Exit(1)


def _greedy_options(drawn: Mapping[str, Any], group_size: int) -> dict[str, Any]:
    """Return the sampling options that select the most likely token."""
    also = [f"--{name.replace('_', '-')}" for name, value in drawn.items() if value is not None]
    if also:
        raise ConfigError(f"--greedy takes the likeliest token, so {also[0]} has no effect.", "Leave one out.")
    if group_size > 1:
        raise ConfigError(f"--greedy samples the same episode {group_size} times per task.", "Leave --group-size out.")
    return {"temperature": 1.0, "top_k": 1, "top_p": 1.0, "min_p": 0.0}


def _rollout_values(rollout: Mapping[str, Any]) -> dict[str, Any]:
    return {f"rollout.{key}": value for key, value in rollout.items() if value is not None}


def _show_score(run: str, policy: str, result: Any, as_json: bool) -> None:
    if as_json:
        show_json({"run": run, "policy": policy, **{key: result[key] for key in SCORE_COLUMNS}})
        return
    show(f"{policy} on {result['dataset']} ({result['split']})")
    show(f"  n {result['episodes']}  mean {cell(result['mean_reward'])}  {format_interval(result)}  errors {result['errors']}")
    if result["accuracy"] is not None:
        chances = "".join(f"  pass@{k} {cell(chance)}" for k, chance in result["pass_at"].items())
        show(f"  accuracy {cell(result['accuracy'])}{chances}")
    show(f"  run {run}")


def chat(
    policy: PolicyName,
    env: Annotated[
        str | None, typer.Option(help="Env that provides the tools and the prompt [the run's, else math].", show_default=False)
    ] = None,
    temperature: Annotated[float, typer.Option(help="Sampling temperature, above 0 and at most 10.")] = 1.0,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    stop: Stop = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens per turn.")] = 256,
    engine: Annotated[str | None, typer.Option(help="Sampling engine [the run's, else rolling].", show_default=False)] = None,
    tool_format: ToolFormatName = None,
    chat_template: TemplateFile = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of all random draws.")] = 0,
    trust_remote_code: Trust = False,
) -> None:
    """Talk to a policy that may call its tools; everything runs in this process.

    At a terminal, /help lists the commands, Ctrl-C stops an answer, and Ctrl-D ends the chat. In a pipe, each line of input is
    one message, and an empty line ends the chat.
    """
    from contextlib import closing

    from agentrl.cli.chat import Loading, chat_at_terminal, chat_in_pipe
    from agentrl.workflow import engines
    from agentrl.workflow.config import build
    from agentrl.workflow.experiment import Experiment
    from agentrl.workflow.settings import settings

    config, ref = find_trusted_policy(policy, trust_remote_code)
    chat_env, tools = _env_at_hand(config, env)

    options: dict[str, Any] = {"temperature": temperature, "max_new_tokens": max_new_tokens, "engine": engine}
    options |= {"top_k": top_k, "top_p": top_p, "min_p": min_p, "stop": stop or None}
    config = build(config.flat() | _rollout_values(options) | chat_values(tool_format, chat_template))
    engines.check_options(Experiment(config).engine, config.rollout)
    if ref is None:
        _check_model(config.model.path, trust_remote_code)

    def make() -> "Talk":
        from agentrl.cli.conversation import Talk

        with pause_gc():
            from agentrl.workflow.inference.open_policy import open_policy

        return Talk(open_policy(config, ref, seed), chat_env, tools)

    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        with closing(make()) as talk:
            chat_in_pipe(talk)
        return
    with closing(Loading(make, policy)) as loading:
        chat_at_terminal(loading, _greeting(policy, tools), settings().root)


def _check_model(name: str, trusted: bool) -> None:
    from pathlib import Path

    from agentrl.workflow.models.lookup import TINY_DATASET, model_folder, resolve_model

    base = resolve_model(name, TINY_DATASET)
    if Path(base).is_absolute() or base.startswith("."):
        model_folder(base, trusted)


def _greeting(policy: str, tools: Mapping[str, Any]) -> str:
    offered = f"tools: {', '.join(tools)}" if tools else "no tools"
    return f"{one_line(policy)}, {offered}. /help lists the commands; Ctrl-D ends the chat."


def _env_at_hand(config: RunConfig, env_name: str | None) -> tuple[Any, Mapping[str, Any]]:
    """Return the env of the chat and its tools: the env that the user named, or else the run's env with the run's texts."""
    from agentrl.workflow.envs import Env
    from agentrl.workflow.experiment import Experiment
    from agentrl.workflow.plugins import find

    if env_name:
        env: Env = find("envs", env_name)
        return env, env.toolset()
    name: str | None = config.env or ("arithmetic" if config.model.path.startswith("tiny") else "math")
    try:
        find("envs", str(name))
    except ConfigError as error:
        say(f"The chat continues without the run's env: {error}")
        name = None
    tools = tuple(tool for tool in config.tools if _is_here(tool))
    texts = {} if config.agent is not None else config.resources  # an agent's texts are for its own code
    chat = Experiment(config.model_copy(update={"env": name, "tools": tools, "agent": None})).reading(texts)
    try:
        return chat.env, chat.tools
    except ConfigError as error:
        say(f"The chat continues without tools: {error}")
        return chat.env, {}


def _is_here(tool: str) -> bool:
    from agentrl.workflow.mcp import mcp_tool
    from agentrl.workflow.plugins import find

    try:
        mcp_tool.is_server(tool) or find("tools", tool)
    except ConfigError as error:
        say(f"The chat continues without a tool: {error}")
        return False
    return True

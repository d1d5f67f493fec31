"""The plan of a run that `submit --dry-run` prints, and descriptions of its parts."""

import math
from collections.abc import Mapping
from typing import Any

from agentrl.cli.console import show_json, show_lines, show_table
from agentrl.cli.resolve_targets import existing_database
from agentrl.workflow.config import AgentConfig, ModelConfig
from agentrl.workflow.runtime.shown_text import cell, format_count


def _describe_origin(origin: dict[str, Any]) -> str:
    return f"{origin['run']}@{origin['version']}{', merged' if origin['lora'] == 'new' else ''}"


def _describe_evaluations(submission: Any, every: int | None) -> dict[str, str]:
    evaluation = submission.evaluation
    if evaluation is None or every is None:
        return {}
    times, episodes = 1 + math.ceil(submission.iterations / every), len(evaluation.tasks) * evaluation.group_size
    tasks = f"{format_count(len(evaluation.tasks), 'task')} of {evaluation.dataset} ({evaluation.config['dataset']['split']})"
    cost = f"{times} x {episodes} = {format_count(times * episodes, 'episode')}"
    return {"held_out": f"every {'version' if every == 1 else f'{every} versions'}: {tasks} x {evaluation.group_size}; {cost}"}


def _describe_roles(submission: Any) -> dict[str, str]:
    roles = list(submission.roles.values())
    if not roles:
        return {}
    choose, held_out = roles.count("choose"), roles.count("held_out")
    return {"of these": f"{len(submission.tasks) - len(roles)} for edits, {choose} for selection, {held_out} held out"}


def describe_agent(agent: AgentConfig) -> str:
    """Return the agent's name, and whether it runs in a sandbox."""
    if agent.is_external:
        return f"{agent.name} (runs elsewhere)"
    if not agent.sandboxed:
        return f"{agent.name} (no sandbox)"
    return f"{agent.name} (in the sandbox, reaches {'all' if agent.network == 'all' else 'the endpoint only'})"


def describe_rewards(weights: Mapping[str, float], agent: AgentConfig | None = None) -> list[str]:
    """Return the rewards with their weights, including the agent's own rewards."""
    rewards = [f"{name} x {cell(weight)}" for name, weight in weights.items()]
    own = [f"the agent's rewards x {cell(float(agent.own_rewards))}"] if agent is not None else []
    return [*rewards, *own]


def _describe_update(prepared: Any) -> dict[str, Any]:
    """Return the parts of an update that are not the default. For a prompt search, return the texts and the critic."""
    from agentrl.workflow.algorithms import searches
    from agentrl.workflow.plugins import find

    config = prepared.config
    if searches(find("algorithms", config.algorithm.name)):
        return {"texts": ", ".join(config.resources), "critic": config.search.critic or "none"}
    first = format_count(config.critic.warmup, "iteration")
    warmup = f"; only the critic trains in the first {first}" if config.critic.warmup else ""
    parts: dict[str, Any] = {"convention": config.algorithm.convention}
    parts |= {"trainer": config.update.trainer} if config.update.trainer != "agentrl" else {}
    parts |= {"critic": f"learning rate {cell(config.critic.learning_rate)}{warmup}"} if prepared.algorithm.critic else {}
    return parts | ({"passes": config.update.epochs} if config.update.epochs > 1 else {})


def _describe_calls(model: Any) -> str:
    tool_format = "the template's own" if model.tool_format == "auto" else model.tool_format or "auto"
    return f"{tool_format}, strict" if model.strict_calls else tool_format


def _describe_time(submission: Any) -> dict[str, str]:
    from statistics import median

    from agentrl.workflow.store.reads.run_rows import find_similar_iterations

    db = existing_database()
    if db is None or submission.kind != "train" or not submission.episodes:
        return {}
    similar = find_similar_iterations(db, submission.policy.base, submission.config)
    if similar is None:
        return {}
    run, seconds = similar[0], median(similar[1])
    return {
        "time": f"about {_hours(seconds * submission.iterations)}: {seconds:.1f} s an iteration, as in {run}, plus evaluations"
    }


def _hours(seconds: float) -> str:
    minutes = max(1, round(seconds / 60))
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def _describe_model(facts: dict[str, Any], sampled_here: bool, model: ModelConfig) -> dict[str, str]:
    """Return how the sampler runs the model, which layers LoRA trains, and remarks."""
    plan = {"sampler": facts["sampler"]} if sampled_here and "sampler" in facts else {}
    if layers := facts.get("lora_layers"):
        trained = facts["trained"]
        plan["lora_layers"] = ", ".join(f"{name} x {count}" for name, count in layers.items())
        plan["lora_trains"] = f"{trained['trainable']:,} of {trained['all']:,} parameters"
    elif "trained" in facts and model.dtype == "auto" and model.numerics != "exact":
        plan["precision"] = "float32; on a GPU bfloat16 with float32 weights (model.dtype=float32: float32 there too)"
    return plan | ({"remarks": " ".join(facts["remarks"])} if facts.get("remarks") else {})


def show_plan(prepared: Any, facts: dict[str, Any], as_json: bool) -> None:
    """Print the plan of the run."""
    submission, config = prepared.submission, prepared.config
    tasks, more = len(submission.tasks), config.rollout.dynamic_sampling
    planned = submission.episodes
    rewards = describe_rewards(submission.weights, config.agent)
    plan = {
        "name": submission.name,
        "dataset": f"{config.dataset.name} ({config.dataset.split})",
        "model": submission.policy.base,
        **({"from": _describe_origin(submission.manifest["from"])} if "from" in submission.manifest else {}),
        **_describe_model(facts, prepared.experiment.engine.local, config.model),
        "env": config.env,
        **({"agent": describe_agent(config.agent)} if config.agent is not None else {}),
        "tool_format": _describe_calls(config.model),
        "rewards": ", ".join(rewards),
        "algorithm": config.algorithm.name,
        **_describe_update(prepared.experiment),
        **({"hooks": ", ".join(config.hooks)} if config.hooks else {}),
        **({"report_to": ", ".join(config.report.to)} if config.report.to else {}),
        "tasks": tasks or f"{len(submission.groups)} stored groups",
        **({} if submission.kind == "search" else {"epochs": submission.passes, "iterations": submission.iterations}),
        "group_size": submission.group_size,
        **_describe_evaluations(submission, config.eval.every),
        **_describe_roles(submission),
        "episodes": planned or ("as many as the search needs" if submission.kind == "search" else "stored"),
        **({"dynamic_sampling": f"up to {planned * more} episodes ({more} x)"} if planned and more > 1 else {}),
        "output_dir": submission.output_dir,
        **_describe_time(submission),
    }
    if as_json:
        show_json(plan | {"config": submission.config})
    else:
        show_table(("plan", ""), [(key, value) for key, value in plan.items() if key != "rewards"])
        show_lines([("rewards", "bold"), *((f"  {line}", "") for line in rewards)])  # a table would cut long names

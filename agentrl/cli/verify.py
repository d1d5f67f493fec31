"""`agentrl replay EPISODE --verify WHAT`: repeats the episode and reports differences from its record."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from agentrl.cli.console import say, show_json, show_lines
from agentrl.cli.resolve_targets import stored_database
from agentrl.workflow.errors import CheckpointError, ConfigError, StateError, did_you_mean
from agentrl.workflow.runtime.shown_text import Line, cell, format_count, one_line
from agentrl.workflow.trajectory import Episode, Message, SamplingKey, ToolResult

if TYPE_CHECKING:
    from agentrl.workflow.analysis.episode_diff import TokenDifference
    from agentrl.workflow.analysis.verify_episode import RewardsReport, TokensReport, ToolsReport
    from agentrl.workflow.config import RolloutConfig
    from agentrl.workflow.experiment import Experiment
    from agentrl.workflow.store.reads.provenance import Origin

TOOLS, TOKENS, REWARDS = "tools", "tokens", "rewards"
CHECK_CHOICES = (TOOLS, TOKENS, REWARDS, "all")

MAX_QUOTED = 200
"""The most characters of a text in a report."""
AROUND_CHARS = 32
"""The most characters that are shown before a token that differs, and after it."""


def verify(episode: int, what: str, as_json: bool) -> int:
    """Repeat the episode and print the report. Return 1 if the repetition differs from the record, else 0.

    If no part of the episode could be verified, the report says so. The value `same` in the JSON is then null, and 0 is
    returned. Raise CheckpointError if only tokens were requested, and the weights that sampled them were removed. Raise
    ModelError if the base model on this machine is not the run's.
    """
    from agentrl.workflow.experiment import Experiment
    from agentrl.workflow.store.imported_runs import EXACT
    from agentrl.workflow.store.reads.provenance import find_origin
    from agentrl.workflow.store.run_format import check_format

    if what not in CHECK_CHOICES:
        raise ConfigError(f"--verify does not know {what!r}.", did_you_mean(what, CHECK_CHOICES))
    origin = find_origin(stored_database(), episode)
    if EXACT in origin.manifest:
        raise StateError(f"Episode {episode} cannot be verified: another system sampled it.", f"agentrl replay {episode}")
    check_format(origin.run, origin.format, "verify")
    parts: tuple[str, ...] = CHECK_CHOICES[:3] if what == "all" else (what,)
    if origin.config.get("agent"):  # no env said anything, and no tool of ours ran
        if what == TOOLS:
            raise StateError(
                f"Cannot verify the tools of episode {episode}: its agent ran them itself.",
                "Tokens and rewards can be verified: --verify tokens, --verify rewards.",
            )
        parts = tuple(name for name in parts if name != TOOLS)
    experiment = Experiment.load(origin.config).reading(origin.resources)
    reports: dict[str, Any] = {name: check(origin, experiment) for name, check in _CHECKS.items() if name in parts}
    every = [report for result in reports.values() for report in (result if isinstance(result, list) else [result])]
    same = all(report.same for report in every)
    verified = sum(report.compared_count for report in every)
    if as_json:
        done = origin.record.episode
        document = {"same": same if verified or not same else None, "parent": done.parent_id, "inherited": done.inherited}
        show_json({"episode": episode, **document, **{name: _report_document(result) for name, result in reports.items()}})
    else:
        show_lines(_report_lines(origin, what, reports, _verdict_line(origin, reports, same, verified)))
    tokens: TokensReport | None = reports.get(TOKENS)
    if tokens is not None:
        _say_remark(tokens, samples_here=not experiment.engine.at_url)
    if what == TOKENS and same and tokens and tokens.unverified and not tokens.steps:
        raise CheckpointError(
            f"No token of episode {episode} could be verified.",
            "Tools and rewards can still be verified: --verify tools, --verify rewards.",
        )
    return 0 if same else 1


def _say_remark(report: "TokensReport", samples_here: bool) -> None:
    """Say what was not verified. `samples_here` is False if another server sampled the tokens."""
    for sentence in report.unverified:
        say(f"NOT VERIFIED: {sentence}")
    if samples_here and report.precision == "float32" and (report.logprob or report.draw):
        say("The check ran in float32, but a LoRA policy with dtype: auto samples in half precision on a GPU. Repeat it there.")


def _report_document(result: Any) -> Any:
    return (
        [_report_document(report) for report in result] if isinstance(result, list) else {"same": result.same, **asdict(result)}
    )


# the repetition


def _check_tools(origin: "Origin", experiment: "Experiment") -> "ToolsReport":
    from agentrl.workers.jobs.tool_call import run_tool
    from agentrl.workflow.agent import observe
    from agentrl.workflow.analysis.verify_episode import check_tools
    from agentrl.workflow.store.episode_loader import message_row, message_value
    from agentrl.workflow.store.tool_calls import CallWork
    from agentrl.workflow.tools.python import Notebook, keeps_session
    from agentrl.workflow.trajectory import storable

    name, env, tools = str(experiment.config.env), experiment.env, experiment.tools
    notebook = Notebook()

    def run(tool: str, arguments: Mapping[str, Any]) -> ToolResult:
        if tool not in tools:
            return ToolResult(f"the env {name!r} no longer has a tool {tool!r}", "unknown_tool")
        if keeps_session(tools[tool]):
            result = notebook.run(tools[tool], arguments)
        else:
            result = run_tool(tools[tool], CallWork(0, name, tool, arguments, tools[tool].effects))
        return replace(result, content=storable(result.content))  # as the record holds it

    def reads(before: Episode) -> list[Message]:
        if origin.opening and not before.begun:
            messages = origin.opening
        elif not before.steps:
            messages = env.reset(before.task)
        else:
            messages = observe(before, env, experiment.config.rollout)
        return [message_value(message_row(message)) for message in messages]  # as the record holds them

    effects = {tool: declared.effects for tool, declared in tools.items()}
    episode, calls = origin.record.episode, origin.record.calls
    with closing(notebook):
        for call in calls:
            if call["step"] < episode.inherited and call["exit_status"] and keeps_session(tools.get(call["tool"])):
                run(call["tool"], call["arguments"])  # a fork's own cells follow its parent's
        return check_tools(episode, calls, run, effects, reads)


def _check_tokens(origin: "Origin", experiment: "Experiment") -> "TokensReport":
    from agentrl.workflow.analysis.verify_episode import missing_weights
    from agentrl.workflow.analysis.verify_tokens import check_tokens
    from agentrl.workflow.config import CLIENTS
    from agentrl.workflow.dialects.client_sampling import key_asked, limits_asked, with_stop
    from agentrl.workflow.models.policy import open_run_base
    from agentrl.workflow.settings import settings
    from agentrl.workflow.store.steps import load_requests
    from agentrl.workflow.trajectory import GRAMMAR

    where = settings()
    policy = open_run_base(experiment.config.model, origin.base, origin.base_hash, origin.manifest, where.device, where.threads)
    schemas = [tool.schema for tool in experiment.tools.values()]
    lost = missing_weights(origin.policies, origin.collected)
    stored = load_requests(stored_database(), [origin.record.episode.id]).get(origin.record.episode.id, {})
    requests = {step: (request.tools, request.template_options) for step, request in stored.items()}
    rollout, options_by_step = experiment.config.rollout, {step: request.asked for step, request in stored.items()}
    is_clients = experiment.config.agent is not None and experiment.config.agent.name == CLIENTS

    def sampling(number: int) -> "tuple[RolloutConfig, SamplingKey]":
        options = options_by_step.get(number, {})
        limits = with_stop(limits_asked(rollout, options) if is_clients else rollout, options.get("stop", ()))
        return limits, key_asked(origin.key, options) if is_clients else origin.key

    episode = origin.record.episode
    constraints = {step: options[GRAMMAR] for step, options in options_by_step.items() if GRAMMAR in options}
    inputs = (origin.policies, lost, policy, schemas, origin.key, rollout, requests, sampling, origin.clock, constraints)
    return check_tokens(episode, *inputs)


def _check_rewards(origin: "Origin", experiment: "Experiment") -> "list[RewardsReport]":
    from agentrl.workflow.analysis.verify_episode import check_rewards
    from agentrl.workflow.envs import Env

    sets = {"default": experiment.env}
    episode = replace(origin.record.episode, limits=experiment.config.rollout)
    return [
        check_rewards(episode, name, sets.get(name, Env()), scored.weights, scored.parts, scored.code_hash)
        for name, scored in origin.reward_sets.items()
        if scored.parts
    ]


_CHECKS: Mapping[str, Callable[["Origin", "Experiment"], Any]] = {
    TOOLS: _check_tools,
    TOKENS: _check_tokens,
    REWARDS: _check_rewards,
}


# the report


def _report_lines(origin: "Origin", what: str, reports: Mapping[str, Any], verdict: Line) -> Iterator[Line]:
    row, episode = origin.record.row, origin.record.episode
    yield (
        f"episode {row['id']}  of {row['run']}, iteration {row['iteration']}, task {row['task']}, sample {row['sample']}",
        "bold",
    )
    if episode.inherited:
        parent = f"the parent {episode.parent_id}: agentrl replay {episode.parent_id} --verify {what}"
        yield f"{format_count(episode.inherited, 'step')} not verified: inherited from {parent}", ""
    if TOOLS in reports:
        yield from _tool_lines(reports[TOOLS])
    if TOKENS in reports:
        yield from _token_lines(reports[TOKENS])
    if REWARDS in reports:
        yield from _reward_lines(reports[REWARDS], row["status"])
    yield verdict


def _verdict_line(origin: "Origin", reports: Mapping[str, Any], same: bool, verified: int) -> Line:
    inherited = origin.record.episode.inherited
    if not same:
        return "NOT the same", "bold red"
    if not verified:
        return f"nothing{' of its own' if inherited else ''} to verify", "yellow"
    if TOKENS in reports and reports[TOKENS].unverified:
        return "the same, as far as it could be verified", "yellow"
    return ("the same, in what is its own" if inherited else "the same"), "green"


def _tool_lines(report: "ToolsReport") -> Iterator[Line]:
    counts = ", ".join(f"{count} {reason}" for reason, count in report.taken.items())
    note = f", from the record: {counts}" if counts else ""
    yield f"tools    {format_count(report.ran, 'call')} run again, {report.differing} differ{note}", line_style(report.same)
    if (first := report.first) is not None:
        yield f"  first: step {first.step}, call {first.call} ({first.tool})", "red"
        yield f"    recorded: {_result_text(first.recorded)}", ""
        yield f"    now:      {_result_text(first.found)}", ""
    yield (
        f"messages {format_count(report.prompts, 'prompt')} rebuilt from the results, {report.misread} differ",
        line_style(not report.misread),
    )
    if (reading := report.reading) is not None:
        yield f"  first: step {reading.step}, message {reading.index}", "red"
        yield f"    recorded: {_message_text(reading.recorded)}", ""
        yield f"    now:      {_message_text(reading.found)}", ""


def _message_text(message: Message | str | None) -> str:
    if message is None:
        return "(no more)"
    if isinstance(message, str):
        return f"the env raised {one_line(message, MAX_QUOTED)}"
    return f"{message.role}{f' {message.name}' if message.name else ''}: {quote(message.content)}"


def _result_text(result: ToolResult) -> str:
    return f"{f'({result.error_class}) ' if result.error_class else ''}{quote(result.content)}"


def _token_lines(report: "TokensReport") -> Iterator[Line]:
    differ = 0 if report.prompt is None else 1
    yield f"prompts  {report.prompts} rendered again, {'one' if differ else 'none'} differs", line_style(not differ)
    if report.prompt is not None:
        yield from parting_lines(report.prompt, "recorded:", "rendered:")
    yield from _score_lines(report)
    if (off := report.logprob) is not None:
        yield f"  first: step {off.step}, token {off.token} ({off.id} {quote(off.text)})", "red"
        yield f"    recorded: {off.recorded:.7g}", ""
        yield f"    now:      {off.found:.7g}", ""
    yield from _draw_lines(report)
    if (end := report.ending) is not None:
        outcome = "no token ends it" if end.found is None else f"token {end.found - 1} ends it"
        yield (
            f"endings  step {end.step}: recorded as {end.recorded!r} after {format_count(end.tokens, 'token')}, and {outcome}",
            "red",
        )


def _score_lines(report: "TokensReport") -> Iterator[Line]:
    tokens = sum(step.tokens for step in report.steps)
    greatest = max((step.max_difference for step in report.steps), default=0.0)
    text = f"|difference| at most {greatest:.2g} (tolerance {report.logprob_tolerance:g})"
    yield f"logprobs {tokens} recomputed in {report.precision}, {text}", line_style(report.logprob is None)
    if (noise := report.noise) is not None:
        text = f"rms {noise.rms:.2g} (at most {noise.max_rms:.2g}), mean {noise.mean:+.2g} (at most {noise.max_mean:.2g})"
        yield (
            f"noise    {noise.noise:.2g} nats of noise measured on the logits; differences in units of it: {text}",
            line_style(noise.same),
        )
    for step in report.steps:
        difference = f"|difference| at most {step.max_difference:.2g}, mean {step.mean_difference:.2g}"
        yield f"  step {step.step}, policy v{step.policy_version}: {format_count(step.tokens, 'token')}, {difference}", "dim"


def _draw_lines(report: "TokensReport") -> Iterator[Line]:
    same, ties, mismatches = (sum(getattr(step, name) for step in report.steps) for name in ("same", "ties", "mismatches"))
    counts = f"{same} same, {format_count(ties, 'tie')} (within {report.draw_tolerance:g}), {mismatches} mismatches"
    limited = f" ({report.limited} within a grammar)" if report.limited else ""
    yield f"draws    {same + ties + mismatches} drawn again{limited}: {counts}", line_style(report.draw is None)
    if (missed := report.draw) is not None:
        yield f"  first: step {missed.step}, token {missed.token}", "red"
        yield f"    recorded: {missed.recorded_id} {quote(missed.recorded)}", ""
        yield f"    drawn:    {missed.drawn_id} {quote(missed.drawn)}, {missed.distance:.2g} beyond", ""


def _reward_lines(reports: "list[RewardsReport]", status: str) -> Iterator[Line]:
    if not reports:
        yield f"rewards  none: the episode is {status}", ""
    for report in reports:
        if report.error:
            yield f"rewards  {report.reward_set}: cannot be recomputed: {report.error}", "red"
            continue
        hooks = f"; from the record: {', '.join(report.hooks)} (hooks)" if report.hooks else ""
        code = "" if report.same_code else "; the code of the rewards has changed"
        text = f"{format_count(report.parts, 'part')} recomputed, {len(report.differences) or 'none'} differ{hooks}{code}"
        yield f"rewards  {report.reward_set}: {text}", line_style(report.same)
        for item in report.differences:
            at = "" if item.step is None else f" of step {item.step}"
            yield f"  {item.part}{at}: recorded {full_number(item.recorded)}, now {full_number(item.found)}", "red"


def parting_lines(difference: "TokenDifference", left: str, right: str) -> Iterator[Line]:
    """Yield lines about the first difference of two token sequences: the text before it, and one line for each side."""
    before = f", after {quote_end(difference.before)}" if difference.before else ""
    yield f"  first: step {difference.step}, {difference.part} token {difference.index}{before}", "red"
    for name, token, text, after in zip((left, right), difference.ids, difference.texts, difference.after, strict=True):
        side = f"{token}{f' {quote(text)}' if text else ''}{f', then {quote(after, AROUND_CHARS)}' if after else ''}"
        yield f"    {name} {'(no more)' if token is None else side}", ""


def line_style(same: bool) -> str:
    return "" if same else "red"


def quote(text: str, max_chars: int = MAX_QUOTED) -> str:
    """Return the text in quotation marks, with invisible characters escaped, and cut to `max_chars` characters."""
    return repr(text if len(text) <= max_chars else text[: max_chars - 3] + "...")


def quote_end(text: str) -> str:
    """Return the end of the text in quotation marks, with invisible characters escaped: at most `AROUND_CHARS` characters."""
    return repr(text if len(text) <= AROUND_CHARS else "..." + text[3 - AROUND_CHARS :])


def full_number(value: float | str | None) -> str:
    """Return the number with all digits. If the value is a text, which is an error message, return it shortened."""
    return one_line(value, MAX_QUOTED) if isinstance(value, str) else cell(value) if value is None else repr(value)

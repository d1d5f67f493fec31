"""Verification of an episode's record: the episode is repeated from its rows and compared with them.

Three questions, each with its own report: do the tools return the same again, and did the model read these results
(`check_tools`), are the rewards the same (`check_rewards`), did the recorded weights and draws give these tokens
(`analysis.verify_tokens`, since that needs a model)? What cannot or must not be repeated is taken from the record and counted
by its reason.

Nothing here needs torch: the reports of `analysis.verify_tokens` are defined here too, so that they can be printed anywhere.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import zip_longest
from pathlib import Path
from typing import Any

from agentrl.workflow.analysis.episode_diff import SCALAR, TokenDifference
from agentrl.workflow.checkpoints import weights_of
from agentrl.workflow.envs import Env, score_episode, scoring_hash
from agentrl.workflow.errors import ConfigError, RewardError
from agentrl.workflow.rewards import Part, part_sum, total_reward
from agentrl.workflow.settings import is_url
from agentrl.workflow.trajectory import Episode, FinishReason, Message, PolicyRef, Step, ToolResult

Run = Callable[[str, Mapping[str, Any]], ToolResult]
"""Runs the named tool with these arguments, within its time limit."""

Reads = Callable[[Episode], Sequence[Message]]
"""What an episode with these steps reads next: the env's words, or a fork's edited ones. Raises what the env raises."""

NAME = 128
"""Characters of a tool's name that a call's row holds; what the model reads may hold more."""

REFUSED_CLASSES = frozenset({"parse_error", "too_many_calls", "unknown_tool", "bad_arguments"})
"""The `error_class` of a call that was answered without running anything; see `agent.refusal`."""

# tools


@dataclass(frozen=True, slots=True)
class CallDifference:
    """A call whose result differs when it is run again."""

    step: int
    call: int
    tool: str
    recorded: ToolResult
    found: ToolResult


@dataclass(frozen=True, slots=True)
class MessageDifference:
    """A message of a step that is not the one that the env makes of the recorded results.

    Args:
        index: which of the step's messages.
        recorded, found: None where a side has no more; `found` may be what the env raised.
    """

    step: int
    index: int
    recorded: Message | None
    found: Message | str | None


@dataclass(frozen=True, slots=True)
class ToolsReport:
    """Tool calls that were run again, and prompts that the env made again of the recorded results.

    Args:
        ran: how many.
        taken: reason -> how many were taken from the record instead: `once`, `refused`, `timeout`, `unanswered`, `parent's`.
        differing: how many of those that ran said something else.
        first: the first of them.
        prompts: steps whose messages were compared with the env's.
        misread: of these, how many read something else; `reading`: the first of them.
    """

    ran: int
    taken: Mapping[str, int]
    differing: int
    first: CallDifference | None
    prompts: int
    misread: int
    reading: MessageDifference | None

    @property
    def same(self) -> bool:
        """Whether none differs."""
        return not self.differing and not self.misread

    @property
    def compared_count(self) -> int:
        """How much was compared."""
        return self.ran + self.prompts


def check_tools(
    episode: Episode, calls: Sequence[Mapping[str, Any]], run: Run, effects: Mapping[str, str], reads: Reads
) -> ToolsReport:
    """Run the recorded calls again, in their order, as far as their effects allow; compare what each step read.

    Args:
        calls: the episode's rows of `v_tool_calls`, in order.
        run: how a call is run.
        effects: of the env's tools as they are now, by name: what has become `once` since is not run either.
        reads: what the env makes of the recorded results.
    """
    own = [(call, _why_not_run(call, effects)) for call in calls if call["step"] >= episode.inherited]
    taken = Counter(reason for _, reason in own if reason)
    inherited = sum(len(step.message.tool_calls) for step in episode.steps[: episode.inherited])
    differences = [difference for call, reason in own if not reason and (difference := _run_again(call, run))]
    steps = episode.steps[episode.inherited :]
    misread = [other for step in steps if (other := _read_again(episode, step, reads))]
    return ToolsReport(
        ran=len(own) - taken.total(),
        taken={**taken, **({"parent's": inherited} if inherited else {})},
        differing=len(differences),
        first=next(iter(differences), None),
        prompts=len(steps),
        misread=len(misread),
        reading=next(iter(misread), None),
    )


def _run_again(call: Mapping[str, Any], run: Run) -> CallDifference | None:
    result = run(call["tool"], call["arguments"])
    recorded = ToolResult(call["result"], call["error_class"], call["seconds"])
    if (result.content, result.error_class) == (recorded.content, recorded.error_class):
        return None
    return CallDifference(call["step"], call["call"], call["tool"], recorded, result)


def _read_again(episode: Episode, step: Step, reads: Reads) -> MessageDifference | None:
    """The first of the step's messages that is another than the env's."""
    try:
        messages = reads(replace(episode, steps=episode.steps[: step.index]))
    except Exception as error:  # noqa: BLE001 - anybody's `reset` and `step`; that it raises now is the difference
        return MessageDifference(step.index, 0, step.prompt[0] if step.prompt else None, f"{type(error).__name__}: {error}")
    for index, (ours, theirs) in enumerate(zip_longest(step.prompt, messages)):
        if ours is None or theirs is None or _words(ours) != _words(theirs):
            return MessageDifference(step.index, index, ours, theirs)
    return None


def _words(message: Message) -> tuple[str, str, str]:
    """What the record keeps of a message that a step read, and of its name what it keeps of a call's."""
    return message.role, message.content, message.name.replace("\0", "\ufffd")[:NAME]


def _why_not_run(call: Mapping[str, Any], effects: Mapping[str, str]) -> str:
    """Why a call is taken from the record; empty where it is run again."""
    if call["kind"] == "agent":
        return "run by the agent"
    if call["result"] is None:
        return "unanswered"
    if call["error_class"] in REFUSED_CLASSES:
        return "refused"
    if "once" in (call["effects"], effects.get(call["tool"])):
        return "once"
    return "timeout" if call["error_class"] == "timeout" else ""


# tokens


@dataclass(frozen=True, slots=True)
class StepScore:
    """The sampled tokens of one step under the weights that the record names.

    Args:
        max_difference: greatest |recorded - recomputed logprob|, in nats; `mean_difference` over its tokens.
        same: draws that give the recorded token; `ties`: another, but within the tolerance; `mismatches`: another. All 0
            where the engine keyed no draw.
    """

    step: int
    policy_version: int
    tokens: int
    max_difference: float
    mean_difference: float
    same: int
    ties: int
    mismatches: int


@dataclass(frozen=True, slots=True)
class LogprobDifference:
    """A token whose logprob was recorded as another than the weights give it; `token` counts within the step."""

    step: int
    token: int
    id: int
    text: str
    recorded: float
    found: float


@dataclass(frozen=True, slots=True)
class DrawDifference:
    """A token that its draw does not give.

    Args:
        token: its number within its step, which is also the position of its draw.
        recorded_id: what the record says; `drawn_id`: what the draw gives.
        distance: probability between the draw and the recorded token's share of [0, 1).
    """

    step: int
    token: int
    recorded_id: int
    recorded: str
    drawn_id: int
    drawn: str
    distance: float


@dataclass(frozen=True, slots=True)
class EndDifference:
    """A turn that did not end where its tokens say.

    Args:
        tokens: how many it has; `recorded`: why it ended.
        found: after so many of them stands its first end token or stop string; None: there is none.
    """

    step: int
    tokens: int
    recorded: FinishReason
    found: int | None


@dataclass(frozen=True, slots=True)
class NoiseReport:
    """Differences of an episode's recorded logprobs, in units of the rounding noise measured on it (`analysis.rounding_noise`).

    Args:
        noise: of the logits, in nats.
        rms: root mean square of the differences; `mean`: their mean; each with the most that honest rounding makes.
    """

    noise: float
    rms: float
    max_rms: float
    mean: float
    max_mean: float

    @property
    def same(self) -> bool:
        """Whether rounding explains the differences."""
        return self.rms <= self.max_rms and abs(self.mean) <= self.max_mean


@dataclass(frozen=True, slots=True)
class TokensReport:
    """Tokens rendered, scored and drawn again.

    Args:
        precision: what it was computed in: `exact`, `float32` or `coarse` (16 bits, or a quantised base).
        logprob_tolerance: in nats; `draw_tolerance`: in probability; where noise was measured, the greatest of all tokens.
        prompts: steps whose prompt was rendered again, and the first that differs.
        steps: the steps whose tokens were scored and drawn again.
        parents: steps that a fork has from its parent: verified with the parent, not here.
        unverified: a sentence for each policy whose weights are gone.
        logprob, draw: the first token beyond the tolerance.
        ending: the first turn that did not end as its tokens say.
        noise: the differences of all tokens together, where rounding noise was measured.
    """

    precision: str
    logprob_tolerance: float
    draw_tolerance: float
    prompts: int
    prompt: TokenDifference | None
    steps: tuple[StepScore, ...]
    parents: int
    unverified: tuple[str, ...] = ()
    logprob: LogprobDifference | None = None
    draw: DrawDifference | None = None
    ending: EndDifference | None = None
    noise: NoiseReport | None = None

    @property
    def same(self) -> bool:
        """Whether nothing that could be verified differs; ties do not."""
        differences = (self.prompt, self.logprob, self.draw, self.ending)
        return all(difference is None for difference in differences) and (self.noise is None or self.noise.same)

    @property
    def compared_count(self) -> int:
        """How much was compared."""
        return self.prompts + sum(step.tokens for step in self.steps)


def missing_weights(policies: Mapping[int, PolicyRef], collected: Mapping[int, datetime]) -> dict[int, str]:
    """Step -> a sentence on its policy's weights, for the steps whose weights cannot be read any more.

    Args:
        policies: what each step was sampled with.
        collected: when the weights' files were removed to save space, by step.
    """
    reasons = {}
    for step, ref in policies.items():
        if step in collected:
            reasons[step] = f"policy v{ref.version} was collected at {collected[step]:%Y-%m-%d %H:%M:%S} UTC"
        elif ref.path and not is_url(ref.path) and not weights_of(Path(ref.path)).is_file():
            reasons[step] = f"policy v{ref.version} is gone from {ref.path!r}"
    return {step: f"{reason}: its tokens cannot be verified." for step, reason in reasons.items()}


# rewards


@dataclass(frozen=True, slots=True)
class RewardDifference:
    """A part (or the `reward`, their weighted sum) that comes to something else.

    `step`: whose; None for the whole episode's.
    """

    part: str
    recorded: float | None
    found: float | str | None
    step: int | None = None


@dataclass(frozen=True, slots=True)
class RewardsReport:
    """One reward set of the episode, computed again.

    Args:
        parts: how many were computed.
        hooks: parts that hooks added; taken from the record.
        same_code: whether the rewards' files are those that scored the episode.
        error: why they could not be computed; empty if they were.
    """

    reward_set: str
    parts: int
    hooks: tuple[str, ...]
    same_code: bool
    differences: tuple[RewardDifference, ...] = ()
    error: str = ""

    @property
    def same(self) -> bool:
        """Whether every number is exactly the recorded one."""
        return not self.differences and not self.error

    @property
    def compared_count(self) -> int:
        """How much was compared."""
        return self.parts


def check_rewards(
    episode: Episode, reward_set: str, env: Env, weights: Mapping[str, float], recorded: Mapping[str, Part], code: str
) -> RewardsReport:
    """Score a finished episode again; what judges it judges here.

    Args:
        reward_set: its name; the episode's own scalar belongs to `default`.
        env: what gives rewards of its own to that set; for another set an env that gives none.
        weights: of the set.
        recorded: the parts in the set, those of hooks too, in the order in which they were recorded.
        code: `envs.scoring_hash` of the set when it was made.

    Raises:
        SandboxUnavailable: a judge must run code, and nothing here can hold it.
        InfraError: the system failed a reward.
    """
    hooks = tuple(part for part in recorded if part not in weights)
    same_code = False
    try:
        same_code = scoring_hash(env, weights) == code
        parts = score_episode(env, replace(episode, status="done", reward=None, rewards={}), weights)
        hooks = tuple(part for part in hooks if part not in parts)
        sums = {SCALAR: total_reward({**parts, **{part: recorded[part] for part in hooks}}, weights)}
    except (ConfigError, RewardError) as error:  # the other reward sets are verified all the same
        return RewardsReport(reward_set, 0, hooks, same_code, error=str(error))
    differences = [
        difference for name, part in parts.items() for difference in _reward_differences(name, recorded.get(name), part)
    ]
    differences += [
        RewardDifference(name, part_sum(recorded[name]), None) for name in weights if name in recorded.keys() - parts
    ]
    if reward_set == "default":
        differences += _reward_differences(SCALAR, episode.reward, sums[SCALAR])
    return RewardsReport(reward_set, len(parts), hooks, same_code, tuple(differences))


def _reward_differences(name: str, recorded: Part | None, part: Part) -> Iterator[RewardDifference]:
    if isinstance(recorded, tuple) and isinstance(part, tuple):
        for step, (ours, theirs) in enumerate(zip_longest(recorded, part)):
            if ours != theirs:
                yield RewardDifference(name, ours, theirs, step)
    elif recorded != part:
        yield RewardDifference(name, None if recorded is None else part_sum(recorded), part_sum(part))

"""The verification of an episode's record: the episode is repeated from its rows, and the results are compared with these rows.

`check_tools` verifies tools and messages, `check_rewards` rewards, and `analysis.verify_tokens` tokens, for which it needs a
model. Parts that cannot or must not be repeated are taken from the record, and counted by reason. This module needs no torch.
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
"""A function that runs the tool of a given name with the given arguments, within the tool's time limit."""

Reads = Callable[[Episode], Sequence[Message]]
"""A function that returns the messages which follow the steps of an episode: the env's messages, or the edited ones of a fork.

It raises the exceptions of the env.
"""

NAME = 128
"""The most characters of a tool's name in a call's row. The model may read a longer name."""

REFUSED_CLASSES = frozenset({"parse_error", "too_many_calls", "unknown_tool", "bad_arguments"})
"""The `error_class` values of calls that were answered without running a tool; see `agent.refusal`."""

# tools


@dataclass(frozen=True, slots=True)
class CallDifference:
    """A call that returned another result when it was run again."""

    step: int
    call: int
    tool: str
    recorded: ToolResult
    found: ToolResult


@dataclass(frozen=True, slots=True)
class MessageDifference:
    """A recorded message of a prompt that is not the message that the env makes again from the recorded results.

    Args:
        step: the index of the step.
        index: the index of the message in the step's prompt.
        recorded: the recorded message; None if the record has fewer messages.
        found: the env's message; None if the env returns fewer messages. If the env raised an exception, its text.
    """

    step: int
    index: int
    recorded: Message | None
    found: Message | str | None


@dataclass(frozen=True, slots=True)
class ToolsReport:
    """The report on tool calls that were run again, and on prompts that the env made again from the recorded results.

    Args:
        ran: the number of calls that were run.
        taken: the number of calls that were taken from the record instead, by reason: `once`, `refused`, `timeout`,
            `unanswered`, `parent's`, `run by the agent`.
        differing: the number of calls that were run and returned another result.
        first: the first of the calls that returned another result.
        prompts: the number of steps whose messages were compared with the env's.
        misread: the number of these steps in which a message differs.
        reading: the first message that differs.
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
        """True if no result and no message differs."""
        return not self.differing and not self.misread

    @property
    def compared_count(self) -> int:
        """The number of calls and prompts that were compared."""
        return self.ran + self.prompts


def check_tools(
    episode: Episode, calls: Sequence[Mapping[str, Any]], run: Run, effects: Mapping[str, str], reads: Reads
) -> ToolsReport:
    """Run the recorded calls again in their order, if their effects allow it, and compare the messages that each step read.

    Args:
        calls: the episode's rows of `v_tool_calls`, in order.
        run: the function that runs a call.
        effects: the present effects of the env's tools, by name. A call is not run if its tool's effect is `once` in the record
            or now.
        reads: the function that returns the env's messages for the recorded results.
    """
    own = [(call, _why_not_run(call, effects)) for call in calls if call["step"] >= episode.inherited]
    reasons = Counter(reason for _, reason in own if reason)
    inherited = sum(len(step.message.tool_calls) for step in episode.steps[: episode.inherited])
    differences = [difference for call, reason in own if not reason and (difference := _run_again(call, run))]
    steps = episode.steps[episode.inherited :]
    misread = [other for step in steps if (other := _read_again(episode, step, reads))]
    return ToolsReport(
        ran=len(own) - reasons.total(),
        taken={**reasons, **({"parent's": inherited} if inherited else {})},
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
    """Return the first of the step's messages that differs from the env's; None if all are the same."""
    try:
        messages = reads(replace(episode, steps=episode.steps[: step.index]))
    except Exception as error:  # noqa: BLE001 - anybody's `reset` and `step`; that it raises now is the difference
        return MessageDifference(step.index, 0, step.prompt[0] if step.prompt else None, f"{type(error).__name__}: {error}")
    for index, (ours, theirs) in enumerate(zip_longest(step.prompt, messages)):
        if ours is None or theirs is None or _words(ours) != _words(theirs):
            return MessageDifference(step.index, index, ours, theirs)
    return None


def _words(message: Message) -> tuple[str, str, str]:
    """Return the parts of a message that are recorded. The name is cut to the length that a call's row stores."""
    return message.role, message.content, message.name.replace("\0", "\ufffd")[:NAME]


def _why_not_run(call: Mapping[str, Any], effects: Mapping[str, str]) -> str:
    """Return why a call is taken from the record; empty if the call is run again."""
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
    """The scores of one step's sampled tokens under the recorded weights.

    Each token's random draw is repeated. `same`, `ties` and `mismatches` are 0 if the engine's draws cannot be repeated.

    Args:
        step: the index of the step.
        policy_version: the version of the policy that sampled the step.
        tokens: the number of sampled tokens.
        max_difference: the largest |recorded - recomputed logprob|, in nats.
        mean_difference: the mean of these differences over the tokens, in nats.
        same: the number of draws that give the recorded token.
        ties: the number of draws that give another token only because of rounding (within the tolerance).
        mismatches: the number of draws that give another token, which rounding does not explain.
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
    """A token whose recorded logprob differs from the logprob that the recorded weights give. `token` is the token's index in
    the step.
    """

    step: int
    token: int
    id: int
    text: str
    recorded: float
    found: float


@dataclass(frozen=True, slots=True)
class DrawDifference:
    """A recorded token that differs from the token which its draw gives.

    Args:
        step: the index of the step.
        token: the token's index within its step, which is also the position of its draw.
        recorded_id: the recorded token id.
        drawn_id: the token id that the draw gives.
        distance: the distance between the draw and the recorded token's interval of [0, 1), in probability.
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
    """A turn whose recorded end differs from the end that its tokens determine.

    Args:
        step: the index of the step.
        tokens: the number of the turn's tokens.
        found: the number of tokens up to the first end token or stop string; None if the turn has neither.
    """

    step: int
    tokens: int
    recorded: FinishReason
    found: int | None


@dataclass(frozen=True, slots=True)
class NoiseReport:
    """The differences between an episode's recorded and recomputed logprobs, in units of the measured rounding noise.

    See `analysis.rounding_noise`.

    Args:
        noise: the noise of the logits, in nats.
        rms: the root mean square of the differences.
        max_rms: the largest `rms` that rounding can cause.
        mean: the mean of the differences.
        max_mean: the largest absolute `mean` that rounding can cause.
    """

    noise: float
    rms: float
    max_rms: float
    mean: float
    max_mean: float

    @property
    def same(self) -> bool:
        """True if rounding explains the differences."""
        return self.rms <= self.max_rms and abs(self.mean) <= self.max_mean


@dataclass(frozen=True, slots=True)
class TokensReport:
    """The report on prompts that were rendered again, and on tokens that were scored and drawn again.

    Args:
        precision: the precision of the computation: `exact`, `float32` or `coarse` (16 bits, or a quantised base).
        logprob_tolerance: the tolerance of a logprob, in nats; if noise was measured, the largest tolerance of any token.
        draw_tolerance: the tolerance of a draw, in probability; if noise was measured, the largest tolerance of any token.
        prompts: the number of steps whose prompt was rendered again.
        prompt: the first difference in a prompt.
        steps: the steps whose tokens were scored and drawn again.
        parents: the number of steps that a fork inherits from its parent; they are verified with the parent.
        unverified: a sentence for each policy whose weights no longer exist, and for draws within a grammar that cannot be
            repeated.
        logprob: the first token whose logprob is beyond the tolerance.
        draw: the first token whose draw is beyond the tolerance.
        ending: the first turn whose recorded end differs from the end that its tokens determine.
        noise: the differences of all tokens together, if rounding noise was measured.
        limited: the number of draws within a grammar that were repeated.
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
    limited: int = 0

    @property
    def same(self) -> bool:
        """True if everything that could be verified agrees with the record; ties agree."""
        differences = (self.prompt, self.logprob, self.draw, self.ending)
        return all(difference is None for difference in differences) and (self.noise is None or self.noise.same)

    @property
    def compared_count(self) -> int:
        """The number of prompts and tokens that were compared."""
        return self.prompts + sum(step.tokens for step in self.steps)


def missing_weights(policies: Mapping[int, PolicyRef], collected: Mapping[int, datetime]) -> dict[int, str]:
    """Return, for each step whose weights can no longer be read, the reason: they were removed at the time in `collected`, or
    their file is missing.
    """
    reasons = {}
    for step, ref in policies.items():
        if step in collected:
            reasons[step] = f"the weights of policy v{ref.version} were removed at {collected[step]:%Y-%m-%d %H:%M:%S} UTC"
        elif ref.path and not is_url(ref.path) and not weights_of(Path(ref.path)).is_file():
            reasons[step] = f"the weights of policy v{ref.version} are missing in {ref.path!r}"
    return {step: f"{reason}: its tokens cannot be verified." for step, reason in reasons.items()}


# rewards


@dataclass(frozen=True, slots=True)
class RewardDifference:
    """A reward part (or `reward`, the weighted sum) that has another value when it is computed again.

    `step` is the index of the step that the reward belongs to; None for a reward of the complete episode.
    """

    part: str
    recorded: float | None
    found: float | str | None
    step: int | None = None


@dataclass(frozen=True, slots=True)
class RewardsReport:
    """The report on one reward set of the episode, which was computed again.

    Args:
        parts: the number of parts that were computed.
        hooks: the parts that hooks added; they are taken from the record.
        same_code: True if the code of the rewards is the same as when the reward set was written.
        error: why the rewards could not be computed; empty if they were computed.
    """

    reward_set: str
    parts: int
    hooks: tuple[str, ...]
    same_code: bool
    differences: tuple[RewardDifference, ...] = ()
    error: str = ""

    @property
    def same(self) -> bool:
        """True if every number equals the recorded one exactly."""
        return not self.differences and not self.error

    @property
    def compared_count(self) -> int:
        """The number of parts that were compared."""
        return self.parts


def check_rewards(
    episode: Episode, reward_set: str, env: Env, weights: Mapping[str, float], recorded: Mapping[str, Part], code: str
) -> RewardsReport:
    """Score a finished episode again, and compare the rewards with the record. Judges run in this process. Raise
    SandboxUnavailable if a judge has to run code, and this machine has no sandbox for it. Raise InfraError if a reward failed
    because of the system.

    Args:
        reward_set: the name of the set. Only for the set `default` the weighted sum is compared with the episode's `reward`.
        env: the env, if its own rewards belong to this set; else an env without rewards.
        weights: the weights of the set.
        recorded: the parts in the set, including those of hooks, in the order in which they were recorded.
        code: the result of `envs.scoring_hash` at the time when the set was made.
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

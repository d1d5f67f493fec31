"""Turns that were sampled elsewhere, as the steps of an episode: what continues an earlier one token for token is its chain.

Tokens are the span's own where it has them, with their logprobs. Elsewhere the messages are rendered by the model's template,
as for demonstrations: such steps can be imitated and scored, and say nothing of what their sampler thought.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentrl.workflow.adapters import Turn
from agentrl.workflow.chat.rendering import Chat
from agentrl.workflow.inference.agent_draft import AgentDraft, Lines, continuing, opening
from agentrl.workflow.tool_formats import Schema
from agentrl.workflow.trajectory import Message, Step, messages_of

OTHER = "its request does not continue an earlier turn's tokens"
"""Why a turn opens another chain."""
UNKNOWN = math.nan
"""The logprob of a token whose own is not known."""


@dataclass(frozen=True, slots=True)
class TracedStep:
    """A step as it is stored.

    Args:
        text: what was sampled, readable.
        tools: what was offered.
        shared_messages: so many of its prompt's first messages are those of its parent's line.
        shown: (step, call) -> what came of it, as this step's prompt shows it.
    """

    step: Step
    text: str
    tools: Sequence[Schema]
    shared_messages: int
    shown: Mapping[tuple[int, int], str]


def traced_steps(
    turns: Sequence[Turn], seconds: Sequence[float | None], chat: Chat, vocabulary: int, exact: bool
) -> list[TracedStep]:
    """Return the turns as steps, in their order.

    Args:
        seconds: how long each took.
        vocabulary: the size of the model's vocabulary.
        exact: take the spans' own tokens; else all are rendered.

    Raises:
        ValueError: a token is none of the model's, or there is nothing in a turn.
        ModelError: the template refuses the messages.
    """
    lines, traced = Lines(), list[TracedStep]()
    for turn, took in zip(turns, seconds, strict=True):
        prompt_ids = turn.prompt_ids if exact else chat.opening(turn.messages, turn.tools)
        sampled_ids = turn.sampled_ids if exact else chat.turn(turn.said, turn.tools)
        if not sampled_ids or max(*prompt_ids, *sampled_ids) >= vocabulary:
            raise ValueError(
                f"its tokens are not in the vocabulary of the model, which has {vocabulary}"
                if sampled_ids
                else "a turn is empty"
            )
        draft = _place(lines, turn.messages, prompt_ids)
        step = Step(
            index=len(traced),
            prompt=draft.messages,
            prompt_ids=draft.prompt_ids,
            sampled_ids=sampled_ids,
            behavior_logprobs=turn.logprobs if exact else (UNKNOWN,) * len(sampled_ids),
            finish_reason=turn.finish_reason,
            message=turn.said,
            policy_version=0,
            seconds=took or 0.0,
            new_row=draft.reason,
            parent=draft.parent,
            shared=draft.shared,
        )
        lines.add(step)
        results = _shown(traced, draft, turn.answers) if draft.shared is None else {}
        traced.append(TracedStep(step, chat.decode(sampled_ids), turn.tools, draft.shared_messages, results))
    return traced


def _place(lines: Lines, messages: tuple[Message, ...], prompt_ids: tuple[int, ...]) -> AgentDraft:
    parent, shared = lines.longest_share(prompt_ids)
    if shared and shared == len(lines.tokens(parent)):
        before = len(messages_of(lines.steps, parent))
        if before < len(messages):
            return continuing(lines, parent, messages[before:], prompt_ids[shared:])
    return opening(lines, messages, prompt_ids, OTHER if lines.steps else None)


def _shown(traced: Sequence[TracedStep], draft: AgentDraft, answers: Sequence[int]) -> dict[tuple[int, int], str]:
    """What came of the calls of the step that the draft goes on from: the tools' messages; `answers` as in `Turn`."""
    if not traced or draft.parent < 0:
        return {}
    results = [message.content for message in draft.messages if message.role == "tool"]
    calls = len(traced[draft.parent].step.message.tool_calls)
    places = answers or range(len(results))
    return {(draft.parent, place): text for place, text in zip(places, results, strict=False) if 0 <= place < calls}

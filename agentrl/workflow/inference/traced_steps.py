"""The conversion of turns that another system sampled to an episode's steps.

A turn that continues an earlier turn token for token joins its chain. If a span has token ids and logprobs, these are used.
Otherwise the messages are rendered with the model's template, as for demonstrations. Such steps can be imitated and scored, but
the logprobs of their sampler are unknown.
"""

import math
from collections.abc import Sequence

from agentrl.workflow.adapters import Turn
from agentrl.workflow.chat.rendering import Chat
from agentrl.workflow.engines import Completion
from agentrl.workflow.inference.prompt_draft import Draft, Lines, continuing, opening
from agentrl.workflow.trajectory import CallRecord, Message, StepRecord, StepRequest, messages_of

OTHER = "its request does not continue an earlier turn's tokens"
"""The reason why a turn that continues no earlier turn begins a chain."""
UNKNOWN = math.nan
"""The value that is stored for an unknown logprob."""


def traced_steps(
    turns: Sequence[Turn], seconds: Sequence[float | None], chat: Chat, vocabulary: int, exact: bool
) -> list[StepRecord]:
    """Convert the turns to step records, in the same order. The records do not have an episode or a policy yet.

    Args:
        seconds: the duration of each turn, in seconds; None if it is unknown.
        vocabulary: the size of the model's vocabulary.
        exact: whether to use the token ids of the spans; otherwise all messages are rendered.

    Raises:
        ValueError: a token is not in the model's vocabulary, or a turn is empty.
        ModelError: the template refuses the messages.
    """
    lines, records = Lines(), list[StepRecord]()
    for turn, took in zip(turns, seconds, strict=True):
        prompt_ids = turn.prompt_ids if exact else chat.opening(turn.messages, turn.tools)
        sampled_ids = turn.sampled_ids if exact else chat.turn(turn.said, turn.tools)
        if not sampled_ids or max(*prompt_ids, *sampled_ids) >= vocabulary:
            raise ValueError(
                f"a turn has a token that is not in the model's vocabulary of {vocabulary} tokens"
                if sampled_ids
                else "a turn is empty"
            )
        draft = _place(lines, turn.messages, prompt_ids)
        logprobs = turn.logprobs if exact else (UNKNOWN,) * len(sampled_ids)
        step = draft.step(len(records), Completion(sampled_ids, logprobs, turn.finish_reason, took or 0.0), turn.said, 0)
        lines.add(step)
        results = _shown(records, draft, turn.answers) if draft.shared is None else {}
        request = StepRequest(f"import:{step.index}", "", tools=turn.tools)
        calls = tuple(CallRecord(call, "none", None) for call in step.message.tool_calls)
        records.append(
            StepRecord(0, step, 0, chat.decode(sampled_ids), calls, request, draft.shared_messages, earlier_results=results)
        )
    return records


def _place(lines: Lines, messages: tuple[Message, ...], prompt_ids: tuple[int, ...]) -> Draft:
    parent, shared = lines.longest_share(prompt_ids)
    if shared and shared == len(lines.tokens(parent)):
        before = len(messages_of(lines.steps, parent))
        if before < len(messages):
            return continuing(lines, parent, messages[before:], prompt_ids[shared:])
    return opening(lines, messages, prompt_ids, OTHER if lines.steps else None)


def _shown(records: Sequence[StepRecord], draft: Draft, answers: Sequence[int]) -> dict[tuple[int, int], str]:
    """Return the results of the parent step's calls, by (step, call number). They are the tools' messages in the draft.

    Args:
        answers: see `adapters.Turn`.
    """
    if not records or draft.parent < 0:
        return {}
    results = [message.content for message in draft.messages if message.role == "tool"]
    calls = len(records[draft.parent].step.message.tool_calls)
    places = answers or range(len(results))
    return {(draft.parent, place): text for place, text in zip(places, results, strict=False) if 0 <= place < calls}

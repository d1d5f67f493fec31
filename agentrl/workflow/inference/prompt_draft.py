"""A turn from its prompt to its step, for rollouts and chats alike."""

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.workflow.chat.rendering import Chat
from agentrl.workflow.engines import Completion
from agentrl.workflow.tool_formats import Schema
from agentrl.workflow.trajectory import Episode, Message, Step


@dataclass(frozen=True, slots=True)
class Draft:
    """The prompt of a turn that is not sampled yet.

    Args:
        messages: the messages that are new to the policy.
        prompt_ids: ids that continue the episode's tokens; the whole prompt if `new_row` says why that is impossible.
        new_row: see `trajectory.Step`.
        chain: the number of its chain.
    """

    messages: tuple[Message, ...]
    prompt_ids: tuple[int, ...]
    new_row: str | None = None
    chain: int = 0

    def context(self, episode: Episode) -> tuple[int, ...]:
        """Return the policy's full input: the episode's training row so far, and the new tokens."""
        return self.prompt_ids if self.new_row else episode.context_ids + self.prompt_ids

    def step(self, index: int, completion: Completion, message: Message, policy_version: int) -> Step:
        """Return the step of a completion; `message` is what its ids spell."""
        return Step(
            index=index,
            prompt=self.messages,
            prompt_ids=self.prompt_ids,
            sampled_ids=completion.token_ids,
            behavior_logprobs=completion.logprobs,
            finish_reason=completion.finish_reason,
            message=message,
            policy_version=policy_version,
            seconds=completion.seconds,
            new_row=self.new_row,
            chain=self.chain,
        )


def draft_turn(chat: Chat, episode: Episode, messages: tuple[Message, ...], schemas: Sequence[Schema]) -> Draft:
    """Return the prompt of the episode's next turn.

    Raises:
        ModelError: the template refuses these messages.
    """
    if not episode.steps:
        return Draft(messages, chat.opening(messages, schemas))
    ids, reason = chat.continuation(messages, schemas, episode.steps[-1].sampled_ids)
    if ids is not None:
        return Draft(messages, ids, chain=episode.steps[-1].chain)
    chain = max(step.chain for step in episode.steps) + 1
    return Draft(messages, chat.opening((*episode.messages, *messages), schemas), reason, chain)

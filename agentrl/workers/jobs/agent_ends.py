"""How an episode ends when its agent has: a pure table of what the agent's row says and what was recorded."""

from collections.abc import Mapping
from dataclasses import dataclass

from agentrl.workflow.store.rollout_claims import Outcome
from agentrl.workflow.trajectory import UNCLOSED, UNFINISHED, Episode, StopReason

TIMEOUT = "timeout"
"""The error class of an agent that was over its time."""


@dataclass(frozen=True, slots=True)
class AgentEnd:
    """How an agent ended.

    Args:
        error_class: empty where it returned, or its program exited with 0.
        error: in its words.
        answer: the text that it gave as the episode's answer, if it gave one.
        rewards: what it says it earned.
    """

    error_class: str = ""
    error: str = ""
    answer: str | None = None
    rewards: Mapping[str, float] | None = None


def judge_end(episode: Episode, end: AgentEnd) -> StopReason | Outcome:
    """Why the episode stopped, if anything was sampled and delivered; else how it failed."""
    last = episode.last_turn
    if last is None:
        said = end.error or "The agent ended without one answered call of the model."
        return Outcome(episode.id, "failed", error_class="AgentError", error=said)
    if end.error_class:
        return "timeout" if end.error_class == TIMEOUT else "agent_error"
    if last.finish_reason == "length":
        return "max_tokens"
    if any(call.error in (UNCLOSED, UNFINISHED) for call in last.message.tool_calls):
        return "parse_error"
    return "answered"

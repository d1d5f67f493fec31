"""tool_use: the share of an episode's tool calls that succeeded, from 0.0 to 1.0; 0.0 if the episode has no tool call."""

from agentrl.workflow.trajectory import Episode


def tool_use(episode: Episode) -> float:
    calls = sum(len(step.message.tool_calls) for step in episode.steps)
    worked = sum(result.error_class is None for step in episode.steps for result in step.results or ())
    return worked / calls if calls else 0.0

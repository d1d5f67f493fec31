"""tool_use: the share of an episode's tool calls that worked, from 0.0 to 1.0; 0.0 where it called no tool.

A call worked if its tool answered it: one that could not be read, was refused, failed, or was never run since the episode ended
with it, did not.
"""

from agentrl.workflow.trajectory import Episode


def tool_use(episode: Episode) -> float:
    """Return the share."""
    calls = sum(len(step.message.tool_calls) for step in episode.steps)
    worked = sum(result.error_class is None for step in episode.steps for result in step.results or ())
    return worked / calls if calls else 0.0

"""echoed: 1.0 if a tool returned exactly the reference, else 0.0."""

from agentrl.workflow.trajectory import Episode


def echoed(episode: Episode) -> float:
    results = (result for step in episode.steps for result in step.results or ())
    return float(any(result.error_class is None and result.content == episode.task.reference for result in results))

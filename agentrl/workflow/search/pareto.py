"""GEPA with the package `gepa`: reflective mutation, and a Pareto front over tasks. The trajectories of GEPA are agentrl's
episodes.

Source: Agrawal et al. 2025, "GEPA: Reflective Prompt Evolution Can Outperform Reinforcement Learning", arXiv 2507.19457.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any, cast

from gepa.api import optimize
from gepa.core.adapter import EvaluationBatch

from agentrl.workflow.resources import places
from agentrl.workflow.search import Candidate, Critic, Resources, Rollouts, group_score
from agentrl.workflow.search.feedback import conversation, feedback
from agentrl.workflow.trajectory import Episode, Group, Task


def run(
    resources: Resources,
    rollouts: Rollouts,
    train_tasks: Sequence[Task],
    choose_tasks: Sequence[Task],
    critic: Critic,
    rng: random.Random,
    options: Mapping[str, Any],
) -> Candidate:
    """Return the candidate with the best mean score over `choose_tasks`."""
    result: Any = optimize(
        seed_candidate=dict(resources),
        trainset=list(train_tasks),
        valset=list(choose_tasks),
        adapter=cast(Any, _Adapter(resources, rollouts)),
        reflection_lm=lambda prompt: critic(_as_text(prompt)),
        reflection_minibatch_size=options["batch_tasks"],
        max_metric_calls=options["max_rollouts"],
        skip_perfect_score=False,
        logger=_Silent(),
        seed=rng.randrange(2**31),
        raise_on_exception=True,
    )
    return dict(result.best_candidate)


class _Adapter:
    """The adapter that GEPA calls. It scores a candidate, and collects the texts that the critic reads."""

    propose_new_texts = None

    def __init__(self, resources: Resources, rollouts: Rollouts) -> None:
        self._resources, self._rollouts = resources, rollouts
        self._shown: dict[str, str] | None = None

    def evaluate(
        self, batch: list[Task], candidate: dict[str, str], capture_traces: bool = False
    ) -> EvaluationBatch[Episode | str, str]:
        faults = [
            f"{name}: {fault}" for name, text in candidate.items() if (fault := self._resources.validation_error(name, text))
        ]
        if faults:
            problem = f"This text cannot be used: {'; '.join(faults)}"
            return EvaluationBatch([""] * len(batch), [0.0] * len(batch), [problem] * len(batch) if capture_traces else None)
        groups = self._rollouts(candidate, batch, "a reflection" if self._shown else "the beginning", self._shown)
        self._shown = dict(candidate) if capture_traces else self._shown  # the next one is made from it
        scores = [group_score(group) or 0.0 for group in groups]
        episodes: list[Episode | str] = [_first(group) for group in groups]
        return EvaluationBatch([""] * len(batch), scores, episodes if capture_traces else None)

    def make_reflective_dataset(
        self, candidate: dict[str, str], eval_batch: EvaluationBatch[Episode | str, str], components_to_update: list[str]
    ) -> dict[str, list[dict[str, Any]]]:
        """Return, for each prompt in `components_to_update`, the records that the critic reads before it rewrites the prompt:
        the conversation and the feedback of each episode, and the placeholders that the prompt must keep.
        """
        records = [_record(trace) for trace in eval_batch.trajectories or ()]
        return {name: [*records, *self._places(name)] for name in components_to_update}

    def _places(self, name: str) -> list[dict[str, Any]]:
        needed = ", ".join(f"{{{place}}}" for place in sorted(places(self._resources[name])))
        return [{"Rule": f"The text must keep these places, which are filled in later: {needed}"}] if needed else []


class _Silent:
    def log(self, message: str) -> None:
        """Ignore the message, because the run's database rows contain the information."""


def _first(group: Group) -> Episode:
    return next((episode for episode in group.episodes if episode.reward is not None), group.episodes[0])


def _record(trace: Episode | str) -> dict[str, Any]:
    if isinstance(trace, str):
        return {"Feedback": trace}
    return {"Conversation": conversation(trace), "Feedback": feedback(trace)}


def _as_text(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else "\n\n".join(str(message.get("content", "")) for message in prompt)

"""APO: a critic criticises and edits a prompt, given episodes that used the prompt. Beam search keeps the best prompts.

Source: Pryzant et al. 2023, "Automatic Prompt Optimization with 'Gradient Descent' and Beam Search", arXiv 2305.03495,
algorithms 1 to 3. The paper selects candidates with bandits; here every candidate is tried on all of `choose_tasks`.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.workflow.resources import places
from agentrl.workflow.search import Candidate, Critic, Resources, Rollouts, score
from agentrl.workflow.search.feedback import describe_group
from agentrl.workflow.trajectory import Group, Task


def run(
    resources: Resources,
    rollouts: Rollouts,
    train_tasks: Sequence[Task],
    choose_tasks: Sequence[Task],
    critic: Critic,
    rng: random.Random,
    options: Mapping[str, Any],
) -> Candidate:
    """Return the best candidate of the last beam. If scores are equal, return the older candidate."""
    seed = dict(resources)
    beam = [(score(rollouts(seed, choose_tasks, "the beginning")), seed)]
    for number in range(1, options["rounds"] + 1):
        parents = [candidate for _, candidate in beam]
        batch = rng.sample(list(train_tasks), min(options["batch_tasks"], len(train_tasks)))
        names = [[rng.choice(list(resources)) for _ in range(options["branch_factor"])] for _ in parents]
        rollout_groups = rollouts.each(parents, batch)
        edits = _edits(resources, critic, parents, names, rollout_groups)
        candidates = [candidate for _, candidate in beam]
        fresh = [(text, parent) for text, parent in edits if text not in candidates]
        fresh = [pair for place, pair in enumerate(fresh) if pair[0] not in [text for text, _ in fresh[:place]]]
        if not fresh:
            continue
        notes = [f"round {number}, edit {place}" for place in range(1, len(fresh) + 1)]
        tried = rollouts.each([text for text, _ in fresh], choose_tasks, notes, [parent for _, parent in fresh])
        beam += [(score(groups), text) for groups, (text, _) in zip(tried, fresh, strict=True)]
        beam = sorted(beam, key=lambda pair: -pair[0])[: options["beam_width"]]
    return beam[0][1]


def _edits(
    resources: Resources,
    critic: Critic,
    parents: Sequence[Candidate],
    names: Sequence[Sequence[str]],
    rollout_groups: Sequence[Sequence[Group]],
) -> list[tuple[dict[str, str], Candidate]]:
    """Return the edited candidates, each with its parent. If a critic's answer is not a valid edit, it is ignored."""
    targets = [
        (parent, name, groups) for parent, its, groups in zip(parents, names, rollout_groups, strict=True) for name in its
    ]
    critiques = critic.each([_ask_for_critique(parent[name], name, groups) for parent, name, groups in targets])
    pairs = zip(targets, critiques, strict=True)
    edits = critic.each([_ask_for_edit(parent[name], name, critique) for (parent, name, _), critique in pairs])
    candidates = []
    for (parent, name, _), edit in zip(targets, edits, strict=True):
        text = edited(edit)
        if not resources.validation_error(name, text):
            candidates.append((resources.with_text(parent, name, text), parent))
    return candidates


def edited(answer: str) -> str:
    """Return the prompt in a critic's answer, from the first <prompt> to the last </prompt>; empty if there is none."""
    text, closed, _ = answer.partition("<prompt>")[2].rpartition("</prompt>")
    return text.strip() if closed else ""


def _ask_for_critique(text: str, name: str, groups: Sequence[Group]) -> str:
    episodes = "\n\n".join(
        f'<episode number="{number}">\n{describe_group(group)}\n</episode>' for number, group in enumerate(groups, 1)
    )
    return (
        f"A language-model agent works with this text, called {name}:\n\n<prompt>\n{text}\n</prompt>\n\n"
        f"These are episodes of it, each with what it earned (more is better):\n\n{episodes}\n\n"
        "Say in a short list what in the text made it earn less than it could, and what a better text would tell the agent. "
        "Speak of the kind of task, never of the answers to these very tasks."
    )


def _ask_for_edit(text: str, name: str, critique: str) -> str:
    needed = ", ".join(f"{{{place}}}" for place in sorted(places(text)))
    instruction = f" Keep these places as they are, since they are filled in later: {needed}." if needed else ""
    return (
        f"This text, called {name}, is what a language-model agent works with:\n\n<prompt>\n{text}\n</prompt>\n\n"
        f"A critic said of it:\n\n<critique>\n{critique}\n</critique>\n\n"
        f"Write a better one.{instruction} Answer with the whole new text between <prompt> and </prompt>, and nothing after it."
    )

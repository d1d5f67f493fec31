"""The chains of an episode: which steps form a training row, which tokens precede them, and which steps train.

A chain is a sequence of steps. Each step continues the previous step token for token. A chain may begin with tokens of another
chain, which are its context. Context tokens train only in the chain that sampled them, so each sampled token trains once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from agentrl.workflow.trajectory import ROOT, Episode, Step

UNREAD = "the client did not receive the complete turn, and no other step continues it"
"""The reason why a step does not train if it was cancelled or not delivered completely."""

INHERITED = "the parent episode sampled this step"
"""The reason why an inherited step of a fork does not train."""

SIDE_CALL = "the agent marked its call as a side call"
"""The reason why the step of a side call does not train."""

EQUAL = "equal_histories"
"""The key in `steps.asked` for the number of turns whose messages are equal to those of the step's parent line.

The key is set only if there are several such turns, because the request could continue any of them.
"""


def chains_of(episode: Episode) -> list[list[Step]]:
    """Return the episode's steps, one list per chain, in the order in which the chains began.

    A step without a parent begins a new chain, whatever its chain number is. In episodes that were stored before chain numbers
    existed, all steps have the number 0.
    """
    chains: list[list[Step]] = []
    ends: dict[int, list[Step]] = {}  # the index of a chain's last step -> the chain
    for step in episode.steps:
        chain = None if step.parent is None or step.shared is not None else ends.get(step.parent)
        if chain is None or chain[-1].chain != step.chain:
            chains.append(chain := [])
        else:
            del ends[chain[-1].index]
        chain.append(step)
        ends[step.index] = chain
    return chains


def context_of(episode: Episode, step: Step) -> list[tuple[int, float | None]]:
    """Return the tokens before the step's prompt: ids with their logprobs, which are None for tokens that were not sampled."""
    if step.parent is None or step.parent == ROOT:
        return []
    tokens: list[tuple[int, float | None]] = []
    for one in episode.line(step.parent):
        del tokens[len(tokens) if one.shared is None else one.shared :]
        tokens += [(token, None) for token in one.prompt_ids]
        tokens += zip(one.sampled_ids, one.behavior_logprobs, strict=True)
    return tokens[: step.shared]


def reasons_not_to_train(episode: Episode) -> Mapping[int, str]:
    """Return the reason why a step does not train, by step index, for each step that does not train."""
    lengths = _lengths(episode)
    continued = {
        step.parent
        for step in episode.steps
        if step.parent is not None and step.parent != ROOT and (step.shared is None or step.shared >= lengths[step.parent])
    }
    side_calls = {step.index: SIDE_CALL for step in episode.steps if step.side_call}
    unread = {step.index: UNREAD for step in episode.steps if not step.delivered and step.index not in continued}
    return side_calls | unread | {step.index: INHERITED for step in episode.steps if step.index < episode.fork_step}


def as_read(episode: Episode) -> tuple[Episode, Sequence[int]]:
    """Return the episode without the steps that the client never received, and the old indices of the remaining steps.

    A step is removed if it was not delivered and no other step continues it. Rewards and training use the returned episode, so
    requests that failed and were repeated do not change them. If a step began a new chain only because a removed step already
    continued its parent, it now continues the parent's chain.
    """
    if all(step.delivered for step in episode.steps):
        return episode, range(len(episode.steps))
    reasons, lengths = reasons_not_to_train(episode), _lengths(episode)
    places = [step.index for step in episode.steps if reasons.get(step.index) != UNREAD]
    moved = {ROOT: ROOT, **{place: index for index, place in enumerate(places)}}
    read: list[Step] = []
    ends: set[int] = set()
    for place in places:
        step = _moved(episode, episode.steps[place], moved, lengths)
        on = step.parent if step.shared is None and step.parent in ends else None
        chain = max((one.chain for one in read), default=-1) + 1 if on is None else read[on].chain
        ends = ends - {on} | {step.index}
        read.append(replace(step, chain=chain, delivered=True))
    return replace(episode, steps=tuple(read)), places


def _moved(episode: Episode, step: Step, moved: Mapping[int, int], lengths: Mapping[int, int]) -> Step:
    """Return the step with its new index and parent.

    If the parent was removed, the nearest remaining step of the parent's line replaces it. `shared` is then the number of
    tokens that the step shares with the new parent's line.
    """
    parent, shared = ROOT if step.parent is None else step.parent, step.shared
    while parent not in moved:
        gone = episode.steps[parent]
        before = ROOT if gone.parent is None else gone.parent
        bounds = (shared, gone.shared, lengths[before])
        parent, shared = before, min(bound for bound in bounds if bound is not None)
    if parent == step.parent:
        return replace(step, index=moved[step.index], parent=moved[parent])
    whole = episode.tokens_of(step.index)
    prompt_ids = whole[shared : len(whole) - len(step.sampled_ids)]
    return replace(
        step, index=moved[step.index], parent=moved[parent], shared=None if parent == ROOT else shared, prompt_ids=prompt_ids
    )


def _lengths(episode: Episode) -> dict[int, int]:
    """Return the number of tokens up to the end of each step, including the context, by step index."""
    lengths = {ROOT: 0}
    for step in episode.steps:
        before = lengths[ROOT if step.parent is None else step.parent]
        start = before if step.shared is None else min(before, step.shared)
        lengths[step.index] = start + len(step.prompt_ids) + len(step.sampled_ids)
    return lengths

"""The verification of tokens: with the recorded weights, prompts are rendered, tokens are scored, and draws are repeated.

The model reads each training row at once, by teacher forcing. Every sampled token is scored after the recorded tokens before
it, so one difference does not cause others. The token's draw is repeated from the key of its turn with `inference.sampling`,
which is also the sampler's code.

The sampler read the same tokens one by one, in a batch with other rows. Sums in another order give slightly different
probabilities. A draw close to a boundary may then fall on its other side: this is a *tie*, not a mismatch. These differences
were measured on a CPU over 5,000 tokens of a warmed-up tiny model (vocabulary: 150 tokens), and over 1,000 to 2,000 tokens of a
random model with 8 layers (vocabulary: 151,936 tokens). If a cell has two numbers, they belong to these two models, in this
order:

    computed in   greatest |difference|   draws that give another token   the greatest distance of one
    exact         0, 7e-7                 none, none
    float32       1e-5, 3e-5              none, 0.3%                      4e-8
    bfloat16      0.11, 0.17              0.1%, 79%                       0.019
    4 bit         0.07                    0.1%                            0.006
    8 bit         0.15, 0.39              0.1%, 88%                       0.030

`TOLERANCES` are wider than these, for models, lengths and devices that were not measured. `coarse` is 16 bits, or a base
quantised to 4 or 8 bits.

For `coarse`, a constant tolerance proves little: with 1 nat, a recorded probability may be 2.7 times the true one. So the
constant is used only for an 8-bit base, and for samplers of other programs. For 16 and 4 bits, the tolerances follow from the
noise that is measured on the episode (`analysis.rounding_noise`).

With top_k, top_p or min_p, only the tokens above a limit can be drawn. Rounding may put a token on the other side of the limit.
So each draw is also repeated with the limit moved up, and moved down, by the tolerances.

The draws of a turn with a grammar are repeated if the same version of the library is installed: the grammar is built again from
its record, and its masks limit the draws as in the sampler.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import chain, groupby, islice, repeat
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from agentrl.workflow.analysis.episode_diff import TokenDifference, token_difference
from agentrl.workflow.analysis.rounding_noise import NoiseBounds, TokenNoise, compare_readings, read_in_company
from agentrl.workflow.analysis.verify_episode import (
    DrawDifference,
    EndDifference,
    LogprobDifference,
    NoiseReport,
    StepScore,
    TokensReport,
)
from agentrl.workflow.chat.grammar import recorded_grammar
from agentrl.workflow.chat.rendering import Chat
from agentrl.workflow.config import RolloutConfig
from agentrl.workflow.engines import Backend
from agentrl.workflow.errors import ModelError
from agentrl.workflow.inference.model_rows import ModelRows, open_rows
from agentrl.workflow.inference.sampling import (
    cumulative_probabilities,
    distribution,
    draw_distance,
    lowest_logit,
    mask_below,
    sample,
    scale_logits,
    uniforms,
)
from agentrl.workflow.models.logprobs import kept_logits
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.plugins import find, names
from agentrl.workflow.token_chains import chains_of, context_of
from agentrl.workflow.tool_formats import Schema
from agentrl.workflow.trajectory import ROOT, Episode, PolicyRef, SamplingKey, Step

Request = tuple[Sequence[Schema], Mapping[str, Any]]
"""The tools and the chat template options of an agent's request."""
NO_REQUESTS: Mapping[int, Request] = MappingProxyType({})
NO_CONSTRAINTS: Mapping[int, Mapping[str, Any]] = MappingProxyType({})
Sampling = tuple[RolloutConfig, SamplingKey]
"""The sampling options of a step, and the key of its draws."""

_Value = tuple[float, int, float, TokenNoise | None]
"""The logprob, drawn id, distance and noise of a token."""

TOLERANCES = {"exact": (4e-6, 1e-9), "float32": (1e-3, 1e-5), "coarse": (1.0, 0.1)}
"""By precision, the largest allowed differences from the record: of a logprob, in nats, and of a draw, in probability."""

CONSTRAINED = "constrained: not checked"
"""The beginning of what a report says of turns with a grammar whose draws cannot be repeated here."""

BLOCK = 1024
"""The number of sampled tokens whose logits are in memory at once: 0.6 GB for 152,000 words in float32."""

CHUNK = 64
"""The number of these tokens whose distributions are in memory at once. Each float64 tensor of them takes about 80 MB."""


@dataclass(frozen=True, slots=True)
class _Token:
    """A sampled token that was scored and drawn again. `noise` is None if rounding noise was not measured."""

    step: Step
    index: int
    logprob: float
    drawn: int
    distance: float
    noise: TokenNoise | None

    @property
    def id(self) -> int:
        return self.step.sampled_ids[self.index]

    @property
    def recorded(self) -> float:
        return self.step.behavior_logprobs[self.index]

    @property
    def off(self) -> float:
        return abs(self.logprob - self.recorded)


class _Tolerances:
    """The tolerances of each token's logprob and draw: from measured noise, or from `TOLERANCES`."""

    def __init__(self, tokens: Sequence[_Token], precision: str) -> None:
        self._fixed = TOLERANCES[precision]
        self._noises = [token.noise for token in tokens if token.noise is not None]
        self._bounds = NoiseBounds.of(self._noises) if self._noises else None

    def of(self, token: _Token) -> tuple[float, float]:
        """Return the tolerance of the token's logprob, in nats, and that of its draw, in probability."""
        if self._bounds is None or token.noise is None:
            return self._fixed
        nats, mass = self._fixed  # no token is allowed more, however large the noise is
        return min(nats, self._bounds.logprob(token.noise)), min(mass, self._bounds.draw(token.noise))

    def report(self, tokens: Sequence[_Token]) -> NoiseReport | None:
        """Return the test of all tokens together; None if no noise was measured."""
        if self._bounds is None:
            return None
        return self._bounds.report(self._noises, *zip(*((token.logprob, token.recorded) for token in tokens), strict=True))


def check_tokens(
    episode: Episode,
    policies: Mapping[int, PolicyRef],
    gone: Mapping[int, str],
    policy: Policy,
    schemas: Sequence[Schema],
    key: SamplingKey,
    rollout: RolloutConfig,
    requests: Mapping[int, Request] = NO_REQUESTS,
    sampling: Callable[[int], Sampling] | None = None,
    clock: datetime | None = None,
    constraints: Mapping[int, Mapping[str, Any]] = NO_CONSTRAINTS,
) -> TokensReport:
    """Verify the prompts, the sampled tokens and the ends of turns, for the steps that the episode sampled itself (not for
    those that a fork inherits).

    Every prompt is rendered again. Every sampled token is scored and drawn again. Raise CheckpointError if the recorded weights
    have changed, or do not fit the base model.

    Args:
        policies: the policy with which each of these steps was sampled, by the step's index.
        gone: why the weights of a step can no longer be read (`analysis.verify_episode.missing_weights`), by the step's index.
        policy: the run's base model. Its trained weights are replaced by the recorded ones.
        schemas: the schemas of the env's tools.
        key: the key of the episode's draws.
        rollout: the run's options for sampling.
        requests: the tools and options of an agent's request, by the index of the step that answered it.
        sampling: a function from a step's index to its sampling options and key, if clients could set them; None: `rollout` and
            `key`.
        clock: the time that chat templates read; None: the time of the policy's own chat.
        constraints: the constraints that the column `steps.asked` stores, by the step's index; only for turns with a grammar.
    """
    precision = policy.precision
    own = [step for step in episode.steps if step.index >= episode.inherited]
    there = {number: ref for number, ref in policies.items() if number not in gone}
    sampling_of = sampling or (lambda number: (rollout, key))
    rows = open_rows(policy) if there and _has_measurable_noise(policy, rollout.engine) else None
    chat = policy.chat if clock is None else policy.chat.at(clock)
    keyed = _is_keyed(rollout.engine)  # else there is no draw to repeat
    limited = [step for step in own if step.grammar and keyed]
    grammars, unchecked = _rebuild_grammars(episode, limited, chat, requests, constraints)
    repeated = {step.index for step in own if keyed and (not step.grammar or step.index in grammars)}
    tokens = sorted(
        _rescore(episode, there, policy, sampling_of, rows, grammars), key=lambda token: (token.step.index, token.index)
    )
    tolerances = _Tolerances(tokens, precision)
    limits = [tolerances.of(token) for token in tokens] or [TOLERANCES[precision]]
    off = next((token for token in tokens if not token.off <= tolerances.of(token)[0]), None)
    drawn = (token for token in tokens if token.step.index in repeated)
    missed = next((token for token in drawn if token.drawn != token.id and token.distance > tolerances.of(token)[1]), None)
    return TokensReport(
        precision=precision,
        logprob_tolerance=max(limit for limit, _ in limits),
        draw_tolerance=max(limit for _, limit in limits),
        prompts=len(own),
        prompt=next(
            (difference for step in own if (difference := _prompt_difference(episode, step, chat, schemas, requests))), None
        ),
        steps=tuple(_score(step, list(group), tolerances, step.index in repeated) for step, group in _group_by_step(tokens)),
        parents=episode.inherited,
        unverified=tuple(sorted({*gone.values(), *unchecked})),
        logprob=_logprob_difference(off, chat) if off else None,
        draw=_draw_difference(missed, chat) if missed else None,
        ending=next((wrong for step in own if (wrong := _end_difference(step, chat, sampling_of(step.index)[0].stop))), None),
        noise=tolerances.report(tokens),
        limited=sum(token.step.index in grammars for token in tokens),
    )


def _rebuild_grammars(
    episode: Episode,
    steps: Sequence[Step],
    chat: Chat,
    requests: Mapping[int, Request],
    constraints: Mapping[int, Mapping[str, Any]],
) -> tuple[dict[int, str], set[str]]:
    """Return the grammars of these steps, by the step's index, and a sentence for each reason why others have none here."""
    grammars, unchecked = dict[int, str](), set[str]()
    for step in steps:
        tools, _ = requests.get(step.index, ((), {}))
        prompt_ids = episode.tokens_of(step.index)[: -len(step.sampled_ids) or None]
        try:
            grammars[step.index] = recorded_grammar(constraints.get(step.index, {}), tools, chat, prompt_ids)
        except ModelError as error:
            unchecked.add(f"{CONSTRAINED} ({error.message})")
    return grammars, unchecked


def _has_measurable_noise(policy: Policy, engine: str) -> bool:
    """Return True if the difference between two readings on this machine shows how much the sampler's reading may differ."""
    return policy.precision == "coarse" and not policy.config.load_in_8bit and _is_known(engine) and _find_engine(engine).local


# prompts


def _prompt_difference(
    episode: Episode, step: Step, chat: Chat, schemas: Sequence[Schema], requests: Mapping[int, Request]
) -> TokenDifference | None:
    """Return the first difference between a step's recorded prompt and its rendered one; None if they are equal."""
    if step.shared is not None and not step.prompt_ids:  # another choice of a request: its prompt is the first one's
        return None
    if step.index in requests:
        ids = _requested_ids(episode, step, chat, *requests[step.index])
    else:
        ids = _offered_ids(episode, step, chat, schemas)
    difference = token_difference(step.index, "prompt", step.prompt_ids, ids)
    return difference.with_texts(chat.decode, chat.decode) if difference else None


def _offered_ids(episode: Episode, step: Step, chat: Chat, schemas: Sequence[Schema]) -> tuple[int, ...]:
    """Return the prompt ids that the built-in loop renders for the messages of a turn."""
    before = replace(episode, steps=episode.steps[: step.index])
    ids: tuple[int, ...] | None = None
    if before.steps:
        ids, _ = chat.continuation(step.prompt, schemas, before.steps[-1].sampled_ids)
    return chat.opening((*before.messages, *step.prompt), schemas) if ids is None else ids


def _requested_ids(
    episode: Episode, step: Step, chat: Chat, tools: Sequence[Schema], options: Mapping[str, Any]
) -> tuple[int, ...]:
    """Return the prompt ids of an agent's request.

    If the step continues its parent, these are the ids after the parent's tokens. Otherwise these are the ids of all messages,
    without those that are shared.
    """
    parent = None if step.parent in (None, ROOT) else episode.steps[step.parent]
    if parent is not None and step.shared is None:
        ids, _ = chat.continuation(step.prompt, tools, parent.sampled_ids, options)
        return () if ids is None else ids
    whole = chat.opening(step.prompt, tools, options)
    shared = episode.tokens_of(parent.index)[: step.shared] if parent is not None else ()
    return whole[len(shared) :] if whole[: len(shared)] == shared else whole


# how turns ended


def _end_difference(step: Step, chat: Chat, strings: tuple[str, ...]) -> EndDifference | None:
    """Compare a turn's recorded end with the end that its tokens determine. Return the difference, or None.

    A turn ends with `stop` at its first end token or stop string, and with `length` if it has neither.
    """
    ids = step.sampled_ids
    stops = chat.stops(strings) if strings else None
    over = (token in chat.end_ids or (stops and stops.is_completed(ids, n)) for n, token in enumerate(ids, 1))
    end = next((n for n, is_over in enumerate(over, 1) if is_over), None)
    expected = len(ids) if step.finish_reason == "stop" else None
    return None if end == expected else EndDifference(step.index, len(ids), step.finish_reason, end)


# sampled tokens


@torch.no_grad()
def _rescore(
    episode: Episode,
    policies: Mapping[int, PolicyRef],
    policy: Policy,
    sampling: Callable[[int], Sampling],
    rows: ModelRows | None,
    grammars: Mapping[int, str],
) -> Iterator[_Token]:
    """Score and draw every token of the steps in `policies` again, and yield it.

    Each training row is read once per policy and per set of sampling options. With `rows`, each token is read a second time in
    these model rows, to measure the noise. `grammars` limit the draws of their steps.
    """
    for row in chains_of(episode):
        scored = [step for step in row if step.index in policies and step.sampled_ids]
        for (ref, rollout), group in groupby(scored, key=lambda step: (policies[step.index], sampling(step.index)[0])):
            steps = list(group)
            ids, places = _context([token for token, _ in context_of(episode, row[0])], row, steps, policy)
            keys = [sampling(step.index)[1].of_step(episode, step.index) for step in steps]
            tokens = [(step, i) for step in steps for i in range(len(step.sampled_ids))]
            draws = torch.cat([_draws(key, len(step.sampled_ids)) for step, key in zip(steps, keys, strict=True)])
            policy.publish(ref)
            masks = chain.from_iterable(_masks(step, grammars.get(step.index, ""), policy) for step in steps)
            row_values = _values(policy, ids, places, draws, rollout, rows, masks)
            yield from (_Token(step, index, *values) for (step, index), values in zip(tokens, row_values, strict=True))


def _context(before: Sequence[int], row: Sequence[Step], steps: Sequence[Step], policy: Policy) -> tuple[list[int], list[int]]:
    """Return the ids before and in a row up to the last step's end, and the positions of the steps' sampled tokens."""
    ids = list(before)
    places: list[int] = []
    for step in row[: row.index(steps[-1]) + 1]:
        ids += step.prompt_ids
        if step in steps:
            places += range(len(ids), len(ids) + len(step.sampled_ids))
        ids += step.sampled_ids
    vocabulary = policy.vocabulary
    if not 0 <= min(ids) <= max(ids) < vocabulary:
        outside = max(ids) if min(ids) >= 0 else min(ids)
        raise ModelError(
            f"The record has the token id {outside}, which is not in the model's vocabulary of {vocabulary} tokens."
        )
    return ids, places


def _masks(step: Step, grammar: str, policy: Policy) -> Iterator[NDArray[np.bool_] | None]:
    """Yield which tokens, (V,), the grammar allows at each sampled token; None without a grammar."""
    if not grammar:
        yield from repeat(None, len(step.sampled_ids))
        return
    matcher = policy.chat.grammars.matcher(grammar)
    for token in step.sampled_ids:
        yield matcher.allowed(policy.vocabulary)
        if token not in policy.chat.end_ids:
            matcher.take(token)


def _draws(key: int, count: int) -> Tensor:
    return torch.from_numpy(uniforms(np.full(count, key, dtype=np.uint64), np.arange(count, dtype=np.uint64)))


def _values(
    policy: Policy,
    ids: Sequence[int],
    places: Sequence[int],
    draws: Tensor,
    rollout: RolloutConfig,
    rows: ModelRows | None,
    masks: Iterator[NDArray[np.bool_] | None],
) -> Iterator[_Value]:
    """Yield the values of the token at each position. The ids are read again for every `BLOCK` positions."""
    tolerances = TOLERANCES[policy.precision]
    for start in range(0, len(places), BLOCK):
        positions = places[start : start + BLOCK]
        with policy.sampling() as model:
            logits = _logits(model, ids[: positions[-1] + 1], positions, policy.device)
        again = None if rows is None else read_in_company(rows, ids, positions)
        yield from _chunks(logits, again, ids, positions, draws[start : start + BLOCK], rollout, tolerances, masks)


def _logits(model: nn.Module, ids: Sequence[int], places: Sequence[int], device: torch.device) -> Tensor:
    """Return the logits (N, V) from which the tokens at the N positions were drawn."""
    before = torch.tensor(places, device=device) - 1
    return kept_logits(model, before, input_ids=torch.tensor([ids[:-1]], device=device), use_cache=False)[0]


def _chunks(
    logits: Tensor,
    again: Tensor | None,
    ids: Sequence[int],
    places: Sequence[int],
    draws: Tensor,
    rollout: RolloutConfig,
    tolerances: tuple[float, float],
    masks: Iterator[NDArray[np.bool_] | None],
) -> Iterator[_Value]:
    """Yield the values for the positions of the logits (N, V).

    `again` are the logits of the second reading, `masks` the tokens that a grammar allows at each position.
    """
    recorded = torch.tensor([ids[place] for place in places], device=logits.device)
    for start in range(0, len(places), CHUNK):
        part = slice(start, start + CHUNK)
        everything, cumulative = distribution(logits[part], rollout.temperature)
        token_ids, numbers = recorded[part], draws[part].to(logits.device)
        allowed = _stack(list(islice(masks, len(token_ids))), logits)
        drawable = everything if allowed is None else _within(everything, allowed)
        if allowed is not None:
            cumulative = cumulative_probabilities(drawable)
        scores = everything.gather(-1, token_ids[:, None])[:, 0].float().tolist()  # as the sampler records them
        if (rollout.top_k, rollout.top_p, rollout.min_p) == (0, 1.0, 0.0):
            floor, away = None, draw_distance(cumulative, numbers, token_ids)
        else:
            scaled = scale_logits(logits[part], rollout.temperature)
            floor = _floor(scaled if allowed is None else scaled.masked_fill(~allowed, -torch.inf), rollout)
            away = _distance(drawable, numbers, token_ids, rollout, tolerances)
        if allowed is not None:
            away = away.where(allowed.gather(-1, token_ids[:, None])[:, 0], 1.0)
        drawn, _ = sample(logits[part], numbers, rollout.temperature, floor, allowed)
        noise: Sequence[TokenNoise | None] = [None] * len(scores)
        if again is not None:
            second, sums = distribution(again[part], rollout.temperature)
            sums = sums if allowed is None else cumulative_probabilities(_within(second, allowed))
            noise = compare_readings(everything, second, (cumulative, sums), token_ids)
        yield from zip(scores, drawn.tolist(), away.tolist(), noise, strict=True)


def _stack(masks: Sequence[NDArray[np.bool_] | None], logits: Tensor) -> Tensor | None:
    """Return the masks as one tensor (N, V), in which positions without a grammar allow all tokens; None if all are such."""
    if all(mask is None for mask in masks):
        return None
    whole = np.ones(logits.shape[-1], bool)
    stacked = np.stack([whole if mask is None or not mask.any() else mask for mask in masks])
    return torch.from_numpy(stacked).to(logits.device)


def _within(logprobs: Tensor, allowed: Tensor) -> Tensor:
    """Return the logprobs (N, V) of draws within a grammar: the allowed tokens have all of the probability."""
    limited = logprobs.masked_fill(~allowed, -torch.inf)
    return torch.where(allowed.all(-1, keepdim=True), logprobs, limited - limited.logsumexp(-1, keepdim=True))


def _distance(
    logprobs: Tensor, draws: Tensor, token_ids: Tensor, rollout: RolloutConfig, tolerances: tuple[float, float]
) -> Tensor:
    """Return the least distance (N,) between the draws and the recorded ids, if the limits of top_k, top_p and min_p may be
    rounded.

    The distance is 1 if no limit allows the id.
    """
    distances = []
    for side in (-1, 0, 1):
        floor = _floor(logprobs, rollout, side, tolerances)
        possible = logprobs.gather(-1, token_ids[:, None])[:, 0] >= floor
        distances.append(
            draw_distance(cumulative_probabilities(mask_below(logprobs, floor)), draws, token_ids).where(possible, 1.0)
        )
    return torch.stack(distances).amin(0)


def _floor(logits: Tensor, rollout: RolloutConfig, side: int = 0, tolerances: tuple[float, float] = (0.0, 0.0)) -> Tensor:
    """Return the lowest logit (N,) that may be drawn.

    Args:
        side: -1: the lowest result within the tolerances; 1: the highest; 0: without tolerances.
    """
    nats, mass = tolerances
    top_p = rollout.top_p if rollout.top_p == 1 else min(1.0, max(1e-9, rollout.top_p - side * mass))
    top_k = logits.new_full((len(logits),), rollout.top_k, dtype=torch.int64)
    shares = logits.new_tensor([[top_p, rollout.min_p]], dtype=torch.float64).expand(len(logits), 2)
    floor = lowest_logit(logits, top_k, shares[:, 0], shares[:, 1]) + side * nats
    return torch.minimum(floor, logits.amax(-1))


# the report


def _is_keyed(engine: str) -> bool:
    """Return True if the engine's draws can be repeated. Draws of an engine that is not installed here cannot be repeated."""
    return _is_known(engine) and _find_engine(engine).keyed


def _is_known(engine: str) -> bool:
    return ":" in engine or engine in names("engines")


def _find_engine(engine: str) -> Backend:
    return cast(Backend, find("engines", engine))


def _group_by_step(tokens: Sequence[_Token]) -> Iterator[tuple[Step, Iterator[_Token]]]:
    return cast(Iterator[tuple[Step, Iterator[_Token]]], groupby(tokens, key=lambda token: token.step))


def _score(step: Step, tokens: Sequence[_Token], tolerances: _Tolerances, keyed: bool) -> StepScore:
    drawn = tokens if keyed else ()
    same = sum(token.drawn == token.id for token in drawn)
    ties = sum(token.drawn != token.id and token.distance <= tolerances.of(token)[1] for token in drawn)
    return StepScore(
        step=step.index,
        policy_version=step.policy_version,
        tokens=len(tokens),
        max_difference=max(token.off for token in tokens),
        mean_difference=sum(token.off for token in tokens) / len(tokens),
        same=same,
        ties=ties,
        mismatches=len(drawn) - same - ties,
    )


def _logprob_difference(token: _Token, chat: Chat) -> LogprobDifference:
    return LogprobDifference(token.step.index, token.index, token.id, chat.decode([token.id]), token.recorded, token.logprob)


def _draw_difference(token: _Token, chat: Chat) -> DrawDifference:
    return DrawDifference(
        step=token.step.index,
        token=token.index,
        recorded_id=token.id,
        recorded=chat.decode([token.id]),
        drawn_id=token.drawn,
        drawn=chat.decode([token.drawn]),
        distance=token.distance,
    )

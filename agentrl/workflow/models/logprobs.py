"""Logprobs by teacher forcing: the logprob of every wanted token of a training row, given the tokens before it.

The model's body reads every token, and its head computes only the wanted positions (`models.lm_head`). Rows may have a common
beginning, such as the prompt of a group's episodes. The model then reads this beginning once, and all of its rows use its keys
and values. The gradients of these rows are summed in the beginning. The result differs from that of complete rows only in the
order of sums.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from agentrl.workflow.errors import ModelError
from agentrl.workflow.models.lm_head import head_logprobs, logits_logprobs

_plain_models: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""For each tested model, True if its logits are exactly its head applied to the last hidden states of its body."""

_apart_models: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""For each tested model, True if rows that are packed on one line do not attend to each other."""


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Common beginnings of rows: G prefixes of up to S tokens, padded on the right.

    Args:
        ids: (G, S).
        mask: (G, S), 1 for a token and 0 for padding.
        of: (B,), for each row the index (0 to G - 1) of the prefix that the row continues.
    """

    ids: Tensor
    mask: Tensor
    of: Tensor


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of the tokens 1..T-1, each (B, T - 1) and 0 for tokens that are not wanted: float32, or float64 if the model
    computes in float64.

    Args:
        logprobs: the logprob of each token given the tokens before it, in nats.
        entropy: the entropy of the distribution that each token was drawn from, in nats.
        values: the critic's value before each token; None without a critic.
    """

    logprobs: Tensor
    entropy: Tensor
    values: Tensor | None = None


def token_logprobs(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor,
    temperature: float = 1.0,
    score_mask: Tensor | None = None,
    prefixes: Prefixes | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the logprobs and the entropies of `token_scores`, each (B, T - 1). The entropies have no gradient."""
    scores = token_scores(model, input_ids, attention_mask, temperature, score_mask, prefixes)
    return scores.logprobs, scores.entropy


def line_logprobs(
    model: nn.Module, input_ids: Tensor, positions: Tensor, score_mask: Tensor, temperature: float = 1.0
) -> Tensor:
    """Compute the logprobs (B, T - 1) of the wanted tokens on lines. A line is a tensor row that contains several training
    rows, one after another (`training.packing`).

    Call this function only if `keeps_apart(model)` is True, so that the training rows of a line do not attend to each other.

    Args:
        input_ids: (B, T).
        positions: (B, T), the position of each token in its training row; the first token has 0.
        score_mask: (B, T), True if the token's logprob is wanted. It must be False for the first token of a training row.
        temperature: the divisor of the logits.
    """
    causal = causal_model(model)
    chosen = score_mask[:, 1:]
    hidden = _hidden_on_lines(causal.base_model, input_ids, positions)[:, :-1][chosen]
    head = cast(nn.Linear, causal.get_output_embeddings())  # type: ignore[no-untyped-call]
    logprobs, _ = head_logprobs(head, hidden, input_ids[:, 1:][chosen], temperature)
    return logprobs.new_zeros(chosen.shape).masked_scatter(chosen, logprobs)


def token_scores(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor,
    temperature: float = 1.0,
    score_mask: Tensor | None = None,
    prefixes: Prefixes | None = None,
    critic: nn.Linear | None = None,
    entropy_trains: bool = False,
) -> Scores:
    """Compute, for every wanted token, its logprob given the tokens before it, the entropy of its distribution, and the
    critic's value.

    Args:
        input_ids: (B, T), padded on the right.
        attention_mask: (B, T), 1 for a token and 0 for padding.
        temperature: the divisor of the logits, as in the sampler.
        score_mask: (B, T), True if the token is wanted; None: all tokens are.
        prefixes: the beginnings that the rows continue. With prefixes, `shares_prefixes(model)` must be True.
        critic: (H) -> (1), applied to the hidden state before the token.
        entropy_trains: whether the entropy has a gradient.
    """
    chosen = attention_mask[:, 1:] > 0 if score_mask is None else score_mask[:, 1:]
    targets = input_ids[:, 1:][chosen]
    causal = causal_model(model)
    if _is_plain(causal):
        hidden = _hidden(causal.base_model, input_ids, attention_mask, prefixes)[:, :-1][chosen]
        head = cast(nn.Linear, causal.get_output_embeddings())  # type: ignore[no-untyped-call]
        scores = head_logprobs(head, hidden, targets, temperature, entropy_trains)
    else:
        logits, hidden = _own_logits(causal, input_ids, attention_mask, chosen, critic is not None)
        scores = logits_logprobs(logits, targets, temperature, entropy_trains)
    valued = () if critic is None else (critic(hidden.to(critic.weight.dtype))[:, 0],)
    return Scores(*(values.new_zeros(chosen.shape).masked_scatter(chosen, values) for values in (*scores, *valued)))


def causal_model(model: nn.Module) -> PreTrainedModel:
    """Return the language model itself, without PEFT's wrapper."""
    return next(module for module in model.modules() if isinstance(module, PreTrainedModel))


def cache_parameter(model: nn.Module) -> str:
    """Return the name of the parameter for the cache in the model's forward pass; transformers 5.24 renamed it."""
    return next((name for name in ("cache", "cache_params") if takes_parameter(model, name)), "past_key_values")


def takes_parameter(model: nn.Module, name: str) -> bool:
    """Return True if the language model's forward pass has a parameter of that name."""
    return name in _parameters(type(causal_model(model)).forward)


@cache
def _parameters(forward: Callable[..., Any]) -> frozenset[str]:
    return frozenset(signature(forward).parameters)


def kept_logits(model: nn.Module, keep: int | Tensor, **inputs: Any) -> Tensor:
    """Return the model's own logits (B, N, V) at N positions.

    Args:
        keep: the number of last positions, or a tensor of positions.
    """
    if takes_parameter(model, "logits_to_keep"):
        logits: Tensor = model(**inputs, logits_to_keep=keep).logits
        return logits
    logits = model(**inputs).logits
    return logits[:, -keep:] if isinstance(keep, int) else logits[:, keep]


def shares_prefixes(model: nn.Module) -> bool:
    """Return True if rows can continue keys and values that are already in a cache.

    This requires that every layer attends to all earlier tokens. It also requires that the logits are the head's output for the
    last hidden states.
    """
    causal = causal_model(model)
    layers = DynamicCache(config=causal.config).layers
    return all(type(layer) is DynamicLayer for layer in layers) and _is_plain(causal)


def keeps_apart(model: nn.Module) -> bool:
    """Return True if training rows that are packed on one line do not attend to each other. Each model is tested once."""
    causal = causal_model(model)
    if causal not in _apart_models:
        training = causal.training
        causal.eval()  # type: ignore[no-untyped-call]
        _apart_models[causal] = _is_plain(causal) and _probe_keeps_apart(causal)
        causal.train(training)
    return _apart_models[causal]


@torch.no_grad()
def _probe_keeps_apart(causal: PreTrainedModel) -> bool:
    """Test whether other rows on the line, before or after a row, change the row's hidden states."""
    first, other, row = [1, 2, 3, 4], [4, 3, 2, 1], [2, 4, 1]
    lines = [[*first, *row], [*other, *row], [*row, *first]]
    positions = [[0, 1, 2, 3, 0, 1, 2], [0, 1, 2, 3, 0, 1, 2], [0, 1, 2, 0, 1, 2, 3]]
    device = next(causal.parameters()).device
    states = _hidden_on_lines(causal.base_model, *(torch.tensor(values, device=device) for values in (lines, positions)))
    behind, alike, before = states[0, 4:], states[1, 4:], states[2, :3]
    rounding = 1e-3 if states.dtype in (torch.float32, torch.float64) else 0.05
    return torch.equal(behind, alike) and bool((behind - before).abs().max() <= rounding * behind.abs().max())


def _hidden_on_lines(body: nn.Module, ids: Tensor, positions: Tensor) -> Tensor:
    """Return the last hidden states (B, T, H) of lines of several rows."""
    return cast(Tensor, body(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state)


@contextmanager
def checkpointing(model: nn.Module, on: bool) -> Iterator[None]:
    """If `on`, use gradient checkpointing inside the context.

    Layers in train mode then store only their inputs. The backward pass computes the layers again.

    Raises:
        ModelError: the model does not support gradient checkpointing.
    """
    causal = causal_model(model)
    if not on:
        yield
        return
    if not causal.supports_gradient_checkpointing:
        raise ModelError(
            f"{type(causal).__name__} does not support gradient checkpointing.", "Leave update.gradient_checkpointing out."
        )
    # Older versions of transformers 5 say gradient checkpointing; newer ones warn at that name.
    name = "activation" if hasattr(causal, "activation_checkpointing_enable") else "gradient"
    getattr(causal, f"{name}_checkpointing_enable")({"use_reentrant": False})
    try:
        yield
    finally:
        getattr(causal, f"{name}_checkpointing_disable")()


def _hidden(body: nn.Module, ids: Tensor, mask: Tensor, prefixes: Prefixes | None) -> Tensor:
    """Return the last hidden states (B, T, H) of the rows."""
    if prefixes is None:
        return cast(Tensor, body(**_inputs(ids, mask), use_cache=False).last_hidden_state)
    cache = DynamicCache()
    argument = {cache_parameter(body): cache}
    body(**_inputs(prefixes.ids, prefixes.mask), **argument, use_cache=True)
    cache.reorder_cache(prefixes.of)  # type: ignore[arg-type]  # annotated LongTensor
    whole = torch.cat([prefixes.mask.index_select(0, prefixes.of), mask], 1)
    return cast(Tensor, body(**_inputs(ids, whole), **argument, use_cache=True).last_hidden_state)


def _inputs(ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Return the inputs of a model's body. The mask may also cover tokens that are already in the cache."""
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions[:, -ids.shape[1] :]}


def _own_logits(causal: nn.Module, ids: Tensor, mask: Tensor, chosen: Tensor, hidden: bool) -> tuple[Tensor, Tensor]:
    """Return the model's own logits (N, V) before the chosen tokens (B, T - 1).

    The model computes every column in which a row has a chosen token. With `hidden`, also return the last hidden states (N, H)
    at these positions, else an empty tensor (0,).
    """
    columns = chosen.any(0).nonzero()[:, 0]
    if not hidden:
        logits = kept_logits(causal, columns, **_inputs(ids, mask), use_cache=False)[chosen[:, columns]]
        return logits, logits.new_empty(0)
    output = causal(**_inputs(ids, mask), use_cache=False, output_hidden_states=True)
    return output.logits[:, :-1][chosen], output.hidden_states[-1][:, :-1][chosen]


def _is_plain(causal: PreTrainedModel) -> bool:
    if causal not in _plain_models:
        _plain_models[causal] = _probe_plain_head(causal)
    return _plain_models[causal]


@torch.no_grad()
def _probe_plain_head(causal: PreTrainedModel) -> bool:
    """Test whether the model's logits are its head applied to the last hidden states of its body.

    Run the model once. Compare the head's input with the body's hidden states, and the head's output with the logits.
    """
    head, body = causal.get_output_embeddings(), causal.base_model  # type: ignore[no-untyped-call]
    if type(head) is not nn.Linear or body is causal:
        return False
    seen: dict[str, Tensor] = {}
    hooks = [
        head.register_forward_hook(lambda _, head_input, out: seen.update(given=head_input[0], out=out)),
        body.register_forward_hook(lambda _, __, out: seen.update(hidden=out.last_hidden_state)),
    ]
    ids = torch.arange(2, device=head.weight.device)[None]
    try:
        with torch.random.fork_rng(devices=[ids.device] if ids.device.type == "cuda" else []):
            logits = causal(input_ids=ids, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    if seen.keys() != {"given", "out", "hidden"}:
        return False
    return torch.equal(seen["given"], seen["hidden"]) and torch.equal(seen["out"], logits)

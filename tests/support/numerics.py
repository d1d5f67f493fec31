"""Where the tests of the model compute, how precisely, and how near is the same there.

As they stand they run on the CPU, each in the precision that it asks for: mostly `numerics: exact`, so that nothing but a
fault can make a difference. `TEST_DEVICE=cuda TEST_PRECISION=bfloat16` (or float32) runs the same tests on a GPU in what it
computes with; `make gpu-check` does so. There sums are taken in another order with each shape of a batch, so that

- a logprob and a gradient may be off by `NEAR`;
- two samplings of one turn may part, but only at a draw that lies that near a boundary between two tokens.

`NEAR` is what these tests' small models came to on a CPU, and what `analysis.verify_tokens` measured, some three times
over; it does not change what a test asks for where it says nothing about precision.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from agentrl.workflow.engines import Completion, GenerateRequest
from agentrl.workflow.inference.sampling import distribution, draw_distance, uniforms
from agentrl.workflow.models.policy import Policy

DEVICE = os.environ.get("TEST_DEVICE", "cpu")
PRECISION = os.environ.get("TEST_PRECISION", "")
"""float32 or bfloat16; empty: what each test asks for."""


@dataclass(frozen=True)
class Near:
    """How far apart what is the same may be.

    Args:
        logprob: in nats.
        gradient: the norm of the difference, of the norm.
        draw: in probability, how far a draw may be from the boundary that rounding decided.
    """

    logprob: float
    gradient: float
    draw: float


NEAR = {"float32": Near(1e-4, 1e-4, 1e-5), "bfloat16": Near(0.3, 0.1, 0.05)}


def asked(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A test's fields of the model's config, each beginning with the prefix, in the precision that was asked for."""
    if not PRECISION:
        return dict(fields)
    return {f"{prefix}dtype": PRECISION} | {name: value for name, value in fields.items() if name != f"{prefix}numerics"}


def tolerance(own: float) -> float:
    """How far logprobs may be apart in a test that allows `own` in its own precision."""
    return max(own, NEAR[PRECISION].logprob) if PRECISION else own


def same_gradient(one: Tensor, other: Tensor, rtol: float = 1e-9, atol: float = 1e-13) -> bool:
    """Whether two gradients are the same; the tolerances are those of the test's own precision."""
    if not PRECISION:
        return torch.allclose(one, other, rtol=rtol, atol=atol)
    return float((one.double() - other.double()).norm()) <= NEAR[PRECISION].gradient * float(other.double().norm())


def nearly(own: float) -> float:
    """The relative error of gradients, and of what is summed up beside them, in a test that allows `own`."""
    return max(own, NEAR[PRECISION].gradient) if PRECISION else own


def same_turn(policy: Policy, request: GenerateRequest, first: Completion, second: Completion, own: float) -> bool:
    """Whether two samplings of one request say the same, or part where rounding decides."""
    together = _common(first.token_ids, second.token_ids)
    if not np.allclose(first.logprobs[:together], second.logprobs[:together], rtol=0, atol=tolerance(own)):
        return False
    if first.token_ids == second.token_ids:
        return first.finish_reason == second.finish_reason
    both = len(first.token_ids) > together < len(second.token_ids)
    return bool(PRECISION) and both and _tied(policy, request, first.token_ids[: together + 1], second.token_ids[together])


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((n for n, (one, other) in pairs if one != other), min(len(first), len(second)))


@torch.no_grad()
def _tied(policy: Policy, request: GenerateRequest, said: Sequence[int], other: int) -> bool:
    """Whether the draw of the last of what was said lies near enough to the other token too."""
    policy.publish(request.policy)
    with policy.sampling() as model:
        ids = torch.tensor([[*request.prompt_ids, *said[:-1]]], device=policy.device)
        _, cumulative = distribution(model(input_ids=ids).logits[:, -1], request.temperature)
    place = request.position + len(said) - 1
    drawn = torch.from_numpy(uniforms(np.array([request.key], dtype=np.uint64), np.array([place], dtype=np.uint64)))
    away = [float(draw_distance(cumulative.cpu(), drawn, torch.tensor([token]))) for token in (said[-1], other)]
    return max(away) <= NEAR[PRECISION].draw


def cpu_alone(why: str) -> pytest.MarkDecorator:
    """Marks a test that says something of a CPU, or of `numerics: exact`, which is one: a GPU has nothing to say to it."""
    return pytest.mark.skipif(DEVICE != "cpu", reason=why)

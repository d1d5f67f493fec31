"""What may be drawn: top_k, top_p and min_p as transformers' own processors limit it, row by row, and what is drawn then."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from agentrl.workflow.config import ModelConfig
from agentrl.workflow.engines import Completion, GenerateRequest
from agentrl.workflow.inference.sampler import RollingEngine
from agentrl.workflow.inference.sampling import lowest_logit, mask_below, sample
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.trajectory import PolicyRef
from tests.support.reference_sampler import alone
from tests.support.small_models import first_layer, tiny_random

LOGITS = st.lists(
    st.one_of(st.integers(-12, 12).map(lambda n: n / 4), st.floats(-30, 30), st.just(-math.inf)), min_size=1
).filter(lambda row: max(row) > -math.inf)
SHARE = st.floats(0.001, 0.999)


def truncated(rows: Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    count = len(rows)
    shares = torch.tensor([[top_p, min_p]] * count, dtype=torch.float64)
    return mask_below(rows, lowest_logit(rows, torch.full((count,), top_k), shares[:, 0], shares[:, 1]))


def by_transformers(rows: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Their processors in the order of `generate`, and, of tokens as likely as the last that stays, all."""
    left = rows
    for wanted, processor in (
        (top_k > 0, lambda: TopKLogitsWarper(top_k)),
        (top_p < 1, lambda: TopPLogitsWarper(top_p)),
        (min_p > 0, lambda: MinPLogitsWarper(min_p)),
    ):
        left = processor()(torch.empty(0), left) if wanted else left
    last = left.masked_fill(left == -math.inf, math.inf).amin(-1, keepdim=True)
    return rows.masked_fill(rows < last, -math.inf)


def close_to_a_limit(row: Tensor, top_k: int, top_p: float, min_p: float) -> bool:
    """Whether rounding decides."""
    left = by_transformers(row[None], top_k, 1.0, 0.0)[0]
    sums = left.softmax(-1).sort(descending=True).values.cumsum(-1)
    shares = (row - row.max()).exp()
    return bool(((sums - top_p).abs() < 1e-9).any() or ((shares - min_p).abs() < 1e-9).any())


@given(LOGITS, st.integers(0, 12), st.one_of(st.just(1.0), SHARE), st.one_of(st.just(0.0), SHARE))
def test_truncation_equals_transformers(row: list[float], top_k: int, top_p: float, min_p: float) -> None:
    rows = torch.tensor([row], dtype=torch.float64)
    assume(not close_to_a_limit(rows[0], top_k, top_p, min_p))
    assert truncated(rows, top_k, top_p, min_p).equal(by_transformers(rows, top_k, top_p, min_p))


@pytest.mark.parametrize("spread", [0.001, 0.5, 2.0, 8.0], ids=["flat", "wide", "narrow", "peaked"])
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(0, 0.95, 0.0), (300, 0.99, 0.0), (9000, 1.0, 0.001), (50, 0.9, 0.1)])
def test_truncation_of_large_vocabulary_equals_transformers(spread: float, top_k: int, top_p: float, min_p: float) -> None:
    rows = spread * torch.randn(3, 20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert truncated(rows, top_k, top_p, min_p).equal(by_transformers(rows, top_k, top_p, min_p))


def test_truncation_of_row_is_independent_of_others() -> None:
    rows = torch.tensor([0.01, 1.0, 4.0, 0.3])[:, None] * torch.randn(4, 20_000, generator=torch.Generator().manual_seed(1))
    top_k, top_p = torch.tensor([0, 40, 0, 9000]), torch.tensor([0.9, 0.8, 0.99, 1.0], dtype=torch.float64)
    min_p = torch.tensor([0.0, 0.0, 0.01, 0.2], dtype=torch.float64)
    together = lowest_logit(rows, top_k, top_p, min_p)
    for row in range(4):
        alone = slice(row, row + 1)
        assert together[alone].equal(lowest_logit(rows[alone], top_k[alone], top_p[alone], min_p[alone]))


@given(LOGITS)
def test_truncation_extremes_keep_all_or_likeliest(row: list[float]) -> None:
    rows = torch.tensor([row])
    assert truncated(rows).equal(rows)
    likeliest = rows.masked_fill(rows < rows.amax(), -math.inf)
    for limits in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}):
        assert truncated(rows, **limits).equal(likeliest)  # type: ignore[arg-type]


@given(LOGITS, st.floats(0, 1, exclude_max=True), st.integers(1, 12), SHARE, SHARE, st.floats(0.2, 4))
def test_truncated_draw_has_logprob_of_full_vocabulary(
    row: list[float], u: float, top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    logits = torch.tensor([row])
    shares = torch.tensor([[top_p, min_p]], dtype=torch.float64)
    floor = lowest_logit(logits / temperature, torch.tensor([top_k]), shares[:, 0], shares[:, 1])
    (token,), (logprob,) = sample(logits, torch.tensor([u], dtype=torch.float64), temperature, floor)
    assert logits[0, token] / temperature >= floor
    expected = (logits / temperature).log_softmax(-1)[0, token]
    assert float(logprob) == pytest.approx(float(expected), abs=1e-5)


def test_truncated_draws_are_proportional() -> None:
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log().expand(700, 4)
    floor = lowest_logit(logits, torch.full((700,), 2), torch.ones(700), torch.zeros(700))
    ids, _ = sample(logits, (torch.arange(700, dtype=torch.float64) + 0.5) / 700, 1.0, floor)
    assert ids.bincount(minlength=4).tolist() == [0, 400, 0, 300]


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_truncated_row_with_nan_shows_it_and_spares_others(broken: float) -> None:
    rows = torch.tensor([[0.0, broken, 1.0], [0.0, 1.0, 2.0]])
    floor = lowest_logit(rows, torch.tensor([2, 2]), torch.tensor([0.9, 0.9]), torch.tensor([0.1, 0.1]))
    ids, logprobs = sample(rows, torch.tensor([0.5, 0.5], dtype=torch.float64), 1.0, floor)
    assert logprobs.isnan().tolist() == [True, False]
    assert floor[1] == rows[1, 1]
    assert (0 <= int(ids[0]) < 3, int(ids[1]) in (1, 2)) == (True, True)


# --- the engine ---------------------------------------------------------------------------------------------------------------

WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"top_k": 3},
    {"top_p": 0.5, "temperature": 0.7},
    {"min_p": 0.2, "temperature": 1.5},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.02},
    {"top_k": 1},
)


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Policy]:
    folder = tiny_random(tmp_path_factory.mktemp("base"))
    yield Policy.load(ModelConfig(numerics="exact"), str(folder), device="cpu")
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def requests(exact: Policy) -> list[GenerateRequest]:
    """Every way to draw, first without a stop string and then with one that the turn would say."""
    ref = PolicyRef(str(exact.folder), exact.base_hash)
    plain = [GenerateRequest((9, 8, 7 + n % 3), ref, 1000 + n, 5, 24, **WAYS[n % len(WAYS)]) for n in range(2 * len(WAYS))]
    watched = []
    for request in plain[len(WAYS) :]:
        said = exact.chat.decode(alone(exact, request).token_ids)
        watched.append(replace(request, stop=("never said", said[len(said) // 2 :][:3])))
    return plain[: len(WAYS)] + watched


@pytest.mark.parametrize("slots", [3, 32])
def test_engine_truncates_in_batch_as_alone(exact: Policy, requests: list[GenerateRequest], slots: int) -> None:
    engine = RollingEngine(exact, slots=slots)
    futures = [engine.submit(request) for request in requests]
    together = [future.result(60) for future in futures]
    engine.close()
    expected = [alone(exact, request) for request in requests]
    assert all(same(ours, theirs) for ours, theirs in zip(together, expected, strict=True))
    ended = [n for n, completion in enumerate(together) if completion.finish_reason == "stop"]
    assert any(not exact.chat.has_end_token(together[n].token_ids) for n in ended), "by a stop string"


def same(first: Completion, second: Completion) -> bool:
    said = (first.token_ids, first.finish_reason) == (second.token_ids, second.finish_reason)
    return said and np.allclose(first.logprobs, second.logprobs, rtol=0, atol=1e-6)


def test_engine_finds_stop_string_after_memory_shortage(exact: Policy, requests: list[GenerateRequest]) -> None:
    expected = [alone(exact, request) for request in requests]
    calls = 0

    def small_card(module: torch.nn.Module, args: tuple[torch.Tensor]) -> None:
        nonlocal calls
        calls += 1
        if calls % 7 == 0 and len(args[0]) > 1:
            raise torch.OutOfMemoryError("as if")

    engine = RollingEngine(exact)
    with exact.sampling() as model:
        hook = first_layer(model).register_forward_pre_hook(small_card)
    try:
        futures = [engine.submit(request) for request in requests]
        assert all(same(future.result(60), one) for future, one in zip(futures, expected, strict=True))
    finally:
        hook.remove()
        engine.close()
    assert calls > 14

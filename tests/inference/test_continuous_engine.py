"""The engine over transformers' continuous batching: the same promises as our own, but for draws that can be repeated."""

import json
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

from agentrl.workflow import engines
from agentrl.workflow.checkpoints import sealed_folder
from agentrl.workflow.config import ModelConfig
from agentrl.workflow.engines import Completion, GenerateRequest
from agentrl.workflow.errors import AgentRLError, CheckpointError, ConfigError, InfraError, ModelError
from agentrl.workflow.inference import continuous_engine
from agentrl.workflow.inference.continuous_engine import PAGE_TOKENS, ContinuousEngine
from agentrl.workflow.models.logprobs import token_logprobs
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.plugins import find
from agentrl.workflow.settings import Settings
from agentrl.workflow.trajectory import PolicyRef
from tests.support.numerics import DEVICE, asked, tolerance
from tests.support.small_models import tiny_random

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

LONG = tuple(10 + number % 50 for number in range(3 * PAGE_TOKENS))
"""A prompt that fills pages, which whoever has the same one shares."""


@pytest.fixture(scope="module", params=[4, 0], ids=["lora", "full"])
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Policy:
    folder = tiny_random(tmp_path_factory.mktemp("base"))
    return Policy.load(ModelConfig.model_validate(asked({"lora_r": request.param})), str(folder), DEVICE, 1)


@pytest.fixture
def engine(policy: Policy) -> Iterator[ContinuousEngine]:
    made = engines.start(find("engines", "continuous"), policy, Settings(slots=4))
    assert isinstance(made, ContinuousEngine)
    yield made
    made.close()


@pytest.fixture
def trained(policy: Policy, tmp_path: Path) -> PolicyRef:
    """A checkpoint whose logprobs are far from the base's."""
    with torch.no_grad():
        for name, parameter in policy.trainable().items():
            if policy.kind == "full" or "lora_B" in name:
                parameter.add_(0.3)
    sha256 = sealed_folder.write(tmp_path / "v1", lambda beside: policy.save_weights(beside / sealed_folder.WEIGHTS))
    policy.load_weights(None)
    return PolicyRef(str(policy.folder), policy.base_hash, str(tmp_path / "v1"), sha256, 1)


def ask(loaded: Policy, **changes: Any) -> GenerateRequest:
    base = PolicyRef(str(loaded.folder), loaded.base_hash)
    return replace(GenerateRequest(LONG, base, key=1, position=0, max_new_tokens=20), **changes)


def expected(policy: Policy, request: GenerateRequest, done: Completion) -> torch.Tensor:
    """The logprobs of what was sampled, as a trainer computes them from the same weights."""
    if request.policy.path:
        policy.load_weights(Path(request.policy.path) / sealed_folder.WEIGHTS)
    ids = torch.tensor([[*request.prompt_ids, *done.token_ids]], device=policy.device)
    with policy.training() as model, torch.no_grad():
        found = token_logprobs(model, ids, torch.ones_like(ids), request.temperature)[0][0, len(request.prompt_ids) - 1 :]
    policy.load_weights(None)
    return found


def assert_its_own(policy: Policy, request: GenerateRequest, done: Completion) -> None:
    assert torch.allclose(expected(policy, request, done).cpu(), torch.tensor(done.logprobs), atol=tolerance(1e-4))
    assert done.finish_reason == ("stop" if done.token_ids[-1] in policy.chat.end_ids else "length")
    assert not policy.chat.end_ids & set(done.token_ids[:-1])


def test_every_row_has_the_logprobs_of_its_own_temperature_and_weights_whoever_comes_between(
    engine: ContinuousEngine, policy: Policy, trained: PolicyRef
) -> None:
    base = ask(policy)
    requests = [
        replace(base, temperature=temperature, policy=ref, prompt_ids=LONG[:length], max_new_tokens=most)
        for most, ref in ((20, base.policy), (9, trained), (1, base.policy), (15, trained))
        for temperature, length in ((1.0, 3 * PAGE_TOKENS), (0.5, 3 * PAGE_TOKENS), (1.7, 7))
    ]
    turns = [engine.submit(request) for request in requests]
    for request, turn in zip(requests, turns, strict=True):
        done = turn.result(120)
        assert 0 < len(done.token_ids) <= request.max_new_tokens
        assert_its_own(policy, request, done)


def test_rows_that_come_in_the_middle_join(engine: ContinuousEngine, policy: Policy) -> None:
    policy.chat.end_ids, ends = frozenset(), policy.chat.end_ids
    try:
        first = engine.submit(ask(policy, max_new_tokens=200))
        later = [engine.submit(ask(policy, prompt_ids=LONG[:9])).result(120) for _ in range(2)]
        assert len(first.result(120).token_ids) == 200
        assert {len(turn.token_ids) for turn in later} == {20}
        assert len({turn.token_ids for turn in later}) == 2
    finally:
        policy.chat.end_ids = ends


def test_a_trainer_of_the_same_process_has_the_model_to_itself(engine: ContinuousEngine, policy: Policy) -> None:
    request = ask(policy, max_new_tokens=60)
    turns = [engine.submit(request) for _ in range(6)]
    ids = torch.tensor([LONG], device=policy.device)
    for _ in range(5):
        with policy.training() as model:
            before = token_logprobs(model, ids, torch.ones_like(ids))[0]
            assert model.training
            assert torch.equal(before, token_logprobs(model, ids, torch.ones_like(ids))[0])
    for turn in turns:
        assert_its_own(policy, request, turn.result(120))


def test_nothing_is_sampled_while_a_trainer_holds_the_model(engine: ContinuousEngine, policy: Policy) -> None:
    engine.submit(ask(policy)).result(120)
    begun, go_on = threading.Event(), threading.Event()

    def train() -> None:
        with policy.training():
            begun.set()
            go_on.wait(120)

    trainer = threading.Thread(target=train)
    trainer.start()
    begun.wait(120)
    turn = engine.submit(ask(policy, max_new_tokens=1))
    with pytest.raises(TimeoutError):
        turn.result(0.3)
    go_on.set()
    assert turn.result(120).token_ids
    trainer.join()


def test_a_prompt_that_fills_the_context_samples_nothing(engine: ContinuousEngine, policy: Policy) -> None:
    full = tuple(10 + number % 50 for number in range(policy.max_context))
    done = engine.submit(ask(policy, prompt_ids=full)).result(120)
    assert (done.token_ids, done.finish_reason) == ((), "length")
    assert len(engine.submit(ask(policy, prompt_ids=full[:-1])).result(120).token_ids) == 1


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"top_k": 3}, ConfigError),
        ({"top_p": 0.9}, ConfigError),
        ({"min_p": 0.1}, ConfigError),
        ({"stop": ("x",)}, ConfigError),
        ({"prompt_ids": ()}, ModelError),
        ({"prompt_ids": (10**6,)}, ModelError),
        ({"policy": PolicyRef("other", "otherhash")}, CheckpointError),
    ],
)
def test_what_cannot_be_sampled_is_refused_and_the_others_go_on(
    engine: ContinuousEngine, policy: Policy, changes: Any, kind: type[AgentRLError]
) -> None:
    refused = engine.submit(ask(policy, **changes))
    assert isinstance(refused.exception(120), kind)
    assert engine.submit(ask(policy)).result(120).token_ids


def test_nan_instead_of_logits_is_an_error_and_the_next_weights_are_sampled_from(
    engine: ContinuousEngine, policy: Policy, trained: PolicyRef, tmp_path: Path
) -> None:
    with torch.no_grad():
        next(iter(policy.trainable().values())).fill_(torch.nan)
    sha256 = sealed_folder.write(tmp_path / "nan", lambda beside: policy.save_weights(beside / sealed_folder.WEIGHTS))
    policy.load_weights(None)
    broken = replace(trained, path=str(tmp_path / "nan"), sha256=sha256)
    with pytest.raises(ModelError, match="NaN"):
        engine.submit(ask(policy, policy=broken)).result(120)
    request = ask(policy, policy=trained)
    assert_its_own(policy, request, engine.submit(request).result(120))


def failing(calls: int, error: Exception, there: Callable[..., Any]) -> Callable[..., Any]:
    """The model, but that the first calls fail."""
    left = iter(range(calls))

    def call(*given: Any, **batch: Any) -> Any:
        if next(left, None) is not None:
            raise error
        return there(*given, **batch)

    return call


@pytest.mark.slow
def test_where_memory_runs_out_half_as_many_rows_go_on_and_another_failure_fails_only_those_that_were_live(
    engine: ContinuousEngine, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    with policy.sampling() as model:
        inner: Any = model.get_base_model() if policy.kind == "lora" else model  # type: ignore[operator]
    there = inner.forward
    monkeypatch.setattr(inner, "forward", failing(1, torch.OutOfMemoryError("CUDA out of memory"), there))
    turns = [engine.submit(ask(policy)) for _ in range(4)]
    for turn in turns:
        assert_its_own(policy, ask(policy), turn.result(120))
    monkeypatch.setattr(inner, "forward", failing(1, RuntimeError("the device is gone"), there))
    with pytest.raises(InfraError, match="the device is gone"):
        engine.submit(ask(policy)).result(120)
    assert engine.submit(ask(policy)).result(120).token_ids


@pytest.mark.slow
def test_a_loop_that_cannot_begin_again_fails_the_rows_that_wait_for_it_and_is_begun_at_the_next_request(
    engine: ContinuousEngine, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[bool] = []

    def begin(*given: Any) -> Any:
        held.append(cache() is not None)
        if len(held) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return ContinuousBatchingManager(*given)

    engine.submit(ask(policy, max_new_tokens=1)).result(120)
    assert engine._manager is not None
    assert engine._manager.batch_processor is not None
    cache = weakref.ref(engine._manager.batch_processor.cache)
    with policy.sampling() as model:
        inner: Any = model.get_base_model() if policy.kind == "lora" else model  # type: ignore[operator]
    monkeypatch.setattr(inner, "forward", failing(1, torch.OutOfMemoryError("CUDA out of memory"), inner.forward))
    monkeypatch.setattr(continuous_engine, "ContinuousBatchingManager", begin)
    for turn in [engine.submit(ask(policy)) for _ in range(2)]:
        with pytest.raises(InfraError, match="out of memory"):
            turn.result(120)
    for turn in [engine.submit(ask(policy)) for _ in range(2)]:
        assert_its_own(policy, ask(policy), turn.result(120))
    assert held == [False, False], "the cache that broke was held while the next one was made"


def test_a_closed_engine_fails_what_is_open_and_samples_no_more(policy: Policy) -> None:
    engine = ContinuousEngine(policy, 2)
    turns = [engine.submit(ask(policy, max_new_tokens=400)) for _ in range(5)]
    engine.close()
    assert all(isinstance(turn.exception(60), InfraError) or turn.result().token_ids for turn in turns)
    assert isinstance(engine.submit(ask(policy)).exception(60), InfraError)


def test_a_process_that_ends_does_not_wait_for_the_engine(policy: Policy) -> None:
    before = set(threading.enumerate())
    engine = ContinuousEngine(policy, 2)
    assert engine.submit(ask(policy)).result(120).token_ids
    begun = set(threading.enumerate()) - before
    assert len(begun) == 2
    assert all(thread.daemon for thread in begun)
    engine.close()
    assert not begun & set(threading.enumerate())


@pytest.mark.slow
def test_a_run_samples_and_trains_in_one_process_and_its_record_holds(short_folder: Path, tmp_path: Path) -> None:
    from tests.support.real_stack import SMALL, embedded_stack  # workers and their database, which no other test here needs

    with embedded_stack(short_folder, idle_seconds="3600") as stack:
        asked = ("--dataset", "arithmetic", "--model", str(tiny_random(tmp_path / "small")), "--max-samples", "8", *SMALL)
        run = stack.agentrl("submit", *asked, "--engine", "continuous", "-s", "model.lora_r=4").strip()
        stack.wait_for(run)
        versions = stack.agentrl("sql", "SELECT DISTINCT policy_version FROM v_steps ORDER BY 1", "--json")
        assert [row["policy_version"] for row in json.loads(versions)] == [0, 1]
        assert "0 drawn again" in stack.agentrl("replay", "17", "--verify", "tokens")  # of the second iteration
        stack.agentrl("submit", *asked, "--engine", "continuous", "-s", "rollout.top_p=0.9", code=2)

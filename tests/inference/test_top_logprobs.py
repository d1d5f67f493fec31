"""The likeliest tokens at each place: told where they are asked for, of the whole vocabulary, whichever engine samples."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.workflow import engines
from agentrl.workflow.config import ModelConfig
from agentrl.workflow.engines import MAX_TOP_LOGPROBS, Completion, GenerateRequest
from agentrl.workflow.errors import AgentRLError, ConfigError, InfraError, ModelError
from agentrl.workflow.inference.remote_engine import ServedEngine, likeliest
from agentrl.workflow.inference.sampler import RollingEngine
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.plugins import find, names
from agentrl.workflow.settings import Settings
from agentrl.workflow.trajectory import PolicyRef
from tests.support.model_server import Routes, served
from tests.support.small_models import first_layer, tiny_random, tokenizer

PROMPT = tuple(range(10, 24))
VOCABULARY = len(tokenizer())
BASE = GenerateRequest(PROMPT, PolicyRef("small", ""), key=7, position=0, max_new_tokens=12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_random(tmp_path_factory.mktemp("base") / "small")


@pytest.fixture(scope="module")
def policy(folder: Path) -> Policy:
    return Policy.load(ModelConfig(lora_r=0), str(folder), "cpu", 1)


@pytest.fixture
def engine(policy: Policy) -> Iterator[RollingEngine]:
    engine = RollingEngine(policy)
    yield engine
    engine.close()


@torch.no_grad()
def check(policy: Policy, request: GenerateRequest, done: Completion) -> None:
    """Compares with the whole row, read at once."""
    with policy.sampling() as model:
        logits = model(input_ids=torch.tensor([[*request.prompt_ids, *done.token_ids]])).logits[0].float()
    everything = torch.log_softmax(logits[len(request.prompt_ids) - 1 : -1] / request.temperature, -1)
    assert len(done.top) == len(done.token_ids)
    for place, top, token, logprob in zip(everything, done.top, done.token_ids, done.logprobs, strict=True):
        best = place.topk(request.top_logprobs).values
        assert torch.allclose(torch.tensor([said for _, said in top]), best, atol=1e-4)
        assert torch.allclose(place[[id for id, _ in top]], best, atol=1e-4), "they are the ids of those tokens"
        assert dict(top).get(token, logprob) == logprob


def test_top_logprobs_equal_full_row_in_mixed_batch(policy: Policy, engine: RollingEngine) -> None:
    asked = [
        replace(
            BASE, key=key, top_logprobs=(0, 3, 20)[key % 3], temperature=(1.0, 0.6)[key % 2], max_new_tokens=3 + key, top_k=key
        )
        for key in range(9)
    ]
    for request, future in [(request, engine.submit(request)) for request in asked]:
        done = future.result(60)
        if request.top_logprobs:
            check(policy, request, done)
        else:
            assert done.top == ()


def test_top_logprobs_change_no_draw(engine: RollingEngine) -> None:
    plain, told = (engine.submit(replace(BASE, top_logprobs=count)).result(60) for count in (0, 5))
    assert (plain.token_ids, plain.logprobs) == (told.token_ids, told.logprobs)


def test_top_logprobs_of_evicted_turn_are_complete(policy: Policy, engine: RollingEngine) -> None:
    calls: list[int] = []

    def small_card(module: torch.nn.Module, args: tuple[torch.Tensor]) -> None:
        calls.append(len(args[0]))
        if calls[-1] > 2 and len(calls) > 6:
            raise torch.OutOfMemoryError("as if")

    requests = [replace(BASE, key=key, top_logprobs=2) for key in range(8)]
    with policy.sampling() as model:
        hook = first_layer(model).register_forward_pre_hook(small_card)
    try:
        done = [future.result(60) for future in [engine.submit(request) for request in requests]]
    finally:
        hook.remove()
    assert max(calls) > 2
    for request, completion in zip(requests, done, strict=True):
        check(policy, request, completion)


@pytest.mark.parametrize("count", [-1, MAX_TOP_LOGPROBS + 1, 10**30])
def test_top_logprobs_beyond_maximum_are_refused(count: int) -> None:
    with pytest.raises(ConfigError, match="between 0 and 20"):
        replace(BASE, top_logprobs=count)


def test_engines_declare_top_logprobs() -> None:
    assert {name for name in names("engines") if find("engines", name).top_logprobs} >= {"rolling", "openai", "llamacpp"}


# --- servers ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def server(folder: Path) -> Iterator[tuple[Routes, str]]:
    with served(folder) as made:
        yield made


@pytest.fixture
def client(folder: Path, server: tuple[Routes, str], home: Path) -> Iterator[Callable[[str], ServedEngine]]:
    with ExitStack() as opened:

        def make(name: str) -> ServedEngine:
            policy = Policy.load(ModelConfig(lora_r=4), str(folder), "cpu", 1, weights=False)
            engine = engines.start(find("engines", name), policy, Settings(engine_url=server[1], slots=2))
            assert isinstance(engine, ServedEngine)
            opened.callback(engine.close)
            return engine

        yield make


@pytest.mark.parametrize("name", ["openai", "llamacpp"])
def test_top_logprobs_come_from_server_on_request(
    policy: Policy, server: tuple[Routes, str], client: Callable[[str], ServedEngine], name: str
) -> None:
    engine = client(name)
    for count in (1, 4, 20):
        request = replace(BASE, top_logprobs=count)
        check(policy, request, engine.submit(request).result(60))
    assert engine.submit(BASE).result(60).top == ()
    assert all("return_tokens_as_token_ids" not in body for body in server[0].bodies[3:])


def of_vllm(top: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    told = {"token_ids": [1], "logprobs": {"token_logprobs": [-1.0], "top_logprobs": top}}
    return lambda reply: {**reply, "choices": [{**reply["choices"][0], **told}]}


def of_llama(top: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda reply: {**reply, "tokens": [1], "completion_probabilities": [{"logprob": -1.0, "top_logprobs": top}]}


@pytest.mark.parametrize(
    ("name", "spoil", "kind", "said"),
    [
        ("openai", of_vllm(None), ModelError, "for 0 of 1 tokens"),
        ("openai", of_vllm([]), ModelError, "for 0 of 1 tokens"),
        ("openai", of_vllm([{}, {}]), ModelError, "for 2 of 1 tokens"),
        ("openai", of_vllm([{"the": -1.0}]), ModelError, "without their ids"),
        ("openai", of_vllm([{"token_id:" + "9" * 5000: -1.0}]), ModelError, "without their ids"),
        ("openai", of_vllm([{f"token_id:{VOCABULARY}": -1.0}]), ModelError, "the model has the tokens 0 to"),
        ("openai", of_vllm([{"token_id:1": math.nan}]), ModelError, "NaN"),
        ("openai", of_vllm([{"token_id:1": 0.5}]), InfraError, "above 0"),
        ("openai", of_vllm([{f"token_id:{n}": -1.0 for n in range(1001)}]), InfraError, "more than 1000 tokens"),
        ("llamacpp", of_llama(None), ModelError, "does not return the likeliest"),
        ("llamacpp", of_llama([{"id": -1, "logprob": -1.0}]), ModelError, "the model has the tokens 0 to"),
        ("llamacpp", of_llama([{"id": 1, "logprob": None}]), ModelError, "NaN"),
        ("llamacpp", of_llama([{"id": 1, "logprob": 2.0}]), InfraError, "above 0"),
        ("llamacpp", of_llama([{"id": "1", "logprob": -2.0}]), InfraError, "cannot read"),
        ("llamacpp", of_llama([{"id": 1, "logprob": -2.0}] * 1001), InfraError, "cannot read"),
    ],
)
def test_top_logprobs_of_server_are_bounded_and_checked(
    server: tuple[Routes, str],
    client: Callable[[str], ServedEngine],
    name: str,
    spoil: Callable[[dict[str, Any]], dict[str, Any]],
    kind: type[AgentRLError],
    said: str,
) -> None:
    server[0].spoil = spoil
    with pytest.raises(kind) as raised:
        client(name).submit(replace(BASE, top_logprobs=2)).result(60)
    assert said in str(raised.value)
    assert len(str(raised.value)) < 600


@pytest.mark.parametrize(
    ("found", "best"),
    [({}, ()), ({3: -2.0, 1: -1.0, 2: -2.0}, ((1, -1.0), (2, -2.0))), ({5: -0.0}, ((5, -0.0),))],
)
def test_top_logprobs_are_sorted_by_value_then_id(found: Mapping[int, float], best: Any) -> None:
    assert likeliest(found, 2, 10, "url") == best

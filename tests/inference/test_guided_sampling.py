"""Sampling within a grammar, with the real engine and library: equal draws in any batch, logprobs of the whole vocabulary."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from agentrl.workflow.chat.grammar import ANY_TOOL, WHOLE_MASS, Constraint, GrammarError, TurnMatcher, turn_grammar
from agentrl.workflow.config import ModelConfig
from agentrl.workflow.engines import Completion, GenerateRequest
from agentrl.workflow.errors import ModelError
from agentrl.workflow.inference.sampler import RollingEngine
from agentrl.workflow.inference.sampling import allowed_mass, sample
from agentrl.workflow.models.logprobs import token_logprobs
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.trajectory import PolicyRef
from tests.chat.test_grammar import SHORT, TOOLS
from tests.support.small_models import tiny_random


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_random(tmp_path_factory.mktemp("guided"))


@pytest.fixture(scope="module")
def policy(folder: Path) -> Policy:
    return Policy(ModelConfig.model_validate({"path": str(folder), "lora_r": 0, "numerics": "exact"}), folder, "cpu")


@pytest.fixture
def engine(policy: Policy) -> Iterator[RollingEngine]:
    engine = RollingEngine(policy, slots=8)
    yield engine
    engine.close()


def request(policy: Policy, key: int, constraint: Constraint | None = None, **more: object) -> GenerateRequest:
    prompt = tuple(policy.chat.tokenizer.encode("What is 4 plus 5?"))
    text = "" if constraint is None else turn_grammar(constraint, TOOLS, policy.chat, prompt)
    made = GenerateRequest(prompt, PolicyRef(str(policy.folder), ""), key, 0, 120, grammar=text)
    return replace(made, **more)  # type: ignore[arg-type]


REQUIRED = Constraint(ANY_TOOL, one_call=True)
TOO_COMPLEX = {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(2000)}}
"""A schema that compiles, and that the library cannot follow after the first brace."""


def test_guided_turn_is_the_same_alone_and_in_a_batch(policy: Policy, engine: RollingEngine) -> None:
    guided = [request(policy, key, REQUIRED) for key in range(6)]
    alone = [engine.submit(one).result(60) for one in guided]
    free = [request(policy, key) for key in range(100, 110)]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda one: engine.submit(one).result(60), [*free, *guided]))[len(free) :]
    assert [(one.token_ids, one.logprobs, one.guided) for one in together] == [
        (one.token_ids, one.logprobs, one.guided) for one in alone
    ]
    messages = [policy.chat.parse(one.token_ids, TOOLS, False) for one in alone if one.finish_reason == "stop"]
    assert messages
    assert all(len(message.tool_calls) == 1 and message.tool_calls[0].error is None for message in messages)


def test_guided_turn_continues_after_an_eviction(policy: Policy, engine: RollingEngine) -> None:
    expected = engine.submit(request(policy, 3, REQUIRED)).result(60)
    evicted = 0

    def evict_once(token: int) -> bool:
        nonlocal evicted
        evicted += 1
        if evicted == 9:
            real = engine._batch.step

            def failing() -> None:
                engine._batch.step = real  # type: ignore[method-assign]
                raise torch.OutOfMemoryError("CUDA out of memory")

            engine._batch.step = failing  # type: ignore[method-assign]
        return True

    beside = engine.submit(request(policy, 77, REQUIRED))  # one turn alone would fail instead
    found = engine.submit(request(policy, 3, REQUIRED, heard=evict_once)).result(60)
    beside.result(60)
    assert evicted >= 9
    assert (found.token_ids, found.logprobs, found.guided) == (expected.token_ids, expected.logprobs, expected.guided)


def test_guided_logprobs_are_those_of_the_whole_vocabulary(policy: Policy, engine: RollingEngine) -> None:
    found: Completion = engine.submit(request(policy, 5, Constraint(schema=SHORT))).result(60)
    prompt = request(policy, 5).prompt_ids
    ids = torch.tensor([[*prompt, *found.token_ids]])
    with torch.no_grad(), policy.sampling() as model:
        logprobs = token_logprobs(model, ids, torch.ones_like(ids), 1.0)[0][0, len(prompt) - 1 :]
    assert torch.allclose(logprobs.float(), torch.tensor(found.logprobs), atol=1e-4)
    assert found.guided, "a random model would have drawn other tokens than JSON"


def test_guided_tokens_are_those_whose_mass_the_grammar_took(policy: Policy, engine: RollingEngine) -> None:
    one = request(policy, 5, Constraint(schema=SHORT))
    found = engine.submit(one).result(60)
    matcher, expected = policy.chat.grammars.matcher(one.grammar), list[int]()
    for index, token in enumerate(found.token_ids):
        ids = torch.tensor([[*one.prompt_ids, *found.token_ids[:index]]])
        with torch.no_grad(), policy.sampling() as model:
            logits = model(ids).logits[:, -1]
        allowed = matcher.allowed(logits.shape[-1])
        assert allowed[token]
        if float(allowed_mass(logits, 1.0, torch.from_numpy(allowed)[None])[0]) < WHOLE_MASS:
            expected.append(index)
        if token not in policy.chat.end_ids:
            matcher.take(token)
    assert list(found.guided) == expected


def test_free_turn_beside_guided_ones_has_no_guided_tokens(policy: Policy, engine: RollingEngine) -> None:
    futures = [engine.submit(request(policy, key, REQUIRED if key % 2 else None)) for key in range(6)]
    assert [bool(future.result(60).guided) for future in futures] == [False, True] * 3


def test_grammar_without_any_text_fails_its_turn_only(policy: Policy, engine: RollingEngine) -> None:
    bad = engine.submit(request(policy, 1, grammar="start: A\nA: /a/ & /b/"))
    worse = engine.submit(request(policy, 1, grammar="start: nowhere"))
    fine = engine.submit(request(policy, 2))
    for future in (bad, worse):
        with pytest.raises(ModelError):
            future.result(60)
    assert fine.result(60).token_ids


@pytest.mark.parametrize("first", ["", "/[ab]/ "])
def test_turn_ends_where_its_grammar_becomes_too_complex(policy: Policy, engine: RollingEngine, first: str) -> None:
    heard: list[int] = []
    grammar = f"start: {first}%json {json.dumps(TOO_COMPLEX)}"
    bad = engine.submit(request(policy, 1, grammar=grammar, top_logprobs=2, heard=lambda token: heard.append(token) is None))
    fine = engine.submit(request(policy, 2))
    done = bad.result(60)
    assert done.finish_reason == "length"
    assert 0 < len(done.token_ids) < 120
    assert len(done.token_ids) == len(done.logprobs) == len(done.top)
    assert heard == list(done.token_ids)
    assert fine.result(60).token_ids


def test_grammar_too_complex_for_one_token_fails_its_turn(
    policy: Policy, engine: RollingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TurnMatcher, "allowed", lambda self, vocabulary: np.zeros(vocabulary, bool))
    monkeypatch.setattr(TurnMatcher, "has_failed", True)
    with pytest.raises(GrammarError, match="too complex"):
        engine.submit(request(policy, 1, REQUIRED)).result(60)


def test_allowed_tokens_are_drawn_even_if_their_weights_are_zero() -> None:
    logits = torch.tensor([[200.0, 0.0, -1.0, 200.0]])
    allowed = torch.tensor([[False, True, True, False]])
    drawn = {int(sample(logits, torch.tensor([u]), 1.0, None, allowed)[0]) for u in np.linspace(0, 0.999, 50)}
    assert drawn == {1, 2}
    _, logprobs = sample(logits, torch.tensor([0.0]), 1.0, None, allowed)
    assert float(logprobs[0]) == pytest.approx(-200.693, abs=1e-2)
    assert float(allowed_mass(logits, 1.0, allowed)[0]) < 1e-60

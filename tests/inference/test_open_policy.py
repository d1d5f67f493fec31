"""opened: a policy asked from Python says what rollouts sample, what transformers computes, what its critic expects."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM

from agentrl.workflow.chat.letters import Letters
from agentrl.workflow.checkpoints import sealed_folder
from agentrl.workflow.config import ModelConfig
from agentrl.workflow.engines import GenerateRequest
from agentrl.workflow.errors import AgentRLError, CheckpointError, ConfigError, ModelError
from agentrl.workflow.inference.open_policy import OpenPolicy, open_policy
from agentrl.workflow.models.critic import make_critic, save_critic
from agentrl.workflow.models.logprobs import token_scores
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.tools.calculator import calculator
from agentrl.workflow.trajectory import Message, PolicyRef, SamplingKey
from tests.support.reference_sampler import alone
from tests.support.scripted_engine import ScriptedEngine
from tests.support.small_models import chat, tiny_calling, tiny_random, tokenizer

ASKED = [Message("user", "What is 15 minus 8?")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_random(tmp_path_factory.mktemp("opened") / "tiny")


@pytest.fixture(scope="module")
def opened(folder: Path) -> Iterator[OpenPolicy]:
    with open_policy(str(folder), seed=3, max_new_tokens=24) as policy:
        yield policy


def test_generate_draws_like_plainest_sampler(opened: OpenPolicy) -> None:
    said = opened.generate(ASKED, [calculator], sample=2)
    prompt = opened.chat.opening(ASKED, [calculator.schema])
    key = SamplingKey(3, "chat", 0, "chat", 2)
    expected = alone(opened.policy, GenerateRequest(prompt, opened.ref, key.of_turn(prompt, 0), 0, 24))
    assert (said.prompt_ids, said.sampled_ids) == (prompt, expected.token_ids)
    assert said.behavior_logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    assert said.message == opened.chat.parse(expected.token_ids)
    assert opened.generate(ASKED, [calculator], sample=2).sampled_ids == said.sampled_ids
    assert opened.generate(ASKED, [calculator], sample=3).sampled_ids != said.sampled_ids


def test_generate_continues_exact_tokens(opened: OpenPolicy) -> None:
    first = opened.generate(ASKED)
    more = (Message("user", "And twice that?"),)
    second = opened.generate(more, before=[first])
    assert (second.index, second.prompt) == (1, more)
    assert second.prompt_ids == opened.chat.continuation(more, (), first.sampled_ids)[0]
    assert second.new_row is None


def test_open_policy_logits_equal_transformers(folder: Path, opened: OpenPolicy) -> None:
    said = opened.generate(ASKED, temperature=1.0)
    ids = [[*said.prompt_ids, *said.sampled_ids]]
    out = opened.forward(ids)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.tensor(ids)).logits
    assert out.logits.dtype == torch.float32
    assert torch.allclose(out.logits, theirs, rtol=0, atol=1e-6)
    assert out.logprobs[0, len(said.prompt_ids) :].tolist() == pytest.approx(said.behavior_logprobs, abs=1e-5)
    assert out.logprobs[0, 0] == 0
    assert out.values is None


def test_open_policy_logprobs_use_sampling_temperature(folder: Path) -> None:
    with open_policy(str(folder), temperature=0.5, max_new_tokens=8) as policy:
        said = policy.generate(ASKED)
        out = policy.forward([[*said.prompt_ids, *said.sampled_ids]])
    assert out.logprobs[0, len(said.prompt_ids) :].tolist() == pytest.approx(said.behavior_logprobs, abs=1e-5)


def test_open_policy_ignores_padding_on_either_side(opened: OpenPolicy) -> None:
    row = list(range(10, 20))
    plain = opened.forward([row])
    padded = opened.forward([[0, 0, *row], [*row, 0, 0]], [[0] * 2 + [1] * 10, [1] * 10 + [0] * 2])
    for line, start in enumerate((2, 0)):
        assert torch.allclose(padded.logits[line, start : start + 10], plain.logits[0], atol=1e-5)
        assert torch.allclose(padded.logprobs[line, start : start + 10], plain.logprobs[0], atol=1e-5)
        assert padded.logprobs[line].count_nonzero() == 9


@pytest.mark.parametrize("lora", [0, 4])
def test_open_policy_values_use_critic_and_trained_weights(folder: Path, tmp_path: Path, lora: int) -> None:
    policy = Policy.load(ModelConfig(lora_r=lora), str(folder), "cpu", 1)
    critic = make_critic(policy)
    nn.init.normal_(critic.weight)
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.add_(0.02)

    def write(beside: Path) -> None:
        policy.save_weights(beside / sealed_folder.WEIGHTS)
        save_critic(critic, beside)

    sha256 = sealed_folder.write(tmp_path / "v1", write)
    ids = torch.arange(10, 30).view(2, 10)
    with policy.training() as model, torch.no_grad():
        expected = token_scores(model.eval(), ids, torch.ones_like(ids), critic=critic)
    with OpenPolicy(policy, PolicyRef(str(folder), policy.base_hash, str(tmp_path / "v1"), sha256, 1)) as opened:
        out = opened.forward(ids)
        assert opened.generate(ASKED, max_new_tokens=2).policy_version == 1
    assert out.values is not None
    assert torch.allclose(out.values[:, :-1], expected.values, atol=1e-5)  # type: ignore[arg-type]
    assert torch.allclose(out.logprobs[:, 1:], expected.logprobs, atol=1e-5)


def test_stream_pieces_make_up_turn_while_sampling(opened: OpenPolicy) -> None:
    stream = opened.stream(ASKED, max_new_tokens=40)
    pieces = list(stream)
    step = stream.result()
    ids = list(step.sampled_ids[:-1] if opened.chat.has_end_token(step.sampled_ids) else step.sampled_ids)
    assert "".join(pieces) == opened.chat.decode(ids)
    assert len(pieces) > 5
    assert step.sampled_ids == opened.generate(ASKED, max_new_tokens=40).sampled_ids


def test_stream_closed_early_stops_turn(opened: OpenPolicy) -> None:
    long = opened.generate(ASKED, max_new_tokens=200, sample=5, top_k=2)
    stream = opened.stream(ASKED, max_new_tokens=200, sample=5, top_k=2)
    for _ in stream:
        break
    step = stream.result()
    assert step.finish_reason == "length"
    assert 0 < len(step.sampled_ids) < len(long.sampled_ids)
    assert step.sampled_ids == long.sampled_ids[: len(step.sampled_ids)]


def test_stream_of_engine_without_tokens_is_one_piece(opened: OpenPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = opened.chat.turn(Message("assistant", "42"))
    monkeypatch.setattr(opened, "engine", ScriptedEngine([answer, answer], tells=False))
    assert list(opened.stream(ASKED)) == ["42"]
    assert opened.generate(ASKED).message.content == "42"


def test_generate_refuses_bad_arguments_in_a_sentence(opened: OpenPolicy, folder: Path) -> None:
    with pytest.raises(ConfigError, match="temperature"):
        opened.generate(ASKED, temperature=0)
    with pytest.raises(ConfigError, match="nonsense"):
        opened.generate(ASKED, nonsense=1)
    with pytest.raises(ConfigError, match=r"does not know rollout\.temperature"):
        opened.generate(ASKED, engine="llamacpp", temperature=0.5)
    for ids in ([[]], [[10_000]], [[1] * (opened.policy.max_context + 1)]):
        with pytest.raises(ModelError, match="forward takes"):
            opened.forward(ids)
    with pytest.raises(ModelError, match="mask"):
        opened.forward([[1, 2]], [[1]])
    with pytest.raises(AgentRLError):
        open_policy("/nowhere/model")
    policy = Policy.load(ModelConfig(), str(folder), "cpu", 1)
    with (
        pytest.raises(CheckpointError, match="missing"),
        OpenPolicy(policy, PolicyRef("x", "", "/nowhere", "0" * 64, 1)) as gone,
    ):
        gone.forward([[1, 2]])


def test_generate_in_full_window_ends_as_length(opened: OpenPolicy) -> None:
    said = opened.generate([Message("user", "7 " * opened.policy.max_context)])
    assert (said.sampled_ids, said.finish_reason) == ((), "length")


@given(st.lists(st.integers(0, len(tokenizer()) - 1), max_size=60))
def test_letters_add_up_to_any_text(ids: list[int]) -> None:
    talk = chat()
    said = [token for token in ids if token not in talk.end_ids]
    letters = Letters(talk)
    pieces = [*map(letters.take, said), letters.rest()]
    assert "".join(pieces) == talk.decode(said)


def test_letters_show_multi_token_character_at_once() -> None:
    talk = chat()
    ids = talk.tokenizer.encode("漢字 🙂 é", add_special_tokens=False)
    assert len(ids) > 8
    letters = Letters(talk)
    pieces = [piece for piece in map(letters.take, ids) if piece]
    assert pieces == ["漢", "字", " ", "🙂", " ", "é"]


def test_letters_show_bytes_that_make_no_character() -> None:
    talk = chat()
    lone = talk.tokenizer.encode("漢", add_special_tokens=False)[1]
    letters = Letters(talk)
    assert len("".join(letters.take(lone) for _ in range(200))) > 100


def test_open_policy_that_learned_tools_calls_them(tmp_path: Path) -> None:
    with open_policy(str(tiny_calling(tmp_path)), max_new_tokens=40) as policy:
        said = [policy.generate(ASKED, [calculator], sample=n) for n in range(4)]
    assert any(call.name == "calculator" for step in said for call in step.message.tool_calls)

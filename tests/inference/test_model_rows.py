"""How the sampler finds a way to run a model, and what it refuses, in a sentence and with nothing lost."""

import math
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import BertConfig, PreTrainedConfig

from agentrl.workflow.config import ModelConfig
from agentrl.workflow.engines import Completion, GenerateRequest
from agentrl.workflow.errors import ModelError
from agentrl.workflow.inference.cache_rows import CacheRows, TokenRows
from agentrl.workflow.inference.kv_cache import SlotCache
from agentrl.workflow.inference.model_rows import ModelRows, open_rows, sample_one
from agentrl.workflow.inference.sampler import RollingEngine
from agentrl.workflow.inference.slot_rows import SlotRows
from agentrl.workflow.models import loading
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.trajectory import PolicyRef
from tests.support.families import FAMILIES, save_random
from tests.support.reference_sampler import alone

CONFIG = ModelConfig.model_validate({"lora_r": 0, "dtype": "float32"})


def load(folder: Path, config: PreTrainedConfig) -> Policy:
    return Policy.load(CONFIG, str(save_random(folder, config)), "cpu")


def spoil(monkeypatch: pytest.MonkeyPatch, way: type[Any]) -> None:
    """Make a way's logits wrong."""
    next_logits: Callable[..., Tensor] = way.next_logits
    monkeypatch.setattr(way, "next_logits", lambda *arguments: next_logits(*arguments).roll(1, -1))


def test_open_rows_takes_the_first_way_that_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = load(tmp_path, FAMILIES["Qwen3.5"]())
    for way, wrong in ((SlotRows, SlotRows), (CacheRows, CacheRows), (TokenRows, TokenRows)):
        rows = open_rows(policy)
        assert type(rows) is way
        sample_one(rows, policy)
        spoil(monkeypatch, wrong)
    with pytest.raises(ModelError, match=r"cannot run 'qwen3_5_text': its cache cannot be continued exactly\.") as caught:
        open_rows(policy)
    assert "--engine openai" in caught.value.hint


def test_open_rows_reads_again_what_it_cannot_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = load(tmp_path, FAMILIES["Qwen3.5"]())
    resume = SlotRows.resume
    monkeypatch.setattr(SlotRows, "resume", lambda self, first, rows: resume(self, first, [(kept, ()) for kept, _ in rows]))
    rows = open_rows(policy)
    assert (type(rows), rows.resumes) == (SlotRows, False)


def test_open_rows_refuses_a_model_that_is_not_causal(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    policy = load(tmp_path, BertConfig(**sizes, initializer_range=0.2))
    with pytest.raises(ModelError, match="not causal"):
        open_rows(policy)


def test_open_rows_refuses_weights_that_give_nan(tmp_path: Path) -> None:
    policy = load(tmp_path, FAMILIES["LFM2"]())
    with torch.no_grad(), policy.sampling() as model:
        next(model.parameters()).fill_(math.nan)
    with pytest.raises(ModelError, match="NaN instead of logits"):
        open_rows(policy)


def test_open_rows_refuses_incomplete_model(tmp_path: Path) -> None:
    folder = save_random(tmp_path, FAMILIES["Qwen3.5"]())
    file = folder / "model.safetensors"
    weights = load_file(file)
    save_file({name: weight for name, weight in weights.items() if "layers.1." not in name}, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lack \d+ weights of the model, such as model\.layers\.1\."):
        Policy.load(CONFIG, str(folder), "cpu")


def test_open_rows_refuses_tokenizer_of_another_model(tmp_path: Path) -> None:
    config = FAMILIES["Qwen3"]()
    folder = save_random(tmp_path, config)
    config.vocab_size = 100
    config.save_pretrained(folder)
    with pytest.raises(ModelError, match=r"has \d+ tokens, the model only 100: it belongs to another model"):
        loading.check(CONFIG, folder)


@pytest.mark.parametrize("family", ["Qwen3.5", "gpt-oss"])
def test_model_rows_out_of_memory_change_no_token(family: str, tmp_path: Path) -> None:
    """States and caches of a failed step may be changed in part: its rows are read again."""
    policy = load(tmp_path, FAMILIES[family]())
    base = PolicyRef(str(tmp_path), policy.base_hash)
    engine = RollingEngine(policy, slots=2)
    engine.submit(GenerateRequest((5, 6, 7), base, 1, 0, 4, follows_length=True, session=1)).result(60)
    calls = [0]

    def run_out(module: torch.nn.Module, inputs: object, output: object) -> None:
        calls[0] += 1
        if calls[0] == 6:
            raise torch.OutOfMemoryError("as if")

    with policy.sampling() as model:
        hook = model.get_submodule("model.layers.0").register_forward_hook(run_out)
    requests = [GenerateRequest(tuple(range(5, 5 + length)), base, length, 0, 10) for length in (3, 8)]
    completions = [future.result(60) for future in [engine.submit(request) for request in requests]]
    hook.remove()
    engine.close()
    assert calls[0] > 6
    assert [completion.token_ids for completion in completions] == [alone(policy, request).token_ids for request in requests]


@pytest.mark.parametrize("family", ["Qwen3", "Qwen3.5", "Gemma 3", "Falcon-H1"])
def test_model_rows_with_aligned_masks_have_same_logits(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU; lengths on both sides of a multiple of 8, the sliding window's, and several tokens of a resumed row."""
    policy = Policy.load(ModelConfig(dtype="float32"), str(save_random(tmp_path, FAMILIES[family]())), "cpu")
    ids = [tuple(3 + (7 * place + row) % 50 for place in range(30)) for row in range(2)]

    @torch.no_grad()
    def logits(alignment: int) -> list[Tensor]:
        rows = open_rows(policy)
        assert isinstance(rows, SlotRows)
        monkeypatch.setattr(rows, "_alignment", alignment)
        rows.read(0, [ids[0][:5], ids[1][:11]])
        found = [
            rows.next_logits(torch.tensor([ids[0][5 + n], ids[1][11 + n]]), torch.tensor([5 + n, 11 + n])) for n in range(8)
        ]
        rows.resume(2, [(*rows.take([1], [19]), ids[1][19:23])])
        newest = torch.tensor([ids[0][13], ids[1][19], ids[1][23]])
        return [*found, rows.next_logits(newest, torch.tensor([13, 19, 23]))]

    for one, other in zip(logits(1), logits(8), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["Qwen3", "Qwen3.5", "Falcon-H1", "gpt-oss"])
@torch.no_grad()
def test_model_rows_change_places_together(family: str, tmp_path: Path) -> None:
    """Rows of unequal lengths are taken, dropped and resumed at once; each keeps the logits of a row that is alone."""
    policy = Policy.load(ModelConfig(dtype="float32"), str(save_random(tmp_path, FAMILIES[family]())), "cpu")
    ids = [tuple(3 + (7 * place + row) % 50 for place in range(30)) for row in range(5)]
    lengths = [3, 4, 9, 9, 20]

    def step(rows: ModelRows, at: list[tuple[int, int]]) -> dict[int, Tensor]:
        """Read the next token of rows, each given by its ids and the number of tokens that it has read."""
        logits = rows.next_logits(torch.tensor([ids[row][read] for row, read in at]), torch.tensor([read for _, read in at]))
        return {row: logits[place] for place, (row, _) in enumerate(at)}

    def alone(row: int, read: int) -> Tensor:
        rows = open_rows(policy)
        rows.read(0, [ids[row][:read]])
        return step(rows, [(row, read)])[row]

    rows = open_rows(policy)
    rows.reserve(5)
    rows.read(0, [ids[row][:length] for row, length in enumerate(lengths)])
    step(rows, [*enumerate(lengths)])
    out = dict(zip([0, 1, 4], rows.take([0, 1, 4], [4, 5, 21]), strict=True))
    rows.drop([0, 1, 4], [], {3: 0, 2: 1}, 10)
    rows.drop([1], [], {}, 0)  # row 3 is left
    rows.copy(0, 1, 2, 10)  # three copies of row 3
    rows.resume(3, [(out[4], ids[4][21:22]), (out[0], ids[0][4:6]), (out[1], ids[1][5:7])])
    logits = step(rows, [(3, 10), (3, 10), (3, 10), (4, 22), (0, 6), (1, 7)])
    for row, read in ((3, 10), (4, 22), (0, 6), (1, 7)):
        assert torch.allclose(logits[row], alone(row, read), rtol=0, atol=1e-5)


def test_engine_cache_of_ended_turns_is_bounded(tmp_path: Path) -> None:
    """Turns that end together share memory, which counts as a whole."""
    policy = load(tmp_path, FAMILIES["Qwen3"]())
    base = PolicyRef(str(tmp_path), policy.base_hash)
    engine = RollingEngine(policy, slots=8)
    for round_ in range(6):
        requests = [
            GenerateRequest((5, 6 + key), base, key, 0, 30, follows_length=True, session=8 * round_ + key) for key in range(8)
        ]
        assert all(future.result(60) for future in [engine.submit(request) for request in requests])
        batch = engine._batch
        assert 0 < batch._left_tokens() <= batch._rows.tokens
        before = batch._left_tokens()
        engine.release(8 * round_)  # seven of eight still hold the memory of all
        assert engine.submit(GenerateRequest((5,), base, 0, 0, 1)).result(60)
        assert 8 * round_ not in batch._left
        assert batch._left_tokens() == before
    engine.close()


@pytest.mark.parametrize("family", ["Qwen3", "Qwen3.5"])
def test_engine_keeps_rows_whose_neighbours_continue(family: str, tmp_path: Path) -> None:
    """The rows that ended together nearly fill the cache. Those that have continued give their memory back, a quarter at a
    time: until they are so many, the oldest row is dropped instead.
    """
    policy = load(tmp_path, FAMILIES[family]())
    base = PolicyRef(str(tmp_path), policy.base_hash)
    engine = RollingEngine(policy, slots=8)

    def play(session: int, prompt: tuple[int, ...], first: int, tokens: int) -> "Future[Completion]":
        return engine.submit(GenerateRequest(prompt, base, session, first, tokens, follows_length=True, session=session))

    ended = [future.result(60) for future in [play(key, (5, 6 + key), 0, 118) for key in range(8)]]
    dropped: set[int] = set()
    for key in (0, 7, 3):
        prompt = (5, 6 + key, *ended[key].token_ids, 9)
        assert play(key, prompt, 118, 2).result(60)
        dropped |= set(range(8)) - set(engine._batch._left)
        assert len(dropped) <= 1
        assert engine._batch._left_tokens() <= engine._batch._rows.tokens
    fresh = RollingEngine(policy, slots=8)
    (key, *_) = {2, 4, 5, 6} - dropped
    prompt = (5, 6 + key, *ended[key].token_ids, 9)
    read_anew = fresh.submit(GenerateRequest(prompt, base, key, 118, 4)).result(60)
    again = play(key, prompt, 118, 4).result(60)
    assert again.token_ids == read_anew.token_ids
    assert again.logprobs == pytest.approx(read_anew.logprobs, abs=1e-5)
    engine.close()
    fresh.close()


@pytest.mark.parametrize("family", ["Qwen3", "Qwen3.5"])
def test_engine_out_of_memory_while_rows_move_ends_turns(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step's tokens count already when the rows of ended turns are dropped: no turn may get a token more."""
    policy = load(tmp_path, FAMILIES[family]())
    base = PolicyRef(str(tmp_path), policy.base_hash)
    moves = []

    def run_out(cache: SlotCache, sources: Tensor, targets: Tensor, length: int) -> None:
        moves.append(length)
        raise torch.OutOfMemoryError("as if")

    monkeypatch.setattr(SlotCache, "move", run_out)
    engine = RollingEngine(policy, slots=4)
    requests = [GenerateRequest((5, 6 + key), base, key, 0, 5 + 6 * key) for key in range(4)]
    completions = [future.result(60) for future in [engine.submit(request) for request in requests]]
    engine.close()
    assert moves
    assert [completion.token_ids for completion in completions] == [alone(policy, request).token_ids for request in requests]

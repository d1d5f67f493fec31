"""The sampler: the draw itself, and that an episode's tokens depend on its request alone."""

import math
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, GPT2Config, GPTJConfig

from agentrl.workflow.checkpoints import sealed_folder
from agentrl.workflow.config import ModelConfig
from agentrl.workflow.engines import Completion, GenerateRequest
from agentrl.workflow.errors import CheckpointError, DeviceLost, InfraError, ModelError
from agentrl.workflow.inference import decoding_batch, sampler
from agentrl.workflow.inference.kv_cache import SlotCache, SlotStates
from agentrl.workflow.inference.sampler import RollingEngine
from agentrl.workflow.inference.sampling import sample, uniforms
from agentrl.workflow.models.logprobs import token_logprobs
from agentrl.workflow.models.policy import Policy, Slot
from agentrl.workflow.trajectory import PolicyRef
from tests.support.numerics import DEVICE, asked, same_turn, tolerance
from tests.support.reference_sampler import alone
from tests.support.small_models import first_layer, tiny_random, tokenizer

BITS = st.integers(0, 2**64 - 1)
LOGITS = st.lists(st.one_of(st.floats(-80, 80), st.just(-math.inf)), min_size=1, max_size=40).filter(
    lambda row: max(row) > -math.inf
)
PINNED_UNIFORMS = [0.6524484863740322, 0.1663964394676608, 0.23928447285727472]
UNIT = st.floats(0, 1, exclude_max=True)


# --- the draw ---------------------------------------------------------------------------------------------------------------


def numbers(keys: list[int], positions: list[int]) -> list[float]:
    return [float(value) for value in uniforms(np.array(keys, dtype=np.uint64), np.array(positions, dtype=np.uint64))]


@given(st.lists(st.tuples(BITS, st.integers(0, 2**40)), min_size=1, max_size=20))
def test_uniform_is_below_one_and_depends_on_key_and_position(pairs: list[tuple[int, int]]) -> None:
    keys, positions = [key for key, _ in pairs], [position for _, position in pairs]
    together = numbers(keys, positions)
    assert all(0 <= value < 1 for value in together)
    assert together == [numbers([key], [position])[0] for key, position in pairs]


def test_uniform_has_these_fixed_values() -> None:
    assert numbers([0, 1, 2**64 - 1], [0, 0, 7]) == PINNED_UNIFORMS


def test_uniform_is_uniform_along_positions_and_keys() -> None:
    for draws in (numbers([12345] * 100_000, list(range(100_000))), numbers(list(range(100_000)), [3] * 100_000)):
        counts, _ = np.histogram(draws, bins=100, range=(0, 1))
        assert ((counts - 1000) ** 2 / 1000).sum() < 160  # chi-squared, 99 degrees of freedom: p = 1e-4
        assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.02


@given(LOGITS, UNIT, st.floats(0.1, 5))
@example([80.0, 79.875], 0.0, 0.109375)
def test_sample_never_draws_probability_zero_and_gives_logprob(row: list[float], u: float, temperature: float) -> None:
    ids, logprobs = sample(torch.tensor([row]), torch.tensor([u], dtype=torch.float64), temperature)
    scaled = torch.tensor(row).double() / float(np.float32(temperature))  # in float64: a float32 near 700 is off by 3e-5 itself
    expected = torch.log_softmax(scaled, dim=-1)
    assert expected.float().exp()[ids[0]] > 0
    assert logprobs.dtype == torch.float32
    assert torch.isclose(logprobs[0], expected[ids[0]].float(), atol=1e-6)


@given(LOGITS, UNIT, UNIT)
def test_sample_is_monotonic_in_uniform_number(row: list[float], first: float, second: float) -> None:
    ids, _ = sample(torch.tensor([row, row]), torch.tensor(sorted([first, second]), dtype=torch.float64), 1.0)
    assert ids[0] <= ids[1]


@given(st.lists(LOGITS.map(lambda row: (row * 40)[:40]), min_size=2, max_size=6), UNIT)
def test_sample_is_independent_of_other_rows(rows: list[list[float]], u: float) -> None:
    draws = torch.full((len(rows),), u, dtype=torch.float64)
    ids, logprobs = sample(torch.tensor(rows, dtype=torch.float64), draws, torch.linspace(0.5, 2, len(rows)))
    alone = sample(torch.tensor(rows[:1], dtype=torch.float64), draws[:1], 0.5)
    assert (ids[0], logprobs[0]) == (alone[0][0], alone[1][0])


def test_sample_draws_follow_the_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0])
    u = torch.from_numpy(uniforms(np.full(50_000, 9, dtype=np.uint64), np.arange(50_000, dtype=np.uint64)))
    ids, _ = sample(logits.expand(50_000, -1), u, 0.7)
    frequencies = torch.bincount(ids, minlength=4) / 50_000
    assert torch.allclose(frequencies, torch.softmax(logits / 0.7, -1), atol=0.01)


# --- the engine -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_random(tmp_path_factory.mktemp("base"))


def sharpened(policy: Policy, folder: Path, scale: float, version: int) -> PolicyRef:
    """A checkpoint whose distributions are far from uniform and depend on every token before."""
    with torch.no_grad():
        for parameter in policy.trainable().values():
            if parameter.ndim == 2:
                parameter.mul_(scale)
    sha256 = sealed_folder.write(folder, lambda beside: policy.save_weights(beside / sealed_folder.WEIGHTS))
    policy.load_weights(None)
    return PolicyRef(str(policy.folder), policy.base_hash, str(folder), sha256, version)


@pytest.fixture(scope="module")
def exact(folder: Path) -> Iterator[Policy]:
    yield Policy.load(ModelConfig.model_validate(asked({"numerics": "exact"})), str(folder), DEVICE)
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def ref(exact: Policy, tmp_path_factory: pytest.TempPathFactory) -> PolicyRef:
    return sharpened(exact, tmp_path_factory.mktemp("v1") / "v1", 4.0, 1)


@pytest.fixture
def engine(exact: Policy) -> Iterator[RollingEngine]:
    engine = RollingEngine(exact)
    yield engine
    engine.close()


def requests_of(ref: PolicyRef, count: int, new: int = 24) -> list[GenerateRequest]:
    """Prompts of many lengths, some shared by siblings, at several temperatures."""
    generator = np.random.default_rng(5)
    prompts = [tuple(generator.integers(3, 60, size=length).tolist()) for length in (1, 2, 5, 17, 40, 70)]
    return [
        GenerateRequest(prompts[i % 6], ref, 1000 + i, 3 * (i % 4), 1 + (new * (1 + i % 5)) // 5, (1.0, 0.8)[i % 2])
        for i in range(count)
    ]


def all_same(
    policy: Policy, requests: Iterable[GenerateRequest], first: Iterable[Completion], second: Iterable[Completion]
) -> bool:
    """Whether each request was answered alike both times."""
    return all(same_turn(policy, *turn, 1e-9) for turn in zip(requests, first, second, strict=True))


def test_engine_samples_the_same_alone_and_in_any_batch(exact: Policy, ref: PolicyRef, engine: RollingEngine) -> None:
    requests = requests_of(ref, 36)
    alone = [engine.submit(request).result(60) for request in requests]
    crowd = [future.result(60) for future in [engine.submit(request) for request in requests]]
    backwards = [future.result(60) for future in [engine.submit(request) for request in reversed(requests)]][::-1]
    narrow = RollingEngine(exact, slots=5)
    waiting = [future.result(60) for future in [narrow.submit(request) for request in requests]]
    narrow.close()
    for other in (crowd, backwards, waiting):
        assert all_same(exact, requests, alone, other)
    assert len({completion.token_ids for completion in alone}) > 30


def test_engine_takes_requests_while_sampling(engine: RollingEngine, exact: Policy, ref: PolicyRef) -> None:
    long = GenerateRequest((5, 6, 7), ref, 1, 0, 150)
    late = GenerateRequest((5, 6, 7), ref, 2, 0, 10)
    alone = [engine.submit(request).result(60) for request in (long, late)]
    first = engine.submit(long)
    joined = []
    while not first.done():
        joined.append(engine.submit(late).result(60))
    assert same_turn(exact, long, first.result(), alone[0], 1e-9)
    assert len(joined) > 1
    assert all(same_turn(exact, late, completion, alone[1], 1e-9) for completion in joined)


def test_engine_resumes_interrupted_turn_exactly(engine: RollingEngine, exact: Policy, ref: PolicyRef) -> None:
    whole = engine.submit(GenerateRequest((9, 8, 7), ref, 77, 0, 20)).result(60)
    assert len(whole.token_ids) > 8
    kept = whole.token_ids[:8]
    going_on = GenerateRequest((9, 8, 7, *kept), ref, 77, 8, 12)
    rest = Completion(whole.token_ids[8:], whole.logprobs[8:], whole.finish_reason, 0.0)
    assert same_turn(exact, going_on, engine.submit(going_on).result(60), rest, 1e-9)


def teacher_forced(policy: Policy, request: GenerateRequest, completion: Completion) -> list[float]:
    ids = torch.tensor([[*request.prompt_ids, *completion.token_ids]], device=policy.device)
    with policy.sampling() as model, torch.no_grad():
        logprobs, _ = token_logprobs(model, ids, torch.ones_like(ids), request.temperature)
    return logprobs[0, len(request.prompt_ids) - 1 :].tolist()


@pytest.mark.parametrize("lora_r", [0, 4], ids=["full weights", "LoRA"])
def test_engine_float32_logprobs_equal_full_forward_pass(folder: Path, tmp_path: Path, lora_r: int) -> None:
    policy = Policy.load(ModelConfig.model_validate(asked({"lora_r": lora_r})), str(folder), DEVICE)
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.add_(0.05)
    ref = sharpened(policy, tmp_path / "v1", 2.0, 1)
    engine = RollingEngine(policy)
    requests = requests_of(ref, 24)
    completions = [future.result(60) for future in [engine.submit(request) for request in requests]]
    engine.close()
    for request, completion in zip(requests, completions, strict=True):
        assert np.allclose(completion.logprobs, teacher_forced(policy, request, completion), rtol=0, atol=tolerance(1e-5))


def test_engine_ends_turn_at_end_token_or_limit(engine: RollingEngine, exact: Policy, ref: PolicyRef) -> None:
    futures = [engine.submit(GenerateRequest((4, 5), ref, key, 0, 200, 2.0)) for key in range(20)]
    completions = [future.result(60) for future in futures]
    ends = exact.chat.end_ids
    assert {completion.finish_reason for completion in completions} == {"stop", "length"}
    for completion in completions:
        assert not ends & set(completion.token_ids[:-1])
        assert (completion.token_ids[-1] in ends) == (completion.finish_reason == "stop")
        assert len(completion.logprobs) == len(completion.token_ids) <= 200
        assert completion.finish_reason == "stop" or len(completion.token_ids) == 200


def test_engine_stops_at_end_of_context(engine: RollingEngine, exact: Policy, ref: PolicyRef) -> None:
    room = [(3,) * (exact.max_context - 2), (3,) * exact.max_context, (3,) * (exact.max_context + 1)]
    completions = [engine.submit(GenerateRequest(prompt, ref, 1, 0, 10, 0.01)).result(60) for prompt in room]
    assert [len(completion.token_ids) for completion in completions] == [2, 0, 0]
    assert {completion.finish_reason for completion in completions} == {"length"}


def test_engine_batches_rows_of_equal_weights_only(
    engine: RollingEngine, exact: Policy, ref: PolicyRef, tmp_path: Path
) -> None:
    other = sharpened(exact, tmp_path / "v2", 3.0, 2)
    base = PolicyRef(str(exact.folder), exact.base_hash)
    wanted = [GenerateRequest((5, 6), (ref, other, base)[i % 3], 50, 0, 8) for i in range(12)]
    ended: list[int] = []
    futures = [engine.submit(request) for request in wanted]
    for future in futures:
        future.add_done_callback(lambda done: ended.append(futures.index(done)))
    together = [future.result(60) for future in futures]
    alone = [engine.submit(request).result(60) for request in wanted]
    assert ended == [0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11], "the first in line says whose turn it is"
    assert all_same(exact, wanted, together, alone)
    assert len({completion.token_ids for completion in together}) == 3


def test_engine_batches_aliases_of_weights(engine: RollingEngine, exact: Policy, ref: PolicyRef) -> None:
    request = GenerateRequest((5, 6), ref, 50, 0, 8)
    alias = replace(request, policy=replace(ref, version=9))
    assert same_turn(exact, request, engine.submit(request).result(60), engine.submit(alias).result(60), 0)


def test_engine_with_missing_weights_fails_only_their_rows(
    engine: RollingEngine, exact: Policy, ref: PolicyRef, tmp_path: Path
) -> None:
    missing = replace(ref, path=str(tmp_path / "gone"), sha256="0" * 64)
    good = GenerateRequest((5, 6), ref, 1, 0, 4)
    futures = [engine.submit(request) for request in (good, replace(good, policy=missing), good)]
    assert same_turn(exact, good, futures[0].result(60), futures[2].result(60), 1e-9)
    with pytest.raises(CheckpointError, match="missing"):
        futures[1].result(60)


def test_engine_fails_invalid_request_alone(engine: RollingEngine, exact: Policy, ref: PolicyRef) -> None:
    good = GenerateRequest((5, 6, 7), ref, 1, 0, 4)
    expected = engine.submit(good).result(60)
    with exact.lock:  # whoever is first waits for it while it joins, the others wait for that one and join together
        first = engine.submit(good)
        others = [engine.submit(replace(good, top_k=top_k)) for top_k in (0, 0, 10**24, 0, 0)]
    with pytest.raises(InfraError, match="OverflowError"):
        others.pop(2).result(60)
    assert all(same_turn(exact, good, turn.result(60), expected, 1e-9) for turn in (first, *others))


@pytest.mark.parametrize("prompt", [(), (-1,), (10**6,)], ids=["empty", "negative", "beyond the vocabulary"])
def test_engine_refuses_prompt_beyond_vocabulary(engine: RollingEngine, ref: PolicyRef, prompt: tuple[int, ...]) -> None:
    with pytest.raises(ModelError, match="A prompt needs ids between 0 and"):
        engine.submit(GenerateRequest(prompt, ref, 1, 0, 4)).result(60)


def test_engine_survives_nan_and_fails_its_row(engine: RollingEngine, exact: Policy, ref: PolicyRef, tmp_path: Path) -> None:
    with torch.no_grad():
        next(iter(exact.trainable().values())).fill_(math.nan)
    broken = sharpened(exact, tmp_path / "nan", 1.0, 3)
    with pytest.raises(ModelError, match="NaN"):
        engine.submit(GenerateRequest((5, 6), broken, 1, 0, 4)).result(60)
    assert engine.submit(GenerateRequest((5, 6), ref, 1, 0, 4)).result(60).token_ids


def test_engine_without_memory_uses_fewer_rows_for_same_tokens(engine: RollingEngine, exact: Policy, ref: PolicyRef) -> None:
    requests = requests_of(ref, 24)
    expected = [future.result(60) for future in [engine.submit(request) for request in requests]]
    calls: list[int] = []

    def small_card(module: torch.nn.Module, args: tuple[torch.Tensor]) -> None:
        calls.append(len(args[0]))
        if calls[-1] > 3 and len(calls) > 6:
            raise torch.OutOfMemoryError("as if")

    with exact.sampling() as model:
        hook = first_layer(model).register_forward_pre_hook(small_card)
    try:
        completions = [future.result(60) for future in [engine.submit(request) for request in requests]]
    finally:
        hook.remove()
    assert max(calls) > 3
    assert all_same(exact, requests, completions, expected)


def test_engine_with_eager_attention_samples_same_tokens(folder: Path, exact: Policy, ref: PolicyRef) -> None:
    """Its masks have one mark per token: a path of its own through the sampler. It norms in float32."""
    eager = Policy.load(ModelConfig(numerics="exact", attn_implementation="eager"), str(folder), "cpu")
    with eager.sampling() as model:
        assert model.config._attn_implementation == "eager"  # type: ignore[union-attr]
    requests, engine = requests_of(ref, 12), RollingEngine(eager, slots=4)
    try:
        completions = [future.result(60) for future in [engine.submit(request) for request in requests]]
    finally:
        engine.close()
    expected = [alone(exact, request) for request in requests]
    assert all(same_turn(exact, *turn, 1e-5) for turn in zip(requests, completions, expected, strict=True))


def test_engine_refuses_unsupported_attention_in_a_sentence(folder: Path) -> None:
    with pytest.raises(
        ModelError, match=r"^model.attn_implementation=flash_attention_2 cannot be used here: .*FlashAttention2"
    ):
        Policy.load(ModelConfig(attn_implementation="flash_attention_2"), str(folder), "cpu")


def test_engine_frees_memory_while_idle(exact: Policy, ref: PolicyRef, monkeypatch: pytest.MonkeyPatch) -> None:
    freed = threading.Event()
    monkeypatch.setattr(sampler, "IDLE_SECONDS", 0.05)
    monkeypatch.setattr(decoding_batch, "free_cached_blocks", lambda device: freed.set())
    engine = RollingEngine(exact, slots=2)
    assert engine.submit(GenerateRequest((5, 6), ref, 1, 0, 4)).result(60).token_ids
    assert freed.wait(60)
    assert engine._batch._rows.tokens == 0
    engine.close()


def test_engine_restores_slots_once_memory_suffices(exact: Policy, ref: PolicyRef, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "CALM_STEPS", 10)
    engine = RollingEngine(exact, slots=8)
    rows: list[int] = []

    def peak_of_another_process(module: torch.nn.Module, args: tuple[torch.Tensor]) -> None:
        rows.append(len(args[0]))
        if len(rows) < 20 and rows[-1] > 2:
            raise torch.OutOfMemoryError("as if")

    requests = requests_of(ref, 48)
    with exact.sampling() as model:
        hook = first_layer(model).register_forward_pre_hook(peak_of_another_process)
    try:
        completions = [future.result(60) for future in [engine.submit(request) for request in requests]]
    finally:
        hook.remove()
        engine.close()
    assert all_same(exact, requests, completions, [alone(exact, request) for request in requests])
    assert max(rows[20:24]) <= 4
    assert max(rows[24:]) == 8


def test_slot_limit_doubles_wait_for_size_that_fails_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "CALM_STEPS", 10)
    limit, waits = sampler._SlotLimit(8), list[int]()
    for _ in range(4):
        limit.halve(8)
        assert limit.limit == 4
        waits.append(1)
        while not limit.note_calm_step():
            waits[-1] += 1
        assert limit.limit == 8
    assert waits == [10, 20, 40, 80]
    for _ in range(80):
        assert not limit.note_calm_step()
    limit.halve(6)  # after a long calm time: another peak
    assert limit.limit == 3
    assert [limit.note_calm_step() for _ in range(10)] == [False] * 9 + [True]
    assert limit.limit == 6
    assert [limit.note_calm_step() for _ in range(10)] == [False] * 9 + [True]
    assert limit.limit == 8


def test_engine_survives_model_error_and_fails_live_rows(engine: RollingEngine, exact: Policy, ref: PolicyRef) -> None:
    def broken(module: torch.nn.Module, args: object) -> None:
        raise torch.OutOfMemoryError("as if")

    with exact.sampling() as model:
        hook = first_layer(model).register_forward_pre_hook(broken)
    try:
        with pytest.raises(InfraError, match="Sampling failed: OutOfMemoryError: as if"):
            engine.submit(GenerateRequest((5, 6), ref, 1, 0, 4)).result(60)
    finally:
        hook.remove()
    assert engine.submit(GenerateRequest((5, 6), ref, 1, 0, 4)).result(60).token_ids


def test_engine_ends_when_its_device_is_lost(exact: Policy, ref: PolicyRef) -> None:
    """Later turns would fail alike: all of them, live, waiting or new, have the error by which a worker ends its process."""

    def lose(module: torch.nn.Module, args: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    engine = RollingEngine(exact, slots=2)
    with exact.sampling() as model:
        futures = [engine.submit(GenerateRequest((5, 6), ref, key, 0, 4)) for key in range(5)]
        hook = first_layer(model).register_forward_pre_hook(lose)
    try:
        for future in futures:
            with pytest.raises(DeviceLost, match="illegal memory access"):
                future.result(60)
    finally:
        hook.remove()
    with pytest.raises(DeviceLost, match="illegal memory access"):
        engine.submit(GenerateRequest((5, 6), ref, 9, 0, 4)).result(60)
    engine.close()


@pytest.mark.filterwarnings("ignore:Exception in thread sampler")
def test_engine_that_ends_fails_waiting_requests(exact: Policy, ref: PolicyRef) -> None:
    def leave(module: torch.nn.Module, args: object) -> None:
        raise SystemExit

    engine = RollingEngine(exact, slots=2)
    with exact.sampling() as model:
        futures = [engine.submit(GenerateRequest((5, 6), ref, key, 0, 4)) for key in range(5)]
        hook = first_layer(model).register_forward_pre_hook(leave)
    try:
        for future in futures:
            with pytest.raises(InfraError, match="closed"):
                future.result(60)
    finally:
        hook.remove()
    with pytest.raises(InfraError, match="closed"):
        engine.submit(GenerateRequest((5, 6), ref, 9, 0, 4)).result(60)
    engine.close()


def test_engine_does_not_sample_cancelled_request(exact: Policy, ref: PolicyRef) -> None:
    engine = RollingEngine(exact, slots=1)
    with exact.lock:  # so that the first cannot end, and the second has to wait
        first, second = (engine.submit(GenerateRequest((5, 6), ref, key, 0, 4)) for key in (1, 2))
        assert second.cancel()
    assert first.result(60).token_ids
    assert engine.submit(GenerateRequest((5, 6), ref, 3, 0, 4)).result(60).token_ids
    engine.close()


def test_engine_yields_policy_between_tokens(engine: RollingEngine, exact: Policy, ref: PolicyRef) -> None:
    sampling = engine.submit(GenerateRequest((5, 6), ref, 4, 0, 200, 0.5))
    turns = 0
    while not sampling.done():
        with exact.lock:
            turns += 1
    assert turns > 1


def test_engine_closed_fails_queued_and_later_requests(exact: Policy, ref: PolicyRef) -> None:
    engine = RollingEngine(exact, slots=1)
    futures = [engine.submit(GenerateRequest((5, 6), ref, key, 0, 200)) for key in range(20)]
    engine.close()
    futures.append(engine.submit(GenerateRequest((5, 6), ref, 1, 0, 4)))
    for future in futures[-2:]:
        with pytest.raises(InfraError, match="closed"):
            future.result(60)


@settings(max_examples=15)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 12), BITS), min_size=1, max_size=20), st.integers(1, 4))
def test_engine_keeps_tokens_of_requests_apart_in_any_mix(
    exact: Policy, ref: PolicyRef, mix: list[tuple[int, int, int]], slots: int
) -> None:
    prompts = [(7,), (7, 8), (7, 8, 9), (3,) * 30, (4,) * 65, (7, 8, 9, 10)]
    requests = [GenerateRequest(prompts[prompt], ref, key, 0, new) for prompt, new, key in mix]
    narrow, wide = RollingEngine(exact, slots=slots), RollingEngine(exact)
    few = [future.result(60) for future in [narrow.submit(request) for request in requests]]
    many = [future.result(60) for future in [wide.submit(request) for request in requests]]
    narrow.close()
    wide.close()
    assert all_same(exact, requests, few, many)


# --- keys and values that are kept ------------------------------------------------------------------------------------------


@contextmanager
def tokens_read(policy: Policy) -> Iterator[list[int]]:
    """How many tokens each call of the model reads, padding counted."""
    read: list[int] = []

    def count(module: torch.nn.Module, args: tuple[torch.Tensor]) -> None:
        read.append(args[0].numel())

    with policy.sampling() as model:
        hook = first_layer(model).register_forward_pre_hook(count)
    try:
        yield read
    finally:
        hook.remove()


def ended_turn(engine: RollingEngine, ref: PolicyRef, prompt: tuple[int, ...]) -> tuple[GenerateRequest, tuple[int, ...]]:
    """A request whose turn ended with an end token, and prompt and turn together."""
    for key in range(100):
        request = GenerateRequest(prompt, ref, key, 0, 100, 2.0, session=key)
        completion = engine.submit(request).result(60)
        if completion.finish_reason == "stop":
            return request, prompt + completion.token_ids
    raise AssertionError("no turn ended")


def next_turn(request: GenerateRequest, context: tuple[int, ...], new: int = 6) -> GenerateRequest:
    """What its episode asks for after it was told something."""
    said = (9, 10, 11)
    return replace(request, prompt_ids=context + said, position=len(context) - len(request.prompt_ids), max_new_tokens=new)


def test_engine_next_turn_reads_only_new_tokens(engine: RollingEngine, exact: Policy, ref: PolicyRef) -> None:
    request, context = ended_turn(engine, ref, (5, 6) * 40)
    following = next_turn(request, context)
    with tokens_read(exact) as read:
        kept = engine.submit(following).result(60)
    assert read[0] == 3, "the end token and two of the three that it was told"
    assert set(read[1:]) <= {1}, "then one at a time; a GPU's graphs do not call the layer"
    with tokens_read(exact) as read:
        again = engine.submit(following).result(60)
    assert read[0] == len(following.prompt_ids) - 1
    assert same_turn(exact, following, kept, again, 1e-9)


def test_engine_keeps_turn_at_limit_if_session_may_continue(engine: RollingEngine, exact: Policy, ref: PolicyRef) -> None:
    for follows in (False, True):
        request = GenerateRequest((5, 6) * 40, ref, 1, 0, 2, session=1, follows_length=follows)
        cut = engine.submit(request).result(60)
        assert cut.finish_reason == "length"
        context = request.prompt_ids + cut.token_ids
        with tokens_read(exact) as read:
            engine.submit(next_turn(request, context)).result(60)
        assert read[0] == (3 if follows else len(context) + 2), "the last token of the turn and two of the three since"


def test_engine_frees_kept_cache_at_episode_end_or_release(engine: RollingEngine, exact: Policy, ref: PolicyRef) -> None:
    request, context = ended_turn(engine, ref, (5, 6) * 40)
    for session in (request.session, None):
        engine.submit(request).result(60)
        engine.release(session)
        with tokens_read(exact) as read:
            engine.submit(next_turn(request, context)).result(60)
        assert read[0] == len(context) + 2


def test_engine_ignores_kept_cache_of_other_tokens_or_weights(
    engine: RollingEngine, exact: Policy, ref: PolicyRef, tmp_path: Path
) -> None:
    request, context = ended_turn(engine, ref, (5, 6) * 40)
    following = next_turn(request, context)
    edited = replace(following, prompt_ids=(7, *following.prompt_ids[1:]))
    other = replace(following, policy=sharpened(exact, tmp_path / "v2", 3.0, 2))
    for changed in (edited, other):
        engine.submit(request).result(60)
        with tokens_read(exact) as read:
            engine.submit(changed).result(60)
        assert read[0] == len(changed.prompt_ids) - 1


def test_engine_cancelled_turn_frees_slot_and_cache(exact: Policy, ref: PolicyRef) -> None:
    engine = RollingEngine(exact, slots=1)
    heard: list[int] = []
    begun, may_go_on = threading.Event(), threading.Event()

    def hear(token: int) -> bool:
        heard.append(token)
        begun.set()
        return may_go_on.wait(60) and False

    stopped = engine.submit(GenerateRequest((5, 6) * 10, ref, 1, 0, 100, heard=hear, session=1))
    assert begun.wait(60)
    waiting = engine.submit(GenerateRequest((7, 8) * 10, ref, 2, 0, 100, session=2))
    assert not stopped.cancel(), "it samples: `heard` ends it"
    assert waiting.cancel(), "it has not joined"
    may_go_on.set()
    assert (stopped.result(60).finish_reason, list(stopped.result().token_ids)) == ("length", heard)
    assert len(heard) == 1
    assert engine.submit(GenerateRequest((9, 8), ref, 3, 0, 4)).result(60).token_ids, "the only slot is free"
    engine.close()
    assert (engine._batch.turns, engine._batch.has_kept, list(engine._waiting)) == ([], False, [])


def test_engine_keeps_no_cache_without_session(engine: RollingEngine, exact: Policy, ref: PolicyRef) -> None:
    request, context = ended_turn(engine, ref, (5, 6) * 40)
    engine.release()
    unnamed = replace(request, session=None)
    engine.submit(unnamed).result(60)
    assert not engine._batch.has_kept
    with tokens_read(exact) as read:
        engine.submit(next_turn(unnamed, context)).result(60)
    assert read[0] == len(context) + 2


@pytest.mark.slow
def test_engine_evicts_oldest_kept_cache_for_slots(exact: Policy, ref: PolicyRef) -> None:
    engine = RollingEngine(exact, slots=1)
    request, context = ended_turn(engine, ref, (5, 6) * 10)
    for start in range(12, 20):  # their turns are kept too: more tokens than one slot has
        ended_turn(engine, ref, (start, 6) * 10)
    with tokens_read(exact) as read:
        engine.submit(next_turn(request, context)).result(60)
    engine.close()
    assert read[0] == len(context) + 2


def test_engine_samples_multi_turn_episodes_alike_in_any_batch(exact: Policy, ref: PolicyRef) -> None:
    """Turns of many lengths come back while others are in the middle of theirs, with twice as many episodes as slots."""
    crowd, alone = RollingEngine(exact, slots=4), RollingEngine(exact, slots=1)
    requests = [GenerateRequest(((5, 6), (7, 8, 9) * 9)[key % 2], ref, 300 + key, 0, 60, 2.0, session=key) for key in range(8)]
    for _ in range(3):
        together = [future.result(60) for future in [crowd.submit(request) for request in requests]]
        for request, completion in zip(requests, together, strict=True):
            alone.release()
            assert same_turn(exact, request, completion, alone.submit(request).result(60), 1e-9)
        contexts = [r.prompt_ids + c.token_ids for r, c in zip(requests, together, strict=True)]
        requests = [
            replace(r, prompt_ids=context + (9,) * (1 + r.key % 5), position=r.position + len(c.token_ids))
            for r, c, context in zip(requests, together, contexts, strict=True)
        ]
    crowd.close()
    alone.close()


def test_engine_without_memory_drops_kept_cache_before_slots(exact: Policy, ref: PolicyRef) -> None:
    engine = RollingEngine(exact, slots=2)
    request, context = ended_turn(engine, ref, (5, 6) * 40)
    broken = [True]

    def run_out(module: torch.nn.Module, args: object) -> None:
        if broken:
            broken.clear()
            raise torch.OutOfMemoryError("as if")

    with exact.sampling() as model:
        hook = first_layer(model).register_forward_pre_hook(run_out)
    try:
        pair = [engine.submit(GenerateRequest((8,), ref, key, 0, 30)) for key in (901, 902)]
        assert all(future.result(60).token_ids for future in pair)
    finally:
        hook.remove()
    assert engine._slots.limit == 2
    with tokens_read(exact) as read:
        engine.submit(next_turn(request, context)).result(60)
    engine.close()
    assert read[0] == len(context) + 2


def test_engine_ends_turn_without_memory_for_cache(
    engine: RollingEngine, exact: Policy, ref: PolicyRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, context = ended_turn(engine, ref, (5, 6) * 40)

    def run_out(cache: SlotCache, slots: torch.Tensor, length: int) -> SlotStates:
        raise torch.OutOfMemoryError("as if")

    monkeypatch.setattr(SlotCache, "take", run_out)
    pair = [engine.submit(replace(request, prompt_ids=request.prompt_ids)) for _ in range(2)]
    assert [request.prompt_ids + future.result(60).token_ids for future in pair] == [context, context]
    monkeypatch.undo()
    assert engine.submit(next_turn(request, context)).result(60).token_ids


def test_engine_slot_is_clean_after_nan(exact: Policy, ref: PolicyRef) -> None:
    spoilt = [True]

    def spoil(module: torch.nn.Module, args: object, states: torch.Tensor) -> torch.Tensor:
        return states * math.nan if spoilt else states

    engine = RollingEngine(exact, slots=2)
    with exact.sampling() as model:
        hook = first_layer(model).register_forward_hook(spoil)
    with pytest.raises(ModelError, match="NaN"):
        engine.submit(GenerateRequest((5, 6) * 30, ref, 1, 0, 4)).result(60)
    spoilt.clear()
    pair = [GenerateRequest(prompt, ref, 2, 0, 8) for prompt in ((7,), (8, 9) * 31)]
    together = [future.result(60) for future in [engine.submit(request) for request in pair]]
    hook.remove()
    assert all_same(exact, pair, together, [engine.submit(request).result(60) for request in pair])
    engine.close()


def test_engine_republishes_interrupted_weights(
    exact: Policy, ref: PolicyRef, engine: RollingEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = sharpened(exact, tmp_path / "v2", 3.0, 2)
    request = GenerateRequest((5, 6), ref, 1, 0, 8)
    expected = engine.submit(request).result(60)

    fill = Policy._fill

    def run_out(policy: Policy, slot: Slot, weights: Mapping[str, torch.Tensor]) -> None:
        fill(policy, slot, weights)
        raise InfraError("as if")

    monkeypatch.setattr(Policy, "_fill", run_out)
    with pytest.raises(InfraError, match="as if"):
        engine.submit(replace(request, policy=other)).result(60)
    monkeypatch.undo()
    assert same_turn(exact, request, engine.submit(request).result(60), expected, 1e-9)


ARCHITECTURES = {
    "eager attention": GPTJConfig(n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=96),
    "a table of positions": GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=96),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_engine_samples_other_architectures_as_if_alone(name: str, tmp_path: Path) -> None:
    config = ARCHITECTURES[name]
    config.vocab_size = len(tokenizer())
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)  # type: ignore[no-untyped-call]
    tokenizer().save_pretrained(tmp_path)
    policy = Policy.load(ModelConfig.model_validate(asked({"lora_r": 0})), str(tmp_path), DEVICE)
    base = PolicyRef(str(tmp_path), policy.base_hash)
    engine = RollingEngine(policy, slots=4)
    requests = [GenerateRequest((9,) * length, base, 40 + length, 0, 12, 2.0) for length in (2, 30, 60, 71)]
    for _ in range(2):
        completions = [future.result(60) for future in [engine.submit(request) for request in requests]]
        for request, completion in zip(requests, completions, strict=True):
            assert same_turn(policy, request, completion, alone(policy, request), 1e-4)
        requests = [
            replace(r, prompt_ids=r.prompt_ids + c.token_ids + (8,) * (1 + index % 3), position=99, max_new_tokens=4)
            for index, (r, c) in enumerate(zip(requests, completions, strict=True))
        ]
    engine.close()

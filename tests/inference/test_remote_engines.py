"""Engines over a server: what it sampled is what is recorded, and what it cannot do is said. The server runs our own engine."""

import fcntl
import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from agentrl.cli import doctor
from agentrl.workflow import engines
from agentrl.workflow.checkpoints import object_store, sealed_folder
from agentrl.workflow.checkpoints.sealed_folder import ADAPTER
from agentrl.workflow.config import ModelConfig, build
from agentrl.workflow.engines import Backend, Completion, GenerateRequest
from agentrl.workflow.errors import AgentRLError, CheckpointError, ConfigError, InfraError, ModelError, ServiceError
from agentrl.workflow.inference import exported_adapters, http, openai_engine, remote_engine, server_responses
from agentrl.workflow.inference.http import Connection
from agentrl.workflow.inference.llamacpp_engine import ends_within_character
from agentrl.workflow.inference.openai_engine import OpenAIServer
from agentrl.workflow.inference.remote_engine import ServedEngine
from agentrl.workflow.inference.server_responses import Cards, Completions, LlamaTurn, ServerResponse, TokenizeAnswer
from agentrl.workflow.models.logprobs import token_logprobs
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.plugins import find
from agentrl.workflow.settings import Settings
from agentrl.workflow.trajectory import PolicyRef
from tests.support.model_server import Routes, kept_port, served
from tests.support.small_models import tiny_random, tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

PROMPT = tuple(range(10, 24))
VOCABULARY = len(tokenizer())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_random(tmp_path_factory.mktemp("base") / "small")


@pytest.fixture(scope="module")
def trainer(folder: Path) -> Policy:
    """The policy of a process that trains."""
    return Policy.load(ModelConfig(lora_r=4), str(folder), "cpu", 1)


@pytest.fixture
def server(folder: Path) -> Iterator[tuple[Routes, str]]:
    with served(folder) as made:
        yield made


@pytest.fixture
def client(folder: Path, home: Path) -> Iterator[Callable[..., ServedEngine]]:
    """Makes engines over a server, for the same base."""
    with ExitStack() as opened:

        def make(url: str, name: str = "openai", key: str = "", base: Path = folder, lora_r: int = 4) -> ServedEngine:
            policy = Policy.load(ModelConfig(path=str(base), lora_r=lora_r), str(base), "cpu", 1, weights=False)
            engine = engines.start(backend(name), policy, Settings(engine_url=url, engine_key=key, slots=8))
            assert isinstance(engine, ServedEngine)
            opened.callback(engine.close)
            return engine

        yield make


def backend(name: str) -> Backend:
    found: Backend = find("engines", name)
    return found


def ask(**changes: Any) -> GenerateRequest:
    return replace(GenerateRequest(PROMPT, PolicyRef("small", ""), key=2**64 - 5, position=3, max_new_tokens=12), **changes)


def refusal(engine: ServedEngine, kind: type[AgentRLError], **changes: Any) -> str:
    with pytest.raises(kind) as raised:
        engine.submit(ask(**changes)).result(60)
    return str(raised.value)


def trained(policy: Policy, folder: Path, scale: float) -> PolicyRef:
    """A checkpoint whose adapter is far from nothing."""
    with torch.no_grad():
        for name, parameter in policy.trainable().items():
            parameter.fill_(scale) if "lora_B" in name else parameter.mul_(1.0)
    sha256 = sealed_folder.write(folder, lambda beside: policy.save_weights(beside / sealed_folder.WEIGHTS))
    policy.load_weights(None)
    return PolicyRef(str(policy.folder), policy.base_hash, str(folder), sha256, 1)


def expected(policy: Policy, ref: PolicyRef, done: Completion, temperature: float = 1.0) -> torch.Tensor:
    """The logprobs of what was sampled, as a trainer computes them."""
    policy.publish(ref)
    ids = torch.tensor([[*PROMPT, *done.token_ids]])
    with policy.sampling() as model, torch.no_grad():
        return token_logprobs(model, ids, torch.ones_like(ids), temperature)[0][0, len(PROMPT) - 1 :]


# --- what was sampled -------------------------------------------------------------------------------------------------------


def test_remote_engine_returns_logprobs_of_trainer(
    server: tuple[Routes, str], client: Callable[..., ServedEngine], trainer: Policy
) -> None:
    routes, url = server
    engine = client(url)
    turns = [engine.submit(ask(key=key)) for key in range(6)]
    done = [turn.result(60) for turn in turns]
    assert {(turn.token_ids, turn.logprobs) for turn in done} == {(each.ids, each.logprobs) for each in routes.sampled}
    assert len({turn.token_ids for turn in done}) == 6
    for turn in done:
        assert torch.allclose(expected(trainer, ask().policy, turn), torch.tensor(turn.logprobs), atol=1e-4)
        assert turn.finish_reason == ("stop" if turn.token_ids[-1] in trainer.chat.end_ids else "length")


def test_remote_engine_names_everything_that_decides_a_draw(
    server: tuple[Routes, str], client: Callable[..., ServedEngine]
) -> None:
    routes, url = server
    routes.raw = True
    engine = client(url + "/v1/")
    engine.submit(ask(top_k=5, top_p=0.9, min_p=0.1, stop=("</tool_call>",))).result(60)
    body = routes.bodies[-1]
    assert (body["top_k"], body["top_p"], body["min_p"], body["stop"]) == (5, 0.9, 0.1, ["</tool_call>"])
    assert body["include_stop_str_in_output"] is True
    assert body["skip_special_tokens"] is False
    assert body["stop_token_ids"] == sorted(routes.policy.chat.end_ids)
    assert 0 <= body["seed"] < 2**63


def test_remote_engine_publishes_policy_by_hash(
    server: tuple[Routes, str], client: Callable[..., ServedEngine], trainer: Policy, tmp_path: Path
) -> None:
    routes, url = server
    ref = trained(trainer, tmp_path / "v1", 0.3)
    engine = client(url)
    done = [engine.submit(ask(policy=ref, key=key)) for key in range(4)]
    base = engine.submit(ask(max_new_tokens=2)).result(60)
    for turn in done:
        assert turn.exception(60) is None
    assert routes.loads == [ref.sha256]
    assert [each.model for each in routes.sampled].count(ref.sha256) == 4
    for turn in done:
        assert torch.allclose(expected(trainer, ref, turn.result(60)), torch.tensor(turn.result(60).logprobs), atol=1e-4)
    assert torch.allclose(expected(trainer, ask().policy, base), torch.tensor(base.logprobs), atol=1e-4)
    assert not torch.allclose(expected(trainer, ref, base), torch.tensor(base.logprobs), atol=1e-2)


def test_exported_adapter_loads_in_peft(folder: Path, home: Path, trainer: Policy, tmp_path: Path) -> None:
    ref = trained(trainer, tmp_path / "v1", 0.3)
    made = exported_adapters.exported_folder(trainer, ref)
    assert json.loads((made / "adapter_config.json").read_text())["base_model_name_or_path"] == str(folder)
    (made / ADAPTER).write_bytes(b"cut off")
    assert exported_adapters.exported_folder(trainer, ref) == made
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), str(made))
    ids = torch.tensor([PROMPT])
    trainer.publish(ref)
    with trainer.sampling() as ours, torch.no_grad():
        assert torch.allclose(model(input_ids=ids).logits, ours(input_ids=ids).logits, atol=1e-5)


def test_exported_adapter_is_made_once_and_remade_if_broken(
    home: Path, trainer: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = trained(trainer, tmp_path / "v1", 0.3)
    looks = exported_adapters._is_sound

    def held_by_us(made: Path, sha256: str) -> bool:
        with (made.parent / ".lock").open("w") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return looks(made, sha256)

    monkeypatch.setattr(exported_adapters, "_is_sound", held_by_us)
    made = exported_adapters.exported_folder(trainer, ref).stat().st_ino
    assert exported_adapters.exported_folder(trainer, ref).stat().st_ino == made


def test_remote_engine_unloads_old_and_restores_lost_adapters(
    server: tuple[Routes, str],
    client: Callable[..., ServedEngine],
    trainer: Policy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    routes, url = server
    monkeypatch.setattr(openai_engine, "KEEP", 2)
    engine = client(url)
    refs = [trained(trainer, tmp_path / f"v{number}", 0.1 * number) for number in range(1, 5)]
    for ref in refs:
        engine.submit(ask(policy=ref, max_new_tokens=1)).result(60)
    assert list(routes.adapters) == [ref.sha256 for ref in refs[-2:]]
    routes.adapters.clear()
    engine.submit(ask(policy=refs[-1], max_new_tokens=1)).result(60)
    assert list(routes.adapters) == [refs[-1].sha256]
    other = client(url)
    other.submit(ask(policy=refs[-1], max_new_tokens=1)).result(60)
    assert len(routes.loads) == 5


@pytest.mark.parametrize("status", [503, 500])
def test_remote_engine_unloads_adapter_later_after_failure(
    server: tuple[Routes, str],
    client: Callable[..., ServedEngine],
    trainer: Policy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
) -> None:
    routes, url = server
    monkeypatch.setattr(openai_engine, "KEEP", 1)
    routes.instead["/v1/unload_lora_adapter"] = (status, "not now")
    engine = client(url)
    refs = [trained(trainer, tmp_path / f"v{number}", 0.1 * number) for number in range(1, 4)]
    for ref in refs:
        assert engine.submit(ask(policy=ref, max_new_tokens=1)).result(60).token_ids
    assert list(routes.adapters) == [ref.sha256 for ref in refs]
    routes.instead.clear()
    assert engine.submit(ask(policy=refs[2], max_new_tokens=1)).result(60).token_ids
    assert list(routes.adapters) == [refs[2].sha256]


def test_remote_engine_keeps_adapters_for_max_staleness() -> None:
    with pytest.raises(ConfigError, match="max_staleness"):
        build({"rollout.max_staleness": min(openai_engine.KEEP, object_store.KEEP) - 1})


def test_remote_sampler_never_reads_weights(
    server: tuple[Routes, str], client: Callable[..., ServedEngine], tmp_path: Path
) -> None:
    base = tiny_random(tmp_path / "small")
    engine = client(server[1], base=base)
    (base / "model.safetensors").unlink()
    assert engine.submit(ask()).result(60).token_ids
    late = Policy.load(ModelConfig(lora_r=4), str(tiny_random(tmp_path / "other")), "cpu", 1, weights=False)
    (tmp_path / "other" / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="holds no weights"):
        late.trainable()


# --- the window -------------------------------------------------------------------------------------------------------------


def test_remote_turn_ends_at_server_window(server: tuple[Routes, str], client: Callable[..., ServedEngine]) -> None:
    routes, url = server
    routes.window = len(PROMPT) + 2
    routes.policy.chat.end_ids = frozenset()
    engine = client(url)
    assert len(engine.submit(ask()).result(60).token_ids) == 2
    full = engine.submit(ask(prompt_ids=(*PROMPT, 5, 6))).result(60)
    assert (full.token_ids, full.finish_reason) == ((), "length")
    assert len(routes.sampled) == 1


# --- a server that is away --------------------------------------------------------------------------------------------------


def test_remote_engine_missing_is_service_error(client: Callable[..., ServedEngine]) -> None:
    assert "AGENTRL_ENGINE_URL" in refusal(client("http://127.0.0.1:9"), ServiceError)
    for url in ("", "nowhere"):
        with pytest.raises(ConfigError, match="AGENTRL_ENGINE_URL"):
            client(url)


def test_remote_engine_resumes_after_server_restart(
    folder: Path, client: Callable[..., ServedEngine], trainer: Policy, tmp_path: Path
) -> None:
    ref = trained(trainer, tmp_path / "v1", 0.2)
    with kept_port() as port:
        with served(folder, port) as (routes, url):
            engine = client(url)
            engine.submit(ask(policy=ref)).result(60)

            def die(reply: Any) -> Any:
                raise ConnectionAbortedError

            routes.spoil = die
            refusal(engine, ServiceError, policy=ref)
        refusal(engine, ServiceError, policy=ref)
        with served(folder, port) as (routes, _):
            done = engine.submit(ask(policy=ref)).result(60)
            assert routes.loads == [ref.sha256]
    assert torch.allclose(expected(trainer, ref, done), torch.tensor(done.logprobs), atol=1e-4)


@pytest.mark.parametrize(("status", "kind"), [(503, ServiceError), (429, ServiceError), (500, InfraError), (422, ModelError)])
def test_remote_engine_maps_http_errors(
    server: tuple[Routes, str],
    client: Callable[..., ServedEngine],
    status: int,
    kind: type[AgentRLError],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    routes, url = server
    monkeypatch.setattr(routes, "_complete", lambda body: (status, {"error": "as declared"}))
    assert "as declared" in refusal(client(url), kind)


def test_remote_engine_closed_fails_requests_without_waiting(
    server: tuple[Routes, str], client: Callable[..., ServedEngine]
) -> None:
    routes, url = server
    asked, ended = threading.Semaphore(0), threading.Event()

    def hang(reply: Any) -> Any:
        asked.release()
        ended.wait(60)
        return reply

    before = set(threading.enumerate())
    engine = client(url)
    assert engine.submit(ask()).result(60).token_ids
    routes.spoil = hang
    turns = [engine.submit(ask(key=key)) for key in range(12)]
    for _ in range(8):
        assert asked.acquire(timeout=60)
    engine.close()
    closed = [turn for turn in turns if turn.done()]
    assert closed
    assert all(isinstance(turn.exception(), AgentRLError) for turn in closed)
    assert all(thread.daemon for thread in set(threading.enumerate()) - before)
    assert isinstance(engine.submit(ask()).exception(60), InfraError)
    ended.set()


def meanwhile(act: Callable[[], Any]) -> threading.Thread:
    """Another thread comes in between: as far as it gets."""
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(0.3)
    return thread


def test_remote_engine_starts_thread_for_each_caller(client: Callable[..., ServedEngine]) -> None:
    engine = client("http://127.0.0.1:9")
    others = list[threading.Thread]()

    class Interrupted(list[threading.Thread]):
        def append(self, thread: threading.Thread) -> None:
            super().append(thread)
            if not others:
                others.append(threading.current_thread())
                others.append(meanwhile(lambda: engine.submit(ask())))

    engine._threads = Interrupted()
    assert isinstance(engine.submit(ask()).exception(60), ServiceError)
    others[1].join(60)
    assert len(engine._threads) == 2


def test_remote_engine_ends_turn_submitted_during_close(client: Callable[..., ServedEngine]) -> None:
    engine = client("http://127.0.0.1:9")
    for _ in range(8):  # all the threads that it starts
        assert isinstance(engine.submit(ask()).exception(60), ServiceError)
    waiting, closing = engine._waiting, list[threading.Thread]()

    class Interrupted:
        def put(self, turn: Any) -> None:
            if not closing:
                closing.append(threading.current_thread())
                closing.append(meanwhile(engine.close))
            waiting.put(turn)

        def get(self) -> Any:
            return waiting.get()

        def get_nowait(self) -> Any:
            return waiting.get_nowait()

    engine._waiting = Interrupted()  # type: ignore[assignment]
    assert isinstance(engine.submit(ask()).exception(60), AgentRLError)
    closing[1].join(60)


# --- refusals ---------------------------------------------------------------------------------------------------------------


def spoilt(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """An answer whose only choice is changed."""
    return lambda reply: {**reply, "choices": [{**reply["choices"][0], **changes}]}


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda reply: {**reply, "model": "another"}, "was asked for the model 'small', but 'another' answered"),
        (spoilt(token_ids=None), "does not return token ids"),
        (spoilt(logprobs=None), "no logprobs"),
        (spoilt(token_ids=[1, 2], logprobs={"token_logprobs": [-1.0, None]}), "the server's model probably returned NaN"),
        (spoilt(token_ids=[1, 2], logprobs={"token_logprobs": [-1.0, math.nan]}), "the server's model probably returned NaN"),
        (spoilt(token_ids=[1], logprobs={"token_logprobs": [-1e300]}), "the server's model probably returned NaN"),
        (
            spoilt(token_ids=[-1], logprobs={"token_logprobs": [-1.0]}),
            "sampled the token -1, but the model has the tokens 0 to",
        ),
        (spoilt(token_ids=[VOCABULARY], logprobs={"token_logprobs": [-1.0]}), f"sampled the token {VOCABULARY}, but"),
        (spoilt(token_ids=[10**400], logprobs={"token_logprobs": [-1.0]}), "sampled the token"),
        (spoilt(token_ids=[1, 2], logprobs={"token_logprobs": [-1.0]}), "2 ids and 1 logprobs"),
        (spoilt(token_ids=[], logprobs={"token_logprobs": []}), "0 ids"),
        (spoilt(token_ids=[1] * 13, logprobs={"token_logprobs": [-1.0] * 13}), "at most 12 tokens"),
        (spoilt(prompt_token_ids=[1, *PROMPT]), "a prompt other than the given one"),
        (lambda reply: [reply], "not an object"),
    ],
)
def test_remote_turn_that_contradicts_request_ends_run(
    server: tuple[Routes, str], client: Callable[..., ServedEngine], spoil: Callable[[Any], Any], said: str
) -> None:
    server[0].spoil = spoil
    assert said in refusal(client(server[1]), ModelError)


NONSENSE = "with data that this engine cannot read: "


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/v1/models", {"data": None}),
        ("/v1/models", {"data": ["x"]}),
        ("/v1/models", {"data": [{"root": "small"}]}),
        ("/v1/models", {}),
        *(("/v1/models", {"data": [{"id": "small", "max_model_len": n}]}) for n in ("abc", math.inf, 0, -1, True, 1.5)),
        ("/v1/completions", {"model": "small", "choices": {}}),
        ("/v1/completions", {"model": "small", "choices": []}),
        ("/v1/completions", {"model": "small", "choices": [None]}),
        ("/props", {"default_generation_settings": []}),
        ("/props", {"default_generation_settings": {"n_ctx": 0}}),
        ("/tokenize", {"tokens": 5}),
        ("/completion", {"tokens": [1], "completion_probabilities": [1]}),
        ("/completion", {"tokens": [True]}),
    ],
)
def test_remote_answer_unreadable_names_server_and_route(
    server: tuple[Routes, str], client: Callable[..., ServedEngine], path: str, answer: Any
) -> None:
    routes, url = server
    routes.instead[path] = (200, answer)
    said = refusal(client(url, name="openai" if path.startswith("/v1") else "llamacpp"), InfraError)
    assert f"{url} answered {path} {NONSENSE}" in said


WRONG_IN_MANY_PLACES: dict[str, tuple[type[ServerResponse], Callable[[], Any]]] = {
    "choices": (Completions, lambda: {"choices": [1] * 1_000_000}),
    "token ids": (Completions, lambda: {"choices": [{"token_ids": ["x"] * 1_000_000}]}),
    "the likeliest": (
        Completions,
        lambda: {"choices": [{"logprobs": {"top_logprobs": [dict.fromkeys(map(str, range(1_000_000)))]}}]},
    ),
    "models": (Cards, lambda: {"data": [1] * 1_000_000}),
    "tokens": (TokenizeAnswer, lambda: {"tokens": ["x"] * 1_000_000}),
    "a turn": (LlamaTurn, lambda: {"tokens": ["x"] * 1_000_000}),
    "probabilities": (LlamaTurn, lambda: {"completion_probabilities": [1] * 1_000_000}),
    "a large value": (TokenizeAnswer, lambda: {"tokens": {number: [number] for number in range(1_000_000)}}),
}


@pytest.mark.parametrize(("shape", "make_answer"), WRONG_IN_MANY_PLACES.values(), ids=WRONG_IN_MANY_PLACES)
def test_remote_answer_check_stops_at_first_fault(shape: type[ServerResponse], make_answer: Callable[[], Any]) -> None:
    found = make_answer()
    before = time.process_time()
    with pytest.raises(InfraError, match=NONSENSE) as told:
        server_responses.read(shape, found, "http://host", "/path")
    assert time.process_time() - before < 0.5
    assert len(told.value.message) < 300


def test_remote_answer_too_long_is_not_read(
    server: tuple[Routes, str], client: Callable[..., ServedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "MAX_BYTES", 100_000)
    routes, url = server
    routes.instead["/v1/models"] = (200, {"data": [], "more": "x" * 100_000})
    assert "with more than 100000 bytes" in refusal(client(url), InfraError)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"finish_reason": []}, NONSENSE),
        ({"prompt_token_ids": 5}, NONSENSE),
        ({"token_ids": [True]}, NONSENSE),
        ({"token_ids": ["a"]}, NONSENSE),
        ({"logprobs": [1]}, NONSENSE),
        ({"logprobs": "text"}, NONSENSE),
        ({"logprobs": {"token_logprobs": "text"}}, NONSENSE),
        ({"logprobs": {"token_logprobs": [10**400]}}, NONSENSE),
        ({"logprobs": {"token_logprobs": [0.01]}}, "gave a token the logprob 0.01, which is above 0"),
        ({"logprobs": {"token_logprobs": [math.inf]}}, "gave a token the logprob inf"),
    ],
)
def test_remote_turn_unreadable_is_system_failure_of_one_turn(
    server: tuple[Routes, str], client: Callable[..., ServedEngine], changes: Any, said: str
) -> None:
    routes, url = server
    engine = client(url)
    routes.spoil = spoilt(**{"token_ids": [1], "logprobs": {"token_logprobs": [-1.0]}, **changes})
    assert said in refusal(engine, InfraError)
    routes.spoil = spoilt(token_ids=[VOCABULARY - 1], logprobs={"token_logprobs": [9e-4]})  # as much as rounding may do
    assert engine.submit(ask()).result(60).logprobs == (9e-4,)


@pytest.mark.parametrize("likeliest", [[], [None], [{}], [{"x": math.nan}], [{"x": 1.0}], [["x"]]])
def test_remote_engine_needs_known_kind_of_logprobs(
    server: tuple[Routes, str], client: Callable[..., ServedEngine], likeliest: Any
) -> None:
    routes, url = server
    routes.spoil = spoilt(logprobs={"token_logprobs": [-1.0], "top_logprobs": likeliest})
    assert url in refusal(client(url), AgentRLError, temperature=0.5)
    assert len(routes.sampled) == 1


def test_remote_turn_aborted_by_server_is_system_failure(
    server: tuple[Routes, str], client: Callable[..., ServedEngine]
) -> None:
    server[0].spoil = spoilt(finish_reason="abort")
    assert "'abort'" in refusal(client(server[1]), InfraError)


def test_remote_engine_refuses_other_base_or_key(
    server: tuple[Routes, str], client: Callable[..., ServedEngine], tmp_path: Path
) -> None:
    routes, url = server
    assert "serves small, and not" in refusal(client(url, base=tiny_random(tmp_path / "another")), ModelError)
    routes.key = "secret"
    assert "AGENTRL_ENGINE_KEY" in refusal(client(url), ConfigError)
    assert client(url, key="secret").submit(ask()).result(60).token_ids


def test_remote_engine_uses_own_model_and_window_among_several(
    server: tuple[Routes, str], client: Callable[..., ServedEngine]
) -> None:
    routes, url = server
    routes.foreign = ({"id": "another", "root": "/models/another", "max_model_len": 100_000},)
    routes.window = len(PROMPT) + 2
    routes.policy.chat.end_ids = frozenset()
    assert len(client(url).submit(ask()).result(60).token_ids) == 2
    assert {each.model for each in routes.sampled} == {"small"}


@pytest.mark.parametrize(
    ("raw", "changes", "hint"),
    [
        (True, {"temperature": 0.5}, "processed_logprobs"),
        (False, {"top_p": 0.9}, "raw_logprobs"),
        (False, {"top_k": 3}, "raw_logprobs"),
        (True, {"min_p": 0.1}, ""),
        (False, {"temperature": 0.5}, ""),
    ],
)
def test_remote_engine_refuses_logprobs_of_other_distribution(
    server: tuple[Routes, str], client: Callable[..., ServedEngine], trainer: Policy, raw: bool, changes: Any, hint: str
) -> None:
    routes, url = server
    routes.raw = raw
    if hint:
        assert hint in refusal(client(url), ConfigError, **changes)
        return
    done = client(url).submit(ask(**changes)).result(60)
    wanted = expected(trainer, ask().policy, done, changes.get("temperature", 1.0))
    assert torch.allclose(wanted, torch.tensor(done.logprobs), atol=1e-4)


def test_remote_turn_keeps_logprob_kind_across_new_handshake(server: tuple[Routes, str], trainer: Policy) -> None:
    routes, url = server
    routes.raw = True
    asked = OpenAIServer(trainer, Connection(Settings(engine_url=url, slots=8)))

    class Interrupted(float):
        """A temperature at whose comparison another thread, as it were, greets the server."""

        def __ne__(self, other: object) -> bool:
            asked.greet()
            return float(self) != other

    asked.greet()
    try:
        assert asked.sample(ask(temperature=Interrupted(1.0), top_k=3), 4).token_ids
    finally:
        asked.close()


def test_remote_engine_retries_adapter_after_server_failure(
    server: tuple[Routes, str], client: Callable[..., ServedEngine], trainer: Policy, tmp_path: Path
) -> None:
    routes, url = server
    engine = client(url)
    ref = trained(trainer, tmp_path / "v1", 0.2)
    routes.instead["/v1/load_lora_adapter"] = (500, "Internal Server Error")
    assert "Internal Server Error" in refusal(engine, InfraError, policy=ref)
    routes.instead.clear()
    assert engine.submit(ask(policy=ref)).result(60).token_ids


def test_remote_engine_refuses_adapter_that_cannot_be_published(
    server: tuple[Routes, str], client: Callable[..., ServedEngine], trainer: Policy, tmp_path: Path
) -> None:
    routes, url = server
    ref = trained(trainer, tmp_path / "v1", 0.2)
    assert "another base" in refusal(client(url), CheckpointError, policy=replace(ref, base_hash="x"))
    assert "altered" in refusal(client(url), CheckpointError, policy=replace(ref, sha256="0" * 64))
    routes.runtime_lora = False
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in refusal(client(url), ConfigError, policy=ref)
    routes.runtime_lora = True
    wide = Policy.load(ModelConfig(lora_r=8), str(trainer.folder), "cpu", 1)
    other = trained(wide, tmp_path / "v2", 0.2)
    assert "--max-lora-rank" in refusal(client(url, lora_r=8), ConfigError, policy=other)


# --- llama.cpp --------------------------------------------------------------------------------------------------------------


def test_llama_cpp_samples_the_base_for_eval_and_chat(
    server: tuple[Routes, str], client: Callable[..., ServedEngine], trainer: Policy, tmp_path: Path
) -> None:
    routes, url = server
    engine = client(url, name="llamacpp")
    done = engine.submit(ask()).result(60)
    assert (done.token_ids, done.logprobs) == (routes.sampled[0].ids, routes.sampled[0].logprobs)
    assert "temperature 1" in refusal(engine, ConfigError, temperature=0.5)
    assert "untrained base" in refusal(engine, ConfigError, policy=trained(trainer, tmp_path / "v1", 0.2))
    routes.spoil = lambda reply: {**reply, "tokens": [VOCABULARY]}
    assert "the model has the tokens 0 to" in refusal(engine, ModelError)
    told = "completion_probabilities"
    routes.spoil = lambda reply: {**reply, told: [{**one, "logprob": 1.0} for one in reply[told]]}
    assert "which is above 0" in refusal(engine, InfraError)
    routes.spoil = lambda reply: {**reply, told: [{"logprob": -1.0}]}
    assert "tokens that it did not sample" in refusal(engine, InfraError)
    routes.spoil = lambda reply: {**reply, "tokens": []}
    assert "does not return token ids" in refusal(engine, ModelError)


@pytest.mark.slow
def test_llama_cpp_partial_character_token_gets_logprob(
    server: tuple[Routes, str], client: Callable[..., ServedEngine]
) -> None:
    routes, url = server
    routes.is_forgetful = True
    engine = client(url, name="llamacpp")
    for key in range(20):
        done = engine.submit(ask(key=key, top_logprobs=2)).result(60)
        assert done.token_ids == routes.sampled[-1].ids
        assert done.logprobs == pytest.approx(routes.sampled[-1].logprobs, abs=1e-4)
        assert all(len(place) == 2 for place in done.top)
    assert routes.forced, "no turn had such a token"


@pytest.mark.parametrize(
    ("text", "ends_within"),
    [(b"", False), (b"a", False), ("ü".encode(), False), (b"\xc3", True), (b"\xe4\xb8", True), (b"\xf0\x9f\x99", True),
     ("🙂".encode(), False), (b"\xe4a", True), (b"\xe4ab", False), (b"\x80\x80", False)],
)  # fmt: skip
def test_ends_within_character_agrees_with_llama_cpp(text: bytes, ends_within: bool) -> None:
    assert ends_within_character(text) == ends_within


def test_llama_cpp_with_another_vocabulary_is_refused(
    server: tuple[Routes, str], client: Callable[..., ServedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server[0].policy.tokenizer, "encode", lambda text, **options: [1, 2, 3])
    assert "has another tokenizer" in refusal(client(server[1], name="llamacpp"), ModelError)


def test_doctor_reports_model_of_server_or_its_absence(server: tuple[Routes, str], home: Path) -> None:
    def checks(urls: str) -> list[tuple[str, str]]:
        return [(check.state, check.found) for check in doctor._engine(Settings(engine_url=urls))]

    with kept_port() as port:
        good, (state, said) = checks(f"{server[1]}/v1, http://127.0.0.1:{port}")
    assert good == ("ok", f"{server[1]} serves {server[0].name}")
    assert state == "fail"
    assert "does not answer" in said
    assert [state for state, _ in checks("nowhere")] == ["fail"]


@contextmanager
def dripping() -> Iterator[str]:
    """The URL of a server whose answer is a header line each tenth of a second, without end."""

    def drip(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\n")
            while not ended.wait(0.1):
                connection.sendall(b"A: b\r\n")

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=drip, args=(listening.accept()[0],), daemon=True).start()

    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        ended.set()


def test_server_that_drips_headers_counts_as_silent(
    server: tuple[Routes, str], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "CHECK_SECONDS", 0.5)
    server[0].foreign = ({"id": "x" * 100_000},)
    with dripping() as url:
        listed = Settings(engine_url=f"{url},{server[1]}")
        http.check_bases(listed, {server[0].name})
        silent, good = doctor._engine(listed)
    assert (silent.state, silent.found) == ("fail", f"The engine's server at {url} has not answered within 0.5 seconds.")
    assert good.state == "ok"
    assert len(good.found) < 400


def test_doctor_warns_of_open_development_routes(
    server: tuple[Routes, str], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    routes, url = server

    def states() -> list[str]:
        return [check.state for check in doctor._engine(Settings(engine_url=url))]

    routes.instead["/server_info"] = 200, {"vllm_config": "..."}
    assert states() == ["ok"]
    monkeypatch.setattr(http, "names_loopback", lambda url: False)
    assert states() == ["ok", "warn"]
    del routes.instead["/server_info"]
    assert states() == ["ok"]


@pytest.mark.parametrize(
    ("url", "is_local"),
    [
        ("http://localhost:80", True),
        ("http://127.0.0.2", True),
        ("http://[::1]:8000", True),
        ("http://10.0.0.1", False),
        ("http://localhost.example.org", False),
        ("http://[", False),
    ],
)
def test_names_loopback_reads_only_the_host(url: str, is_local: bool) -> None:
    assert http.names_loopback(url) is is_local


# --- several servers --------------------------------------------------------------------------------------------------------


@pytest.fixture
def servers(folder: Path) -> Iterator[list[tuple[Routes, str]]]:
    with ExitStack() as opened:
        yield [opened.enter_context(served(folder)) for _ in range(2)]


def sessions_of(routes: Routes) -> set[int]:
    """The seeds of the turns that a server was asked for; each session has one."""
    return {body["seed"] for body in routes.bodies if body["prompt"] == list(PROMPT)}


def test_servers_get_sessions_evenly_and_keep_them(
    servers: list[tuple[Routes, str]], client: Callable[..., ServedEngine]
) -> None:
    hold = threading.Event()

    def wait(reply: Any) -> Any:
        assert hold.wait(60)
        return reply

    for routes, _ in servers:
        routes.spoil = wait
    engine = client(",".join(url for _, url in servers))
    turns = [engine.submit(ask(key=session, session=session)) for session in range(6)]
    hold.set()
    for turn in turns:
        turn.result(60)
    first = [sessions_of(routes) for routes, _ in servers]
    assert [len(sessions) for sessions in first] == [3, 3]
    for routes, _ in servers:
        routes.bodies.clear()
    for session in range(6):
        engine.submit(ask(key=session, session=session)).result(60)
    assert [sessions_of(routes) for routes, _ in servers] == first


def test_dead_server_costs_only_its_turns_and_returns(
    folder: Path,
    client: Callable[..., ServedEngine],
    trainer: Policy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote_engine, "RETRY_SECONDS", 0.3)
    ref = trained(trainer, tmp_path / "v1", 0.2)
    with kept_port() as port, served(folder) as (other, other_url):
        with served(folder, port) as (routes, url):
            engine = client(f"{url},{other_url}")
            engine.submit(ask(policy=ref, session=1)).result(60)
            assert (len(routes.sampled), len(other.sampled)) == (1, 0)

            def die(reply: Any) -> Any:
                raise ConnectionAbortedError

            routes.spoil = die
            broken = engine.submit(ask(policy=ref, session=1)).result(60)
            assert other.sampled[-1].ids == broken.token_ids
            assert other.loads == [ref.sha256]
        window = engine.window()
        for key in range(4):
            engine.submit(ask(policy=ref, key=key, session=key)).result(60)
        assert len(other.sampled) == 5
        with served(folder, port) as (routes, _):
            time.sleep(0.4)
            assert engine.window() == window
            for key in range(4):
                engine.submit(ask(policy=ref, key=key, session=key + 10)).result(60)
            assert routes.loads == [ref.sha256]
    assert torch.allclose(expected(trainer, ref, broken), torch.tensor(broken.logprobs), atol=1e-4)
    refusal(engine, ServiceError, policy=ref)


def test_window_is_smallest_of_servers_that_respond(
    servers: list[tuple[Routes, str]], client: Callable[..., ServedEngine]
) -> None:
    servers[1][0].window = 100
    assert client(",".join(url for _, url in servers)).window() == 100
    with kept_port() as port:
        assert client(f"http://127.0.0.1:{port},{servers[1][1]}").window() == 100


def test_list_with_one_wrong_model_is_refused_at_submit(servers: list[tuple[Routes, str]]) -> None:
    (good, good_url), (wrong, wrong_url) = servers
    wrong.name = "another"
    wrong.policy.folder = Path("/models/another")
    with kept_port() as port:
        listed = Settings(engine_url=f"{good_url},http://127.0.0.1:{port},{wrong_url}")
        with pytest.raises(ModelError, match=f"at {wrong_url} serves another, and not {good.name}"):
            http.check_bases(listed, {good.name})
        http.check_bases(Settings(engine_url=f"{good_url},http://127.0.0.1:{port}"), {good.name})


@pytest.mark.parametrize(
    ("urls", "who", "said"),
    [
        ("http://a:1,http://b:2,http://a:1/v1", "engine", "names http://a:1 twice"),
        ("http://a:1,", "engine", "is not an http:// or https:// URL with a host and a valid port"),
        (",".join(f"http://a:{port}" for port in range(65)), "engine", "names 65 servers; at most 64"),
        ("http://a:1,http://b:2", "critic", "names 2 servers; at most 1"),
        ("http://a:1,http://A:1", "engine", "names http://A:1 twice"),
        ("http://a,http://b,http://a:80/v1/", "engine", "names http://a:80 twice"),
        ("http://a:0", "engine", "is not an http:// or https:// URL with a host and a valid port"),
        ("http://a:65536", "critic", "is not an http:// or https:// URL with a host and a valid port"),
        ("http://a b:1", "engine", "is not an http:// or https:// URL with a host and a valid port"),
        ("http://a/" + "p" * 100_000, "engine", "has 100009 characters"),
    ],
)
def test_server_urls_refuses_bad_lists(urls: str, who: http.Who, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        http.server_urls(Settings(engine_url=urls, critic_url=urls), who)


@pytest.mark.parametrize("who", ["engine", "critic"])
@pytest.mark.parametrize(
    "urls",
    [
        "http://user:secret@a:1", "user:secret@a:1", "http://user:secret@a:port", "http:/user:secret@a",
        "http://b:1,user:secret@a:2", "http://user:secret,more@a:1", "http://a:1?key=secret", "http://a:1#secret",
    ],
)  # fmt: skip
def test_server_urls_never_quotes_password(urls: str, who: http.Who) -> None:
    with pytest.raises(ConfigError, match="must not contain a password") as refused:
        http.server_urls(Settings(engine_url=urls, critic_url=urls), who)
    assert "secret" not in str(refused.value)

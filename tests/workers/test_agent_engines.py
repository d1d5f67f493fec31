"""Agents on engines that are servers (vLLM, llama.cpp): what they may ask for, what they are refused, a server that dies."""

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.workflow import engines
from agentrl.workflow.config import ModelConfig
from agentrl.workflow.engines import Backend
from agentrl.workflow.inference.remote_engine import ServedEngine
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.plugins import find
from agentrl.workflow.settings import Settings
from agentrl.workflow.store.connect import Database
from tests.support.agents_stage import (
    Reply,
    Stage,
    ask,
    calling,
    episode_of,
    group_of,
    run_agent,
    staged,
    user,
    wait_for,
    write,
)
from tests.support.model_server import Routes, kept_port, served
from tests.support.played_runs import value
from tests.support.small_models import tiny_random
from tests.workers.test_agent_rollout import db as db
from tests.workers.test_workers import in_memory as in_memory

QUESTION = user("How much is 6*7?")
ENGINES = pytest.mark.parametrize("name", ["openai", "llamacpp"])
Sampler = Callable[[str], tuple[ServedEngine, Policy]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_random(tmp_path_factory.mktemp("base") / "small")


@pytest.fixture
def port() -> Iterator[int]:
    with kept_port() as kept:
        yield kept


@pytest.fixture
def server(folder: Path, port: int) -> Iterator[Routes]:
    with served(folder, port) as (routes, _):
        yield routes


@pytest.fixture
def sampler(folder: Path, port: int, home: Path) -> Iterator[Sampler]:
    """Makes engines over the server at the port, whether it is there or not."""
    with ExitStack() as opened:

        def make(name: str) -> tuple[ServedEngine, Policy]:
            policy = Policy.load(ModelConfig(lora_r=4), str(folder), "cpu", 1, weights=False)
            backend: Backend = find("engines", name)
            engine = engines.start(backend, policy, Settings(engine_url=f"http://127.0.0.1:{port}", slots=8))
            assert isinstance(engine, ServedEngine)
            opened.callback(engine.close)
            return engine, policy

        yield make


def stage_of(db: Database, name: str, sampler: Sampler, **rollout: Any) -> Stage:
    """A group of one episode, whose turns that engine samples."""
    engine, policy = sampler(name)
    group = group_of(db, rollout={"engine": name, "max_new_tokens": 12, **rollout})
    write(db, "UPDATE runs SET base_hash = ''")
    return Stage(db, group, engine, policy.chat, engines.window(engine, policy.max_context))


def events(reply: Reply) -> list[Any]:
    """The chunks of a stream that came whole."""
    lines = reply.body.decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


@ENGINES
def test_agent_gets_every_supported_sampling_option(db: Database, server: Routes, sampler: Sampler, name: str) -> None:
    with staged(stage_of(db, name, sampler)) as stage:
        key = run_agent(db, 1)
        asked = {"n": 2, "logprobs": True, "top_logprobs": 3, "return_token_ids": True, "max_tokens": 5}
        whole = ask(stage, key, [QUESTION], request="first", **asked).document
        stream = events(ask(stage, key, [QUESTION], request="second", stream=True, **asked))
        again = ask(stage, key, [QUESTION], request="first", **asked).document
    assert again == whole
    steps = episode_of(db, 1).steps
    assert sorted(step.sampled_ids for step in steps) == sorted(one.ids for one in server.sampled)
    for place, choice in enumerate(whole["choices"]):
        assert tuple(choice["token_ids"]) == steps[place].sampled_ids
        told = choice["logprobs"]["content"]
        assert tuple(one["logprob"] for one in told) == pytest.approx(steps[place].behavior_logprobs)
        assert all(len(one["top_logprobs"]) == 3 for one in told)
        assert len(told) <= 5
    pieces = [choice for chunk in stream for choice in chunk["choices"]]
    for place in (0, 1):
        ids = [token for piece in pieces if piece["index"] == place for token in piece.get("token_ids") or ()]
        assert tuple(ids) == steps[2 + place].sampled_ids


def test_agent_stop_text_is_passed_to_engine(db: Database, server: Routes, sampler: Sampler) -> None:
    with staged(stage_of(db, "openai", sampler)) as stage:
        assert ask(stage, run_agent(db, 1), [QUESTION], stop=["stop here"]).status == 200
        assert server.bodies[-1]["stop"] == ["stop here"]


def test_agent_stop_text_unsupported_by_engine_is_refused(db: Database, server: Routes, sampler: Sampler) -> None:
    with staged(stage_of(db, "llamacpp", sampler)) as stage:
        refused = ask(stage, run_agent(db, 1), [QUESTION], stop=["stop here"])
        assert (refused.status, refused.code) == (400, "unsupported_parameter")
        assert refused.document["error"]["param"] == "stop"
        assert refused.document["error"]["message"] == "The engine 'llamacpp' does not support stop strings."


@ENGINES
def test_agent_prompt_beyond_server_window_is_refused(
    db: Database, folder: Path, port: int, sampler: Sampler, name: str
) -> None:
    with served(folder, port, window=64), staged(stage_of(db, name, sampler)) as stage:
        key = run_agent(db, 1)
        long = ask(stage, key, [user("7 " * 64)])
        assert (long.status, long.code) == (400, "context_length_exceeded")
        assert ask(stage, key, [QUESTION]).status == 200


@ENGINES
def test_agent_retry_gets_turn_begun_before_disconnect(db: Database, server: Routes, sampler: Sampler, name: str) -> None:
    let, begun = hold(server)
    with staged(stage_of(db, name, sampler)) as stage:
        key = run_agent(db, 1)
        with calling(stage, key, [QUESTION], request="one", stream=True):
            assert begun.wait(60)
        wait_for(lambda: stage.driver._conversations[1].open[0].stopped)
        let.set()
        wait_for(lambda: episode_of(db, 1).steps)
        assert [step.delivered for step in episode_of(db, 1).steps] == [False]
        assert ask(stage, key, [QUESTION], request="one", stream=True).status == 200
        assert [step.delivered for step in episode_of(db, 1).steps] == [True]
    assert len(server.sampled) == 1


@ENGINES
def test_agent_call_is_retried_after_server_death(db: Database, folder: Path, port: int, sampler: Sampler, name: str) -> None:
    with ExitStack() as alive:
        routes, _ = alive.enter_context(served(folder, port))
        let, begun = hold(routes)
        first = stage_of(db, name, sampler).enter()
        key = run_agent(db, 1)
        with ThreadPoolExecutor(1) as pool:
            broken = pool.submit(ask, first, key, [QUESTION], request="one")
            assert begun.wait(60)
            alive.close()
            assert broken.result(60).status == 421, "the group is handed back, and the endpoint asks where it is held next"
            let.set()
    assert value(db, "SELECT failures + losses FROM groups") == 0
    assert not episode_of(db, 1).steps
    with served(folder, port), staged(replace(first, engine=sampler(name)[0], lost=set())) as stage:
        assert ask(stage, key, [QUESTION], request="one").status == 200
        assert [step.delivered for step in episode_of(db, 1).steps] == [True]


def hold(routes: Routes) -> tuple[threading.Event, threading.Event]:
    """Lets the server answer no turn before it may; (that it may, that it was asked)."""
    let, begun = threading.Event(), threading.Event()
    sample = routes._sample

    def held(*arguments: Any) -> Any:
        begun.set()
        assert let.wait(60)
        return sample(*arguments)

    routes._sample = held  # type: ignore[method-assign]
    return let, begun

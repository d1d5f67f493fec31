"""The `openai` package as the client; an agent that says what the built-in loop says has its tokens bit for bit."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from openai import APIStatusError, AsyncOpenAI, OpenAI

from agentrl.workers.jobs.episode_loop import GroupRollout
from agentrl.workflow.config import ModelConfig
from agentrl.workflow.experiment import Experiment
from agentrl.workflow.inference.sampler import RollingEngine
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.store.connect import Database
from agentrl.workflow.trajectory import Episode, PolicyRef
from tests.support.agents_stage import AGENT, Stage, end_agent, episode_of, group_of, run_agent, staged
from tests.support.played_runs import answered, claim, start, submission, values
from tests.support.small_models import tiny_calling
from tests.workers.test_agent_rollout import ANSWER, ASK, CHAT, QUESTION, TOOLS
from tests.workers.test_agent_rollout import Policy as Script
from tests.workers.test_agent_rollout import db as db
from tests.workers.test_resume import answer
from tests.workers.test_workers import in_memory as in_memory

RESULT = "42"


def client(stage: Stage, key: str) -> OpenAI:
    return OpenAI(base_url=f"http://{stage.driver.server.address}/v1", api_key=key, max_retries=0)


def test_openai_client_reads_turn_and_stream_alike(db: Database) -> None:
    with staged(Stage(db, group_of(db), Script(ANSWER).engine, CHAT)) as stage:
        with client(stage, run_agent(db, 1)) as openai:
            whole = openai.chat.completions.create(model="m", messages=[QUESTION])
            with openai.chat.completions.create(model="m", messages=[QUESTION], stream=True) as stream:
                chunks = list(stream)
        assert whole.choices[0].message.content == "#### 42"
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "#### 42"
        assert [step.delivered for step in episode_of(db, 1).steps] == [True, True]


def test_openai_client_calls_its_own_tools(db: Database) -> None:
    with staged(Stage(db, group_of(db), Script(ASK, ANSWER).engine, CHAT)) as stage:
        with client(stage, run_agent(db, 1)) as openai:
            assert play(openai, [QUESTION], TOOLS) == "#### 42"
        steps = episode_of(db, 1).steps
        assert [step.chain for step in steps] == [0, 0]
        assert steps[0].results == (replace(answered(RESULT), seconds=0.0),)


def test_openai_client_calls_concurrently(db: Database) -> None:
    with staged(Stage(db, group_of(db), Script(ANSWER).engine, CHAT)) as stage:
        key = run_agent(db, 1)

        async def at_once() -> list[Any]:
            async with AsyncOpenAI(base_url=f"http://{stage.driver.server.address}/v1", api_key=key, max_retries=0) as openai:
                return await asyncio.gather(*(openai.chat.completions.create(model="m", messages=[QUESTION]) for _ in range(5)))

        assert {reply.choices[0].message.content for reply in asyncio.run(at_once())} == {"#### 42"}
        assert len(episode_of(db, 1).steps) == 5


def test_openai_client_raises_refusals(db: Database) -> None:
    with staged(Stage(db, group_of(db), Script(ANSWER).engine, CHAT, max_context=50)) as stage:
        with client(stage, run_agent(db, 1)) as openai, pytest.raises(APIStatusError) as caught:
            openai.chat.completions.create(model="m", messages=[{"role": "user", "content": "x y " * 200}])
        assert (caught.value.status_code, caught.value.code) == (400, "context_length_exceeded")


def play(openai: OpenAI, messages: list[Any], tools: list[Any]) -> str | None:
    """An agent as people write them: it runs the tools that are asked for, until none is."""
    while True:
        said = openai.chat.completions.create(model="m", messages=messages, tools=tools).choices[0].message
        messages = [*messages, said.model_dump(exclude_none=True)]
        if not said.tool_calls:
            return said.content
        for call in said.tool_calls:
            assert isinstance(json.loads(call.function.arguments), dict)  # type: ignore[union-attr]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": RESULT})


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Policy]:
    folder = tiny_calling(tmp_path_factory.mktemp("calling"))
    yield Policy.load(ModelConfig(numerics="exact"), str(folder), device="cpu")
    torch.use_deterministic_algorithms(False)


@pytest.mark.slow
def test_agent_repeating_builtin_loop_has_identical_tokens(db: Database, policy: Policy) -> None:
    ref = PolicyRef(str(policy.folder), policy.base_hash)
    wanted = replace(submission("built-in", tasks=1), policy=ref)
    config = {**wanted.config, "env": "arithmetic", "rollout": {**wanted.config["rollout"], "max_new_tokens": 40}}
    wanted = replace(wanted, group_size=6)
    (group,) = start(db, replace(wanted, config=config))
    work = claim(db, group)
    experiment, engine = Experiment.load(work.config, work.weights), RollingEngine(policy)
    looped = GroupRollout(db, work, experiment, engine, policy.chat, SimpleQueue(), set())
    looped.start()
    while looped.is_live:
        event = looped.inbox.get(timeout=60)
        looped.handle([event])
        answer(db)
        looped.poll_calls()
    of_agent = replace(wanted, name="agents", config={**config, "name": "agents", "agent": AGENT})
    (other,) = start(db, of_agent)
    opening = [{"role": m.role, "content": m.content} for m in experiment.env.reset(work.task)]
    tools = [tool.schema for tool in experiment.tools.values()]
    pairs = list(zip(episodes(db, group), episodes(db, other), strict=True))
    with staged(Stage(db, other, engine, policy.chat, policy.max_context)) as stage:
        for looped_one, mine in pairs:
            with client(stage, run_agent(db, mine.id)) as openai:
                follow(openai, opening, tools, looped_one)
            end_agent(stage, mine.id)
        stage.over()
    engine.close()
    turns = 0
    for looped_one, mine in zip(episodes(db, group), episodes(db, other), strict=True):
        turns = max(turns, len(mine.steps))
        theirs = looped_one.steps[: len(mine.steps)]
        assert [step.prompt_ids for step in mine.steps] == [step.prompt_ids for step in theirs]
        assert [step.sampled_ids for step in mine.steps] == [step.sampled_ids for step in theirs]
        assert [step.behavior_logprobs for step in mine.steps] == [step.behavior_logprobs for step in theirs]
    assert turns > 1


def follow(openai: OpenAI, messages: list[Any], tools: list[Any], looped: Episode) -> None:
    """An agent that says what the built-in loop said, as long as there are calls that it can see."""
    for step, following in zip(looped.steps, (*looped.steps[1:], None), strict=True):
        said = openai.chat.completions.create(model="m", messages=messages, tools=tools).choices[0].message
        calls = said.tool_calls or []
        if following is None or len(calls) != len(step.message.tool_calls):
            return
        told = zip(calls, following.prompt, strict=True)
        results = [{"role": "tool", "tool_call_id": call.id, "content": message.content} for call, message in told]
        messages = [*messages, said.model_dump(exclude_none=True), *results]


def episodes(db: Database, group: int) -> list[Episode]:
    return [episode_of(db, number) for number in values(db, "SELECT id FROM episodes WHERE group_id = :g ORDER BY id", g=group)]

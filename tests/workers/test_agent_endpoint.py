"""Through the endpoint an agent notices nothing of a worker that is lost in the middle of its call."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from openai import APIStatusError, OpenAI

from agentrl.workflow.store.connect import Database
from tests.support.agents_stage import LONG_MS, Stage, end_agent, episode_of, group_of, run_agent, staged, wait_for, write
from tests.support.played_runs import values
from tests.support.served_endpoint import endpoint_over
from tests.workers.test_agent_rollout import ANSWER, CHAT, QUESTION, Gated, Policy
from tests.workers.test_agent_rollout import db as db
from tests.workers.test_workers import in_memory as in_memory


def held(stage: Stage) -> Stage:
    """The lease of the stage's group is alive for whoever looks."""
    write(stage.db, "UPDATE groups SET lease_until = :until", until=LONG_MS)
    return stage


def client(url: str, key: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def stream(url: str, key: str) -> str:
    with client(url, key) as openai, openai.chat.completions.create(model="m", messages=[QUESTION], stream=True) as chunks:
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def test_stream_continues_after_lost_worker(db: Database) -> None:
    group, gated = group_of(db), Gated()
    stage = Stage(db, group, gated.engine, CHAT).enter()
    held(stage)
    key = run_agent(db, 1)
    with endpoint_over(db) as served, ThreadPoolExecutor(1) as pool:
        said = pool.submit(stream, served.url, key)
        assert gated.begun.acquire(timeout=60)
        gated.let.release(3)
        wait_for(lambda: len(stage.driver._conversations[1].open[0]._heard[0]) >= 3)
        write(db, "UPDATE groups SET lease_until = 0")
        stage.leave()
        gated.let.release(100)
        with staged(Stage(db, group, Policy(ANSWER).engine, CHAT)) as heir:
            held(heir)
            assert said.result(60) == "#### 42"
            assert [(step.delivered, step.sampled_ids) for step in episode_of(db, 1).steps] == [(True, ANSWER)]
            end_agent(heir, 1)
            heir.over()
        with client(served.url, key) as openai, pytest.raises(APIStatusError) as caught:
            openai.chat.completions.create(model="m", messages=[QUESTION])
        assert caught.value.status_code == 409


def test_endpoint_disconnect_stops_sampling(db: Database) -> None:
    gated = Gated()
    with staged(Stage(db, group_of(db), gated.engine, CHAT)) as stage, endpoint_over(db) as served:
        held(stage)
        with client(served.url, run_agent(db, 1)) as openai:
            chunks = openai.chat.completions.create(model="m", messages=[QUESTION], stream=True)
            gated.let.release(2)
            assert next(iter(chunks))
            assert gated.begun.acquire(timeout=30)
            chunks.close()
        wait_for(
            lambda: all(turn.stopped for turn in stage.driver._conversations[1].open)
        )  # or over, if a token was still to come
        gated.let.release(1)
        wait_for(lambda: values(db, "SELECT delivered FROM steps"))
        assert not episode_of(db, 1).steps[0].delivered


def test_endpoint_forwards_mark_of_side_call(db: Database) -> None:
    with staged(Stage(db, group_of(db), Policy(ANSWER).engine, CHAT)) as stage, endpoint_over(db) as served:
        held(stage)
        with client(served.url, run_agent(db, 1)) as openai:
            for value, names in (("0", "x-agentrl-train"), ("1", None)):
                create = openai.chat.completions.with_raw_response.create
                raw = create(model="m", messages=[QUESTION], extra_headers={"x-agentrl-train": value})
                assert raw.headers.get("x-agentrl-not-applied") == names

"""Whole runs whose sampler is a server: real workers, a real queue, real adapters; the server is in this process."""

import json
import threading
from array import array
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from agentrl.workflow.store.reads import event_rows, run_rows
from bench.faults.fork_server import Nursery
from tests.support.forked_stack import ForkedStack
from tests.support.model_server import kept_port, served
from tests.support.real_stack import SMALL
from tests.support.small_models import tiny_random

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

SAMPLED = """
SELECT p.path, p.sha256, t.sampled_ids, t.behavior_logprobs
FROM steps s JOIN step_tokens t ON t.step_id = s.id JOIN policies p ON p.id = s.policy_id
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_random(tmp_path_factory.mktemp("model") / "small")


@pytest.fixture
def stack(short_folder: Path, forks: Nursery, migrated_file: Path) -> Iterator[ForkedStack]:
    """A stack whose workers wait until it is known which server they ask."""
    with closing(ForkedStack(short_folder, forks, migrated_file)) as made:
        yield made


def sampling_at(stack: ForkedStack, url: str) -> None:
    """Starts the workers, which sample from that server."""
    stack.environment["AGENTRL_ENGINE_URL"] = url
    stack.fork_each()


def rows(stack: ForkedStack, query: str) -> list[Any]:
    with stack.database.read() as tx:
        return list(tx.execute(text(query)))


def recorded(stack: ForkedStack, base: str) -> set[tuple[str, tuple[int, ...], tuple[float, ...]]]:
    """Model, ids and logprobs of every step in the rows."""
    return {
        (row.sha256 if row.path else base, tuple(array("i", row.sampled_ids)), tuple(array("f", row.behavior_logprobs)))
        for row in rows(stack, SAMPLED)
    }


def float32(values: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(array("f", values))


def submit(stack: ForkedStack, model: Path, *more: str, code: int = 0) -> str:
    asked = ("--dataset", "arithmetic", "--model", str(model), "--engine", "openai", "-s", "model.lora_r=4", *SMALL, *more)
    return stack.agentrl("submit", *asked, code=code).strip()


@pytest.mark.slow
def test_remote_run_trains_on_server_tokens_and_publishes_each(stack: ForkedStack, model: Path) -> None:
    with served(model) as (routes, url):
        sampling_at(stack, url)
        run = submit(stack, model, "--max-tasks", "12", "--wait")
        assert run_rows.describe_run(stack.database, run)["status"] == "done"
        said = {(each.model, each.ids, float32(each.logprobs)) for each in routes.sampled}
        found = recorded(stack, routes.name)
        assert found <= said
        assert len(found) >= 48
        versions = [row.sha256 for row in rows(stack, "SELECT sha256 FROM policies WHERE version < 3 ORDER BY version")]
        trained = list(dict.fromkeys(sha256 for sha256 in versions if sha256))
        assert trained
        assert routes.loads == trained
        assert {model for model, *_ in found} == {routes.name, *trained}
        episode = rows(stack, "SELECT min(episode_id) AS id FROM steps")[0].id
        assert "0 drawn again" in stack.agentrl("replay", str(episode), "--verify", "tokens")
        away = rows(stack, "SELECT max(sampler_difference_max) AS most FROM updates")[0].most
        assert 0 < away < 1e-3


@pytest.mark.slow
def test_remote_run_loses_no_episode_to_server_outage(stack: ForkedStack, model: Path) -> None:
    with kept_port() as port:
        sampling_at(stack, f"http://127.0.0.1:{port}")
        run = submit(stack, model, "--max-tasks", "8")
        stack.wait(lambda: "does not answer" in stack.agentrl("events", run), "the server being missed, for all to see")
        held = threading.Event()

        def answered(reply: dict[str, Any]) -> dict[str, Any]:
            if len(routes.sampled) > 6:
                held.wait()
            return reply

        with served(model, port) as (routes, _):
            routes.spoil = answered
            stack.wait(lambda: len(routes.sampled) > 6, "the first turns, whose last is never answered")
        held.set()
        with served(model, port) as (routes, _):
            stack.wait_for(run)
            assert routes.sampled
    ended = rows(stack, "SELECT status, count(*) AS n FROM episodes GROUP BY 1")
    assert [(row.status, row.n) for row in ended] == [("done", 32)]
    assert rows(stack, "SELECT max(losses) AS n FROM groups")[0].n == 0
    events = [
        (event["kind"], event["detail"]) for event in event_rows.list_events(stack.database, event_rows.EventFilter(run)).rows
    ]
    told = [event for event in events if event[0] in ("waiting", "going_on")]
    assert told[0][0] == "waiting"
    assert told[-1][0] == "going_on"
    assert all(one != other for one, other in pairwise(told))


@pytest.mark.slow
def test_remote_run_goes_on_while_one_of_two_servers_is_away(stack: ForkedStack, model: Path) -> None:
    with kept_port() as port, served(model) as (other, other_url):
        held = threading.Event()

        def answered(reply: dict[str, Any]) -> dict[str, Any]:
            if len(routes.sampled) > 6:
                held.wait()
                raise ConnectionAbortedError
            return reply

        with served(model, port) as (routes, url):
            routes.spoil = answered
            sampling_at(stack, f"{url},{other_url}")
            run = submit(stack, model, "--max-tasks", "8")
            stack.wait(lambda: len(routes.sampled) > 6, "the first server's turns, whose last is never answered")
            held.set()
        stack.wait_for(run)
        sampled_by_both = {(each.model, each.ids, float32(each.logprobs)) for each in (*routes.sampled, *other.sampled)}
        assert recorded(stack, other.name) <= sampled_by_both
        assert other.loads
    ended = rows(stack, "SELECT status, count(*) AS n FROM episodes GROUP BY 1")
    assert [(row.status, row.n) for row in ended] == [("done", 32)]
    assert rows(stack, "SELECT max(losses) AS n FROM groups")[0].n == 0
    kinds = {event["kind"] for event in event_rows.list_events(stack.database, event_rows.EventFilter(run)).rows}
    assert "waiting" not in kinds


@pytest.mark.slow
def test_remote_run_that_server_cannot_serve_fails_with_reason(stack: ForkedStack, model: Path) -> None:
    with served(model) as (routes, url):
        sampling_at(stack, url)
        routes.spoil = lambda reply: {**reply, "model": "another"}
        renamed = submit(stack, model, "--max-tasks", "4")
        stack.wait_for(renamed, "failed")
        assert "'another' answered" in str(run_rows.describe_run(stack.database, renamed)["reason"])
        assert rows(stack, "SELECT count(*) AS n FROM steps")[0].n == 0
        routes.spoil = lambda reply: reply  # not before: groups that the first run had claimed may come late
        asked = ("--policy", str(model), "--dataset", "arithmetic", "-n", "4", "--engine", "llamacpp", "--json")
        measured = json.loads(stack.agentrl("eval", *asked))
        assert (measured["episodes"], measured["errors"]) == (4, 0)
        assert recorded(stack, routes.name) <= {(routes.name, each.ids, float32(each.logprobs)) for each in routes.sampled}

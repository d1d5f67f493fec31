"""A run whose agents call the endpoint goes on over kills of all that it runs on, with the tokens and weights of a calm one."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from bench.faults.agent_kills import BOTH, RUN, prepare, record, strike
from tests.support.real_stack import Stack, embedded_stack
from tests.support.small_models import tiny_random

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_programs_of_module")]
VICTIMS = ("rollout,train", "endpoint", "agents", "agent", BOTH, "agent", "rollout,train", "agents", "endpoint", "control")
PAUSE_SECONDS = 1.5


@pytest.fixture
def stack(short_folder: Path) -> Iterator[Stack]:
    with embedded_stack(short_folder, idle_seconds="3600") as made:
        prepare(made)
        yield made


def has_unfinished_steps(stack: Stack) -> bool:
    """True if a kill may now cost an agent of the run `struck` its steps, or the run has ended."""
    with stack.database.read() as tx:
        query = "SELECT count(*) FROM v_episodes WHERE run = 'struck' AND status <> 'done' AND steps > 0"
        ended = "SELECT count(*) FROM runs WHERE name = 'struck' AND status = 'done'"
        return any(tx.execute(text(one)).scalar_one() for one in (query, ended))


def test_agent_run_is_identical_after_kills(stack: Stack, short_folder: Path) -> None:
    words = [*RUN, "--max-tasks", "8", "--model", str(tiny_random(short_folder / "model"))]
    stack.agentrl("submit", *words, "--name", "calm", "--wait")
    stack.agentrl("submit", *words, "--name", "struck", "--detach")
    struck = []
    for victim in VICTIMS:
        time.sleep(PAUSE_SECONDS)
        stack.wait(lambda: has_unfinished_steps(stack), "a step of an episode that has not ended, or the end of the run")
        struck += [victim] if strike(stack, victim) else []
    stack.wait_for("struck")
    assert len(struck) >= len(VICTIMS) // 2, struck
    calm, disturbed = record(stack, "calm"), record(stack, "struck")
    assert calm["used"][0] == calm["used"][1] > 0
    assert disturbed == calm
    with stack.database.read() as tx:
        copies = "SELECT max(episode_id) FROM steps WHERE run = 'struck' AND replayed"
        (episode,) = tx.execute(text(copies)).one()
    assert episode is not None
    stack.agentrl("replay", str(episode), "--verify", "tokens")
    stack.agentrl("fork", str(episode), "--step", "2", "-n", "2", "--name", "forked", "--wait")
    with stack.database.read() as tx:
        forked = "SELECT id, status, inherited_steps, steps FROM v_episodes WHERE run = 'forked'"
        forks = tx.execute(text(forked)).all()
    assert [tuple(row)[1:] for row in forks] == [("done", 2, 1)] * 2
    for row in forks:
        stack.agentrl("replay", str(row.id), "--verify", "tokens")

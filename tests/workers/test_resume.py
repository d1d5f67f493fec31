"""An episode goes on in the middle: from its committed tokens, by whoever claims its group next, and by nobody else."""

import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from celery.exceptions import Ignore, Reject

from agentrl.workers.jobs.episode_loop import GroupRollout
from agentrl.workers.jobs.rollout import _run_guarded
from agentrl.workers.jobs.rollout import rollout as rollout_job
from agentrl.workers.jobs.tool_call import calls
from agentrl.workers.stack import dispatch
from agentrl.workers.stack.dispatch import MAX_SENDS, NO_REPLY
from agentrl.workers.stack.process import stopping
from agentrl.workers.stack.supervisor import SupervisedProcess, Supervisor
from agentrl.workflow.engines import Completion, GenerateRequest
from agentrl.workflow.envs import Env
from agentrl.workflow.experiment import Experiment
from agentrl.workflow.plugins import find, names
from agentrl.workflow.settings import Settings
from agentrl.workflow.store import rollout_claims
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.reads import episode_rows
from agentrl.workflow.store.tool_calls import record_result
from agentrl.workflow.trajectory import Episode, Message
from bench.faults.invariants import dump
from tests.support.played_runs import CALL, EXPIRED, LEASE, answered, claim, start, step, submission, value, values
from tests.support.scripted_engine import ScriptedEngine
from tests.support.small_models import chat
from tests.workers.test_workers import ANSWER
from tests.workers.test_workers import in_memory as in_memory

ASK_TWICE = chat().turn(Message("assistant", "", tool_calls=(CALL.call, CALL.call)))
TOOLS = ("calculator",)
restarted = Env(tools=TOOLS, rewards={"numeric_answer": 1.0}, resumability="restart")


def is_later(request: GenerateRequest) -> bool:
    """Whether the policy reads the results of calls."""
    return "<tool_response>" in chat().decode(request.prompt_ids)


class Worker:
    """Claims the group and drives it, one event at a time; remembers what it asked the sampler for."""

    def __init__(self, db: Database, group: int, lease: float = EXPIRED) -> None:
        self.requests: list[GenerateRequest] = []
        work = claim(db, group, lease=lease)
        engine = ScriptedEngine(self._turn, workers=1)
        made = Experiment.load(work.config, work.weights)
        self.driver = GroupRollout(db, work, made, engine, chat(), SimpleQueue(), set())

    def _turn(self, request: GenerateRequest) -> tuple[int, ...]:
        self.requests.append(request)
        return ANSWER if is_later(request) else ASK_TWICE

    def samples(self, turns: int = 2) -> "Worker":
        """So many turns come from the sampler and are committed."""
        for _ in range(turns):
            self.driver.handle([self.driver.inbox.get(timeout=60)])
        return self

    def starts(self) -> "Worker":
        """From where the record stands."""
        self.driver.start()
        return self


def group_of(db: Database, env: str = "math") -> int:
    """The only group of a new run of that env, sent."""
    wanted = submission(tasks=1)
    (group,) = start(db, replace(wanted, config={**wanted.config, "env": env}))
    return group


@pytest.fixture
def sent(in_memory: None) -> Iterator[Callable[[], list[int]]]:
    """A function that takes the calls that were sent to the tools so far."""
    with dispatch.app.connection_for_read() as connection, connection.SimpleQueue("tools") as queue:
        queue.clear()

        def taken() -> list[int]:
            found = list[int]()
            while queue.qsize():
                message = queue.get_nowait()
                found += message.decode()[0][0]
                message.ack()
            return found

        yield taken


def answer(db: Database, calls: Sequence[int] = ()) -> None:
    """The tools answer these calls, or all that are open."""
    for call in calls or values(db, "SELECT id FROM tool_calls WHERE result IS NULL"):
        assert record_result(db, call, answered(), datetime.now(UTC), "tools:1")


def stored(db: Database) -> dict[int, tuple[int, ...]]:
    """Episode -> the tokens of its first step."""
    ids = values(db, "SELECT id FROM episodes ORDER BY id")
    return {episode: episode_rows.find_episode(db, episode).episode.context_ids for episode in ids}


def test_resume_continues_from_committed_tokens(sqlite: Database, sent: Callable[[], list[int]]) -> None:
    group = group_of(sqlite)
    first = Worker(sqlite, group).starts().samples()
    answer(sqlite)
    first.driver.poll_calls()  # it observes, asks for the second turn, and dies
    prefixes = stored(sqlite)
    heir = Worker(sqlite, group).starts().samples()
    assert set(values(sqlite, "SELECT status FROM episodes")) == {"done"}
    assert [request.position for request in heir.requests] == [0, 0]
    assert len({request.key for request in first.requests}) == 4, "each turn has a key of its own"
    for request, prefix in zip(heir.requests, prefixes.values(), strict=True):
        assert request.prompt_ids[: len(prefix)] == prefix
        assert len(request.prompt_ids) > len(prefix)
    second = [request for request in first.requests if is_later(request)]
    assert heir.requests == second, "it asks for what the first worker asked for"


def test_resume_resends_lost_tool_call_limited_times(
    own_database: Database, sent: Callable[[], list[int]], tmp_path: Path
) -> None:
    Worker(own_database, group_of(own_database), LEASE).starts().samples()
    asked = sent()
    answer(own_database, asked[1:2])
    with subprocess.Popen(["true"]) as lost:
        lost.wait()
    watching = Supervisor(Settings(home=tmp_path))
    for _ in range(1, MAX_SENDS):
        watching._restart_ended(SupervisedProcess("control", lost, started=time.monotonic()))
        watching._restart_ended(SupervisedProcess("tools", lost, started=time.monotonic()))
        watching.news.join()
        assert sent() == [asked[0], *asked[2:]]
    watching._restart_ended(SupervisedProcess("tools", lost, started=time.monotonic()))
    watching.news.join()
    assert sent() == []
    calls([asked[0]], NO_REPLY)
    assert values(own_database, "SELECT count(*) FROM tool_calls WHERE result IS NULL") == [2]


def test_resume_resends_only_unanswered_calls(sqlite: Database, sent: Callable[[], list[int]]) -> None:
    group = group_of(sqlite)
    Worker(sqlite, group).starts().samples()
    calls = sent()
    assert len(calls) == 4
    before = dump(sqlite)
    answer(sqlite, calls[:1])
    heir = Worker(sqlite, group).starts()
    assert sorted(sent()) == sorted(calls[1:])
    assert heir.requests == []
    assert dump(sqlite)["steps"] == before["steps"]
    assert dump(sqlite)["step_tokens"] == before["step_tokens"]
    answer(sqlite, calls[1:])
    heir.driver.poll_calls()
    heir.samples()
    assert values(sqlite, "SELECT number FROM steps ORDER BY id") == [0, 0, 1, 1]
    assert values(sqlite, "SELECT starts FROM tool_calls") == [1] * 4
    assert values(sqlite, "SELECT attempts FROM v_tool_calls ORDER BY id") == [1, 2, 2, 2]


def test_resume_observes_calls_answered_without_holder(sqlite: Database, sent: Callable[[], list[int]]) -> None:
    group = group_of(sqlite)
    Worker(sqlite, group).starts().samples()
    answer(sqlite)
    sent()
    Worker(sqlite, group).starts().samples()
    assert sent() == []
    assert values(sqlite, "SELECT status FROM episodes") == ["done"] * 2


def test_resume_restarts_env_without_replay_under_same_key(sqlite: Database, sent: Callable[[], list[int]]) -> None:
    group = group_of(sqlite, f"{__name__}:restarted")
    first = Worker(sqlite, group).starts().samples()
    heir = Worker(sqlite, group).starts().samples()
    assert heir.requests == first.requests, "no attempt is in the key"
    assert values(sqlite, "SELECT attempt || '/' || number FROM steps ORDER BY id") == ["0/0", "0/0", "1/0", "1/0"]
    old, new = (
        values(
            sqlite,
            "SELECT sampled_ids FROM step_tokens t JOIN steps s ON s.id = t.step_id WHERE s.attempt = :attempt",
            attempt=attempt,
        )
        for attempt in (0, 1)
    )
    assert old == new
    answer(sqlite)
    heir.driver.poll_calls()
    heir.samples()
    assert values(sqlite, "SELECT steps FROM episodes") == [2, 2]


def test_rollout_withdraws_unstarted_turns_of_lost_group(sqlite: Database) -> None:
    class Held:
        """Begins nothing."""

        def __init__(self) -> None:
            self.turns: list[Future[Completion]] = []

        def submit(self, request: GenerateRequest) -> Future[Completion]:
            self.turns.append(Future())
            return self.turns[-1]

    worker, engine = Worker(sqlite, group_of(sqlite)), Held()
    worker.driver.engine = engine  # type: ignore[assignment]
    worker.starts()
    assert engine.turns
    engine.turns[0].set_running_or_notify_cancel()
    worker.driver.lose()
    assert [turn.cancelled() for turn in engine.turns] == [False, *[True] * (len(engine.turns) - 1)]


def test_rollout_message_for_held_group_changes_nothing(own_database: Database) -> None:
    group = group_of(own_database)
    claim(own_database, group)
    before = dump(own_database)
    for _ in range(2):
        with pytest.raises(Ignore):
            rollout_job([group])
    assert dump(own_database) == before


def test_rollout_worker_that_stops_requeues_its_message(own_database: Database) -> None:
    group = group_of(own_database)
    before = dump(own_database)
    stopping.set()
    try:
        with pytest.raises(Reject) as left:
            rollout_job([group])
        assert left.value.requeue
    finally:
        stopping.clear()
    assert dump(own_database) == before


def test_rollout_message_for_finished_group_changes_nothing(own_database: Database, sent: Callable[[], list[int]]) -> None:
    group = group_of(own_database)
    worker = Worker(own_database, group, LEASE).starts().samples()
    answer(own_database)
    worker.driver.poll_calls()
    worker.samples()
    before = dump(own_database)
    assert rollout_job([group]) == 1
    assert dump(own_database) == before


@pytest.mark.parametrize("asleep", ["sampling", "waiting for tools", "before its last turn is stored"])
def test_rollout_worker_that_lost_its_group_writes_nothing(
    sqlite: Database, sent: Callable[[], list[int]], asleep: str
) -> None:
    group = group_of(sqlite)
    zombie = Worker(sqlite, group).starts()
    if asleep != "sampling":
        zombie.samples()
    if asleep == "before its last turn is stored":
        answer(sqlite)
        zombie.driver.poll_calls()
    heir = Worker(sqlite, group, LEASE).starts()
    if asleep == "waiting for tools":
        answer(sqlite)
    before = dump(sqlite)
    if asleep == "waiting for tools":
        _run_guarded(zombie.driver, zombie.driver.poll_calls)
    else:
        _run_guarded(zombie.driver, lambda: zombie.driver.handle([zombie.driver.inbox.get(timeout=60)]))
    assert not zombie.driver.is_live
    fence = zombie.driver.work.fence
    rollout_claims.hand_back(sqlite, fence)
    rollout_claims.fail_attempt(sqlite, fence, "InfraError", "too late", 1)
    assert rollout_claims.extend_leases(sqlite, [fence], LEASE) == set()
    assert dump(sqlite) == before
    assert heir.driver.is_live


def test_finished_group_keeps_its_worker(sqlite: Database, sent: Callable[[], list[int]]) -> None:
    group = group_of(sqlite)
    worker = Worker(sqlite, group).starts().samples()
    answer(sqlite)
    worker.driver.poll_calls()
    worker.samples()
    before = dump(sqlite)
    rollout_claims.hand_back(sqlite, worker.driver.work.fence)
    assert dump(sqlite) == before


def test_rollout_failure_of_attempt_is_counted_once(sqlite: Database) -> None:
    fence = claim(sqlite, group_of(sqlite)).fence
    for _ in range(3):
        assert not rollout_claims.fail_attempt(sqlite, fence, "InfraError", "down", 3)
    assert value(sqlite, "SELECT failures FROM groups") == 1


@pytest.mark.parametrize("name", names("envs"))
def test_replayed_env_repeats_its_messages(name: str) -> None:
    env: Env = find("envs", name)
    assert env.resumability == "replay"
    tasks = submission(tasks=3).tasks

    def played() -> list[Any]:
        made = tuple(replace(CALL.call, name=name) for name in env.toolset())
        said = Message("assistant", "", tool_calls=made)
        turns = [replace(step(index), message=said, results=(answered(text),) * len(made)) for index, text in enumerate("121")]
        lived = [[Episode(task, steps=tuple(turns[:count])) for count in (1, 2, 3)] for task in tasks]
        return [(env.reset(episodes[0].task), [env.step(episode) for episode in episodes]) for episodes in lived]

    assert played() == played()

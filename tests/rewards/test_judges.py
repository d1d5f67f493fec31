"""Judges: an episode that is over is judged where the tools run, once, whoever dies; the model sees nothing of it."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import pytest

from agentrl.cli.main import main
from agentrl.workers.jobs import pending_calls
from agentrl.workers.jobs.episode_loop import GroupRollout
from agentrl.workers.jobs.pending_calls import RESENDS
from agentrl.workers.jobs.rollout import _run_guarded
from agentrl.workers.requests.rescoring import rescore
from agentrl.workers.stack import broker, dispatch
from agentrl.workers.stack.celery_app import make_app
from agentrl.workflow.datasets.code import code_metadata
from agentrl.workflow.envs import Env
from agentrl.workflow.errors import ConfigError, InfraError, SandboxUnavailable
from agentrl.workflow.experiment import Experiment
from agentrl.workflow.plugins import find
from agentrl.workflow.rewards import Judge, judges_of
from agentrl.workflow.sandbox.function_tests import Case
from agentrl.workflow.settings import Settings, settings
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.reads import episode_rows
from agentrl.workflow.store.tool_calls import record_result
from agentrl.workflow.trajectory import Episode, Message, Task, ToolCall, ToolResult
from bench.faults.invariants import check_promises, dump
from tests.conftest import put_away
from tests.rewards.test_code import box as box
from tests.support.played_runs import CALL, EXPIRED, claim, start, submission, value, values
from tests.support.real_stack import Stack
from tests.support.sandbox_fixtures import machine
from tests.support.scripted_engine import ScriptedEngine
from tests.support.small_models import chat
from tests.workers.test_workers import in_memory as in_memory

HERE = __name__
ANSWER = chat().turn(Message("assistant", "#### 0"))
ASK = chat().turn(Message("assistant", "", tool_calls=(CALL.call,)))


def _length(text: str) -> str:
    """How long the text is."""
    if text == "41":
        raise ValueError("41 is not a number of mine")
    return str(len(text))


length = Judge(_length, asks=lambda episode: {"text": episode.final_answer} if episode.final_answer else 0.0)
elsewhere = Judge(_length, asks=lambda episode: {"text": episode.task.metadata["nothing"]})
judged = Env(tools=("calculator",), rewards={"numeric_answer": 1.0, f"{HERE}:length": 0.5})
unaskable = Env(rewards={f"{HERE}:elsewhere": 1.0})


class Worker:
    """Claims the group, as if the last claim had run out, and drives it; the policy says these turns."""

    def __init__(self, db: Database, group: int, turns: Sequence[Sequence[int]]) -> None:
        work = claim(db, group, lease=EXPIRED)
        engine = ScriptedEngine(turns, workers=1)
        made = Experiment.load(work.config, work.weights)
        self.driver = GroupRollout(db, work, made, engine, chat(), SimpleQueue(), set())
        self.driver.start()

    def takes(self, turns: int) -> "Worker":
        """So many turns come and are committed."""
        for _ in range(turns):
            self.driver.handle([self.driver.inbox.get(timeout=60)])
        return self


def group_of(db: Database, env: str = "judged", tasks: int = 1) -> int:
    """The first group, of two episodes, of a run in that env."""
    wanted = submission(tasks=tasks)
    path = f"{HERE}:{env}"
    config, weights = {**wanted.config, "env": path}, find("envs", path).rewards
    return start(db, replace(wanted, config=config, weights=weights))[0]


def say(db: Database, result: ToolResult, kind: str = "grade") -> None:
    """Records the result of every call of that kind, as a tools worker would."""
    for number in values(db, f"SELECT id FROM tool_calls WHERE result IS NULL AND kind = '{kind}'"):
        record_result(db, number, result, datetime.now(UTC), "host:2")


def found(db: Database) -> list[Episode]:
    return [episode_rows.find_episode(db, number).episode for number in values(db, "SELECT id FROM episodes ORDER BY id")]


# --- the rows -----------------------------------------------------------------------------------------------------------------


def test_finished_episode_waits_for_judge_hidden_from_model(database: Database, in_memory: None) -> None:
    worker = Worker(database, group_of(database), [ASK, ASK, ANSWER, ANSWER]).takes(2)
    assert [schema["function"]["name"] for schema in worker.driver.schemas] == ["calculator"]
    say(database, ToolResult("42"), "call")
    worker.driver.poll_calls()
    worker.takes(2)
    asked = "SELECT status || ' ' || tool || ' ' || step || ' ' || call FROM tool_calls WHERE kind = 'grade'"
    assert values(database, asked) == [f"pending {HERE}:length 1 0"] * 2
    assert values(database, "SELECT status FROM episodes") == ["running"] * 2
    say(database, ToolResult("7", seconds=3.0))
    worker.driver.poll_calls()
    assert not worker.driver.is_live
    for episode in found(database):
        assert (episode.status, episode.stop_reason, episode.reward) == ("done", "answered", 1.0 + 0.5 * 7)
        assert [len(step.message.tool_calls) for step in episode.steps] == [1, 0]
        record = episode_rows.find_episode(database, episode.id)
        assert [(len(record.calls), len(record.grades))] == [(1, 1)]
        assert (record.row["tool_calls"], record.row["tool_errors"], record.row["tool_seconds"]) == (1, 0, 0.0)
        assert {row["part"]: row["value"] for row in record.rewards} == {"numeric_answer": 1.0, f"{HERE}:length": 7.0}
    assert value(database, "SELECT sum(tool_calls) FROM v_episodes") == 2


def test_judge_with_known_score_is_not_called(sqlite: Database, in_memory: None) -> None:
    Worker(sqlite, group_of(sqlite), [chat().turn(Message("assistant", ""))] * 2).takes(2)
    assert values(sqlite, "SELECT reward FROM episodes") == [0.0, 0.0]
    assert values(sqlite, "SELECT id FROM tool_calls") == []


def test_judge_result_is_reused_by_next_worker(database: Database, in_memory: None) -> None:
    seen: dict[Any, Any] = {}
    group = group_of(database, tasks=2)
    Worker(database, group, [ANSWER] * 2).takes(2)  # it asks, and dies
    check_promises(database, seen)
    rows = values(database, "SELECT id FROM tool_calls ORDER BY id")
    first = Worker(database, group, [])
    assert values(database, "SELECT id FROM tool_calls ORDER BY id") == rows
    record_result(database, rows[0], ToolResult("7"), datetime.now(UTC), "host:2")
    check_promises(database, seen)
    assert first.driver.is_live
    second = Worker(database, group, [])
    assert values(database, "SELECT status FROM episodes ORDER BY id") == ["done", "running", "planned", "planned"]
    record_result(database, rows[1], ToolResult("8"), datetime.now(UTC), "host:2")
    record_result(database, rows[1], ToolResult("9"), datetime.now(UTC), "host:3")  # delivered twice: the first counts
    second.driver.poll_calls()
    assert values(database, "SELECT reward FROM episodes ORDER BY id")[:2] == [3.5, 4.0]
    check_promises(database, seen)


def test_judge_is_not_called_by_worker_that_lost_group(sqlite: Database, in_memory: None) -> None:
    group = group_of(sqlite)
    zombie = Worker(sqlite, group, [ANSWER] * 2)
    events = [zombie.driver.inbox.get(timeout=60) for _ in range(2)]
    heir = Worker(sqlite, group, [ANSWER] * 2).takes(2)
    before = dump(sqlite)
    _run_guarded(zombie.driver, lambda: zombie.driver.handle(events))
    assert not zombie.driver.is_live
    assert dump(sqlite) == before
    assert heir.driver.is_live


def test_judge_without_answer_is_called_again_then_fails_attempt(
    sqlite: Database, in_memory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending_calls, "RESEND_SECONDS", -1000.0)
    worker = Worker(sqlite, group_of(sqlite), [ANSWER] * 2).takes(2)
    for _ in range(RESENDS):
        worker.driver.poll_calls()
    with pytest.raises(InfraError, match="sent 6 times without an answer"):
        worker.driver.poll_calls()
    assert set(values(sqlite, "SELECT status FROM episodes")) == {"running"}
    assert set(values(sqlite, "SELECT sends FROM tool_calls")) == {RESENDS + 1}


@pytest.mark.parametrize(
    "told", [ToolResult("length raised ValueError: 41", "tool_crash"), ToolResult("many"), ToolResult("nan")]
)
def test_judge_exception_or_non_number_fails_episode(sqlite: Database, in_memory: None, told: ToolResult) -> None:
    worker = Worker(sqlite, group_of(sqlite), [ANSWER] * 2).takes(2)
    say(sqlite, told)
    worker.driver.poll_calls()
    for episode in found(sqlite):
        assert (episode.status, episode.reward) == ("failed", None)
        assert told.content in episode.error
    assert value(sqlite, "SELECT min(error_class) FROM episodes") == "RewardError"


def test_judge_that_cannot_be_called_fails_episode(sqlite: Database, in_memory: None) -> None:
    Worker(sqlite, group_of(sqlite, "unaskable"), [ANSWER] * 2).takes(2)
    assert {(episode.status, "KeyError: 'nothing'" in episode.error) for episode in found(sqlite)} == {("failed", True)}
    assert values(sqlite, "SELECT id FROM tool_calls") == []


def test_judge_with_too_long_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "j" * 125
    (tmp_path / f"{name}.py").write_text(f"from {HERE} import length\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="has 132 characters"):
        judges_of({f"{name}:length": 1.0})


# --- a real worker ------------------------------------------------------------------------------------------------------------

ADD = code_metadata("add", [Case((1, 2), 3), Case((5, 5), 10)], visible=[Case((2, 2), 4)])
TRIES = chat().turn(Message("assistant", "", tool_calls=(ToolCall("python", {"code": "def add(a, b): return a + b"}),)))
SOLVES = chat().turn(Message("assistant", "```python\ndef add(a, b): return a + b\n```"))


@pytest.fixture
def stack(short_folder: Path, redis_server: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stack]:
    """A database and a Redis; nobody works yet."""
    machine()
    url = f"{broker.SOCKET_SCHEME}{broker.socket_path(redis_server)}?virtual_host=0"
    faults = {"AGENTRL_FAULT_DIR": str(short_folder / "hits"), "AGENTRL_FAULT": "run_tool.after:3:kill"}
    (short_folder / "hits").mkdir()
    made = Stack(short_folder / "here", AGENTRL_BROKER_URL=url, **faults)
    monkeypatch.setattr(dispatch, "app", make_app(made.settings))
    pending_calls._replies.forget()
    yield made
    pending_calls._replies.forget()
    made.close()


def drive(driver: GroupRollout, ended: Callable[[], bool]) -> None:
    """Lets it work until that is so."""
    while not ended():
        try:
            driver.handle([driver.inbox.get(timeout=0.2)])
        except Empty:
            driver.poll_calls()


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_judge_call_of_killed_worker_is_repeated_and_counts_once(
    stack: Stack, box: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = submission(tasks=1)
    task = Task("code/add", (Message("user", "Write add(a, b)."),), "", ADD)
    config = {**wanted.config, "env": "code", "rollout": {**wanted.config["rollout"], "max_new_tokens": 512}}
    weights = find("envs", "code").rewards
    (group,) = start(stack.database, replace(wanted, tasks=[task], config=config, weights=weights))
    worker = Worker(stack.database, group, [TRIES, TRIES, SOLVES, SOLVES])
    doomed = stack.worker("tools")
    drive(worker.driver, lambda: doomed.poll() is not None)  # when it had judged for the first time, and recorded nothing
    assert values(stack.database, "SELECT id FROM tool_calls WHERE kind = 'grade' AND result IS NULL")
    stack.worker("tools")
    with monkeypatch.context() as patch:
        patch.setattr(pending_calls, "RESEND_SECONDS", -1000.0)
        worker.driver.poll_calls()
    drive(worker.driver, lambda: not worker.driver.is_live)
    for episode in found(stack.database):
        assert (episode.status, episode.reward) == ("done", 1.1)
        grades = episode_rows.find_episode(stack.database, episode.id).grades
        assert {row["tool"]: row["result"] for row in grades} == {"tests_passed": "1.0", "progress": "[[1.0], []]"}
        assert {(row["starts"], row["exit_status"], row["sandbox"] is None) for row in grades} == {(1, "ok", False)}
    _asked_about(stack, episode.id)
    told = rescore(stack.database, "first", ["tests_passed=2"], "again")
    assert (told["episodes"], told["mean"], told["parts"][0]["mean"]) == (2, 2.0, 1.0)


def _asked_about(stack: Stack, episode: int) -> None:
    """The transcript names the judges; calls and rewards come to the same again."""
    assert "judged by tests_passed: 1.0 (" in stack.agentrl("replay", str(episode))
    for what, count in {"tools": "ran", "rewards": "parts"}.items():
        document = json.loads(stack.agentrl("replay", str(episode), "--verify", what, "--json"))
        report = document[what][0] if what == "rewards" else document[what]
        assert (document["same"], report[count]) == (True, 1 if what == "tools" else 3)


def test_judge_without_sandbox_repeats_no_old_answer(
    own_database: Database, box: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = submission(tasks=1)
    task = Task("code/add", (), "", ADD)
    (group,) = start(own_database, replace(wanted, tasks=[task], config={**wanted.config, "env": "code"}, weights={}))
    Worker(own_database, group, [SOLVES] * 2).takes(2)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("AGENTRL_SANDBOX", "bwrap")
    settings.cache_clear()
    put_away()
    with pytest.raises(SandboxUnavailable, match="bubblewrap is not installed"):
        rescore(own_database, "first", ["tests_passed"], None)
    assert main(["replay", str(found(own_database)[0].id), "--verify", "rewards"]) == 0  # none of its own is a judge
    assert values(own_database, "SELECT name FROM reward_sets") == ["default"]

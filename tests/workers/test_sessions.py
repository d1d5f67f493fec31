"""Sessions of the tool python: an episode's names last, whoever runs its next cell and whatever became of its interpreter."""

import os
import random
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from agentrl.cli.main import main
from agentrl.cli.verify import _check_tools
from agentrl.workers.jobs.interpreters import RERUN_NOTE, Sessions
from agentrl.workers.jobs.tool_call import _failure_result
from agentrl.workers.stack import broker, dispatch
from agentrl.workers.stack.celery_app import make_app
from agentrl.workflow.config import build
from agentrl.workflow.envs import Env, offered_tools
from agentrl.workflow.errors import ConfigError, InfraError
from agentrl.workflow.experiment import Experiment
from agentrl.workflow.plugins import find
from agentrl.workflow.settings import Settings
from agentrl.workflow.store import planning, steps, tool_sessions, train_commits
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.forks import Fork
from agentrl.workflow.store.reads import ledger
from agentrl.workflow.store.reads.provenance import find_origin
from agentrl.workflow.store.rollout_claims import GroupWork
from agentrl.workflow.store.tool_sessions import SessionKey
from agentrl.workflow.tools.python import CodeTool, Notebook, python, sandbox
from agentrl.workflow.tools.python_session import python_session
from agentrl.workflow.trajectory import CallRecord, ToolCall, ToolResult
from tests.conftest import forget_process, put_away
from tests.support import sandbox_fixtures
from tests.support.played_runs import claim, claim_training, fail, finish, sampled, start, submission, update_of, value, values
from tests.support.real_stack import Stack

LEASE = 60.0
CLOCK = "import time; time.time_ns()"
"""What no two runs print alike."""


@pytest.fixture(scope="module")
def box() -> Iterator[None]:
    """The process's sandbox, closed at the end, when nothing of it may be alive."""
    sandbox_fixtures.machine()
    yield
    put_away()
    assert sandbox_fixtures.alive() == []


class Worker(Sessions):
    """A tools worker's sessions, in this process, closed by the test."""

    def __init__(self, db: Database, name: str = "tools.first", **options: Any) -> None:
        super().__init__(db, name, LEASE, _failure_result, **options)


@pytest.fixture
def worker(database: Database, box: None) -> Iterator[Worker]:
    """One, on each of the databases."""
    made = Worker(database)
    yield made
    made.close()


def begun(db: Database, name: str = "first") -> GroupWork:
    """A group at work."""
    return claim(db, start(db, submission(name))[0])


def turn(db: Database, work: GroupWork, number: int, *cells: str, position: int = 0, tool: str = "python") -> list[int]:
    """A step with these cells, committed; the ids of its calls."""
    records = tuple(CallRecord(ToolCall(tool, {"code": code}), "repeatable", None) for code in cells)
    (ids,) = steps.commit_sampled(db, work.fence, [sampled(work, position, number, records)])
    return ids


def key(work: GroupWork, position: int = 0) -> SessionKey:
    """The session of the episode at that position."""
    return SessionKey(work.episodes[position].id, 0, "python")


def said(db: Database, worker: Sessions, work: GroupWork, number: int, *cells: str, position: int = 0) -> list[str]:
    """What the cells of one turn print, run by that worker."""
    ids = turn(db, work, number, *cells, position=position)
    for call in ids:
        assert worker.answer(key(work, position), call, python_session) == worker.owner
    return results(db, ids)


def results(db: Database, ids: list[int]) -> list[str]:
    """What was recorded."""
    return [value(db, "SELECT result FROM tool_calls WHERE id = :id", id=call) for call in ids]


def expire(db: Database) -> None:
    """Every lease of a session runs out."""
    with db.engine.begin() as tx:
        tx.execute(text("UPDATE tool_sessions SET lease_until = 0"))


def builds(db: Database) -> list[int]:
    """How often an interpreter was started, for each session."""
    return values(db, "SELECT builds FROM tool_sessions ORDER BY episode_id")


# one worker


def test_session_names_last_and_row_has_sandbox_report(database: Database, worker: Worker) -> None:
    work = begun(database)
    assert said(database, worker, work, 0, "x = 6") == ["(no output)"]
    assert said(database, worker, work, 1, "x * 7", "1 / 0")[0] == "42"
    rows = values(database, "SELECT exit_status || ' ' || exit_code || ' ' || sandbox FROM v_tool_calls ORDER BY id")
    assert rows == [f"ok 0 {sandbox().kind}"] * 2 + [f"error 1 {sandbox().kind}"]
    assert all(seconds > 0 for seconds in values(database, "SELECT cpu_seconds FROM v_tool_calls"))
    assert values(database, "SELECT attempts FROM v_tool_calls") == [1] * 3
    assert values(database, "SELECT error_class FROM tool_calls WHERE exit_code = 1") == ["code_error"]
    assert builds(database) == [1]


def test_session_runs_cells_of_turn_in_order(database: Database, worker: Worker) -> None:
    work = begun(database)
    ids = turn(database, work, 0, "x = [1]", "x.append(2)\nx", "x.append(3)\nx")
    for call in reversed(ids):
        assert worker.answer(key(work), call, python_session) == worker.owner
    assert results(database, ids) == ["(no output)", "[1, 2]", "[1, 2, 3]"]
    assert builds(database) == [1]


def test_session_names_are_not_shared_by_episodes(database: Database, worker: Worker) -> None:
    work = begun(database)
    said(database, worker, work, 0, "x = 1")
    assert "NameError" in said(database, worker, work, 0, "x", position=1)[0]


def test_session_refuses_wrong_arguments_without_a_cell(database: Database, worker: Worker) -> None:
    work = begun(database)
    wrong = CallRecord(ToolCall("python", {"program": "1"}), "repeatable", None)
    ((call,),) = steps.commit_sampled(database, work.fence, [sampled(work, 0, 0, (wrong,))])
    worker.answer(key(work), call, python_session)
    assert "wrong arguments for python" in results(database, [call])[0]
    assert "<cell 1>" in said(database, worker, work, 1, "1 / 0")[0]


def test_session_cell_failed_by_system_is_retried_with_its_names(database: Database, worker: Worker) -> None:
    work = begun(database)
    said(database, worker, work, 0, "x = 1")
    (call,) = turn(database, work, 1, "x += 1\nx")

    class Failing(CodeTool):
        def cell(self, session: object, arguments: object) -> ToolResult:
            raise InfraError("The sandbox is down.")

    broken = Failing(python_session.function, keeps=True)
    with pytest.raises(InfraError):
        worker.answer(key(work), call, broken)
    assert results(database, [call]) == [None]
    worker.answer(key(work), call, python_session)
    assert results(database, [call]) == ["2"]


# an interpreter is lost

HISTORY = (
    "import random\nx = random.random()",
    "print('y' * 100_000)",
    "x += hash('text') % 97\n1 / 0",
    "import os; os.kill(os.getpid(), 9)",
)
"""Cells that draw and hash, that print too much, raise, and die."""
ASKED = "print(x, random.random(), {str(i) for i in range(5)})\n1 / 0"


def test_session_is_rebuilt_identically_by_another_worker(database: Database, worker: Worker) -> None:
    work = begun(database)
    for number, cell in enumerate(HISTORY):
        first = said(database, worker, work, number, cell)
        twin = said(database, worker, work, number, cell, position=1)
        assert first == twin
    second = Worker(database, "tools.second")
    (asked,) = turn(database, work, len(HISTORY), ASKED)
    assert second.answer(key(work), asked, python_session) == worker.owner, "its lease is not over"
    assert results(database, [asked]) == [None]
    expire(database)
    assert second.answer(key(work), asked, python_session) == "tools.second"
    second.close()
    (alone,) = turn(database, work, len(HISTORY), ASKED, position=1)
    assert worker.answer(key(work, 1), alone, python_session) == worker.owner
    assert results(database, [asked]) == results(database, [alone])
    assert "<cell 5>" in results(database, [asked])[0]
    assert builds(database) == [2, 1]
    assert values(database, "SELECT count(*) FROM episodes WHERE tainted") == [0]


def test_session_cell_with_other_result_taints_episode(database: Database, worker: Worker) -> None:
    work = begun(database)
    said(database, worker, work, 0, f"x = 5\n{CLOCK}")
    worker.close()
    assert said(database, worker, work, 1, "x") == [f"{RERUN_NOTE}5"]
    assert values(database, "SELECT tainted FROM episodes ORDER BY id") == [True, False, False, False]
    assert "came to ok" in value(database, "SELECT differs FROM v_tool_sessions")
    assert said(database, worker, work, 2, "x") == ["5"], "it is told once"


def test_update_skips_tainted_episode_and_ledger_says_so(database: Database, worker: Worker) -> None:
    groups = start(database, submission())
    work = claim(database, groups[0])
    said(database, worker, work, 0, CLOCK)
    worker.close()
    said(database, worker, work, 1, "1")
    others = claim(database, groups[1])
    steps.commit_sampled(database, others.fence, [sampled(others, position) for position in range(2)])
    steps.commit_sampled(database, work.fence, [sampled(work, 1)])
    ends = [finish(database, each, position) for each in (work, others) for position in range(2)]
    assert ends[-1].iteration is not None
    train = claim_training(database, ends[-1].iteration)
    tainted = work.episodes[0].id
    trainable = [episode.id for group in train.groups for episode in group.episodes if episode.trainable]
    assert tainted not in trainable
    assert len(trainable) == 3
    train_commits.commit_update(database, train, update_of(train, advantages=dict.fromkeys(trainable, 0.5)), 3)
    assert ledger.explain_fate(database, tainted)["fate"] == "tainted"


def test_session_follows_result_recorded_by_another_worker(database: Database, worker: Worker) -> None:
    work = begun(database)
    (call,) = turn(database, work, 0, "x = 1\nx")

    class Overtaken(CodeTool):
        def cell(self, session: Any, arguments: Any) -> ToolResult:
            expire(database)
            second = Worker(database, "tools.second")
            second.answer(key(work), call, python_session)
            second.close()
            return super().cell(session, arguments)

    overtaken = Overtaken(python_session.function, keeps=True)
    worker.answer(key(work), call, overtaken)
    assert values(database, "SELECT builds FROM tool_sessions") == [2]
    expire(database)
    assert said(database, worker, work, 1, "x + 1") == ["2"]
    assert builds(database) == [3]


def test_session_of_fork_has_names_of_parent(database: Database, worker: Worker) -> None:
    work = begun(database)
    said(database, worker, work, 0, "x = [1]")
    said(database, worker, work, 1, "x.append(2)")
    fail(database, work, 0)
    fork = Fork(work.episodes[0].id, 1)
    made = planning.submit(database, replace(submission("fork"), kind="fork", tasks=[], fork=fork))
    forked = claim(database, planning.start_iteration(database, planning.open_iterations(database, made.id)[0])[0])
    assert said(database, worker, forked, 1, "x") == ["[1]"]


def test_session_restarts_interpreter_that_was_killed(database: Database, worker: Worker) -> None:
    work = begun(database)
    said(database, worker, work, 0, "x = 1")
    (live,) = worker._lives.values()
    for process in live.session._line._box.members():  # type: ignore[union-attr]
        with suppress(ProcessLookupError):  # it went with the first
            os.kill(process, signal.SIGKILL)
    assert said(database, worker, work, 1, "x") == ["1"]
    assert builds(database) == [2]
    suicide = "import os\nfor n in range(2, 30):\n    try: os.kill(n, 9)\n    except OSError: pass"
    assert "crashed the interpreter" in said(database, worker, work, 2, suicide)[0]
    assert said(database, worker, work, 3, "x") == ["1"]


def test_session_needs_only_login_of_tools_worker(postgres: Database, box: None) -> None:
    login = Database(postgres.url.set(username="agentrl_tools").render_as_string(hide_password=False))
    work = begun(postgres)
    worker = Worker(login)
    said(postgres, worker, work, 0, CLOCK)
    worker.close()
    assert said(postgres, worker, work, 1, "1") == [f"{RERUN_NOTE}1"]
    worker.renew_and_clean()
    tool_sessions.leave(login, worker.owner)
    worker.close()
    login.close()


# room


def test_session_least_recently_used_is_evicted_and_rebuilt(database: Database, box: None) -> None:
    worker = Worker(database, max_sessions=1)
    work = begun(database)
    said(database, worker, work, 0, "x = 1")
    said(database, worker, work, 0, "x = 2", position=1)
    assert list(worker._lives) == [key(work, 1)]
    assert said(database, worker, work, 1, "x") == ["1"]
    assert said(database, worker, work, 1, "x", position=1) == ["2"]
    assert builds(database) == [2, 2]
    worker.close()


def test_session_idle_is_evicted_and_rebuilt(database: Database, box: None) -> None:
    worker = Worker(database, idle_seconds=0.0)
    work = begun(database)
    said(database, worker, work, 0, "x = 1")
    worker.renew_and_clean()
    assert not worker._lives
    assert said(database, worker, work, 1, "x") == ["1"]
    worker.close()


def test_session_ends_with_episode_and_renews_its_lease(database: Database, worker: Worker) -> None:
    work = begun(database)
    for position in range(2):
        said(database, worker, work, 0, "x = 1", position=position)
    fail(database, work, 0)
    expire(database)
    worker.renew_and_clean()
    assert list(worker._lives) == [key(work, 1)]
    assert values(database, "SELECT owner FROM tool_sessions ORDER BY episode_id") == ["", worker.owner]
    second = Worker(database, "tools.second")
    (call,) = turn(database, work, 1, "x", position=1)
    assert second.answer(key(work, 1), call, python_session) == worker.owner
    tool_sessions.leave(database, worker.owner)
    assert second.answer(key(work, 1), call, python_session) == "tools.second"
    second.close()


def test_session_is_new_for_restarted_episode(database: Database, worker: Worker) -> None:
    work = begun(database)
    said(database, worker, work, 0, "x = 1")
    steps.restart_episode(database, work.fence, work.episodes[0].id)
    (call,) = turn(database, work, 0, "x")
    worker.answer(replace(key(work), attempt=1), call, python_session)
    assert "NameError" in results(database, [call])[0]
    worker.renew_and_clean()
    assert [live.attempt for live in worker._lives] == [1]


# which runs have them


def test_python_tool_runs_with_or_without_session() -> None:
    assert offered_tools(Env(tools=("python",)), build({}))["python"] is python
    assert offered_tools(Env(tools=("python",)), build({"tools": "python_session"}))["python"] is python_session
    assert offered_tools(Env(), build({"tools": "python_session"}))["python"] is python_session
    assert find("tools", "python_session").effects == "repeatable"


def test_session_without_episode_is_refused_or_lasts_chat(box: None) -> None:
    with pytest.raises(ConfigError, match="keeps a session for each episode"):
        python_session.call({"code": "1"})
    notebook = Notebook()
    assert [notebook.run(python_session, {"code": code}).content for code in ("x = 2", "x", "1 / 0", "x")][1::2] == ["2", "2"]
    assert notebook.run(python_session, {"program": "1"}).error_class == "tool_error"
    assert notebook.run(find("tools", "echo"), {"text": "hi"}).content == "hi"
    notebook.close()


# real workers


@pytest.fixture
def stack(short_folder: Path, redis_server: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stack]:
    """A database of its own, and a Redis; leases of half a second."""
    sandbox_fixtures.machine()
    url = f"{broker.SOCKET_SCHEME}{broker.socket_path(redis_server)}?virtual_host=0"
    made = Stack(short_folder / "here", AGENTRL_BROKER_URL=url, AGENTRL_LEASE_SECONDS="2")
    monkeypatch.setattr(dispatch, "app", make_app(made.settings))
    assert made.database
    yield made
    made.close()


def real(stack: Stack, *tools: str) -> GroupWork:
    """A group at work in a run with these tools beside the calculator."""
    wanted = submission()
    return claim(stack.database, start(stack.database, replace(wanted, config={**wanted.config, "tools": list(tools)}))[0])


def asked(stack: Stack, ids: list[int]) -> list[str]:
    """What the calls come to, sent to whoever takes them."""
    dispatch.send_calls(ids, "agentrl.replies." + "0" * 32)
    stack.wait(lambda: None not in results(stack.database, ids), "the calls being answered")
    return results(stack.database, ids)


def test_tool_call_rows_tell_how_calls_ended(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stack.worker("tools")
    work = real(stack, "python")
    ids = turn(stack.database, work, 0, "print(1)", "1 / 0", "import os; os.abort()", "while True: print('x' * 1000)")
    others = turn(stack.database, work, 0, "1", position=1, tool="calculator")
    asked(stack, ids + others)
    with stack.database.read() as tx:
        columns = "tool, exit_status, exit_code, error_class, attempts, sandbox, cpu_seconds, seconds"
        rows = tx.execute(text(f"SELECT {columns} FROM v_tool_calls ORDER BY id")).all()
    told = [(row.exit_status, row.exit_code, row.error_class, row.attempts, row.sandbox is not None) for row in rows]
    assert told[:2] == [("ok", 0, None, 1, True), ("error", 1, "code_error", 1, True)]
    assert told[2] == ("killed", -signal.SIGABRT, "killed", 1, True)
    assert told[3] == ("output_cap", None, "output_cap", 1, True)
    assert told[4][0] is None
    assert told[4][3:] == (1, False)
    assert all(row.cpu_seconds > 0 and row.seconds > 0 for row in rows)
    shown = replayed(stack, work, monkeypatch, capsys)
    assert f"s of processor time in {rows[0].sandbox}, exit code 1" in shown
    assert "sent" not in shown


def replayed(stack: Stack, work: GroupWork, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What `agentrl replay` says of the group's first episode."""
    monkeypatch.setenv("AGENTRL_HOME", str(stack.home))
    monkeypatch.delenv("AGENTRL_DATABASE_URL", raising=False)
    forget_process()
    capsys.readouterr()
    try:
        assert main(["replay", str(work.episodes[0].id)]) == 0
    finally:
        forget_process()
    return capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_session_of_killed_worker_continues_elsewhere(stack: Stack, box: None) -> None:
    first = stack.worker("tools")
    work = real(stack, "python_session")
    cells = ["import random\nx = [random.random()]", "x.append(len(x))\nx", "x.append(random.random())\nx"]
    before = [asked(stack, turn(stack.database, work, number, cell))[0] for number, cell in enumerate(cells[:2])]
    first.kill()
    first.wait()
    ids = turn(stack.database, work, 2, cells[2])
    free = "SELECT count(*) FROM tool_sessions WHERE lease_until < (julianday('now') - 2440587.5) * 86400000"
    stack.wait(lambda: value(stack.database, free) == 1, "the lease running out")
    stack.worker("tools")
    after = asked(stack, ids)[0]
    drawn = random.Random(0)  # as every session begins
    wanted = [drawn.random(), 1]
    assert before == ["(no output)", repr(wanted)]
    assert after == repr([*wanted, drawn.random()])
    assert builds(stack.database) == [2]
    assert values(stack.database, "SELECT count(*) FROM episodes WHERE tainted") == [0]
    origin = find_origin(stack.database, work.episodes[0].id)
    report = _check_tools(origin, Experiment.load(origin.config))
    assert (report.ran, report.differing) == (3, 0)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_session_calls_reach_worker_that_has_it(stack: Stack) -> None:
    both = [stack.worker("tools") for _ in range(2)]
    work = real(stack, "python_session")
    said = []
    for number in range(6):
        ids = [turn(stack.database, work, number, "x = globals().get('x', 0) + 1\nx", position=at)[0] for at in range(2)]
        said.append(asked(stack, ids))
    assert said == [[str(number + 1)] * 2 for number in range(6)]
    assert builds(stack.database) == [1, 1]
    for process in both:
        process.send_signal(signal.SIGTERM)
    stack.wait(lambda: values(stack.database, "SELECT DISTINCT owner FROM tool_sessions") == [""], "the sessions being let go")

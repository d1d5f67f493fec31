"""The processes' own code: a tool call is always answered, an episode always ends, a replaced model is loaded anew."""

import logging
import math
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from kombu import Connection
from sqlalchemy import text

from agentrl.workers.jobs import pending_calls
from agentrl.workers.jobs.episode_loop import GroupRollout
from agentrl.workers.jobs.model_slot import Models
from agentrl.workers.jobs.pending_calls import RESENDS
from agentrl.workers.jobs.rollout import _run_guarded
from agentrl.workers.jobs.tool_call import calls, run_tool
from agentrl.workers.stack import broker, dispatch
from agentrl.workers.stack.celery_app import make_app
from agentrl.workers.stack.process import worker_name
from agentrl.workers.stack.replies import Replies, Waker
from agentrl.workers.stack.supervisor import SupervisedProcess, Supervisor
from agentrl.workflow.chat.rendering import Chat
from agentrl.workflow.config import RunConfig
from agentrl.workflow.envs import Env
from agentrl.workflow.errors import InfraError, ServiceError, Unready
from agentrl.workflow.experiment import Experiment
from agentrl.workflow.hooks import Hook
from agentrl.workflow.models.lookup import base_hash
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.runtime.wait_budget import waiting
from agentrl.workflow.settings import Settings, settings
from agentrl.workflow.store import steps, tool_calls
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.tool_calls import CallWork
from agentrl.workflow.tools import Tool
from agentrl.workflow.trajectory import Episode, Message, Task, ToolCall, ToolResult
from tests.support.played_runs import CALL, claim, sampled, start, submission, values
from tests.support.scripted_engine import ScriptedEngine
from tests.support.small_models import chat, tiny_random, tokenizer

# --- one tool call ----------------------------------------------------------------------------------------------------------


def listing(x: str) -> list[str]:
    """Returns what is no text."""
    return [x]


def raw(x: str) -> bytes:
    """Returns what is no text."""
    return x.encode()


def leaving(x: str) -> str:
    """Ends the process."""
    raise SystemExit(x)


def impatient(x: str) -> str:
    """Gives up waiting for something of its own."""
    raise TimeoutError("the page did not load")


ended = threading.Event()


def hanging(x: str) -> str:
    """Ends when the test does."""
    ended.wait(60)
    return x


def quick(x: str) -> str:
    """Says it again."""
    return x


def work_for(function: Callable[..., Any]) -> CallWork:
    """A call with the argument 1."""
    return CallWork(1, "math", function.__name__, {"x": "1"}, "none")


@pytest.mark.parametrize(
    ("function", "content", "error_class"),
    [
        (quick, "1", None),
        (listing, '["1"]', None),
        (raw, "b'1'", None),
        (leaving, "leaving failed: SystemExit: 1", "tool_crash"),
        (impatient, "impatient failed: TimeoutError: the page did not load", "tool_crash"),
    ],
)
def test_tool_call_always_gives_text(function: Callable[..., Any], content: str, error_class: str | None) -> None:
    found = run_tool(Tool(function), work_for(function))
    assert (found.content, found.error_class) == (content, error_class)


def test_tool_calls_that_never_end_block_no_others() -> None:
    stuck = [threading.Thread(target=run_tool, args=(Tool(hanging), work_for(hanging)), daemon=True) for _ in range(100)]
    for thread in stuck:
        thread.start()
    try:
        assert run_tool(Tool(quick), work_for(quick)).content == "1"
        assert run_tool(Tool(hanging, timeout_seconds=0.05), work_for(hanging)).error_class == "timeout"
    finally:
        ended.set()
        for thread in stuck:
            thread.join()


def steady(x: str) -> str:
    """Takes half a second of a process that runs."""
    print("begun", flush=True)
    for _ in range(10):
        time.sleep(0.05)
    return x


def in_line(x: str) -> str:
    """Waits for its turn, half a second of a process that runs."""
    with waiting():
        return steady(x)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_tool_call_time_excludes_suspension() -> None:
    with ExitStack() as opened:
        processes = [opened.enter_context(_calling(function)) for function in (steady, in_line)]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n"
            process.send_signal(signal.SIGSTOP)
        time.sleep(5.0)
        for process in processes:
            process.send_signal(signal.SIGCONT)
        assert [process.stdout.read() for process in processes if process.stdout] == ["1 True\n"] * 2


def _calling(function: Callable[..., Any]) -> "subprocess.Popen[str]":
    """A process that calls the tool, and prints what it said and whether it was in time."""
    script = (
        f"from tests.workers.test_workers import Tool, run_tool, {function.__name__} as function, work_for\n"
        "told = run_tool(Tool(function, timeout_seconds=4.0), work_for(function))\n"
        "print(told.content, 0 <= told.seconds < 4)"
    )
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)


@pytest.mark.usefixtures("forked_programs")
def test_tool_call_time_excludes_suspension_before_first_look() -> None:
    script = (
        "import os, signal\n"
        "from agentrl.workflow.runtime.wait_budget import Patience\n"
        "patience = Patience()\n"
        "print('begun', flush=True)\n"
        "os.kill(os.getpid(), signal.SIGSTOP)\n"
        "print(patience.look(0.0) < 0.9, patience.own_seconds < 0.9)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        time.sleep(1.0)
        process.send_signal(signal.SIGCONT)
        assert process.stdout.read() == "True True\n"


@pytest.mark.parametrize("env", ["no_such_module_anywhere:env", f"{__name__}:leaving_env", f"{__name__}:bare"])
def test_unloadable_tool_is_reported_to_waiter_not_model(own_database: Database, env: str) -> None:
    wanted = submission()
    group, *_ = start(own_database, replace(wanted, config={**wanted.config, "env": env}))
    work = claim(own_database, group)
    ((number,), *_) = steps.commit_sampled(own_database, work.fence, [sampled(work, calls=(CALL,))])
    replies, told = Replies(settings()), list[tuple[int, str]]()
    replies.expect(number, lambda call, reason: told.append((call, reason)))
    for _ in range(2):  # sent again: who heard why goes on waiting
        with pytest.raises(InfraError, match="cannot load calculator"):
            calls([number], replies.address)
    assert [found for found, _ in told] == [number, number]
    assert f"The tools worker {worker_name()} cannot load calculator: " in told[0][1]
    assert steps.load_results(own_database, [number]) == {}


def test_tool_unknown_to_worker_is_a_run_event_until_answered(
    own_database: Database, in_memory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AGENTRL_SEARCH", raising=False)
    asked = chat().turn(Message("assistant", "", tool_calls=(ToolCall("search", {"query": "x"}),)))
    driver = rollout_of(own_database, [asked, asked, ANSWER, ANSWER], env="qa", tools=("search",))
    play(driver, turns=2)
    pending = values(own_database, "SELECT id FROM tool_calls ORDER BY id")
    for number in pending:
        with pytest.raises(InfraError):
            calls([number], pending_calls._replies().address)
        driver.handle([driver.inbox.get(timeout=60)])
    assert values(own_database, "SELECT kind FROM events WHERE kind <> 'submitted'") == ["waiting"], "said once"
    (said,) = values(own_database, "SELECT detail FROM events WHERE kind = 'waiting'")
    for part in (worker_name(), "no collection is set", "AGENTRL_SEARCH", "agentrl resume"):
        assert part in said
    monkeypatch.setattr(pending_calls, "RESEND_SECONDS", -1000.0)
    for _ in range(RESENDS):
        driver.poll_calls()
        for number in pending:  # whoever gets it says so again
            with pytest.raises(Unready):
                calls([number], pending_calls._replies().address)
            driver.handle([driver.inbox.get(timeout=60)])
    with pytest.raises(ServiceError, match="no collection is set"):  # its attempt is no attempt: nothing was tried
        driver.poll_calls()
    answer(own_database, driver)
    for _ in range(2):
        driver.handle([driver.inbox.get(timeout=60)])
    assert values(own_database, "SELECT kind FROM events WHERE kind <> 'submitted'") == ["waiting", "going_on"]


def failing(x: str) -> str:
    """The system fails it, as it says of code that used some processor time and then slept."""
    raise InfraError("The machine was too busy.")


failing_tool = Tool(failing)


def test_tool_call_that_always_fails_fails_its_attempt(
    own_database: Database, in_memory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending_calls, "RESEND_SECONDS", -1000.0)
    asked = chat().turn(Message("assistant", "", tool_calls=(ToolCall("failing", {"x": "1"}),)))
    driver = rollout_of(own_database, [asked, asked], tools=(f"{__name__}:failing_tool",))
    play(driver, turns=2)
    for _ in range(RESENDS + 1):
        for number in values(own_database, "SELECT id FROM tool_calls"):
            with pytest.raises(InfraError, match="The machine was too busy"):
                calls([number], pending_calls._replies().address)
        while not driver.inbox.empty():
            driver.handle([driver.inbox.get()])
        _run_guarded(driver, driver.poll_calls)
    assert not [said for said in values(own_database, "SELECT detail FROM events") if "anew" in said]
    assert values(own_database, "SELECT failures FROM groups") == [1], "an attempt of the group's"


def test_tool_call_refused_then_failed_fails_attempt(
    sqlite: Database, in_memory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending_calls, "RESEND_SECONDS", -1000.0)
    driver = rollout_of(sqlite, [ASK, ASK])
    play(driver, turns=2)
    for number in values(sqlite, "SELECT id FROM tool_calls"):
        pending_calls._replies().answer(number, "It has no calculator.")
        driver.handle([driver.inbox.get(timeout=60)])
    for _ in range(RESENDS):
        driver.poll_calls()
    with pytest.raises(InfraError, match="sent 6 times without an answer"):
        driver.poll_calls()


def test_tool_reply_forged_by_others_is_cut_and_ignored(redis_server: Settings) -> None:
    replies, told = Replies(redis_server), list[str]()
    heard = threading.Event()
    replies.expect(7, lambda call, reason: (told.append(reason), heard.set())[0])
    with broker.connect_redis(redis_server) as connection:
        connection.rpush(replies.address, b"7 " + b"\xff" * 100_000, b"no number", b"7" * 100)
    assert heard.wait(30)
    assert len(told[0]) <= 500


# --- a group's episodes -----------------------------------------------------------------------------------------------------


class LeavingEnv(Env):
    """Its tools end the process that loads them."""

    def toolset(self) -> dict[str, Tool]:
        """Never returns."""
        raise SystemExit("not here")


class NoReset(Env):
    """Cannot open an episode."""

    def reset(self, task: Task) -> tuple[Message, ...]:
        """Raises."""
        raise ValueError("no world today")


class NoStep(Env):
    """Opens episodes and then fails."""

    def step(self, episode: Episode) -> tuple[Message, ...]:
        """Raises."""
        raise KeyError("state")


class Mute(Env):
    """Says what is no message."""

    def step(self, episode: Episode) -> tuple[Message, ...]:
        """Returns text."""
        return ("42",)  # type: ignore[return-value]


class Outage(Env):
    """Knows that the failure is the system's."""

    def reset(self, task: Task) -> tuple[Message, ...]:
        """Raises."""
        raise InfraError("The sandbox is down.")


TOOLS = ("calculator",)
leaving_env, bare = LeavingEnv(), Env()
no_reset, no_step, mute, outage = NoReset(tools=TOOLS), NoStep(tools=TOOLS), Mute(tools=TOOLS), Outage(tools=TOOLS)


class Returns(Hook):
    """Adds a part to the reward."""

    parts: Any = None

    def on_rollout_end(self, episode: Episode) -> Mapping[str, float]:
        """The parts, as they are."""
        return self.parts  # type: ignore[no-any-return]


class Good(Returns):
    """Whatever is a number is one, as are those of other libraries."""

    parts: Any = {"bonus": Decimal("0.5")}  # noqa: RUF012


class NotANumber(Returns):
    """Divides nothing by nothing."""

    parts: Any = {"bonus": math.nan}  # noqa: RUF012


class Endless(Returns):
    """Each part may be so large, their sum may not."""

    parts: Any = {"a": 9e29, "b": 9e29}  # noqa: RUF012


class Missing(Returns):
    """Has no value yet."""

    parts: Any = {"bonus": None}  # noqa: RUF012


class Words(Returns):
    """Says it in words."""

    parts: Any = {"bonus": "much"}  # noqa: RUF012


class LongName(Returns):
    """Names a part by its whole path."""

    parts: Any = {"a" * 65: 1.0}  # noqa: RUF012


ANSWER = chat().turn(Message("assistant", "#### 42"))
ASK = chat().turn(Message("assistant", "", tool_calls=(CALL.call,)))


@pytest.fixture
def in_memory(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Jobs go to a broker of this process, where nobody takes them."""
    monkeypatch.setenv("AGENTRL_REDIS_SERVER", "none")
    settings.cache_clear()
    monkeypatch.setattr(dispatch, "app", make_app(settings()))
    pending_calls._replies.forget()
    yield
    pending_calls._replies.forget()


def rollout_of(db: Database, turns: Sequence[Sequence[int]], **config: Any) -> GroupRollout:
    """The first group of a run, whose policy says these turns."""
    wanted = submission(tasks=1)
    group, *_ = start(db, replace(wanted, config={**wanted.config, **config}))
    work = claim(db, group)
    engine = ScriptedEngine(turns, workers=1)
    return GroupRollout(db, work, Experiment.load(work.config, work.weights), engine, chat(), SimpleQueue(), set())


def play(driver: GroupRollout, turns: int) -> None:
    """Starts the group, and commits so many turns as they come."""
    driver.start()
    for _ in range(turns):
        driver.handle([driver.inbox.get(timeout=60)])


def ends(db: Database) -> set[tuple[Any, ...]]:
    """How the episodes ended."""
    with db.read() as tx:
        return {tuple(row) for row in tx.execute(text("SELECT status, error_class, error, reward FROM episodes"))}


@pytest.mark.parametrize(
    ("hook", "why"),
    [
        (NotANumber, "NotANumber.on_rollout_end returned nan for 'bonus'"),
        (Endless, "the weighted sum of the reward parts is 1.8e+30; the largest that can be trained on is 1e+30"),
        (Missing, "Missing.on_rollout_end raised TypeError"),
        (Words, "raised TypeError: a reward must be a number, not 'str'"),
        (LongName, "a name must have 1 to 64 printable characters"),
    ],
)
def test_hook_reward_that_is_none_fails_episode(sqlite: Database, hook: type, why: str) -> None:
    play(rollout_of(sqlite, [ANSWER, ANSWER], hooks=[f"{__name__}:{hook.__name__}"]), turns=2)
    ((status, error_class, error, reward),) = ends(sqlite)
    assert (status, error_class, reward) == ("failed", "RewardError", None)
    assert why in error


def test_hook_without_result_adds_nothing(sqlite: Database) -> None:
    play(rollout_of(sqlite, [ANSWER, ANSWER], hooks=[f"{__name__}:Returns"]), turns=2)
    ((status, error_class, _, reward),) = ends(sqlite)
    assert (status, error_class, reward) == ("done", "", 0.5)


def test_hook_reward_part_counts_as_its_number(sqlite: Database) -> None:
    play(rollout_of(sqlite, [ANSWER, ANSWER], hooks=[f"{__name__}:Good"]), turns=2)
    assert {status for status, *_ in ends(sqlite)} == {"done"}
    assert values(sqlite, "SELECT value FROM rewards WHERE part = 'bonus'") == [0.5, 0.5]


def test_env_that_cannot_open_fails_episode(sqlite: Database) -> None:
    play(rollout_of(sqlite, [], env=f"{__name__}:no_reset"), turns=0)
    assert ends(sqlite) == {("failed", "EnvError", "ValueError: no world today", None)}


def test_env_may_report_system_failure(sqlite: Database) -> None:
    with pytest.raises(InfraError, match="sandbox is down"):
        play(rollout_of(sqlite, [], env=f"{__name__}:outage"), turns=0)


def answer(db: Database, driver: GroupRollout) -> None:
    """Records a result for every call, as a tools worker would, and looks."""
    for number in values(db, "SELECT id FROM tool_calls WHERE result IS NULL"):
        tool_calls.record_result(db, number, ToolResult("42"), datetime.now(UTC), "host:2")
    driver.poll_calls()


@pytest.mark.parametrize(
    ("env", "error"), [("no_step", "KeyError: 'state'"), ("mute", "the env must return messages with text")]
)
def test_env_that_cannot_continue_fails_episode(sqlite: Database, in_memory: None, env: str, error: str) -> None:
    driver = rollout_of(sqlite, [ASK, ASK], env=f"{__name__}:{env}")
    play(driver, turns=2)
    answer(sqlite, driver)
    ((status, error_class, found, _),) = ends(sqlite)
    assert (status, error_class) == ("failed", "EnvError")
    assert error in found
    assert not driver.is_live


def test_result_that_template_refuses_fails_episode(sqlite: Database, in_memory: None) -> None:
    driver = rollout_of(sqlite, [ASK, ASK])
    picky = deepcopy(tokenizer())
    refusal = "{% for m in messages if m.role == 'tool' and m.content == '42' %}{{ raise_exception('no 42') }}{% endfor %}"
    picky.chat_template = refusal + picky.chat_template
    driver.chat = Chat(picky)
    play(driver, turns=2)
    answer(sqlite, driver)
    assert ends(sqlite) == {("failed", "RefusedMessages", "The chat template refuses these messages: no 42.", None)}
    assert not driver.is_live


def test_tool_call_without_answer_is_resent_then_fails_attempt(
    sqlite: Database, in_memory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending_calls, "RESEND_SECONDS", -1000.0)
    driver = rollout_of(sqlite, [ASK, ASK])
    play(driver, turns=2)
    for _ in range(RESENDS):
        driver.poll_calls()
    with pytest.raises(InfraError, match="sent 6 times without an answer"):
        driver.poll_calls()
    first = values(sqlite, "SELECT detail FROM events WHERE kind = 'waiting' ORDER BY id")[0]
    assert "sent once without an answer. Is a tools worker running?" in first, "said with the first call that is overdue"


def test_tool_call_answered_late_is_observed(sqlite: Database, in_memory: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_calls, "RESEND_SECONDS", -1000.0)
    driver = rollout_of(sqlite, [ASK, ASK, ANSWER, ANSWER])
    play(driver, turns=2)
    for _ in range(RESENDS):
        driver.poll_calls()
    answer(sqlite, driver)
    for _ in range(2):
        driver.handle([driver.inbox.get(timeout=60)])
    assert {status for status, *_ in ends(sqlite)} == {"done"}


# --- the model --------------------------------------------------------------------------------------------------------------


def test_model_folder_is_reloaded_only_if_rewritten(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTRL_DEVICE", "cpu")
    settings.cache_clear()
    folder, models = tiny_random(tmp_path / "m"), Models()
    with models.use(Experiment(RunConfig()), str(folder)) as first:
        before = first.policy.base_hash
    with models.use(Experiment(RunConfig()), str(folder)) as again:
        assert again is first
    tiny_random(folder, seed=1)
    with models.use(Experiment(RunConfig()), str(folder)) as anew:
        assert anew.policy.base_hash != before
        anew.engine.close()


def test_model_folder_replaced_during_read_is_read_again(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTRL_DEVICE", "cpu")
    settings.cache_clear()
    mine, other = tiny_random(tmp_path / "mine"), tiny_random(tmp_path / "other", seed=1)
    expected = {"mine": base_hash(mine), "other": base_hash(other)}
    load = Policy.load

    def load_slowly(*args: Any, **named: Any) -> Policy:
        while swaps:
            swaps.pop()()
        return load(*args, **named)

    kept, models = tmp_path / "kept", Models()
    swaps = [lambda: other.rename(mine), lambda: mine.rename(kept)]
    monkeypatch.setattr(Policy, "load", load_slowly)
    with models.use(Experiment(RunConfig()), str(mine)) as loaded:
        assert loaded.policy.base_hash == expected["other"]
    mine.rename(other)
    kept.rename(mine)
    with models.use(Experiment(RunConfig()), str(mine)) as loaded:
        assert loaded.policy.base_hash == expected["mine"], "the files that it asked for first are back"


def test_jobs_of_two_bases_take_turns_without_reload_each(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTRL_DEVICE", "cpu")
    settings.cache_clear()
    bases, models = {name: str(tiny_random(tmp_path / name)) for name in "AB"}, Models()
    entered: list[str] = []

    def job(name: str) -> None:
        with models.use(Experiment(RunConfig()), bases[name]):
            entered.append(name)

    waiting = [threading.Thread(target=job, args=[name]) for name in "BABABA"]
    with models.use(Experiment(RunConfig()), bases["A"]):
        for number, thread in enumerate(waiting, start=1):
            thread.start()
            while len(models._line) < number:  # so that they stand in this order
                thread.join(0.01)
        assert entered == [], "nobody new is let in before one that waits for another base"
    for thread in waiting:
        thread.join()
    assert entered == ["B", "B", "B", "A", "A", "A"]
    with models.use(Experiment(RunConfig()), bases["A"]) as loaded:
        loaded.engine.close()


# --- the supervisor ---------------------------------------------------------------------------------------------------------


def test_supervisor_delays_restart_at_most_half_a_lease(tmp_path: Path, own_database: Database) -> None:
    watching = Supervisor(Settings(home=tmp_path, lease_seconds=4.0))
    with subprocess.Popen(["true"]) as process:
        process.wait()
    child, waits = SupervisedProcess("tools", process, started=time.monotonic()), []
    for _ in range(6):
        child.restart_at = None
        watching._restart_ended(child)
        waits.append(child.backoff)
    watching.news.join()
    assert waits == [1.0, 2.0, 2.0, 2.0, 2.0, 2.0]


# --- the link to Redis ------------------------------------------------------------------------------------------------------


def test_broker_link_given_up_with_message_is_a_lost_one(redis_server: Settings) -> None:
    with Connection(broker.broker_url(redis_server)) as connection:
        held = connection.SimpleQueue("held")
        held.put({})
        held.get(timeout=10)
        connection.transport.client = None  # so Celery leaves it when Redis goes away, before it closes the channel again
        with pytest.raises(connection.connection_errors):
            connection.default_channel.close()


def test_broker_channel_has_one_client_for_each_link(redis_server: Settings) -> None:
    with Connection(broker.broker_url(redis_server)) as connection:
        channel = connection.default_channel
        with channel.conn_or_acquire() as first, channel.conn_or_acquire() as again:
            assert first is again
        channel._disconnect_pools()
        with channel.conn_or_acquire() as other:
            assert other is not first
            assert other.ping()


# --- replies ----------------------------------------------------------------------------------------------------------------


def test_reply_reader_survives_invalid_reply(redis_server: Settings, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    replies, heard = Replies(redis_server), threading.Event()
    replies.expect(7, lambda call, reason: heard.set())
    with broker.connect_redis(redis_server) as connection:
        connection.rpush(replies.address, "not a call", b"\xff", "²")
    Waker(redis_server).wake(f"agentrl.replies.{'0' * 32}", 7)
    with broker.connect_redis(redis_server) as connection:
        connection.rpush(replies.address, 7)
    assert heard.wait(30)
    assert "invalid call id" in caplog.text

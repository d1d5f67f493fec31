"""The rows of the fault matrix (see test_matrix.py) that need no worker: what one part does when it is mistreated."""

import json
import logging
import os
import pickle
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import create_engine, text
from sqlalchemy.exc import DBAPIError

from agentrl.workers.jobs import pending_calls, tool_call
from agentrl.workers.jobs.episode_loop import GroupRollout
from agentrl.workers.stack import dispatch, oom_kills
from agentrl.workers.stack.celery_app import make_app
from agentrl.workers.stack.replies import Replies
from agentrl.workflow import store
from agentrl.workflow.agent import refusal
from agentrl.workflow.chat.parsing import parse_text
from agentrl.workflow.checkpoints import sealed_folder
from agentrl.workflow.config import RolloutConfig, build
from agentrl.workflow.control.scheduler import plan
from agentrl.workflow.errors import CheckpointError, ModelError, ServiceError
from agentrl.workflow.experiment import Experiment
from agentrl.workflow.models.lookup import base_hash
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.plugins import find
from agentrl.workflow.settings import Settings, settings
from agentrl.workflow.store import connect, control_reads, leases, planning, rollout_claims, train_claims, train_commits
from agentrl.workflow.store.connect import POOL_SIZE, Database
from agentrl.workflow.store.leases import OOM_HINT
from agentrl.workflow.store.reads import event_rows
from agentrl.workflow.store.tool_calls import CallWork
from agentrl.workflow.training.trainer import Trainer
from bench.faults.fault_plugins import Harmful
from tests.conftest import forbidden
from tests.support.malformed import HUGE, MALFORMED, tag
from tests.support.own_postgres import Server, own_postgres
from tests.support.played_runs import EXPIRED, LEASE, claim, claim_training, play, start, submission, values
from tests.support.scripted_engine import ScriptedEngine
from tests.support.small_models import chat, tiny_random

# --- 5: a job that ends after Redis was lost ------------------------------------------------------------------------------


def test_worker_survives_job_that_outlives_redis_connection(redis_server: Settings) -> None:
    app = make_app(redis_server)
    link = app.connection_for_write()
    app.send_task("agentrl.calls", args=[[1], ""], connection=link, ignore_result=True)
    message, expected = link.default_channel.basic_get("tools"), link.connection_errors
    link.default_channel._disconnect_pools()
    link._do_close_transport()  # so much is left of it where Redis died
    message.ack_log_error(logging.getLogger(), expected)
    link.close()


# --- 9: Postgres without connections, locks --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own_server() -> Iterator[Server]:
    """With 12 connections, of which one process takes 8 at most."""
    with own_postgres(connections=12) as made:
        yield made


def test_database_threads_beyond_connections_take_turns(own_server: Server) -> None:
    def write(tx: connect.Connection) -> int:
        tx.execute(text("INSERT INTO events (kind) VALUES ('turn')"))
        time.sleep(0.02)
        return int(tx.execute(text("SELECT count(*) FROM pg_stat_activity WHERE datname = 'mine'")).scalar_one())

    with own_server.database() as url, ThreadPoolExecutor(40) as pool:
        mine, other = Database(url), Database(url)
        most = max(pool.map(lambda number: (mine if number % 2 else other).write(write), range(80)))
        assert POOL_SIZE < most <= 12
        assert len(values(mine, "SELECT id FROM events")) == 80
        mine.close()
        other.close()


def refusals(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once the database has refused a transaction, which is then waited for."""
    refused, passing = threading.Event(), connect._is_transient

    def seen(error: DBAPIError) -> bool:
        refused.set()
        return passing(error)

    monkeypatch.setattr(connect, "_is_transient", seen)
    return refused


def test_postgres_without_free_connection_is_awaited(own_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with own_server.database() as url:
        hogs = create_engine(own_server.url, pool_size=12)
        held = [hogs.connect() for _ in range(12)]
        database = Database(url)
        monkeypatch.setattr(connect, "RETRY_SECONDS", 0.2)
        with pytest.raises(ServiceError, match=r"does not answer: .*too many clients already"):
            planning.submit(database, submission("early"))
        monkeypatch.setattr(connect, "RETRY_SECONDS", 30.0)
        refused = refusals(monkeypatch)
        with ThreadPoolExecutor(1) as pool:
            late = pool.submit(planning.submit, database, submission("late"))
            assert refused.wait(60)
            for connection in held:
                connection.close()
            hogs.dispose()
            assert late.result().created
        database.close()


def test_postgres_lock_held_by_others_is_awaited(own_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    assert connect._SERVER_TIMEOUTS["lock_timeout"] < 1000 * connect.RETRY_SECONDS
    monkeypatch.setitem(connect._SERVER_TIMEOUTS, "lock_timeout", 100)
    monkeypatch.setattr(connect, "RETRY_SECONDS", 0.2)
    with own_server.database() as url:
        database, somebody = Database(url), create_engine(url)
        with somebody.connect() as tx, ThreadPoolExecutor(1) as pool:
            tx.execute(text("LOCK TABLE runs IN ACCESS EXCLUSIVE MODE"))
            with pytest.raises(ServiceError, match=r"does not answer: canceling statement due to lock timeout"):
                planning.submit(database, submission("early"))
            monkeypatch.setattr(connect, "RETRY_SECONDS", 30.0)
            refused = refusals(monkeypatch)
            late = pool.submit(planning.submit, database, submission("late"))
            assert refused.wait(60)
            tx.rollback()
            assert late.result().created
        somebody.dispose()
        database.close()


def test_database_thread_without_connection_times_out(own_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "POOL_SECONDS", 0.1)
    with own_server.database() as url:
        database = Database(url)
        held = [database.engine.connect() for _ in range(POOL_SIZE)]
        with pytest.raises(ServiceError, match=r"all 8 connections of this process have been busy for 0\.1 s"):
            planning.submit(database, submission())
        for connection in held:
            connection.close()
        database.close()


# --- 18: malformed tool calls ------------------------------------------------------------------------------------------------


@pytest.fixture
def own_database(own_database: Database, monkeypatch: pytest.MonkeyPatch) -> Database:
    """The process's database, for jobs that are called here; their messages go to a broker where nobody takes them."""
    replies = Replies(settings())
    monkeypatch.setattr(pending_calls, "_replies", lambda: replies)
    monkeypatch.setattr(dispatch, "app", make_app(settings()))
    return own_database


def ids(said: str) -> tuple[int, ...]:
    """The tokens of a turn that says it."""
    return (*chat().tokenizer.encode(said, add_special_tokens=False), min(chat().end_ids))


def test_malformed_call_is_observation_and_episode_continues(own_database: Database) -> None:
    assert len(MALFORMED) > 30
    limits = {"max_new_tokens": 131_072, "max_steps": 2, "max_tool_calls": 8, "group_size": len(MALFORMED)}
    wanted = submission(tasks=1)
    config = {**wanted.config, "rollout": {**wanted.config["rollout"], **limits}}
    work = claim(own_database, start(own_database, replace(wanted, config=config))[0])
    engine = ScriptedEngine([*map(ids, MALFORMED), *[ids("#### 6")] * len(MALFORMED)], workers=1)
    driver = GroupRollout(own_database, work, Experiment.load(config, work.weights), engine, chat(), SimpleQueue(), set())
    driver.start()
    while driver.is_live:
        driver.handle([driver.inbox.get(timeout=60)])
        for number in values(own_database, "SELECT id FROM tool_calls WHERE result IS NULL"):
            tool_call.calls([number], pending_calls._replies().address)
    with own_database.read() as tx:
        ends = tx.execute(text("SELECT sample, stop_reason, reward FROM episodes WHERE status = 'done'")).all()
        heard = dict(tx.execute(text("SELECT coalesce(error_class, ''), count(*) FROM tool_calls GROUP BY 1")).all())
    assert len(ends) == len(MALFORMED)
    unclosed = {number for number, said in enumerate(MALFORMED) if said.rfind("<tool_call>") > said.rfind("</tool_call>")}
    assert {row.sample for row in ends if row.stop_reason == "parse_error"} == unclosed
    assert {row.stop_reason for row in ends if row.sample not in unclosed} == {"answered"}
    assert heard.pop("too_many_calls") == 1000 - 8
    assert heard.keys() == {"", "parse_error", "unknown_tool", "tool_error", "bad_arguments"}
    assert not values(own_database, "SELECT id FROM tool_calls WHERE result IS NULL")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
ALMOST = st.fixed_dictionaries(
    {}, optional={"name": JSON | st.just("calculator"), "arguments": JSON | st.fixed_dictionaries({"expression": JSON})}
)


@given(st.lists(ALMOST | JSON, max_size=4))
def test_call_with_any_json_is_answered(inside: list[Any]) -> None:
    answers("".join(tag(json.dumps(value)) for value in inside))


@pytest.mark.parametrize("said", HUGE, ids=[text[:60] for text in HUGE])
def test_call_of_a_megabyte_gets_short_answer(said: str) -> None:
    told = answers(said)
    assert told
    assert all(error_class for error_class in told)


def answers(said: str) -> list[str | None]:
    """The error class of what each call in a turn's text is told, which is always something and never much."""
    offered = {"calculator": find("tools", "calculator")}
    told = []
    for index, made in enumerate(parse_text(said).tool_calls):
        result = refusal(made, index, offered, RolloutConfig())
        if result is None:
            result = tool_call.run_tool(offered[made.name], CallWork(1, "math", made.name, made.arguments, "none"))
        assert result.error_class in (None, "parse_error", "unknown_tool", "tool_error", "too_many_calls", "bad_arguments")
        assert 0 < len(result.content) < 2000
        told.append(result.error_class)
    return told


# --- 24: clocks --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", [0.0, 4e9], ids=["1970", "2096"])
def test_worker_clock_decides_nothing(database: Database, monkeypatch: pytest.MonkeyPatch, moment: float) -> None:
    """What a worker believes the time to be is only what rows say for people."""
    (group, *others) = start(database, submission())

    class Wrong(datetime):
        """The time on this host."""

        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime.fromtimestamp(moment, tz)

    monkeypatch.setattr(time, "time", lambda: moment)
    for module in (planning, rollout_claims, train_claims, train_commits, store.steps, store.tool_calls):
        if "datetime" in vars(module):
            monkeypatch.setattr(module, "datetime", Wrong)
    work = claim(database, group)
    assert rollout_claims.claim_group(database, group, "second", LEASE) is None
    assert rollout_claims.extend_leases(database, [work.fence], LEASE) == {group}
    assert leases.take_service_lease(database, "control", "first", LEASE)
    assert not leases.take_service_lease(database, "control", "second", LEASE)
    assert plan(control_reads.snapshot(database, LEASE)) == []
    assert rollout_claims.extend_leases(database, [work.fence], EXPIRED) == {group}
    play(database, group)
    for other in others:
        play(database, other)
    iteration = planning.open_iterations(database, 1)[0]
    held = claim_training(database, iteration)
    assert train_claims.claim_iteration(database, iteration, "second", LEASE) is None
    assert train_claims.extend_lease(database, iteration, held.token, LEASE)
    assert values(database, "SELECT max(losses) FROM groups") == [1]


# --- 33: checkpoints that were made to do harm -------------------------------------------------------------------------------


def header(content: bytes, length: int | None = None) -> bytes:
    """A safetensors file's beginning."""
    return struct.pack("<Q", len(content) if length is None else length) + content


def beyond(name: str) -> bytes:
    """A tensor whose bytes are said to lie beyond the end."""
    return header(json.dumps({name: {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode())


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model."""
    return tiny_random(tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize("file", [sealed_folder.MODEL, sealed_folder.OPTIMIZER])
@pytest.mark.parametrize("harm", ["pickle", "no header", "endless header", "beyond the end", "other names"])
def test_malicious_checkpoint_is_refused_despite_manifest(tmp_path: Path, base: Path, file: str, harm: str) -> None:
    config = build({"model.path": str(base)})
    trainer, fired = Trainer(Policy.load(config.model, str(base), device="cpu"), config), tmp_path / "fired"
    contents = {
        "pickle": pickle.dumps(Harmful(fired)),
        "no header": b"",
        "endless header": header(b"{}", 2**62),
        "beyond the end": beyond("model.embed_tokens.weight"),
        "other names": header(b'{"../../x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}') + bytes(4),
    }

    def writer(folder: Path) -> None:
        trainer.save(folder)
        (folder / file).write_bytes(contents[harm])

    sealed_folder.write(tmp_path / "v1", writer)
    sealed_folder.verify(tmp_path / "v1")
    with pytest.raises(CheckpointError):
        trainer.load(tmp_path / "v1")
    assert not fired.exists()


def test_model_with_pickled_weights_is_refused(tmp_path: Path, base: Path) -> None:
    config = build({"model.path": str(base)})
    folder = tiny_random(tmp_path / "model")
    harm = pickle.dumps(Harmful(tmp_path / "fired"))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    (folder / "pytorch_model.bin").write_bytes(harm)
    with pytest.raises(ModelError, match="holds no"):
        base_hash(folder)
    (folder / "model.safetensors").write_bytes(harm)
    with pytest.raises(ModelError, match="are not a valid model"):
        Policy.load(config.model, str(folder), device="cpu")
    assert not (tmp_path / "fired").exists()


# --- 35: the out-of-memory killer --------------------------------------------------------------------------------------------


def test_supervisor_reports_worker_killed_for_memory(database: Database) -> None:
    """The supervisor's own look at its dead child, in a memory cgroup where the child takes all there is."""
    (group, *_) = start(database, submission())
    for _ in range(rollout_claims.MAX_LOSSES - 1):
        claim(database, group, lease=EXPIRED)
    environment = {**os.environ, "AGENTRL_DATABASE_URL": database.url.render_as_string(hide_password=False)}
    with memory_cgroup() as cgroup:
        command = [sys.executable, "-m", "bench.faults.oom_victim", str(cgroup), str(group)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert rollout_claims.claim_group(database, group, "next", LEASE) is None
    (told,) = [
        event for event in event_rows.list_events(database, event_rows.EventFilter("first")).rows if event["kind"] == "oom"
    ]
    assert told["detail"] == f"the worker rollout,train was killed, out of memory. {OOM_HINT}"
    with database.read() as tx:
        query = "SELECT DISTINCT status, error_class, error FROM episodes WHERE group_id = :group"
        (end,) = tx.execute(text(query), {"group": group}).all()
    assert tuple(end) == ("infra_error", "oom", f"its worker was lost 5 times, the last time out of memory. {OOM_HINT}")


@contextmanager
def memory_cgroup() -> Iterator[Path]:
    """A memory cgroup of 256 MB below this process's own."""
    groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    mine = [oom_kills.CGROUPS / "memory" / path.lstrip("/") for _, names, path in groups if "memory" in names.split(",")]
    mine += [oom_kills.CGROUPS / path.lstrip("/") for number, _, path in groups if number == "0"]
    found = [(place, name) for place in mine for name in ("memory.limit_in_bytes", "memory.max") if (place / name).exists()]
    if not found or not os.access(found[0][0], os.W_OK):
        forbidden("a memory cgroup that may be divided")
    place, limit = found[0][0] / f"arl-{os.getpid()}", found[0][1]
    place.mkdir()
    try:
        (place / limit).write_text(str(2**28))
        yield place
    finally:
        place.rmdir()


@pytest.mark.parametrize(
    ("mine", "file"),
    [
        ("4:memory:/job\n0::/\n", "memory/job/memory.oom_control"),
        ("4:memory:/docker/1f\n", "memory/memory.oom_control"),
        ("0::/job\n", "job/memory.events"),
        ("0::/host/job\n", "memory.events"),
    ],
    ids=["version 1", "version 1 in a container", "version 2", "version 2 in a container"],
)
def test_count_kills_finds_counter_of_cgroup(tmp_path: Path, mine: str, file: str) -> None:
    (tmp_path / "mine").write_text(mine)
    counter = tmp_path / "cgroups" / file
    assert oom_kills.count_kills(tmp_path / "cgroups", tmp_path / "mine") == 0
    counter.parent.mkdir(parents=True)
    counter.write_text("low 0\noom 7\noom_kill 3\n")
    assert oom_kills.count_kills(tmp_path / "cgroups", tmp_path / "mine") == 3

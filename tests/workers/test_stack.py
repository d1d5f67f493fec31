"""The embedded stack as processes: who keeps it, who ends it, what it survives. And what a dead broker does to the senders."""

import json
import math
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from sqlalchemy import Engine, create_engine, text

from agentrl.workers.stack import broker, control_loop, dispatch, embedded, supervisor
from agentrl.workers.stack.celery_app import make_app
from agentrl.workers.stack.process import stopping
from agentrl.workers.stack.supervisor import Supervisor
from agentrl.workflow.errors import ConfigError, ServiceError
from agentrl.workflow.plugins import find
from agentrl.workflow.settings import Settings, settings
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.migrate import current, head, upgrade
from tests.conftest import forget_process
from tests.support.real_stack import Stack, embedded_stack


@pytest.fixture
def stack(short_folder: Path) -> Iterator[Stack]:
    """The embedded stack, not started yet, that is idle at once."""
    with embedded_stack(short_folder, idle_seconds="0") as made:
        yield made


def asked_long_ago(stack: Stack) -> None:
    """As if whoever asked for the stack had done so long ago."""
    os.utime(stack.settings.stack_dir / "asked", (1, 1))


WHOLE = ["agentrl.workers.stack.supervisor", "control", "rollout,train", "tools"]


def processes(stack: Stack) -> list[str]:
    """The last words of the command lines of this data folder's supervisors and workers."""
    known = f"AGENTRL_HOME={stack.home}\0".encode()
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and known in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_text().split("\0"))
        except OSError:
            continue  # ended in between, or somebody else's
    return sorted(words[-2] for words in found if any(word.startswith("agentrl.workers.") for word in words))


def ensure(stack: Stack, stay: bool = False) -> bool:
    """As a command does it."""
    code = "from agentrl.workers.stack import embedded as s; from agentrl.workflow.settings import settings; "
    code += f"print(s.ensure_running(settings(), {stay}))"
    done = subprocess.run([sys.executable, "-c", code], env=stack.environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + stack.logs()
    return done.stdout == "True\n"


@pytest.mark.slow
def test_stack_is_replaced_if_it_is_stopping(stack: Stack) -> None:
    assert ensure(stack)
    first = embedded.find_supervisor(stack.settings)
    asked_long_ago(stack)
    where = stack.settings
    stack.wait(lambda: embedded.read_state(where)["stopping"] or embedded.find_supervisor(where) is None, "the idle stop")
    assert ensure(stack)
    second = embedded.find_supervisor(stack.settings)
    assert second not in (None, first)
    assert broker.is_answering(stack.settings)
    assert not ensure(stack), "it was asked for lately, and is kept for a while"
    assert embedded.find_supervisor(stack.settings) == second


@pytest.mark.slow
def test_up_command_keeps_stack_that_submit_started(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Supervisor, "_is_busy", lambda self: False)
    assert ensure(stack)
    assert '"started": false' in stack.agentrl("up", "--json")
    pid = embedded.find_supervisor(stack.settings)
    asked_long_ago(stack)
    looks = Supervisor(stack.settings)
    looks.busy_at = -math.inf
    assert not looks._is_idle(), "as the stack's own looks every second"
    assert embedded.find_supervisor(stack.settings) == pid
    stack.agentrl("down")
    embedded.stay_file(stack.settings).unlink()
    looks.busy_at = -math.inf
    assert looks._is_quiet(), "it was that wish alone that kept it"
    assert embedded.find_supervisor(stack.settings) is None
    assert ensure(stack)
    asked_long_ago(stack)
    stack.wait(lambda: embedded.find_supervisor(stack.settings) is None, "the end of a stack that nobody asked to keep")


@pytest.mark.slow
def test_stack_ends_with_killed_supervisor(stack: Stack) -> None:
    ensure(stack, stay=True)
    stack.wait(lambda: processes(stack) == WHOLE, "the supervisor, Redis and three workers")
    os.kill(embedded.find_supervisor(stack.settings) or 0, signal.SIGKILL)
    stack.wait(lambda: not processes(stack), "the end of the workers", 90)
    stack.wait(lambda: not broker.is_answering(stack.settings), "the end of Redis", 10)


@pytest.mark.slow
def test_stack_starts_once_for_concurrent_commands(stack: Stack) -> None:
    threads = [threading.Thread(target=ensure, args=[stack, True]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pid = embedded.find_supervisor(stack.settings)
    assert pid is not None
    stack.wait(lambda: processes(stack) == WHOLE, "one supervisor, one Redis and three workers")


def test_stack_survives_missing_database(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTRL_DATABASE_URL", "postgresql://nobody@127.0.0.1:1/nowhere")
    monkeypatch.setenv("AGENTRL_IDLE_STOP_SECONDS", "0")
    monkeypatch.setenv("AGENTRL_HOME", str(short_folder))
    forget_process()
    settings().stack_dir.mkdir()
    watching = supervisor.Supervisor(settings())
    assert not watching._is_idle()
    forget_process()


def left_behind(where: Settings) -> None:
    """The state of a supervisor of the release before, which was killed."""
    where.stack_dir.mkdir(parents=True)
    (where.stack_dir / "supervisor.json").write_text(json.dumps({"pid": 2**30, "stopping": False}))


def test_stack_state_without_overlap_means_shared_workers(tmp_path: Path) -> None:
    where = Settings(home=tmp_path)
    left_behind(where)
    assert embedded.read_state(where) == {"pid": 2**30, "stopping": False, "separate": False}


def test_supervisor_waiting_for_database_counts_as_alive(stack: Stack) -> None:
    left_behind(stack.settings)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # a database that takes its time
        silent.settimeout(120)
        away = f"postgresql://nobody@127.0.0.1:{silent.getsockname()[1]}/nowhere"
        command = [sys.executable, "-P", "-m", "agentrl.workers.stack.supervisor"]
        with subprocess.Popen(command, env=stack.environment | {"AGENTRL_DATABASE_URL": away}) as starting:
            connection, _ = silent.accept()
            with connection:
                found = embedded.find_supervisor(stack.settings)
                starting.kill()
    assert found == 0, "it has the lock, and has not said yet what it is"


@pytest.mark.slow
def test_stack_starts_in_folder_with_same_package_names(stack: Stack, short_folder: Path) -> None:
    for package in ("workers", "workflow", "cli"):
        (short_folder / package).mkdir()
        (short_folder / package / "__init__.py").write_text("raise RuntimeError('not agentrl')")
    program = [str(Path(sys.executable).with_name("agentrl")), "up"]
    done = subprocess.run(program, cwd=short_folder, env=stack.environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + stack.logs()
    stack.wait(lambda: processes(stack) == WHOLE, "the supervisor, Redis and three workers")
    assert "not agentrl" not in stack.logs()


def test_plugin_missing_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ConfigError, match="cannot be found"):
        find("rewards", "not_mine:thing")


def test_result_store_failure_is_a_missing_service() -> None:
    for error in (RuntimeError("\nRetry limit exceeded while trying to reconnect\n"), redis.ConnectionError("gone")):
        with pytest.raises(ServiceError, match="broker does not accept messages"), dispatch._broker_errors("chord"):
            raise error
    with pytest.raises(RuntimeError, match="a mistake"), dispatch._broker_errors("chord"):
        raise RuntimeError("a mistake")


def test_broker_socket_folder_must_be_owned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    where = Settings(home=tmp_path / ("long" * 30))
    folder = broker.socket_path(where).parent
    folder.mkdir(mode=0o700)
    assert broker.socket_path(where).parent == folder
    folder.chmod(0o755)
    with pytest.raises(ServiceError, match="must belong to you and be private"):
        broker.socket_path(where)
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ServiceError, match="must belong to you and be private"):
        broker.socket_path(where)


def test_broker_socket_is_private(redis_server: Settings) -> None:
    assert stat.S_IMODE(broker.socket_path(redis_server).stat().st_mode) == 0o700


STRUCK = """
import os, signal, sys, threading, time
from agentrl.workers.stack import control_loop, worker
from agentrl.workers.stack.celery_app import make_app
from agentrl.workers.stack.process import stopping

class Struck(threading.Condition):
    def wait(self, timeout):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
        return super().wait(timeout)

stopping._cond = Struck(threading.Lock())
control_loop.tick = lambda: 0
worker.run(["control"])
"""


@pytest.mark.usefixtures("forked_programs")
def test_control_loop_stops_on_signal_before_sleep(home: Path) -> None:
    environment = {**os.environ, "AGENTRL_HOME": str(home)}
    done = subprocess.run(
        [sys.executable, "-c", STRUCK], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0
    assert [line.split(" ", 3)[3].partition(":")[0] for line in done.stderr.splitlines()] == [
        "agentrl.worker starting control", "agentrl.ready ready",
    ]  # fmt: skip


STOPPED = """
import os, signal
from agentrl.workers.jobs import rollout
from agentrl.workers.stack import worker
from agentrl.workers.stack.celery_app import make_app
from agentrl.workers.stack.process import stopping

def claim_group(*arguments):  # the signal has come, and the worker's own thread has not yet left the queue
    stopping.set()
    os.kill(os.getpid(), signal.SIGTERM)

rollout.store.claim_group = claim_group
worker.run(["rollout"])
"""


@pytest.mark.usefixtures("forked_programs")
@pytest.mark.slow
def test_message_for_stopping_worker_waits_for_next(redis_server: Settings) -> None:
    command = [sys.executable, "-c", STOPPED]
    make_app(redis_server).send_task("agentrl.rollout", [[1, 2]])
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    assert "this worker is stopping" not in done.stderr
    with broker.connect_redis(redis_server) as connection:
        assert connection.llen("agentrl.rollout") == 1


def test_control_loop_continues_after_failed_tick(home: Path) -> None:
    home.write_text("a file where the data folder should be")
    settings.cache_clear()
    ticking = threading.Thread(target=control_loop.run)
    ticking.start()
    try:
        ticking.join(0.5)
        assert ticking.is_alive()
    finally:
        stopping.set()
        ticking.join(30)
        stopping.clear()


@pytest.mark.parametrize("there", [True, False])
def test_upgrade_without_role_rights_names_the_command(
    postgres_server: Engine, empty_postgres: str, there: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTRL_READER_PASSWORD", "secret")
    settings.cache_clear()
    url = Database(empty_postgres).url
    admin = create_engine(url, isolation_level="AUTOCOMMIT")
    reader = "SELECT count(*) FROM pg_roles WHERE rolname = 'agentrl_reader'"
    with admin.connect() as tx:
        known = tx.execute(text(reader)).scalar_one()
        tx.execute(text("CREATE ROLE agentrl_plain LOGIN"))
        tx.execute(text("GRANT ALL ON SCHEMA public TO agentrl_plain"))
        if there and not known:
            tx.execute(text("CREATE ROLE agentrl_reader LOGIN"))
        if not there and known:
            tx.execute(text("ALTER ROLE agentrl_reader RENAME TO agentrl_hidden"))
    plain = Database(url.set(username="agentrl_plain").render_as_string(hide_password=False))
    try:
        upgrade(plain)
        assert current(plain) == head()
        assert ("ALTER ROLE agentrl_reader PASSWORD" if there else "CREATE ROLE agentrl_reader") in caplog.text
    finally:
        plain.close()
        with admin.connect() as tx:
            if not there and known:
                tx.execute(text("ALTER ROLE agentrl_hidden RENAME TO agentrl_reader"))
            tx.execute(text("DROP OWNED BY agentrl_plain CASCADE"))
            tx.execute(text("DROP ROLE agentrl_plain"))
        admin.dispose()
        settings.cache_clear()

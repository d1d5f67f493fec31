"""A run on hosts that share a Postgres, a Redis and an S3 bucket; one of them is cut off in the middle and comes back."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen

import pytest
from celery.signals import after_task_publish
from sqlalchemy import text

from agentrl.workers.stack import dispatch
from agentrl.workers.stack.celery_app import make_app
from agentrl.workflow.checkpoints.sealed_folder import MODEL
from agentrl.workflow.control.scheduler import SendRollouts, plan
from agentrl.workflow.settings import Settings
from agentrl.workflow.store import control_reads, planning
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.reads import run_rows
from tests.support.gate import at_gate, open_gate
from tests.support.network_machines import BUCKET, S3, Host, network, postgres_on, redis_on, s3_server, wait_until
from tests.support.played_runs import claim, submission
from tests.support.real_stack import SIZES, TURNS, Stack
from tests.support.small_models import tiny_random
from tests.workers.test_run import assert_whole, count


@dataclass
class Cluster:
    """The hosts `a` and `b`, what they share, and the worker processes on them; `here` is where one submits."""

    here: Stack
    s3: S3
    a: Host
    b: Host
    model: Path
    workers: dict[str, "Popen[bytes]"] = field(default_factory=dict)

    def home_of(self, host: Host) -> Path:
        """The data folder that the host's workers share."""
        return self.here.home.parent / host.name

    def start(self, host: Host, role: str) -> None:
        """A worker on a host."""
        environment = {**self.here.environment, "AGENTRL_HOME": str(self.home_of(host))}
        log = self.here.home / f"{host.name}-{role}.log"  # where a failing test looks for them
        self.workers[f"{host.name}-{role}"] = host.popen(
            [sys.executable, "-m", "agentrl.cli", "worker", role], environment, log
        )

    def submit(self, name: str, tasks: int, hooks: str = "tests.support.parity_hook:Lucky") -> None:
        """A run that nobody waits for."""
        asked = ("--dataset", "arithmetic", "--model", str(self.model), "--max-tasks", str(tasks), "--name", name)
        self.here.agentrl("submit", *asked, *SIZES, *TURNS, "-s", f"hooks=[{hooks}]", "--detach")

    def held_by(self, host: Host) -> set[int]:
        """The groups that a worker of the host holds, as the rows say."""
        query = "SELECT id FROM groups WHERE status = 'running' AND worker LIKE :host"
        with self.here.database.read() as tx:
            return set(tx.execute(text(query), {"host": f"{host.name}:%"}).scalars())

    def close(self) -> None:
        """Ends the workers."""
        for process in self.workers.values():
            process.terminate()
        for process in self.workers.values():
            process.wait(60)
        self.here.close()


@pytest.fixture
def cluster(short_folder: Path) -> Iterator[Cluster]:
    """Host a: rollout and tools. Host b: train and tools, and later rollout. Here: the services and the control loop."""
    with ExitStack() as stack:
        net, (a, b) = stack.enter_context(network(["host-a", "host-b"]))
        s3 = stack.enter_context(s3_server(short_folder, net.address))
        here = Stack(
            short_folder / "here",
            AGENTRL_DATABASE_URL=stack.enter_context(postgres_on(net)),
            AGENTRL_BROKER_URL=stack.enter_context(redis_on(net, short_folder)),
            AGENTRL_CHECKPOINTS=f"s3://{BUCKET}/runs",
            **s3.environment,
        )
        made = Cluster(here, s3, a, b, tiny_random(short_folder / "model"))
        stack.callback(made.close)
        here.agentrl("db", "upgrade")
        here.worker("control")
        for host, roles in ((a, ("rollout", "tools")), (b, ("train", "tools"))):
            for role in roles:
                made.start(host, role)
        yield made


def cut_off_in_the_middle(cluster: Cluster) -> set[int]:
    """Cuts host a off while it is held with groups that are sampled with adapters; those groups."""
    cluster.here.wait(lambda: at_gate(cluster.home_of(cluster.a), "rollout"), "host a at work on adapters")
    cluster.a.cut_off()
    return cluster.held_by(cluster.a)


def test_dispatch_resends_message_lost_before_it_was_marked_sent(
    sqlite: Database, redis_server: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be waited for as if it lay in a queue, for two leases or the time of two groups."""
    monkeypatch.setattr(dispatch, "app", make_app(redis_server))
    run = planning.submit(sqlite, submission(tasks=1, tasks_per_iteration=1)).id
    groups = planning.start_iteration(sqlite, planning.open_iterations(sqlite, run)[0])

    def lose(**message: object) -> None:
        claim(sqlite, groups[0], lease=0.001)
        time.sleep(0.01)

    after_task_publish.connect(lose, weak=False)
    try:
        dispatch.send_rollouts(sqlite, groups)
    finally:
        after_task_publish.disconnect(lose)
    assert plan(control_reads.snapshot(sqlite, 60.0)) == [SendRollouts(tuple(groups))]


TAKE = text("UPDATE held SET by = 'us'")
HOLDS = """
import sys, time
from sqlalchemy import text
from agentrl.workflow.store.connect import Database
with Database(sys.argv[1]).engine.begin() as tx:
    tx.execute(text("UPDATE held SET by = 'the other'"))
    print("holds", flush=True)
    time.sleep(600)
"""
ASKS = """
import sys, time
from sqlalchemy import text
from agentrl.workflow.errors import ServiceError
from agentrl.workflow.store import connect
connect.RETRY_SECONDS = 0.0
database = connect.Database(sys.argv[1])
while True:
    try:
        database.ask(lambda tx: tx.execute(text("SELECT 1")))
        print("asks", flush=True)
    except ServiceError as error:
        print(error.message, flush=True)
        break
    time.sleep(0.1)
"""


@pytest.mark.slow
def test_network_cut_is_noticed_on_both_ends(short_folder: Path) -> None:
    with network(["far"]) as (net, (far,)), postgres_on(net) as url:
        database = Database(url)
        database.write(lambda tx: tx.execute(text("CREATE TABLE held AS SELECT 'nobody' AS by")))
        logs = {code: short_folder / f"{number}.log" for number, code in enumerate((HOLDS, ASKS))}
        processes = [far.popen([sys.executable, "-c", code, url], os.environ, log) for code, log in logs.items()]
        try:
            wait_until(lambda: "holds" in logs[HOLDS].read_text() and "asks" in logs[ASKS].read_text(), "both connected")
            far.cut_off()
            database.write(lambda tx: tx.execute(text("SET LOCAL statement_timeout = '60s'")) and tx.execute(TAKE))
            wait_until(lambda: "does not answer" in logs[ASKS].read_text(), "the far end giving up", seconds=60)
        finally:
            for process in processes:
                process.kill()
                process.wait(10)
            database.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_host_cut_off_and_back_loses_and_doubles_nothing(cluster: Cluster) -> None:
    here, database = cluster.here, cluster.here.database
    open_gate(cluster.home_of(cluster.b), "rollout")
    cluster.submit("first", 24, "tests.support.parity_hook:Lucky,tests.support.gate:InSecondIteration")
    held = cut_off_in_the_middle(cluster)
    assert held
    cluster.start(cluster.b, "rollout")
    wanted = ",".join(map(str, held))
    taken = f"SELECT count(*) FROM groups WHERE id IN ({wanted}) AND worker LIKE 'host-b:%'"
    here.wait(lambda: count(database, taken) == len(held), "host b taking over what host a held")
    cluster.a.come_back()
    open_gate(cluster.home_of(cluster.a), "rollout")

    here.wait_for("first")
    assert_whole(database, iterations=6, episodes=96)
    assert count(database, "SELECT max(losses) FROM groups") >= 1
    assert all(process.poll() is None for process in cluster.workers.values())

    # Alone, and on adapters that host b writes, it goes on as if nothing had been.
    cluster.workers["host-b-rollout"].terminate()
    cluster.workers["host-b-rollout"].wait(60)
    cluster.submit("second", 8)
    here.wait_for("second")
    mine = "SELECT count(*) FROM groups g JOIN runs r ON r.id = g.run_id WHERE r.name = 'second' AND g.worker LIKE 'host-a:%'"
    assert count(database, mine) == 8
    assert run_rows.describe_run(database, "second")["status"] == "done"
    assert_fetched_once(cluster, held)


def assert_fetched_once(cluster: Cluster, cut: set[int]) -> None:
    """Each adapter went once to host a, twice at most if the cut came between, and never to host b, whose trainer wrote it."""
    adapters = "SELECT DISTINCT p.path FROM policies p JOIN iterations i ON i.policy_id = p.id JOIN groups g"
    of_groups = f"{adapters} ON g.iteration_id = i.id WHERE p.path <> ''"
    with cluster.here.database.read() as tx:
        paths = set(tx.execute(text("SELECT path FROM policies WHERE kind = 'trained'")).scalars())
        on_a = set(tx.execute(text(f"{of_groups} AND g.worker LIKE 'host-a:%'")).scalars())
        between = set(tx.execute(text(f"{of_groups} AND g.id IN ({','.join(map(str, cut))})")).scalars())
    assert on_a
    for path in paths:
        assert path.startswith(f"s3://{BUCKET}/runs/")
        fetched = [
            len(cluster.s3.requests("GET", f"/{os.path.basename(path)}/{MODEL}", host.address))
            for host in (cluster.a, cluster.b)
        ]
        assert fetched[0] <= (2 if path in between else 1)
        assert fetched[0] >= 1 or path not in on_a
        assert fetched[1] == 0

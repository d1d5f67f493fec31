"""Updates on several hosts: workers `ranks` find the train worker by a row, and make with it the update of one process."""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sqlalchemy import text

from agentrl.cli.doctor import _ranks_host
from agentrl.workers.ranks import rank_group, rank_host, rendezvous
from agentrl.workers.ranks.rank import _open_store
from agentrl.workers.ranks.rank_group import RankGroup
from agentrl.workers.ranks.rank_messages import ErrorOfRank, decode_error, encode_error
from agentrl.workers.ranks.rank_process import RankPlace
from agentrl.workers.ranks.rendezvous import (
    JoinedHost,
    JoinRequest,
    Rendezvous,
    check_hosts,
    interfaces_at,
    listen,
    versions,
)
from agentrl.workers.requests import requirements
from agentrl.workflow import checkpoints, trainers
from agentrl.workflow.config import build
from agentrl.workflow.errors import AgentRLError, ConfigError, Fenced, InfraError, ModelError, ServiceError
from agentrl.workflow.models.devices import devices_of_ranks
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.settings import settings
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.migrate import open_database
from agentrl.workflow.store.rendezvous_rows import RendezvousRow, close_rendezvous, list_rendezvous, open_rendezvous
from agentrl.workflow.tables.schema import RIGHTS_OF_AGENTS, RIGHTS_OF_TOOLS, TABLES_FOR_READERS
from agentrl.workflow.training.trainer import Trainer
from bench.faults.fork_server import Child, Nursery, serve
from tests.support.network_machines import Host, network, wait_until
from tests.training.test_trainer import folder as folder
from tests.training.test_trainer import groups_of
from tests.workers.test_rank_faults import are_gone, ranks_of
from tests.workers.test_ranks import FULL, config, hashes, largest_difference, ranked, saved
from tests.workers.test_requirements import asked

HERE = "127.0.0.1"
TOKEN = "a" * 43
ON_HOSTS = config(**FULL, **{"update.hosts": 2})


@pytest.fixture
def database(store_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Database]:
    """A store of a train worker that may lead several hosts."""
    monkeypatch.setenv("AGENTRL_RANKS_HOST", HERE)
    monkeypatch.setenv("AGENTRL_DEVICE", "cpu")
    settings.cache_clear()
    with closing(open_database(settings().database)) as db:
        yield db
    torch.use_deterministic_algorithms(False)


def rendezvous_of(database: Database, hosts: int = 2, devices: str = "1") -> Rendezvous:
    return Rendezvous(hosts, devices, "exact", database, threading.Event(), threading.Event())


class Member:
    """A connection of a test that acts as the worker `ranks` of another host."""

    def __init__(self, row: RendezvousRow) -> None:
        host, _, port = row.address.rpartition(":")
        self.link = socket.create_connection((host, int(port)), 10)
        self.request = JoinRequest(row.token, **versions(), host="node7", member="m", device="cpu", devices=1, index=0)

    def send(self, data: bytes | None = None, **changes: Any) -> "Member":
        """Send the request with these changes, or other data."""
        self.link.sendall(replace(self.request, **changes).encode() if data is None else data)
        return self

    def answer(self) -> str:
        """Return why the train worker refused; empty if it closed the connection without a reason."""
        try:
            with self.link.makefile("rb") as lines:
                line = lines.readline()
        except ConnectionResetError:  # it was closed before it was read to its end
            line = b""
        return str(json.loads(line)["error"]) if line else ""


@pytest.fixture
def host() -> Iterator[Callable[[RendezvousRow], Member]]:
    """Open a connection to a train worker; all are closed at the end."""
    with ExitStack() as links:

        def connect(row: RendezvousRow) -> Member:
            one = Member(row)
            links.enter_context(one.link)
            return one

        yield connect


@pytest.fixture
def gather(database: Database) -> Iterator[Callable[[Rendezvous], tuple[Any, RendezvousRow]]]:
    """Start to wait for other hosts, in a thread. Return the future, and the row."""
    with ThreadPoolExecutor() as threads, ExitStack() as stack:

        def start(wanted: Rendezvous) -> tuple[Any, RendezvousRow]:
            stack.callback(wanted.fenced.set)
            future = threads.submit(wanted.gather, "cpu")
            wait_until(lambda: len(list_rendezvous(database)) == 1, "a row")
            return future, list_rendezvous(database)[0]

        yield start


def test_rendezvous_refuses_bad_requests_and_goes_on(
    gather: Any, host: Any, database: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rendezvous, "REQUEST_SECONDS", 0.5)
    future, row = gather(rendezvous_of(database))
    slow = host(row).send(b'{"token": ')
    versions_here = f"agentrl {versions()['agentrl']} and torch {versions()['torch']}"
    refused = {
        "127.0.0.1 sent a wrong token.": [{"token": TOKEN}, {"token": ""}, {"token": "ä"}],
        f"node7 has agentrl 0.0.9 and torch {versions()['torch']}, and the train worker has {versions_here}.": [
            {"agentrl": "0.0.9"}
        ],
        f"node7 has agentrl {versions()['agentrl']} and torch 1.0, and the train worker has {versions_here}.": [
            {"torch": "1.0"}
        ],
        "node7 computes on cuda, and the train worker on cpu.": [{"device": "cuda"}],
        "node7: It has no device.": [{"error": "It has no device."}],
        "127.0.0.1 sent no valid request.": [{"devices": 65}, {"index": 1}, {"index": -1}, {"host": 7}],
    }
    for reason, requests in refused.items():
        for changes in requests:
            assert host(row).send(**changes).answer() == reason, changes
    lone = json.dumps({**json.loads(host(row).request.encode()), "token": "\ud800"}).encode()
    for garbage in (b"GET / HTTP/1.1\r\n\r\n\n", b"x" * 5000, b"[" * 4000 + b"\n", b"{}\n", b"\xff\n", b"null\n", lone + b"\n"):
        assert host(row).send(garbage).answer() in ("127.0.0.1 sent no valid request.", ""), garbage
    assert slow.answer() == "127.0.0.1 sent no request within 0 s."
    assert row.token not in caplog.text
    assert not future.done()
    good = host(row).send()
    (joined,) = future.result(10)
    assert (joined.name, len(joined.links)) == ("node7", 1)
    assert list_rendezvous(database) == []
    joined.links[0].close()
    assert good.answer() == ""


def test_rendezvous_counts_a_host_with_all_of_its_devices(gather: Any, host: Any, database: Database) -> None:
    """A host that has left, or has sent more than its request, does not count."""
    future, row = gather(rendezvous_of(database, 3, "2"))
    gone = [host(row).send(member="gone", devices=2, index=index) for index in (0, 1)]
    gone[1].link.close()
    loud = host(row).send(member="loud")
    loud.send(b"more")
    assert loud.answer() in ("", "127.0.0.1 sent no valid request.")
    first = host(row).send(member="first", devices=2, index=1)
    other = host(row).send(member="other")
    time.sleep(1)
    assert not future.done()
    last = host(row).send(member="first", devices=2, index=0)
    hosts: list[JoinedHost] = future.result(10)
    ports = [[link.getpeername()[1] for link in one.links] for one in hosts]
    assert sorted(ports) == sorted([[last.link.getsockname()[1], first.link.getsockname()[1]], [other.link.getsockname()[1]]])
    assert gone[0].answer() == ""
    for one in hosts:
        for link in one.links:
            link.close()


def test_rendezvous_says_who_is_missing(gather: Any, host: Any, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "RENDEZVOUS_SECONDS", 0.5)
    with pytest.raises(
        InfraError, match=r"^1 of 2 hosts joined within 0\.5 s: start `agentrl worker ranks` on another host\.$"
    ):
        rendezvous_of(database).gather("cpu")
    monkeypatch.setattr(rendezvous, "RENDEZVOUS_SECONDS", 2.0)
    future, row = gather(rendezvous_of(database, 3))
    host(row).send()
    host(row).send(member="old", torch="1.0").answer()
    with pytest.raises(InfraError, match=r"^2 of 3 hosts joined within 2 s: .* Refused: node7 has .* torch 1\.0"):
        future.result(10)
    assert list_rendezvous(database) == []


@pytest.mark.parametrize(("event", "error"), [("fenced", Fenced), ("stopping", ServiceError)])
def test_rendezvous_ends_if_nobody_wants_it(
    event: str, error: type[AgentRLError], gather: Any, host: Any, database: Database
) -> None:
    """Another worker has taken over the claim, or the train worker gets SIGTERM."""
    wanted = rendezvous_of(database, 3)
    future, row = gather(wanted)
    joined = host(row).send()
    getattr(wanted, event).set()
    with pytest.raises(error):
        future.result(2)
    assert joined.answer() == ""
    assert list_rendezvous(database) == []


@pytest.mark.parametrize("store", ["sqlite", "postgres"])
def test_ended_rendezvous_rows_are_deleted(store: str, request: pytest.FixtureRequest) -> None:
    database: Database = request.getfixturevalue(store)
    rows = [RendezvousRow(f"{HERE}:1", "1", "fast", str(number)) for number in range(3)]
    for row, seconds in zip(rows, (-1, 60, 60), strict=True):
        open_rendezvous(database, row, seconds)
    assert list_rendezvous(database) == rows[1:]
    close_rendezvous(database, "1")
    assert list_rendezvous(database) == rows[2:]
    open_rendezvous(database, replace(rows[0], token=TOKEN), -1)
    open_rendezvous(database, rows[1], 60)
    with database.read() as tx:
        assert tx.execute(text("SELECT count(*) FROM rank_meetings WHERE token IN (:one, '0')"), {"one": TOKEN}).scalar() == 0
    assert TOKEN not in repr(replace(rows[0], token=TOKEN))
    assert "rank_meetings" not in (*TABLES_FOR_READERS, *RIGHTS_OF_TOOLS, *RIGHTS_OF_AGENTS)


def test_ranks_host_must_be_an_address_of_this_machine(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    assert interfaces_at(HERE)["GLOO_SOCKET_IFNAME"] == "lo"
    assert _ranks_host(settings()).found == "other hosts can join updates at 127.0.0.1 (network interface: lo)"
    with pytest.raises(ConfigError, match=r"No network interface of .* has 192\.0\.2\.1"):
        interfaces_at("192.0.2.1")
    for name in rendezvous.INTERFACES:
        monkeypatch.setenv(name, "lo")
    assert interfaces_at("192.0.2.1") == {}
    monkeypatch.setenv("AGENTRL_RANKS_HOST", "192.0.2.1")
    settings.cache_clear()
    with pytest.raises(ConfigError, match=r"Cannot listen at AGENTRL_RANKS_HOST=192\.0\.2\.1"):
        rendezvous_of(database).gather("cpu")
    assert _ranks_host(settings()).state == "fail"


def test_hosts_that_cannot_be_are_refused(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (0, 65, "two", 1.5):
        with pytest.raises(ConfigError, match=r"update\.hosts"):
            build({"update.hosts": value})
    with pytest.raises(ConfigError, match=r"The trainer trl updates on one host, and update\.hosts is 2"):
        trainers.check(build({"update.hosts": 2, "update.trainer": "trl"}))
    check_hosts(2)
    monkeypatch.delenv("AGENTRL_RANKS_HOST")
    settings.cache_clear()
    check_hosts(1)
    with pytest.raises(ConfigError, match="AGENTRL_RANKS_HOST is not set"):
        check_hosts(2)


def test_worker_check_reports_missing_ranks_host(home: Path, tmp_path: Path) -> None:
    question = asked(tmp_path, **{"update.hosts": 2})
    assert requirements.list_lacks(question, ["rollout", "tools"]) == []
    (lack,) = requirements.list_lacks(question, ["train"])
    assert lack.startswith("says: update.hosts=2 needs an address of the train worker's machine, and AGENTRL_RANKS_HOST is not")


def test_errors_of_another_host_name_it() -> None:
    error = decode_error(encode_error(ModelError("There is no model.", "Copy it.")), 1, "node7")
    assert isinstance(error, ModelError)
    assert str(error) == "On node7: There is no model. Copy it."
    reported = encode_error(ErrorOfRank(3, encode_error(ModelError("There is no model."))))
    assert reported == {"class": "ModelError", "message": "There is no model.", "hint": "", "rank": 3}


def test_devices_of_several_hosts_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The train worker must know which kind of device another host has."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert devices_of_ranks(1, "auto", "fast", True) == devices_of_ranks(1, "cuda", "fast", True) == ["cuda:0"]
    assert devices_of_ranks("auto", "auto", "fast", True) == ["cuda:0", "cuda:1"]
    assert devices_of_ranks(1, "auto", "exact", True) == devices_of_ranks(1, "cpu", "fast", True) == ["cpu"]
    assert devices_of_ranks(1, "cuda:1", "fast", True) == devices_of_ranks("auto", "cuda:1", "fast", True) == ["cuda:1"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert devices_of_ranks(1, "auto", "fast", True) == devices_of_ranks("auto", "auto", "fast", True) == ["cpu"]
    for number in (1, "auto"):
        with pytest.raises(ConfigError, match="torch can use none on this machine"):
            devices_of_ranks(number, "cuda", "fast", True)


def test_member_asks_once_if_it_is_refused(gather: Any, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run wants more devices than this host has. The host asks once, and the train worker gets the reason."""
    monkeypatch.setattr(rank_host, "POLL_SECONDS", 0.1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    future, row = gather(Rendezvous(2, "3", "fast", database, fenced := threading.Event(), threading.Event()))
    monkeypatch.setenv("AGENTRL_DEVICE", "cuda")
    settings.cache_clear()
    refusals: list[str] = []
    monkeypatch.setattr(rank_host.log, "warning", lambda text, *values: refusals.append(text % values))
    stopping = threading.Event()
    member = threading.Thread(target=rank_host.serve, args=(database, stopping, lambda: None, lambda error: None))
    member.start()
    wait_until(lambda: bool(refusals), "a refusal")
    time.sleep(0.5)
    stopping.set()
    member.join(10)
    assert len(refusals) == 2, "one in the log of each worker"
    assert all("update.devices=3 needs 3 GPUs, and torch can use none on this machine" in said for said in refusals)
    fenced.set()
    with pytest.raises(Fenced):
        future.result(10)
    assert row.token not in str(refusals)


def test_late_rank_of_another_group_cannot_change_the_store(database: Database) -> None:
    """It has the address of a group that is gone, and another group listens there now."""
    server = listen()
    url = f"tcp://{HERE}:{server.getsockname()[1]}"
    ours = _open_store(RankPlace(0, 2, 0, 1, "cpu", f"{url}/ours?fd={server.detach()}"))["store"]
    late = _open_store(RankPlace(1, 2, 0, 1, "cpu", f"{url}/gone"))["store"]
    late.set("address", "late")
    assert late.check(["address"])
    assert not ours.check(["address"])


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 400\r\n", b"[" * 4000, b"[]", b'{"rank": "1", "count": 2, "store": "tcp://x:1/y"}']
)
def test_member_ignores_an_answer_that_is_none(answer: bytes) -> None:
    with pytest.raises(EOFError):
        rank_host._decode_answer(answer + b"\n")


@pytest.fixture
def other_home(tmp_path: Path) -> Path:
    """The data folder of the other host."""
    return tmp_path / "other-home"


@pytest.fixture
def member(database: Database, forks: Nursery, other_home: Path) -> Iterator[Child]:
    """A worker `ranks`, beside the row of a dead train worker."""
    open_rendezvous(database, RendezvousRow(f"{HERE}:1", "1", "exact", TOKEN), 600)
    url = database.url.render_as_string(hide_password=False)
    environment = {**os.environ, "AGENTRL_HOME": str(other_home), "AGENTRL_DATABASE_URL": url}
    child = forks.start("bench.faults.fork_server:serve", ["ranks"], environment=environment)
    yield child
    child.kill(signal.SIGTERM)
    assert child.end() == 0, child.log.read_text()


@pytest.mark.slow
def test_two_hosts_make_the_update_of_one(
    database: Database, member: Child, other_home: Path, folder: Path, tmp_path: Path, forked_programs: None
) -> None:
    """Bit for bit that of two devices, and that of one process up to rounding. The group stays warm for a second run."""
    run = config(**{"update.hosts": 2, "model.lora_dropout": 0.3})
    with closing(RankGroup.start(["cpu"], rendezvous_of(database))) as hosts, closing(RankGroup.start(["cpu"] * 2)) as devices:
        for iteration, groups in enumerate((groups_of(3, 3), groups_of(1, 3))):
            for name, group in (("hosts", hosts), ("devices", devices)):
                trainer = ranked(group, folder, run)
                trainer.load(tmp_path / f"{name} {iteration - 1}" if iteration else None)
                trainer.update(groups, iteration)
                saved(trainer, tmp_path / f"{name} {iteration}")
            assert hashes(tmp_path / f"hosts {iteration}") == hashes(tmp_path / f"devices {iteration}")
        alone = Trainer(Policy.load(ON_HOSTS.model, str(folder), "cpu"), ON_HOSTS)
        together = ranked(hosts, folder, ON_HOSTS)
        for one in (alone, together):
            one.load(None)
            one.update(groups_of(), 0)
        assert largest_difference(saved(alone, tmp_path / "alone"), saved(together, tmp_path / "together")) < 1e-10
        url = f"file://{tmp_path}/runs/stored"
        sha256 = checkpoints.write(url, together.save)
        assert hosts.is_alive
        (rank,) = ranks_of(member)
        with pytest.raises(ConfigError, match=r"There is no folder '.*none', which has the run's checkpoint"):
            together.load(tmp_path / "none")
        assert not hosts.is_alive
        assert are_gone([rank])
    with closing(RankGroup.start(["cpu"], rendezvous_of(database))) as again:
        together = ranked(again, folder, ON_HOSTS)
        together.load(url, sha256)
        saved(together, tmp_path / "again")
        assert hashes(tmp_path / "again") == hashes(tmp_path / "together")
        assert len(list(other_home.rglob("cache/*/stored"))) == 1  # each host has fetched its own copy
        again_rank = ranks_of(member)
    assert are_gone(again_rank)


def join(host: list[str]) -> None:
    """Be the worker `ranks` of a host."""
    Host(*host).enter()
    rendezvous.SILENCE_SECONDS = 6
    serve(["ranks"])


def lead(host: list[str], folder: str, place: str) -> None:
    """Make an update as the train worker of two hosts, and another one while the test has cut off the other host."""
    Host(*host).enter()
    os.environ["AGENTRL_LEASE_SECONDS"] = "3"
    rank_group.MIN_SILENCE_SECONDS = 6.0
    out = Path(place)
    with closing(open_database(settings().database)) as db, closing(RankGroup.start(["cpu"], rendezvous_of(db))) as group:
        trainer = ranked(group, Path(folder), ON_HOSTS)
        trainer.load(None)
        trainer.update(groups_of(), 0)
        saved(trainer, out / "hosts")
        wait_until((out / "cut").exists, "a cut", 120)
        with pytest.raises(InfraError) as raised:
            trainer.update(groups_of(seed=1), 1)
    (out / "error").write_text(str(raised.value))


@pytest.mark.slow
def test_hosts_of_a_network_update_until_one_is_cut_off(
    store_home: Path, folder: Path, tmp_path: Path, forks: Nursery, forked_programs: None
) -> None:
    """Each host has its own address, and reaches the other only by the network. The checkpoint equals that of two devices."""
    with network(["leader", "member"]) as (_, (leader, member)), ExitStack() as stack:
        environment = {**os.environ, "AGENTRL_DEVICE": "cpu", "AGENTRL_RANKS_HOST": leader.address}

        def start(host: Host, function: Callable[..., None], *arguments: str) -> Child:
            target, values, log = f"{__name__}:{function.__name__}", [*asdict(host).values()], tmp_path / f"{host.name}.log"
            child = forks.start(target, values, *arguments, log=log, environment=environment)
            stack.callback(child.process.wait, 30)
            stack.callback(child.process.terminate)
            return child

        joins, leads = start(member, join), start(leader, lead, str(folder), str(tmp_path))
        wait_until(lambda: (tmp_path / "hosts").exists() or leads.exit_code() is not None, "an update", 200)
        assert leads.exit_code() is None, leads.log.read_text() + joins.log.read_text()
        member.cut_off()
        (tmp_path / "cut").touch()
        assert leads.end() == 0, leads.log.read_text()
        assert "on member, did not respond for" in (tmp_path / "error").read_text()
        wait_until(lambda: "have ended" in joins.log.read_text(), "the end of the rank that is cut off", 100)
    with closing(RankGroup.start(["cpu"] * 2)) as devices:
        together = ranked(devices, folder, ON_HOSTS)
        together.load(None)
        together.update(groups_of(), 0)
        saved(together, tmp_path / "devices")
    assert hashes(tmp_path / "hosts") == hashes(tmp_path / "devices")

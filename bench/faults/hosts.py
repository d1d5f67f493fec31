"""One run on five hosts, left alone and then disturbed: `make hosts`. Both must store the same tokens and the same weights.

The hosts are network namespaces. Two sample, one runs tools, one trains with two ranks, one submits. They share a Postgres and
a Redis, both with TLS and a password, and an S3 store for checkpoints. While the disturbed run goes on:

- a sampling host is cut off for a minute, and comes back;
- the other sampling host is lost: all its processes are killed, and start again later;
- the training host is lost in the same way;
- the tools host's clock is two minutes ahead (with libfaketime, where it is installed);
- the disk of a sampling host is full for a while;
- the training host is cut off for a minute.

With `--train-hosts 2`, the disturbed run trains on two hosts with one rank each. The second one is also lost once, and cut off
once.
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sqlalchemy import text

from agentrl.workers.agents.guardian import descendants
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.reads import run_rows
from tests.support.network_machines import BUCKET, Host, certificate, network, postgres_on, redis_on, s3_server
from tests.support.real_stack import SMALL
from tests.support.small_models import tiny_random

ROLES = {
    "sampler-1": ("rollout",),
    "sampler-2": ("rollout",),
    "tools": ("tools",),
    "trainer": ("train", "control"),
    "trainer-2": ("ranks",),
    "desk": (),
}
RANKS = {1: ("-s", "update.devices=2"), 2: ("-s", "update.devices=1", "-s", "update.hosts=2")}
"""The options of a run of two ranks, by the number of train hosts."""
TASKS = 480
"""The tasks of the run, four in an iteration. The run must go on after the last disturbance."""
CUT_SECONDS = 60.0
LOST_SECONDS = 15.0
"""How long a lost host is away, and how long a disk is full, in seconds."""
AHEAD_SECONDS = 120
LIMIT_SECONDS = 1200.0
DISK_MIB = 64
FAKETIME = "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1"

_TOKENS = """
    SELECT i.number, t.key, e.sample, s.number, k.sampled_ids, e.reward FROM steps s
    JOIN episodes e ON e.id = s.episode_id AND e.attempt = s.attempt JOIN iterations i ON i.id = e.iteration_id
    JOIN tasks t ON t.id = e.task_id JOIN step_tokens k ON k.step_id = s.id JOIN runs r ON r.id = i.run_id
    WHERE r.name = :run ORDER BY 1, 2, 3, 4"""
_WEIGHTS = """
    SELECT p.version, p.sha256 FROM policies p JOIN runs r ON r.id = p.run_id
    WHERE r.name = :run AND p.kind = 'trained' ORDER BY 1"""
_DONE = "SELECT count(*) FROM iterations i JOIN runs r ON r.id = i.run_id WHERE r.name = :run AND i.status = 'done'"
_WRONG = {
    "episodes are not done": "SELECT count(*) FROM episodes WHERE status <> 'done'",
    "episodes were consumed twice": (
        "SELECT count(*) FROM (SELECT 1 FROM consumptions GROUP BY run_id, episode_id, stage HAVING count(*) > 1) twice"
    ),
    "calls have no result": "SELECT count(*) FROM tool_calls WHERE result IS NULL AND status <> 'unobserved'",
}


@dataclass
class Site:
    """The hosts, their worker processes, and what they share."""

    folder: Path
    services: Mapping[str, str]
    hosts: Mapping[str, Host]
    model: Path
    ahead: int = 0
    _workers: "dict[str, list[subprocess.Popen[bytes]]]" = field(default_factory=dict)

    def environment(self, host: str) -> dict[str, str]:
        """What the processes of a host get. The data folders of hosts are their own."""
        own = {"AGENTRL_HOME": str(self.folder / host), "AGENTRL_LEASE_SECONDS": "10", "AGENTRL_TICK_SECONDS": "1"}
        fake = {"LD_PRELOAD": FAKETIME, "FAKETIME": f"+{self.ahead}s", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
        skewed = fake if host == "tools" and self.ahead else {}
        own["AGENTRL_RANKS_HOST"] = self.hosts[host].address
        return {**os.environ, **self.services, **own, "AGENTRL_DEVICE": "cpu", "AGENTRL_THREADS": "1", **skewed}

    def start(self, host: str) -> None:
        """Start the host's workers."""
        for role in ROLES[host]:
            command = [sys.executable, "-m", "agentrl.cli", "worker", role]
            log = self.folder / f"{host}-{role}-{time.monotonic():.0f}.log"
            worker = self.hosts[host].popen(command, self.environment(host), log)
            self._workers.setdefault(host, []).append(worker)

    def lose(self, host: str) -> None:
        """Kill all processes of the host at once."""
        workers = self._workers.pop(host, [])
        pids = {worker.pid for worker in workers}
        for pid in pids.union(*map(descendants, pids)):
            os.kill(pid, signal.SIGKILL)
        for worker in workers:
            worker.wait(10)

    def agentrl(self, *words: str) -> str:
        """Run a command on the desk to its end; return what it prints."""
        log = self.folder / "desk.log"
        command = [sys.executable, "-m", "agentrl.cli", *words]
        code = self.hosts["desk"].popen(command, self.environment("desk"), log).wait(LIMIT_SECONDS)
        if code:
            raise RuntimeError(f"agentrl {' '.join(words)} exited with {code}:\n{log.read_text()}")
        return log.read_text()

    def close(self) -> None:
        """Kill what is left."""
        for host in list(self._workers):
            self.lose(host)


@contextmanager
def site(folder: Path) -> Iterator[Site]:
    """The hosts and the services."""
    with ExitStack() as stack:
        net, hosts = stack.enter_context(network(list(ROLES)))
        tls = certificate(folder, net.address)
        s3 = stack.enter_context(s3_server(folder, net.address))
        services = {
            "AGENTRL_DATABASE_URL": stack.enter_context(postgres_on(net, tls)),
            "AGENTRL_BROKER_URL": stack.enter_context(redis_on(net, folder, tls)),
            "AGENTRL_CHECKPOINTS": f"s3://{BUCKET}/runs",
            **s3.environment,
        }
        made = Site(folder, services, {host.name: host for host in hosts}, tiny_random(folder / "model"))
        small_disk = folder / "sampler-1"
        small_disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", small_disk], check=True)
        stack.callback(lambda: subprocess.run(["umount", "-l", small_disk], check=False))
        stack.callback(made.close)
        made.agentrl("db", "upgrade")
        yield made


def played(where: Site, name: str, train_hosts: int, disturb: "Mapping[int, Callable[[], None]]") -> dict[str, Any]:
    """Play a run; return its tokens and weights. `disturb` has what to do once so many iterations are done."""
    asked = ["submit", "--dataset", "arithmetic", "--model", str(where.model), "--max-tasks", str(TASKS), "--name", name]
    exact = ("-s", "model.numerics=exact", *RANKS[train_hosts], "--seed", "0", "--detach")
    began = time.monotonic()
    where.agentrl(*asked, *SMALL, *exact)
    left, stored = dict(disturb), Database(where.services["AGENTRL_DATABASE_URL"])
    try:
        while (status := run_rows.describe_run(stored, name)["status"]) not in ("done", "failed", "cancelled"):
            if time.monotonic() - began > LIMIT_SECONDS:
                raise RuntimeError(f"{name} is not done after {LIMIT_SECONDS:.0f} s:\n{where.agentrl('events', name)}")
            with stored.read() as tx:
                done = int(tx.execute(text(_DONE), {"run": name}).scalar_one())
            for iteration in [number for number in left if number <= done]:
                left.pop(iteration)()
            time.sleep(0.2)
        with stored.read() as tx:
            tokens = [list(row) for row in tx.execute(text(_TOKENS), {"run": name})]
            weights = [list(row) for row in tx.execute(text(_WEIGHTS), {"run": name})]
            wrong = [f"{count} {what}" for what, query in _WRONG.items() if (count := tx.execute(text(query)).scalar_one())]
    finally:
        stored.close()
    digest = hashlib.sha256(repr([[*row[:4], bytes(row[4]), row[5]] for row in tokens]).encode()).hexdigest()
    return {
        "status": status,
        "turns": len(tokens),
        "tokens": digest,
        "weights": weights,
        "wrong": wrong + [f"iteration {number} was not reached" for number in left],
        "seconds": round(time.monotonic() - began, 1),
    }


def disturbances(where: Site, train_hosts: int, told: list[str]) -> "Mapping[int, Callable[[], None]]":
    """What is done to the hosts, by the number of iterations that are done then. Each says in `told` what it did."""

    def say(what: str) -> None:
        told.append(what)
        print(f"  {what}", flush=True)

    cuts: list[threading.Timer] = []

    def cut(host: str) -> None:
        say(f"{host} is cut off for {CUT_SECONDS:.0f} s")
        where.hosts[host].cut_off()
        cuts.append(threading.Timer(CUT_SECONDS, where.hosts[host].come_back))
        cuts[-1].start()

    def lose(host: str) -> None:
        for comes_back in cuts:
            comes_back.join()
        say(f"{host} is lost for {LOST_SECONDS:.0f} s")
        where.lose(host)
        time.sleep(LOST_SECONDS)
        where.start(host)

    def fill() -> None:
        disk = where.folder / "sampler-1"
        free = shutil.disk_usage(disk).free
        say(f"the disk of sampler-1 is full for {LOST_SECONDS:.0f} s ({free >> 20} MiB were free)")
        with suppress(OSError), (disk / "filler").open("wb") as filler:
            filler.write(b"x" * free)  # until there is no room: the sampler writes too
        time.sleep(LOST_SECONDS)
        (disk / "filler").unlink()

    moments = (5, partial(cut, "sampler-1")), (60, partial(lose, "sampler-2")), (75, partial(lose, "trainer"))
    of_second = [(20, partial(lose, "trainer-2")), (35, partial(cut, "trainer-2"))] if train_hosts > 1 else []
    return dict(sorted([*moments, *of_second, (90, fill), (105, partial(cut, "trainer"))]))


def main() -> None:
    """Play both runs, compare them, and exit with 1 if they differ."""
    parser = argparse.ArgumentParser(prog="python -m bench.faults.hosts", description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("build/hosts.json"))
    parser.add_argument("--train-hosts", type=int, choices=RANKS, default=1)
    asked = parser.parse_args()
    with TemporaryDirectory(prefix="arl-hosts-", dir="/tmp") as folder, site(Path(folder)) as where:
        for host in [name for name in ROLES if name != "trainer-2" or asked.train_hosts > 1]:
            where.start(host)
        calm = played(where, "calm", 1, {})
        print(f"undisturbed: {calm['status']} in {calm['seconds']} s, {calm['turns']} turns", flush=True)
        told: list[str] = []
        if Path(FAKETIME).exists():
            where.lose("tools")
            where.ahead = AHEAD_SECONDS
            where.start("tools")
            told.append(f"the clock of the tools host is {AHEAD_SECONDS} s ahead")
        struck = played(where, "struck", asked.train_hosts, disturbances(where, asked.train_hosts, told))
        print(f"disturbed: {struck['status']} in {struck['seconds']} s, {struck['turns']} turns", flush=True)
        empty = [run for run in (calm, struck) if run["status"] != "done" or not (run["turns"] and run["weights"])]
        differs = [part for part in ("status", "turns", "tokens", "weights") if calm[part] != struck[part]]
        wrong = [*calm["wrong"], *struck["wrong"], *(f"{part} differ" for part in differs)]
        wrong += ["a run is not done, or has no turns or weights"] if empty else []
        asked.json.parent.mkdir(exist_ok=True)
        result = {"calm": calm, "struck": struck, "disturbances": told, "wrong": wrong, "load": os.getloadavg()[1]}
        asked.json.write_text(json.dumps(result, indent=1))
        if wrong:
            for log in sorted(Path(folder).glob("*.log")):
                print(f"== {log.name}\n{log.read_text(errors='replace')[-3000:]}")
        print("\n".join(wrong) or "Tokens and weights are the same; nothing is lost or doubled.")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()

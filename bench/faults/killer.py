"""The killer: every 2 to 10 s a worker that has been ready for 5 s gets a kill -9, and now and then something else is struck.

Seeded, so that the order of its choices can be repeated; the moments cannot. What it did is told as `Blow`s.
"""

import os
import random
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import redis
from sqlalchemy import func, select

from agentrl.workers.stack import broker
from agentrl.workflow.errors import ServiceError
from agentrl.workflow.settings import settings
from agentrl.workflow.store import leases
from agentrl.workflow.store.connect import Database
from agentrl.workflow.tables import schema
from bench.faults import world
from bench.faults.long import at_work_folder
from bench.faults.places import Place

PAUSE_SECONDS = (2.0, 10.0)
READY_SECONDS = 5.0
STRIKE_EVERY = 10
"""After so many kills it is the turn of the next of a place's strikes."""

_PIDBOX = "agentrl._kombu.binding.celery.pidbox"
"""Celery's list of workers that take commands; who is on it takes jobs, too."""


@dataclass(frozen=True)
class Blow:
    """Who was struck, and when."""

    victim: str
    at: datetime


def follow(place: Place, database: Database, seconds: float, rng: random.Random | None) -> list[Blow]:
    """Waits for the end of the run, with `rng` striking until then; returns the blows.

    Raises:
        AssertionError: the run is not over after `seconds`, or ends otherwise than done.
    """
    blows: list[Blow] = []
    since: dict[int, float] = {}
    deadline = time.monotonic() + seconds
    due = time.monotonic() + rng.uniform(*PAUSE_SECONDS) if rng else deadline
    while (status := status_of(database)) in ("planned", "running", "away"):
        now = time.monotonic()
        assert now < deadline, f"the run is {status} after {seconds:g} s and {len(blows)} blows"
        ready = ready_pids(database)
        since = {pid: since.get(pid, now) for pid in place.workers().values() if pid in ready}
        if rng and now >= due and _strike(place, rng, since, blows):
            due = time.monotonic() + rng.uniform(*PAUSE_SECONDS)
        time.sleep(0.2)
    assert status == "done", f"the run is {status}"
    return blows


def _strike(place: Place, rng: random.Random, since: dict[int, float], blows: list[Blow]) -> bool:
    """One blow; False where nobody has been ready for long enough."""
    struck = [blow.victim for blow in blows]
    kills = [victim for victim in struck if victim not in place.strikes]
    for number, (name, strike) in enumerate(place.strikes.items(), start=1):
        if name not in struck and len(kills) >= number * STRIKE_EVERY:
            return _told(blows, name, strike)
    able = {role: pid for role, pid in place.workers().items() if time.monotonic() - since.get(pid, 1e99) >= READY_SECONDS}
    if not able:
        return False
    victim = rng.choice(sorted(able))
    return _told(blows, victim, lambda: os.kill(able[victim], signal.SIGKILL))


def _told(blows: list[Blow], victim: str, strike: Callable[[], None]) -> bool:
    blows.append(Blow(victim, datetime.now(UTC)))
    print(f"{blows[-1].at:%H:%M:%S} {victim}", flush=True)
    strike()
    return True


def ready_pids(database: Database) -> set[int]:
    """Who takes calls, who works with a model in memory, and the control loop in office; nobody while one cannot ask.

    A sampler or trainer that has only just been started takes jobs as well, but must load its model first: killed again and
    again before it has, on a busy machine, it does nothing ever, and its rows are rightly given up as poison.
    """
    try:
        with broker.connect_redis(settings()) as connection:
            members = connection.smembers(_PIDBOX)
        holder = leases.service_holder(database, "control")
    except (redis.RedisError, OSError, ServiceError):
        return set()
    tools = [re.match(rb"tools-(\d+)@", member.rpartition(b"\x16")[2]) for member in members]
    models = {int(file.name) for file in at_work_folder().iterdir()}
    return {int(match[1]) for match in tools if match} | models | ({int(holder.rpartition(":")[2])} if holder else set())


def status_of(database: Database) -> str:
    """The run's status; `away` while the database does not answer."""
    try:
        return str(
            database.ask(
                lambda tx: tx.execute(select(schema.runs.c.status).where(schema.runs.c.name == world.RUN)).scalar_one()
            )
        )
    except ServiceError:
        return "away"


def calls_run(database: Database) -> int:
    """Tool calls that a tools worker began, each counted once."""
    begun = select(func.count()).where(schema.tool_calls.c.starts > 0)
    return int(database.ask(lambda tx: tx.execute(begun).scalar_one()))


def recoveries(blows: Sequence[Blow], database: Database) -> list[tuple[str, float, float]]:
    """Per blow the victim, the seconds to the first progress of any kind, and to the first of what the victim does.

    Progress is a step sampled, a call answered, or an iteration trained, by the time in its row. A control loop, a service
    and a supervisor do neither: of them the first sampled step after it counts. Blows after which nothing came are left out.
    """
    columns = {
        "rollout": schema.steps.c.sampled_at,
        "tools": schema.tool_calls.c.finished_at,
        "train": schema.iterations.c.finished_at,
    }
    moments = {
        role: sorted(database.ask(lambda tx, column=column: list(tx.execute(select(column)).scalars())))
        for role, column in columns.items()
    }
    every = sorted(moment for found in moments.values() for moment in found)
    rows = []
    for blow in blows:
        mine = moments.get(blow.victim, moments["rollout"])
        waited = [
            next(((moment - blow.at).total_seconds() for moment in found if moment > blow.at), None) for found in (every, mine)
        ]
        if waited[0] is not None and waited[1] is not None:
            rows.append((blow.victim, waited[0], waited[1]))
    return rows

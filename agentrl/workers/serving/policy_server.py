"""`agentrl serve`: a policy behind the endpoint, in one process, for any client. Nothing is trained.

The endpoint calls the sampling server of the same process directly, without HTTP. Another thread drives the episodes, whose
rows are like those of any other episodes.
"""

import asyncio
import os
import shutil
import signal
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from logging import getLogger
from pathlib import Path
from tempfile import gettempdir, mkdtemp

from agentrl.workers.jobs.sampling_server import SamplingServer
from agentrl.workers.jobs.served_episodes import ServedEpisodes
from agentrl.workers.requests.serve_request import Serving
from agentrl.workers.serving.attempt_keys import AttemptKeys
from agentrl.workers.serving.endpoint import make_server, raise_file_limit, serve
from agentrl.workers.serving.endpoint_app import Endpoint, EndpointLimits
from agentrl.workers.serving.forwarding import Samplers
from agentrl.workers.serving.served_clients import ServedClients
from agentrl.workers.stack.process import base_hashes
from agentrl.workflow.experiment import Experiment
from agentrl.workflow.inference.open_policy import OpenPolicy
from agentrl.workflow.settings import settings
from agentrl.workflow.store import endpoint_reads, served_runs, train_commits
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.migrate import open_database
from agentrl.workflow.store.planning import Submission
from agentrl.workflow.store.served_runs import ServedRun

log = getLogger("agentrl.serve")
UNRECORDED = "agentrl-serve-"
"""The prefix of the names of temporary folders for unrecorded serving. The pid of the process follows."""
WAIT_SECONDS = 30.0
"""The longest wait of a request for the holder of its episode, in seconds, if `AGENTRL_ENDPOINT_WAIT_SECONDS` is not shorter.
This process itself is the holder, but after the machine slept, the process needs a moment to renew its lease.
"""


@dataclass(frozen=True, slots=True)
class Served:
    """The numbers of served episodes and requests. `was_ended` is True if another process ended the run, for example `agentrl
    cancel`.
    """

    episodes: int
    calls: int
    was_ended: bool


def serve_policy(
    db: Database, run: ServedRun, experiment: Experiment, policy: OpenPolicy, listening: socket.socket, how: Serving
) -> Served:
    """Serve until SIGTERM, SIGINT or the end of the run. All episodes are ended before this function returns.

    Raises:
        ServiceError: the database does not answer, or the address cannot be used.
        ModelError: the run's policy has another base model.
        DeviceLost: the GPU failed.
    """
    train_commits.confirm_base(db, run.id, policy.policy.base_hash, base_hashes(policy.policy))
    sampler = SamplingServer("this process", lambda: db)
    episodes = ServedEpisodes(db, run, experiment, policy, sampler, how.forgets, how.has_upstream)
    assert experiment.config.agent is not None
    max_calls = experiment.config.agent.max_calls
    clients = ServedClients(episodes, run.name, run.created, how.key, how.idle_seconds, max_calls, how.origins)
    raise_file_limit()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    episodes.start()
    try:
        asyncio.run(_serve(db, clients, sampler, episodes, listening))
    except KeyboardInterrupt:
        pass
    finally:
        episodes.close()
    if episodes.failure is not None:
        raise episodes.failure
    return Served(episodes.count, clients.calls, episodes.lost.is_set())


async def _serve(
    db: Database, clients: ServedClients, sampler: SamplingServer, episodes: ServedEpisodes, listening: socket.socket
) -> None:
    max_calls, wait_seconds = settings().endpoint_calls, min(WAIT_SECONDS, settings().endpoint_wait_seconds)
    limits = EndpointLimits(open_calls=max_calls, open_per_attempt=max_calls, wait_seconds=wait_seconds)
    app = Endpoint(AttemptKeys(partial(endpoint_reads.find_places, db)), limits, clients, Samplers(sampler.answer))
    server = make_server(app)

    async def watch() -> None:
        while not episodes.lost.is_set():
            await asyncio.sleep(0.5)
        server.should_exit = True

    watching = asyncio.create_task(watch())
    try:
        await serve(app, listening, server)
    finally:
        watching.cancel()


@contextmanager
def unrecorded_database() -> Iterator[Database]:
    """Yield a temporary database that is deleted at the end. The database is in memory if the machine has a folder whose files
    are in memory.

    A killed process leaves its folder behind; the next call deletes that folder.
    """
    parent = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(gettempdir())
    for left in parent.glob(f"{UNRECORDED}*"):
        number = left.name.removeprefix(UNRECORDED).partition("-")[0]
        if number.isdecimal() and not Path(f"/proc/{number}").exists():
            shutil.rmtree(left, ignore_errors=True)
    folder = mkdtemp(prefix=f"{UNRECORDED}{os.getpid()}-", dir=parent)
    try:
        with closing(open_database(f"sqlite:///{folder}/agentrl.db")) as database:
            yield database
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def open_run(db: Database, submission: Submission, worker: str) -> ServedRun:
    """Write the rows of the run. Before that, end the runs of lost servers, and delete episodes whose retention time is over.

    Raises:
        ConflictError: the run's name is in use.
        ServiceError: the database does not answer.
    """
    lease = settings().lease_seconds
    served_runs.end_lost_runs(db, lease)
    served_runs.forget_old(db)
    return served_runs.open_run(db, submission, worker, lease)

"""The control loop. Every few seconds, it reads the rows and sends the messages that are missing. A lease ensures that only one
control loop is active.

The loop keeps no state in memory. So if the loop is killed, another process can continue its work. It handles lost messages,
lost workers, a lost Redis and a lost control loop in the same way.
"""

import time
from logging import getLogger
from math import inf

from agentrl.workers.stack.dispatch import dispatch, send_rollouts, send_train
from agentrl.workers.stack.machine import MachineRecorder
from agentrl.workers.stack.notify import Notifier
from agentrl.workers.stack.process import database, stopping, worker_name
from agentrl.workers.stack.readiness import readiness
from agentrl.workers.stack.report_processes import ReportProcesses
from agentrl.workflow.control.scheduler import Dispatch, SendRollouts, SendTrain, plan
from agentrl.workflow.errors import ServiceError
from agentrl.workflow.runtime.faults import faultpoint
from agentrl.workflow.settings import settings
from agentrl.workflow.store import control_reads, leases

log = getLogger("agentrl.control")

PASS_SECONDS = 0.1
"""The time after which a pass of the loop sends no further message. The next pass follows at once, and renews the lease first.
So another control loop does not take over while many messages are sent.
"""


def run() -> None:
    """Call `tick` every few seconds, and at once if messages are left, until the process is asked to stop."""
    processes, notifier, recorder = ReportProcesses(), Notifier(settings()), MachineRecorder()
    recorder.start()
    try:
        while not stopping.is_set():
            left: int | None = 0
            try:
                left = tick()
                if left is not None:
                    processes.tend(database())
                    notifier.tend(database())
                readiness().confirm()
            except ServiceError as error:
                readiness().lose(error.message)
            except Exception:
                log.exception("this tick failed; the next one reads the rows again")
            stopping.wait(0 if left else settings().tick_seconds)
    finally:
        processes.stop(database)
        recorder.join()


def tick() -> int | None:
    """Send missing messages for PASS_SECONDS. Return the number of those that are left; None if another control loop holds the
    lease.
    """
    where, db = settings(), database()
    if not leases.take_service_lease(db, "control", worker_name(), 3 * where.tick_seconds + 2):
        return None
    return send_missing(PASS_SECONDS)


def send_missing(seconds: float = inf) -> int:
    """Send the missing messages, at least one; begin no other after so many seconds. Return how many are left. Other processes
    may send the same messages too: a duplicate causes no harm.
    """
    db = database()
    actions = plan(control_reads.snapshot(db, settings().lease_seconds))
    end = time.monotonic() + seconds
    for sent, action in enumerate(actions):
        if sent and time.monotonic() > end:
            return len(actions) - sent
        log.info("sending %s", action)
        faultpoint("control.before")
        match action:
            case Dispatch(iteration, _):
                dispatch(db, iteration)
            case SendRollouts(groups):
                send_rollouts(db, groups)
            case SendTrain(iteration):
                send_train(db, iteration)
        faultpoint("control.after")
    return 0

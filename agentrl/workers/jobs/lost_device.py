"""Ends a process whose device failed. All later calls of such a process fail, but a new process can use the device again."""

import os
import threading
from logging import getLogger

from agentrl.workers.stack import broker
from agentrl.workers.stack.process import database, heartbeat, shared, threaded, worker_name
from agentrl.workflow.errors import DeviceLost
from agentrl.workflow.models.device_errors import as_device_lost
from agentrl.workflow.settings import settings
from agentrl.workflow.store.leases import hand_back_claims

log = getLogger("agentrl.device")
_ending = threading.Lock()
"""The lock by which only one thread ends the process. It is never released: other jobs of the process meet the same error and
must wait for the end.
"""


def end_if_device_lost(error: Exception, role: str) -> DeviceLost | None:
    """End this process if the error means that its device is lost; return None for any other error.

    Before the end, all claims of the process are released, so other workers continue from the last commit. The supervisor or
    docker starts a new process.

    A process that is the whole stack is not ended, because nothing would start it again. This is the user's own process
    (strategy "threads") or an embedded stack without a server. In such a process, the error is returned, and the caller fails
    the run with it.
    """
    lost = as_device_lost(error)
    if lost is None or threaded.is_set() or broker.is_in_memory(settings()):
        return lost
    _ending.acquire()
    log.error("%s Exit code %d.", lost.message, lost.exit_code)
    try:
        heartbeat().stop()
        role = "rollout,train" if shared.is_set() else role
        hand_back_claims(database(), worker_name(), role, lost.reason)
    except Exception as away:  # noqa: BLE001 - the leases then end by themselves
        log.warning("the claims could not be released: %s", away)
        os._exit(1)  # the supervisor then records the loss
    os._exit(lost.exit_code)  # at once: destructors of tensors would fail on the device too

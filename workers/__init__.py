"""The processes: Celery app and queues, the control loop, the supervisor of the embedded stack.

A job is: load, call the library, store. The database owns the truth; a message is only a wake-up.
"""

if __name__ != "agentrl.workers":
    raise ImportError("Import agentrl.workers: each module has one name.")

"""The processes: Celery app and queues, the control loop, the supervisor of the embedded stack.

A job is: load, call the library, store. The database owns the truth; a message is only a wake-up.
"""

if __name__ == "workers":  # imported through the link at the top of a checkout, which would load every module a second time
    raise ImportError("Import agentrl.workers instead.")

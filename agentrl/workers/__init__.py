"""The processes: Celery app and queues, the control loop, the supervisor of the embedded stack.

A job loads rows, calls the library and stores the result. The rows in the database decide what happens next; a message only
wakes a worker.
"""

if __name__ == "workers":  # imported through the link at the top of a checkout, which would load every module a second time
    raise ImportError("Import agentrl.workers instead.")

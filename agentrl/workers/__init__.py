"""The processes: Celery app and queues, the control loop, the supervisor of the embedded stack.

A job is: load, call the library, store. The database owns the truth; a message is only a wake-up.
"""

from agentrl.checkout_links import alias

if __name__ == "workers":  # imported through the link at the top of a checkout
    alias(__name__)

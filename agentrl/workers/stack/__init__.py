"""The processes of the stack: Celery and its broker, the control loop, and the supervisor of the embedded stack."""

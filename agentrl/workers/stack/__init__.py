"""The stack's processes: Celery and its broker, the control loop, the supervisor of the embedded stack."""

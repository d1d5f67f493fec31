"""Decides from the database rows which Celery messages to send next."""

"""Decides from the database rows which messages to send next."""

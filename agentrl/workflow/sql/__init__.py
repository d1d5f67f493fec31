"""Untrusted SQL on read-only databases."""

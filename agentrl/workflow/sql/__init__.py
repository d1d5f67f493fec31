"""Untrusted SQL on databases that can only be read."""

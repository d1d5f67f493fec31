"""Requests of commands: each is checked and prepared before anything is written."""

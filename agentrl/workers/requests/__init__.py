"""Requests of commands, checked and prepared before anything is written."""

"""Decides the next messages from the rows alone."""

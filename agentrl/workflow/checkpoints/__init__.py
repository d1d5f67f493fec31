"""Checkpoints: folders that are whole or absent, local copies of remote ones, links to epochs, garbage collection."""

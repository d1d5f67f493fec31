"""Checkpoints: atomically written folders, local copies of remote ones, links to epochs, garbage collection."""

"""Checkpoints: folders that are whole or absent, copies of remote ones, links, what may be removed."""

"""Sampling: the engines themselves, and a policy to query in this process."""

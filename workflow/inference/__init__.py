"""Sampling: what an engine is, the engines themselves, and a policy to ask in this process."""

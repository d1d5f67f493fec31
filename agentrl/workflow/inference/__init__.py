"""Sampling: the engines, and a policy that can be queried in this process."""

"""Sampling: the engines that sample turns, and a policy that can be queried in this process."""

"""Utilities of one process and its children: time limits, waits, fault points, lazy singletons, warm processes."""

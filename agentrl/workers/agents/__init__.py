"""The agents worker. It runs the agent of each episode in a separate process, enforces its limits, and ends it with all of its
child processes.
"""

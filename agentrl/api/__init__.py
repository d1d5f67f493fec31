"""The Python API of `import agentrl`: trainers, stores, runs, episodes and policies. `agentrl.__all__` lists it."""

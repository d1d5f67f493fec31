"""The agentrl library: values, plug-ins, engine, store, algorithms. No process, no terminal, no web in here."""

import os

if __name__ != "agentrl.workflow":
    raise ImportError("Import agentrl.workflow: each module has one name.")

# Read when torch is loaded: threads that wait give their core away instead of spinning. With several processes on few cores
# (a sampler, tools, a database) spinning made an optimizer step three times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

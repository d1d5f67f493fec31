"""The agentrl library: values, plug-ins, engine, store, algorithms. No process, no terminal, no web in here."""

import os

__version__ = "0.1.0"

# Read when torch is loaded: threads that wait give their core away instead of spinning. With several processes on few cores
# (a sampler, tools, a database) spinning made an optimizer step three times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

"""The agentrl library: data types, plug-ins, sampling engines, the store and the algorithms.

The worker processes, the command line and the web page are in other packages.
"""

import os

if __name__ == "workflow":  # imported through the link at the top of a checkout, which would load every module a second time
    raise ImportError("Import agentrl.workflow instead.")

# Read when torch is loaded: threads that wait give their core away instead of spinning. With several processes on few cores
# (a sampler, tools, a database) spinning made an optimizer step three times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

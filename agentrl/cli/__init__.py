"""The commands: `agentrl submit`, `watch`, `replay` and the rest. A command parses, calls one function, prints.

Heavy modules are imported only when a command needs them, so that `--help` answers at once; only `sft`, `dpo` and `chat`
import torch.
"""

if __name__ == "cli":  # imported through the link at the top of a checkout, which would load every module a second time
    raise ImportError("Import agentrl.cli instead.")

"""The commands: `agentrl submit`, `watch`, `replay` and the others. A command parses its options, calls one function and prints
the result.

Heavy modules are imported only when a command needs them, so `--help` is fast. Only `sft`, `dpo` and `chat` import torch.
"""

if __name__ == "cli":  # imported through the link at the top of a checkout, which would load every module a second time
    raise ImportError("Import agentrl.cli instead.")

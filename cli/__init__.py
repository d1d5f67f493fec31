"""The commands: `agentrl submit`, `watch`, `replay` and the rest. A command parses, calls one function, prints.

Nothing heavy is imported before a command needs it, so that `--help` answers at once; torch comes only with `sft`, `dpo`
and `chat`.
"""

if __name__ != "agentrl.cli":
    raise ImportError("Import agentrl.cli: each module has one name.")

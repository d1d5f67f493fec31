"""The command started inside: an interpreter that reads our files from a descriptor, so that no host path need be visible.

The files that run inside (`runner`, `zygote`, `cells`, `exact_json`) import each other by their own names; the few lines of
`BOOT` make modules of their sources.
"""

from functools import lru_cache
from pathlib import Path

BOOT = """\
import sys, types
sys.path[:] = [path for path in sys.path if path]
for name in ("agentrl", "agentrl.workflow", "agentrl.workflow.sandbox"):
    sys.modules[name] = types.ModuleType(name)
for part in {parts}.split("\\0"):
    short, _, text = part.partition("\\n")
    name = "agentrl.workflow.sandbox." + short
    module = sys.modules[name] = types.ModuleType(name)
    setattr(sys.modules["agentrl.workflow.sandbox"], short, module)
    exec(compile(text, "<" + short + ">", "exec"), module.__dict__)
module.main({arguments})
"""
"""The last of the files is the one whose `main` runs."""

ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONUTF8": "1",
    "PYTHONSAFEPATH": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",  # a set prints the same when cells are run again
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",  # one stack per core would exceed the limit on address space
}
"""The whole environment of a program inside."""

FLAGS = ("-s", "-B")
"""Together with `ENVIRONMENT` as isolated as -I, which would ignore the hash seed."""


@lru_cache(maxsize=8)
def sources(*names: str) -> bytes:
    """Return the files of those names, in the form that `BOOT` reads."""
    folder = Path(__file__).parent
    return b"\0".join(name.encode() + b"\n" + (folder / f"{name}.py").read_bytes() for name in names)


def command(python: str, source: int, *arguments: int) -> list[str]:
    """Return the command line that runs the `main` of the last of the sources on the descriptor `source`."""
    numbers = ", ".join(str(argument) for argument in arguments)
    parts = f'open({source}, encoding="utf-8").read()'
    return [python, *FLAGS, "-c", BOOT.format(parts=parts, arguments=numbers)]


def standalone(*names: str) -> str:
    """Return one script made of those files, for an interpreter that gets nothing else."""
    return BOOT.format(parts=repr(sources(*names).decode()), arguments="")

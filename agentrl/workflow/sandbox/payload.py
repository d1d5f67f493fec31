"""The command that starts an interpreter inside a sandbox. The interpreter reads agentrl's source files from a descriptor, so
no folder of agentrl needs to be visible inside.

The files that run inside (`runner`, `zygote`, `cells`, `exact_json`) import each other by their normal names. The few lines of
`BOOT` create modules from their sources.
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
"""The program that creates modules from the sources, and then calls the `main` of the last one."""

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
"""All environment variables of a program inside."""

FLAGS = ("-s", "-B")
"""The interpreter's flags. Together with `ENVIRONMENT` they isolate the interpreter like -I. The flag -I itself cannot be used,
because it would ignore the fixed hash seed.
"""


@lru_cache(maxsize=8)
def sources(*names: str) -> bytes:
    """Return the source files with these names in the format that `BOOT` reads."""
    folder = Path(__file__).parent
    return b"\0".join(name.encode() + b"\n" + (folder / f"{name}.py").read_bytes() for name in names)


def command(python: str, source: int, *arguments: int) -> list[str]:
    """Return the interpreter's command line. The interpreter reads sources from the descriptor `source`, and calls the `main`
    of the last one.
    """
    numbers = ", ".join(str(argument) for argument in arguments)
    parts = f'open({source}, encoding="utf-8").read()'
    return [python, *FLAGS, "-c", BOOT.format(parts=parts, arguments=numbers)]


def standalone(*names: str) -> str:
    """Return these source files as one script, for an interpreter that cannot get them in another way."""
    return BOOT.format(parts=repr(sources(*names).decode()), arguments="")

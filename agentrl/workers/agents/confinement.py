"""The Landlock sandbox of an agent's program, for containers in which bubblewrap cannot run.

The program can read /usr, its interpreter and the folder of its script, except the files that are hidden from agents. It can
write only to its own folder, which is also its HOME. It can connect only to the endpoint's TCP port, at any address. It cannot
signal, trace or read processes outside. The program has no private /tmp, /proc or network. So the container must not reach
another server that listens at the same port number.
"""

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from agentrl.workflow.sandbox import keeper


def spec(folder: Path, readable: Sequence[str], hidden: AbstractSet[str], port: int) -> dict[str, Any]:
    """Return what a program may reach, as JSON values.

    Args:
        folder: the folder to which the program can write.
        readable: the files and folders that the program can read.
        hidden: the files and folders in `readable` that the program cannot read.
        port: the endpoint's port.

    Raises:
        SandboxUnavailable: the kernel is too old, or libseccomp is missing.
    """
    from agentrl.workflow.sandbox import landlock

    landlock.check()
    rights = [
        (str(path), right) for name in landlock.readable_paths(tuple(readable)) for path, right in _read(Path(name), hidden)
    ]
    rights += [(path, keeper.READ_FILE | keeper.WRITE_FILE) for path in landlock.DEVICES if Path(path).exists()]
    return {"rights": [*rights, (str(folder), keeper.WRITE)], "port": port, "filters": landlock.agent_filters()}


def enter(spec: dict[str, Any]) -> None:
    """Confine this process to what `spec` says."""
    rules = [(str(path), int(right)) for path, right in spec["rights"]]
    keeper.enter_domain(keeper.EVERY_FILE_RIGHT, keeper.EVERY_TCP_RIGHT, rules, spec["port"])
    keeper.enter_filters(spec["filters"])


def _read(path: Path, hidden: AbstractSet[str]) -> Iterator[tuple[Path, int]]:
    """Yield the paths below a readable one with the rights on each. Folders with hidden files are listed only."""
    real = str(path.resolve())
    if any(f"{real}/".startswith(f"{name}/") for name in hidden):
        return
    if not any(name.startswith(f"{real}/") for name in hidden):
        yield path, keeper.READ
        return
    yield path, keeper.READ_DIR
    for entry in path.iterdir():
        yield from _read(entry, hidden)

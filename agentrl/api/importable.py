"""Import paths of objects, `package.module:name`, by which workers import them.

What another process can import has such a name already. What was written in a notebook or a script is written once more, into
a module in the data folder whose name is its content's hash, so that a run can be resumed and scored again long after.
"""

import hashlib
import inspect
import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from agentrl.api.atomic_file import write_once
from agentrl.api.notebook_source import MAIN, Captured, Importable, guarded_script
from agentrl.workflow.errors import ConfigError
from agentrl.workflow.plugins import CODE_PREFIX, HERE, code_folder, lend
from agentrl.workflow.settings import Settings

_here: dict[str, Any] = {}
"""What lives in this process alone, by its path."""
FORBIDDEN = "Put it into a module on the workers' PYTHONPATH, and pass 'module:name'."


def path_of(value: Any, name: str, where: Settings, is_local: bool) -> str:
    """Return the path from which workers can import the object; a text is returned unchanged.

    Args:
        value: a function, a class, or an object of either.
        name: what it is called in a module that is written for it, where it has no name of its own.
        where: the settings with the data folder.
        is_local: whether the workers read this machine's files.

    Raises:
        ConfigError: they would not find it, and what to do.
    """
    if isinstance(value, str):
        return value
    _refuse_constant(value, name)
    found = _found_again(value)
    importable = Importable((*_places(), str(Path.cwd())))
    if found is not None and found[0] != MAIN:
        if importable(found[0]):
            return ":".join(found)
        if is_local:
            said = f"{found[1]!r} is of the module {found[0]!r}, which workers cannot import."
            raise ConfigError(said, "Add its folder to PYTHONPATH, or start Python in its folder.")
    if not is_local:
        raise ConfigError(f"Workers on other machines cannot import {_called(value)!r}.", FORBIDDEN)
    made = Captured(importable)
    if not inspect.isfunction(value) and not inspect.isclass(value):
        made.add_instance(name, value)
        return f"{_written(made.text, where)}:{name}"
    try:
        made.add(value.__name__, value)
        text = made.text
    except ConfigError:
        whole = guarded_script(value)
        if whole is None:
            raise
        text = whole
    return f"{_written(text, where)}:{value.__name__}"


def path_here(value: Any, name: str, where: Settings) -> str:
    """Return a path that gives this object in this process, and its source in other processes, if the source is available.

    Args:
        value, name, where: as in `path_of`.
    """
    if isinstance(value, str):
        return value
    _refuse_constant(value, name)
    try:
        path = path_of(value, name, where, is_local=True)
    except ConfigError:
        path = next((known for known, kept in _here.items() if kept is value), f"{HERE}:{name}_{len(_here)}")
        _here[path] = value
    if path.startswith((CODE_PREFIX, HERE)):
        lend(path, value)
    return path


def _found_again(value: Any) -> tuple[str, str] | None:
    """The module and the name there under which the object stands, be it a function, a class or a value."""
    module = getattr(value, "__module__", "")
    named = getattr(value, "__qualname__", "")
    if named and getattr(sys.modules.get(module), named, None) is value:
        return module, named
    if named:
        return None
    for other in list(sys.modules.values()):
        name = getattr(other, "__name__", MAIN)
        if name == MAIN or not isinstance(other, type(sys)):
            continue
        for key, held in list(vars(other).items()):
            if held is value:
                return name, key
    return None


def _refuse_constant(value: Any, name: str) -> None:
    """Refuses a number, a list or the like, which stands in many modules and does nothing."""
    if type(value).__module__ == "builtins" and not callable(value):
        what = {"solve": "agent"}.get(name, name.partition("_")[0])
        said = f"{value!r:.60} is no {what}."
        raise ConfigError(said, "Pass a function, a class or an object of one, a name, or a path: 'module:name'.")


def _called(value: Any) -> str:
    return getattr(value, "__name__", type(value).__name__)


def _written(text: str, where: Settings) -> str:
    """The name of the module with that text."""
    name = f"{CODE_PREFIX}{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    write_once(code_folder(where) / f"{name}.py", text)
    return name


@cache
def _places() -> tuple[str, ...]:
    """The folders in which a worker that is started here finds modules, beside the one in which it is started."""
    said = subprocess.run(
        [sys.executable, "-P", "-c", "import json, sys; print(json.dumps(sys.path))"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return tuple(str(Path(place).absolute()) for place in json.loads(said.stdout) if place)

"""find(kind, name): a plug-in is one file that defines the object it is named after.

`find("rewards", "numeric_answer")` imports `workflow/rewards/numeric_answer.py` and returns its `numeric_answer`;
`package.module:name` reaches a user's own code. The file name is the registry.

A user edits that code while workers run. `read_anew()`, which every job begins with, looks whether a file of it has changed and
imports it as it is now, or goes on with the older code where that fails; what holds an object of the older code keeps it.
"""

import importlib
import pkgutil
import sys
import threading
import traceback
from dataclasses import dataclass, field
from logging import getLogger
from pathlib import Path
from types import ModuleType
from typing import Any

from workflow.errors import ConfigError, did_you_mean

KINDS = ("datasets", "tools", "rewards", "envs", "engines", "algorithms")
_CLASSES = {"datasets": "Dataset", "tools": "Tool", "envs": "Env", "engines": "Backend", "algorithms": "Algorithm"}
_PATH_HINT = "Write package.module:name, importable from here."
_OURS = ("workflow", "workers", "cli", "migrations")
_NEVER = (*_OURS, "__main__")
_INSTALLED = ("site-packages", "dist-packages")
log = getLogger("agentrl.plugins")

Stamp = tuple[int, int]
"""When a file was written, in ns, and its size."""

_lock = threading.RLock()
_user_code: dict[Path, "_Code"] = {}
"""By the folder that it was imported from."""


@dataclass
class _Code:
    """A user's code: the modules that were asked for, and the files that they are made of, as they were when imported."""

    asked: set[str] = field(default_factory=set)
    files: dict[Path, Stamp | None] = field(default_factory=dict)


def names(kind: str) -> list[str]:
    """The names that `find(kind, ...)` knows, sorted."""
    package = importlib.import_module(f"workflow.{kind}")
    return sorted(module.name for module in pkgutil.iter_modules(package.__path__))


def find(kind: str, name: str) -> Any:
    """The plug-in of that kind and name.

    Raises:
        ConfigError: no such plug-in, its file cannot be imported, or what it defines is of another kind.
    """
    if ":" in name:
        found = _user_object(kind, name)
    elif kind in KINDS:
        found = _own_object(kind, name)
    else:
        raise ConfigError(f"{name!r} ({kind}) is no path to an object.", "Write package.module:Class.")
    _check(kind, name, found)
    return found


def _own_object(kind: str, name: str) -> Any:
    # What is loaded already is asked for with each episode; to list the folder takes ten times as long.
    if f"workflow.{kind}.{name}" not in sys.modules and name not in (known := names(kind)):
        raise ConfigError(f"No {kind.removesuffix('s')} is called {name!r}.", did_you_mean(name, known))
    module = _imported(kind, name, f"workflow.{kind}.{name}")
    if name not in vars(module):
        raise ConfigError(f"{name!r} ({kind}): {module.__file__} defines no {name!r}.", "Name the object after its file.")
    return vars(module)[name]


def _user_object(kind: str, path: str) -> Any:
    module_name, _, attribute = path.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # last: a person's `workers` folder is not ours
    if not all(part.isidentifier() for part in (*module_name.split("."), attribute)):
        raise ConfigError(f"{path!r} ({kind}) leads to no object: it is no path of names.", _PATH_HINT)
    with _lock:
        module = sys.modules.get(module_name)
        if module is None:
            importlib.invalidate_caches()  # its file, or its folder, may be younger than this process
            module = _imported(kind, path, module_name)
        _remember(module_name, module)
    try:
        return getattr(module, attribute)
    except AttributeError as error:
        raise ConfigError(f"{path!r} ({kind}) leads to no object: {error}.", _PATH_HINT) from error


def read_anew() -> None:
    """Imports users' code again of which a file has changed since it was imported, with all that came from the same folder."""
    with _lock:
        for folder, code in _user_code.items():
            changed = [str(file) for file, stamp in code.files.items() if _stamp(file) != stamp]
            if changed:
                log.info("%s: read anew", ", ".join(changed))
                code.files = {file: _stamp(file) for file in code.files}
                _import_again(folder, code)


def _import_again(folder: Path, code: _Code) -> None:
    before = {name: sys.modules.pop(name) for name, _ in _modules_below(folder)}
    importlib.invalidate_caches()
    try:
        for name in sorted(code.asked):
            importlib.import_module(name)
    except (Exception, SystemExit):  # half a file, written this moment: who asks for it anew is told by its own process
        log.exception("the older code goes on")
        for name, _ in _modules_below(folder):
            del sys.modules[name]
        sys.modules.update(before)
    _note_files(folder, code)


def _remember(name: str, module: ModuleType) -> None:
    """Notes the user's module, and what it has imported from beside it."""
    if module.__file__ is None or name.partition(".")[0] in (*_NEVER, *sys.stdlib_module_names):
        return
    file = Path(module.__file__)
    folder = file.parents[name.count(".") + (file.name == "__init__.py")]
    code = _user_code.setdefault(folder, _Code())
    if name not in code.asked and not set(folder.parts) & set(_INSTALLED):
        code.asked.add(name)
        _note_files(folder, code)


def _note_files(folder: Path, code: _Code) -> None:
    code.files |= {file: _stamp(file) for _, file in _modules_below(folder) if file not in code.files}


def _modules_below(folder: Path) -> list[tuple[str, Path]]:
    files = [(name, getattr(module, "__file__", None)) for name, module in list(sys.modules.items())]
    paths = [(name, Path(file)) for name, file in files if isinstance(file, str) and name.partition(".")[0] not in _NEVER]
    return [(name, path) for name, path in paths if folder in path.parents and not set(path.parts) & set(_INSTALLED)]


def _stamp(file: Path) -> Stamp | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _imported(kind: str, name: str, module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            raise ConfigError(f"{name!r} ({kind}) leads to no object: {error}.", _PATH_HINT) from error
        raise _broken(kind, name, error) from error
    except (Exception, SystemExit) as error:
        raise _broken(kind, name, error) from error


def _broken(kind: str, name: str, error: BaseException) -> ConfigError:
    said = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}".removesuffix(": ")
    return ConfigError(f"{name!r} ({kind}) cannot be imported: {_where(error)}{said}.", "Correct the file.")


def _where(error: BaseException) -> str:
    """`FILE:LINE: ` of the first line outside of the import machinery; a file with a wrong syntax has none that ran."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: "
    machinery = (__file__, importlib.__file__)
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename not in machinery and not frame.filename.startswith("<frozen"):
            return f"{frame.filename}:{frame.lineno}: "
    return ""


def _check(kind: str, name: str, found: Any) -> None:
    if kind not in _CLASSES:
        fits, wanted = callable(found), "nothing that can be called"
    else:
        wanted = f"no {_CLASSES[kind]}"
        fits = isinstance(found, getattr(importlib.import_module(f"workflow.{kind}"), _CLASSES[kind]))
    if not fits:
        raise ConfigError(f"{name!r} ({kind}) is {wanted} but of type {type(found).__name__}.", "Name another.")

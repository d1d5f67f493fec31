"""Plug-ins. A plug-in is an object in a file of the same name.

`find("rewards", "numeric_answer")` imports `workflow/rewards/numeric_answer.py` and returns its object `numeric_answer`.
`package.module:name` finds a user's own code. The names of the files are the only registry.
"""

import ast
import importlib
import inspect
import pkgutil
import sys
import traceback
from contextlib import suppress
from difflib import get_close_matches
from functools import lru_cache
from itertools import islice
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from agentrl.workflow.errors import ConfigError, did_you_mean
from agentrl.workflow.settings import Settings, settings

KINDS = ("datasets", "tools", "rewards", "envs", "engines", "trainers", "algorithms", "tool_formats", "adapters", "trackers")
_CLASSES = {
    "datasets": "Dataset", "tools": "Tool", "envs": "Env", "engines": "Backend", "trainers": "TrainerBackend",
    "algorithms": "Algorithm", "tool_formats": "ToolFormat", "adapters": "Adapter",
    "trackers": "Tracker",
}  # fmt: skip
PACKAGE = "agentrl.workflow"
CODE_PREFIX = "agentrl_code_"
"""The prefix of the modules that agentrl writes for code of notebooks and scripts. The hash of the content follows the prefix.
"""
MAX_FILES = 1000
"""The most files of a folder that are compared with an unknown module name to find a similar one."""
ROOT = Path(__file__).parents[2]
"""The folder that holds the package: a checkout, or `site-packages`."""
HERE = "agentrl_here"
"""The module of objects that exist only in one process, such as a function whose source cannot be stored."""
_lent: dict[str, Any] = {}
"""A mapping from a path to the object of this process that it leads to."""
_sources: WeakKeyDictionary[ModuleType, str] = WeakKeyDictionary()
_import_lock = Lock()
"""A lock around the invalidation of the import caches. Without it, two threads could delete the same entry, which raises
KeyError.
"""


def code_folder(where: Settings) -> Path:
    """Return the folder of the modules that agentrl writes for code of notebooks and scripts."""
    return where.root / "code"


def lend(path: str, value: Any) -> None:
    """Register the object under the path, so `find` returns this very object in this process."""
    module = path.partition(":")[0]
    if module == HERE:
        sys.modules.setdefault(HERE, ModuleType(HERE))
    else:
        with suppress(ConfigError):
            _user_object("lent", path)  # its source is that of the module which was written for it
    _lent[path] = value


def is_lent(path: str) -> bool:
    """Return True if the path leads to an object that `lend` has registered. Such an object is used directly, not copied."""
    return path in _lent


def names(kind: str) -> list[str]:
    """Return the names that `find(kind, ...)` can find, sorted."""
    package = importlib.import_module(f"{PACKAGE}.{kind}")
    return sorted(module.name for module in pkgutil.iter_modules(package.__path__))


def find(kind: str, name: str) -> Any:
    """Return the plug-in. Raise ConfigError if it does not exist, cannot be imported, or is of another kind."""
    if ":" in name:
        plugin = _user_object(kind, name)
    elif kind in KINDS:
        plugin = _own_object(kind, name)
    else:
        raise ConfigError(f"{name!r} ({kind}) is not a path to an object.", "Pass package.module:Class.")
    _check(kind, name, plugin)
    return plugin


def code_of(kind: str, name: str) -> str:
    """Return the source of the file that defines the plug-in, in the version that this process has loaded. Raise ConfigError as
    in `find`. Raise OSError if the file was deleted, or the module has no file.
    """
    find(kind, name)
    return source_of(name.partition(":")[0] if ":" in name else f"{PACKAGE}.{kind}.{name}")


def source_of(module: str, anew: bool = False) -> str:
    """Return the source of a loaded module; empty for a notebook. With `anew`, return the current text of the file. Otherwise,
    return the text that this process has loaded. Raise OSError if the module's file was deleted.
    """
    loaded = sys.modules[module]
    if getattr(loaded, "__file__", None) is None and module in (HERE, "__main__"):
        return ""  # a notebook
    if anew:
        return inspect.getsource(loaded)
    if loaded not in _sources:
        _sources[loaded] = inspect.getsource(loaded)
    return _sources[loaded]


def hashed_source(module: str, anew: bool = False) -> str:
    """Return the hashed part of a module's source: its statements only. Raise OSError if its file was deleted."""
    return _statements(source_of(module, anew))


@lru_cache(maxsize=128)
def _statements(source: str) -> str:
    try:
        tree = ast.parse(source)
    except SyntaxError:  # a file that a person is editing
        return source
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [statement for statement in body if not _is_docstring(statement)] or [ast.Pass()]  # type: ignore[attr-defined]
    return ast.unparse(tree)


def _is_docstring(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str)
    )


def _own_object(kind: str, name: str) -> Any:
    # What is loaded already is asked for with each episode; to list the folder takes ten times as long.
    if f"{PACKAGE}.{kind}.{name}" not in sys.modules and name not in (known_names := names(kind)):
        raise ConfigError(f"No {kind.removesuffix('s').replace('_', ' ')} is called {name!r}.", did_you_mean(name, known_names))
    module = _import_module(kind, name, f"{PACKAGE}.{kind}.{name}")
    if name not in vars(module):
        raise ConfigError(f"{name!r} ({kind}): {module.__file__} defines no {name!r}.", "Name the object after its file.")
    return vars(module)[name]


def _user_object(kind: str, path: str) -> Any:
    if path in _lent:
        return _lent[path]
    module_name, _, attribute = path.partition(":")
    if module_name == HERE:
        problem = f"{attribute!r} ({kind}) was defined in a process that has ended, and its source could not be stored."
        raise ConfigError(problem, "Move it to a file, and submit a new run.")
    for place in (str(Path.cwd()), *([str(code_folder(settings()))] if path.startswith(CODE_PREFIX) else [])):
        if place not in sys.path:
            sys.path.insert(_user_position(), place)
    if not all(part.isidentifier() for part in (*module_name.split("."), attribute)):
        raise ConfigError(f"{path!r} ({kind}) is not a path of Python names.", _path_hint())
    if module_name not in sys.modules:
        with _import_lock:
            importlib.invalidate_caches()  # its file, or its folder, may be younger than this process
    module = _import_module(kind, path, module_name)
    try:
        return getattr(module, attribute)
    except AttributeError as error:
        near = get_close_matches(attribute, (name for name in vars(module) if not name.startswith("_")), 1)
        hint = f"Did you mean '{module_name}:{near[0]}'?" if near else _path_hint()
        raise ConfigError(f"{path!r} ({kind}) cannot be found: {error}.", hint) from error


def _user_position() -> int:
    """Return the index in `sys.path` at which a user's folder is inserted.

    The folder comes last, but before a checkout of agentrl. Otherwise the link `workflow` of the checkout would hide a user's
    package `workflow`.
    """
    is_checkout = Path(ROOT, "workflow").exists()
    return sys.path.index(str(ROOT)) if is_checkout and str(ROOT) in sys.path else len(sys.path)


def _path_hint(module: str = "") -> str:
    """Return the hint that lists where a user's module was searched: a worker's folder may differ from the command's."""
    here = Path.cwd()
    near = get_close_matches(module, (file.stem for file in islice(here.glob("*.py"), MAX_FILES)), 1) if module else []
    meant = f"Did you mean '{near[0]}'? " if near else ""
    return f"{meant}Pass package.module:name, on PYTHONPATH or in {str(here)!r}."


def _import_module(kind: str, name: str, module: str) -> ModuleType:
    try:
        plugin_module = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            raise ConfigError(f"{name!r} ({kind}) cannot be found: {error}.", _path_hint(error.name)) from error
        raise _import_error(kind, name, error) from error
    except (Exception, SystemExit) as error:
        raise _import_error(kind, name, error) from error
    with suppress(OSError, TypeError):  # what has no file cannot be edited either
        source_of(module)
    return plugin_module


def _import_error(kind: str, name: str, error: BaseException) -> ConfigError:
    problem = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}".removesuffix(": ")
    missing = isinstance(error, ModuleNotFoundError)
    hint = "Install what it needs where agentrl runs, or correct the file." if missing else "Correct the file."
    return ConfigError(f"{name!r} ({kind}) cannot be imported: {_where(error)}{problem}.", hint)


def _where(error: BaseException) -> str:
    """Return `FILE:LINE: ` of the first line of the traceback outside of the import machinery; empty without one."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: "
    machinery = (__file__, importlib.__file__)
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename not in machinery and not frame.filename.startswith("<frozen"):
            return f"{frame.filename}:{frame.lineno}: "
    return ""


def _check(kind: str, name: str, plugin: Any) -> None:
    if kind not in _CLASSES:
        by_methods = kind == "hooks" or callable(getattr(plugin, "rollout", None))  # an object of such a class
        fits, problem = callable(plugin) or by_methods, "not callable"
    else:
        problem = f"no {_CLASSES[kind]}"
        room = importlib.import_module(f"{PACKAGE}.{kind}")
        fits = isinstance(plugin, getattr(room, _CLASSES[kind])) or (kind == "algorithms" and room.searches(plugin))
    if not fits:
        raise ConfigError(f"{name!r} ({kind}) is {problem} but of type {type(plugin).__name__}.", "Name another object.")

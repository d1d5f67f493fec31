"""find(kind, name): a plug-in is one file that defines the object it is named after.

`find("rewards", "numeric_answer")` imports `workflow/rewards/numeric_answer.py` and returns its `numeric_answer`;
`package.module:name` reaches a user's own code. The file name is the registry.
"""

import importlib
import pkgutil
import sys
from pathlib import Path
from typing import Any

from workflow.errors import ConfigError, did_you_mean

KINDS = ("datasets", "tools", "rewards", "envs", "algorithms")


def names(kind: str) -> list[str]:
    """The names that `find(kind, ...)` knows, sorted."""
    package = importlib.import_module(f"workflow.{kind}")
    return sorted(module.name for module in pkgutil.iter_modules(package.__path__))


def find(kind: str, name: str) -> Any:
    """The plug-in of that kind and name.

    Raises:
        ConfigError: no such plug-in, or `package.module:name` does not lead to an object.
    """
    if ":" in name:
        return _user_object(kind, name)
    known = names(kind)
    if name not in known:
        raise ConfigError(f"No {kind.removesuffix('s')} is called {name!r}.", did_you_mean(name, known))
    module = importlib.import_module(f"workflow.{kind}.{name}")
    return getattr(module, name)


def _user_object(kind: str, path: str) -> Any:
    module_name, _, attribute = path.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    hint = "Write package.module:name, importable from here."
    if not all(part.isidentifier() for part in (*module_name.split("."), attribute)):
        raise ConfigError(f"{path!r} ({kind}) leads to no object: it is no path of names.", hint)
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{path!r} ({kind}) leads to no object: {error}.", hint) from error

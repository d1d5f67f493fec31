"""Imports through the links at the top of a checkout: `workflow.store` is the module `agentrl.workflow.store`.

The folders are in the package. A checkout also has links `workflow`, `workers`, `cli` and `migrations` to them. Through a link
Python would load a module a second time, with classes that differ from the first ones. `install` prevents that.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

LINKS = ("workflow", "workers", "cli", "migrations")


class _LinkFinder(MetaPathFinder, Loader):
    """Find modules below a link under their name in `agentrl`, and a user's own package before a link of that name."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        root = fullname.partition(".")[0]
        if root not in LINKS:
            return None
        if fullname == root:
            return _foreign_spec(root)  # None: Python finds the link, and the package's `__init__.py` calls `alias`
        ours = getattr(sys.modules.get(root), "__name__", "") == f"agentrl.{root}"
        return ModuleSpec(fullname, self) if ours and find_spec(f"agentrl.{fullname}") else None

    def exec_module(self, module: ModuleType) -> None:
        alias(module.__name__)


def alias(name: str) -> None:
    """Make `agentrl.NAME` the module that `import NAME` gives."""
    sys.modules[name] = import_module(f"agentrl.{name}")


def install() -> None:
    """Install the finder, once."""
    if not any(isinstance(finder, _LinkFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _LinkFinder())


def _foreign_spec(root: str) -> ModuleSpec | None:
    """Return the spec of a user's own package called `root`, wherever it is on the path."""
    folders = [folder for folder in sys.path if isinstance(folder, str) and not _is_link(Path(folder, root))]
    for finder in sys.meta_path:
        if not isinstance(finder, _LinkFinder):
            spec = finder.find_spec(root, folders if finder is PathFinder else None)
            if spec:
                return spec
    return None


def _is_link(folder: Path) -> bool:
    """Return whether `folder` is the link of a checkout, this one or another."""
    try:
        return folder.samefile(folder.parent / "agentrl" / folder.name)
    except OSError:
        return False

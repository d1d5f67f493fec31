"""The display of a run while `fit` waits: its lines and, in a notebook, a growing curve."""

import sys
from importlib import import_module
from typing import Any, Self

from agentrl.api.run import Run


class Live:
    """A display of the lines and the curve of a run."""

    def __init__(self, run: Run) -> None:
        """Take the run whose curve a notebook draws."""
        self._run = run
        self._drawn: Any = None

    def __enter__(self) -> Self:
        """Begin the drawing, in a notebook."""
        if _is_notebook():
            display = import_module("IPython.display").display
            self._drawn = display(self._run.curve(), display_id=True)
        return self

    def __exit__(self, *ending: object) -> None:
        """Draw the whole."""
        self._draw()

    def show(self, line: str) -> None:
        """Print a line."""
        print(line, flush=True)
        self._draw()

    def _draw(self) -> None:
        if self._drawn is not None:
            self._drawn.update(self._run.curve())


def _is_notebook() -> bool:
    shell = sys.modules.get("IPython")
    running = shell.get_ipython() if shell is not None else None
    return hasattr(running, "kernel")

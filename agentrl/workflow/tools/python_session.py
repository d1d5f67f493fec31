"""python_session: python that keeps names from one call of an episode to the next, and prints the value of a last expression.

The model sees it as `python`: a run offers one or the other (`--tools python_session`, or an env's `tools`). Each episode has
its own interpreter in the sandbox. A cell that raises keeps its changes. If a cell is killed for its time or memory, the names
are as they were before it. If the interpreter is lost (its worker died, or it was idle for too long), the episode's cells are
run again. String hashes and `random` are fixed, so the results are the same. If one differs, the model reads a note about it,
and the episode is tainted: no update trains on it.
"""

from dataclasses import replace

from agentrl.workflow.tools.python import python


def _cell(code: str) -> str:
    """Runs a cell of a Python session: names last from one call to the next, and the value of a last expression is printed."""
    return code


_cell.__name__ = "python"
python_session = replace(python, function=_cell, effects="repeatable", keeps=True)

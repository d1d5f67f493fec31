"""python_session: python whose names last from one call to the next of an episode, and the value of a last line is printed.

The model knows it as `python`: a run offers either (`--tools python_session`, or an env's `tools`). Each episode has an
interpreter of its own in the sandbox. A cell that raises keeps what it did; one that is killed, for its time or memory, leaves
the names as they were before it. Where the interpreter is lost (its worker died, or it was not used for long), the
episode's cells are run again: strings hash and `random` draws alike, so that they come to the same. Where one does not, the
model is told so, and the episode is tainted: no update trains on it.
"""

from dataclasses import replace

from agentrl.workflow.tools.python import python


def _cell(code: str) -> str:
    """Runs a cell of a Python session: names last from one call to the next, and the value of a last expression is printed."""
    return code


_cell.__name__ = "python"
python_session = replace(python, function=_cell, effects="repeatable", keeps=True)

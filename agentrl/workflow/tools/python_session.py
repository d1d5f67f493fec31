"""python_session: the tool python with names that last from one call of an episode to the next. It prints the value of a last
expression.

The model sees this tool as `python`. A run offers one of the two (`--tools python_session`, or an env's `tools`). Each episode
has its own interpreter in the sandbox. If a cell raises an exception, its changes remain. If a cell is killed for its time or
memory, the names have the values from before the cell.

If the interpreter is lost (its worker died, or it was idle for too long), the episode's cells are run again. String hashes and
`random` are fixed, so the results are the same. If a result differs, the model reads a note about it, and the episode is
tainted: no update trains on it.
"""

from dataclasses import replace

from agentrl.workflow.tools.python import python


def _cell(code: str) -> str:
    """Runs a cell of a Python session: names last from one call to the next, and the value of a last expression is printed."""
    return code


_cell.__name__ = "python"
python_session = replace(python, function=_cell, effects="repeatable", keeps=True)

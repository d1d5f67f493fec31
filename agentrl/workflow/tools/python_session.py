"""python_session: the tool python with names that last from one call of an episode to the next. If the last statement of a call
is an expression, its value is printed.

The model sees this tool as `python`. Each episode has its own interpreter in the sandbox. If a cell raises an exception, its
changes remain. If a cell is killed, the names have the values from before the cell.

If the interpreter is lost, the episode's cells are run again. If a result then differs, the model reads a note about the
difference, and the episode is tainted: no update trains on the episode.
"""

from dataclasses import replace

from agentrl.workflow.tools.python import python


def _cell(code: str) -> str:
    """Runs a cell of a Python session: names last from one call to the next, and the value of a last expression is printed."""
    return code


_cell.__name__ = "python"
python_session = replace(python, function=_cell, effects="repeatable", keeps=True)

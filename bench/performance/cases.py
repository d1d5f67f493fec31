"""The cases of a subject: one that cannot be measured becomes a row that says why, and the next one goes on."""

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from agentrl.workflow.errors import SandboxUnavailable

LONGEST = 200
"""Characters of an error that a row shows."""


class CannotHere(Exception):
    """This machine cannot do what the case measures."""


@dataclass(frozen=True)
class Unmeasured:
    """A case without numbers.

    Args:
        name: as its row would have it.
        why: in one line.
        failed: whether something is broken; else it is this machine that cannot do it.
    """

    name: str
    why: str
    failed: bool

    @property
    def told(self) -> str:
        """What stands in its row in place of numbers."""
        return f"{'failed' if self.failed else 'cannot run here'}: {self.why}"


class Cases:
    """Those of a subject; `unmeasured` are the ones that ended without numbers."""

    def __init__(self) -> None:
        self.unmeasured: list[Unmeasured] = []

    @contextmanager
    def case(self, name: str) -> Iterator[None]:
        """One case: whatever it raises ends it alone."""
        try:
            yield
        except (CannotHere, SandboxUnavailable) as error:
            self._ended(Unmeasured(name, _line(error), failed=False))
        except Exception as error:  # noqa: BLE001 - anybody's: what is measured is also other people's code
            traceback.print_exc(file=sys.stderr)
            self._ended(Unmeasured(name, f"{type(error).__name__}: {_line(error)}", failed=True))

    def rows(self) -> list[list[object]]:
        """A short row for each of them: its name, and why it has no numbers."""
        return [[case.name, case.told] for case in self.unmeasured]

    def _ended(self, case: Unmeasured) -> None:
        print(case.name, case.told, flush=True)
        self.unmeasured.append(case)


def _line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:LONGEST]

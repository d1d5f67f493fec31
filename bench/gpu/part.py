"""The results of one part: each row is printed and written to `OUT/PART.json` as soon as it is measured.

The file is complete JSON at every moment, so a process that is killed loses nothing that it measured.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class Part:
    """The rows of a part, and the time that it has left.

    Args:
        name: the part's name, and its file's.
        folder: where the file is written.
        machine: the result of `machine.facts`.
        seconds: how long the part may take.
        files: the folder with `gpu-1`, `gpu-2` and `gpu-3`, which `make gpu-wheels` made.

    Attributes:
        gpu: True if the machine has a GPU.
    """

    def __init__(self, name: str, folder: Path, machine: Mapping[str, Any], seconds: float, files: Path) -> None:
        self.name = name
        self.folder = folder
        self.machine = machine
        self.files = files
        self.gpu = machine["device"] == "cuda"
        self._deadline = time.monotonic() + seconds
        self._results: dict[str, Any] = {"part": name, "machine": dict(machine), "rows": [], "missing": [], "ended": "no"}
        self._write()

    @property
    def left(self) -> float:
        """Seconds until the part must end."""
        return self._deadline - time.monotonic()

    @property
    def failed(self) -> bool:
        """True if a row could not be measured, or has a wrong value."""
        return any("failed" in row for row in self._results["rows"])

    def add(self, name: str, row: Mapping[str, Any]) -> None:
        """Add a row; its value `failed`, if any, says what is wrong."""
        self._results["rows"].append({"name": name, **row})
        self._write()
        values = "  ".join(f"{key} {_format(value)}" for key, value in row.items())
        self._print(f"{name}  {values}")

    def attempt(self, name: str, work: Callable[[], Row], seconds: float = 0.0) -> Row | None:
        """Add the row that `work` returns, or one with the error that it raises; return the row, or None.

        Args:
            seconds: the least time that the work takes: with less time left it is skipped.
        """
        if self.left < seconds:
            self.skip(name, f"{max(0.0, self.left):.0f} s were left")
            return None
        try:
            row = work()
        except Exception as error:  # noqa: BLE001 - the row reports it, and the other rows follow
            self.add(name, {"failed": describe_error(error)})
            return None
        self.add(name, row)
        return row

    def skip(self, name: str, reason: str) -> None:
        """Record that a row is not measured."""
        self._results["missing"].append({"name": name, "why": reason})
        self._write()
        self._print(f"{name}  not measured: {reason}")

    def end(self) -> None:
        """Record that the part came to its end."""
        self._results["ended"] = "yes"
        self._write()

    def _print(self, line: str) -> None:
        print(f"{self.name}: {line}", file=sys.__stdout__, flush=True)  # also where a part hides what others print

    def _write(self) -> None:
        write_json(self.folder / f"{self.name}.json", self._results)


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    """Write the file in one step: a reader never sees half of it."""
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=1))
    os.replace(partial, file)


def describe_error(error: Exception) -> str:
    """Return the error in one line of at most some 600 characters, the end of a longer text."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) < 600 else '... ' + text[-600:]}"


def _format(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

"""A part's rows, kept as they are made: its file is whole JSON at any moment, and each row is a line on the screen."""

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class Part:
    """What a part found so far.

    Args:
        name: of the part and of its file.
        folder: where the file goes.
        machine: what `machine.facts` said.
        seconds: how long the part may take.

    Attributes:
        gpu: whether there is one.
    """

    def __init__(self, name: str, folder: Path, machine: Mapping[str, Any], seconds: float) -> None:
        self.name = name
        self.folder = folder
        self.machine = machine
        self.gpu = machine["device"] == "cuda"
        self._end = time.monotonic() + seconds
        self._kept: dict[str, Any] = {"part": name, "machine": dict(machine), "rows": [], "missing": [], "ended": "no"}
        self._write()

    @property
    def left(self) -> float:
        """Seconds until it has to be over."""
        return self._end - time.monotonic()

    @property
    def failed(self) -> bool:
        """Whether a row says that it could not be made, or is not as it must be."""
        return any("failed" in row for row in self._kept["rows"])

    def add(self, name: str, row: Mapping[str, Any]) -> None:
        """Keeps a row; `failed` in it is why it is none."""
        self._kept["rows"].append({"name": name, **row})
        self._write()
        values = "  ".join(f"{key} {_shown(value)}" for key, value in row.items())
        print(f"{self.name}: {name}  {values}", flush=True)

    def attempt(self, name: str, work: Callable[[], Row], seconds: float = 0.0) -> Row | None:
        """Keeps the row that the work makes; what it raises is the row, and the others go on.

        Args:
            seconds: that it takes at least: with less left it is not begun, and counted among what is missing.
        """
        if self.left < seconds:
            self.miss(name, f"{max(0.0, self.left):.0f} s were left")
            return None
        try:
            row = work()
        except Exception as error:  # noqa: BLE001 - it is the row
            self.add(name, {"failed": said(error)})
            return None
        self.add(name, row)
        return row

    def miss(self, name: str, why: str) -> None:
        """Says that a row will not be made."""
        self._kept["missing"].append({"name": name, "why": why})
        self._write()
        print(f"{self.name}: {name}  not measured: {why}", flush=True)

    def end(self) -> None:
        """Says that it came to its end."""
        self._kept["ended"] = "yes"
        self._write()

    def _write(self) -> None:
        keep(self.folder / f"{self.name}.json", self._kept)


def keep(file: Path, found: Mapping[str, Any]) -> None:
    """Writes the file whole: who reads it at any moment reads JSON."""
    beside = file.with_suffix(".partial")
    beside.write_text(json.dumps(found, indent=1))
    os.replace(beside, file)


def said(error: Exception) -> str:
    """The error in one line; of a program that failed, the end of what it printed."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) < 600 else '... ' + text[-600:]}"


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

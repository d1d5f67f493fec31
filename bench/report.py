"""Tables of measurements: printed as text, kept as JSON."""

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

FILE = Path("build/bench.json")


@dataclass(frozen=True)
class Table:
    """Rows of names and numbers under their headings; `load` is the machine's when it was measured (1 minute, all cores)."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    load: float

    def shown(self) -> str:
        """The table as text."""
        cells = [[_cell(value) for value in row] for row in (self.columns, *self.rows)]
        widths = [max(len(row[index]) for row in cells) for index in range(len(self.columns))]
        lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in cells]
        return "\n".join([f"== {self.title} (load {self.load:.1f} on {os.cpu_count()} cores)", *lines, ""])


def _cell(value: object) -> str:
    return (
        f"{value:.3g}"
        if isinstance(value, float) and value < 100
        else f"{value:.0f}"
        if isinstance(value, float)
        else str(value)
    )


def load() -> float:
    """How many processes wanted to run in the last minute."""
    return os.getloadavg()[0]


def keep(tables: dict[str, list[Table]]) -> None:
    """Writes `build/bench.json`: subject -> tables; subjects that were not measured now keep what they had."""
    FILE.parent.mkdir(exist_ok=True)
    known = json.loads(FILE.read_text())["subjects"] if FILE.exists() else {}
    subjects = {**known, **{subject: [asdict(table) for table in found] for subject, found in tables.items()}}
    FILE.write_text(json.dumps({"machine": f"{platform.platform()}, {os.cpu_count()} cores", "subjects": subjects}, indent=1))

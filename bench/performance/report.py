"""What was measured: tables and comparisons, printed as text and kept as JSON in `build/bench.json`.

The file has `machine`, `subjects` (name -> when, versions, load and tables) and the flat list `rows`: one comparison each, with
both medians, the median of the rounds' ratios, and the least and the greatest of them. A case that could not be measured has a
row with `error` in place of numbers, and `failed`: whether something is broken, or this machine cannot do it.
"""

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from bench.performance.cases import Unmeasured

FILE = Path("build/bench.json")
PACKAGES = ("torch", "transformers", "trl")


@dataclass(frozen=True)
class Table:
    """Rows of names and numbers under their headings; `load` is the machine's when it was measured (1 minute, all cores).

    A row of two cells is a case and why it has no numbers.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    load: float

    def shown(self) -> str:
        """The table as text."""
        cells = [[_cell(value) for value in row] for row in (self.columns, *self.rows)]
        whole = [row for row in cells if len(row) == len(self.columns)]
        widths = [max(len(row[index]) for row in whole) for index in range(len(self.columns))]
        widths[0] = max(len(row[0]) for row in cells)
        lines = [
            "  ".join([row[0].ljust(widths[0]), *(map(str.rjust, row[1:], widths[1:]) if row in whole else row[1:])])
            for row in cells
        ]
        return "\n".join([f"== {self.title} (load {self.load:.1f} on {os.cpu_count()} cores)", *lines, ""])


@dataclass(frozen=True)
class Comparison:
    """One thing measured on two sides in the same rounds.

    Args:
        name: what was done, with its model and sizes.
        ours, other: one number per round, of the same rounds.
        unit: of both.
        against: what `other` is.
        better: whether less of the unit is better, or more.
        what: what `ours` is, where it is not plainly agentrl.
    """

    name: str
    ours: Sequence[float]
    other: Sequence[float]
    unit: str
    against: str
    better: Literal["less", "more"]
    what: str = "agentrl"

    @property
    def ratios(self) -> list[float]:
        """Ours to theirs, round by round."""
        return [ours / other for ours, other in zip(self.ours, self.other, strict=True)]

    @property
    def ratio(self) -> float:
        """The median of the rounds' ratios."""
        return statistics.median(self.ratios)

    def row(self) -> dict[str, Any]:
        """As `build/bench.json` keeps it."""
        return {
            "name": self.name,
            "ours": statistics.median(self.ours),
            "other": statistics.median(self.other),
            "ratio": self.ratio,
            "spread": [min(self.ratios), max(self.ratios)],
            "unit": self.unit,
            "better": self.better,
            "what": {"ours": self.what, "other": self.against},
            "rounds": len(self.ours),
        }


@dataclass(frozen=True)
class Measured:
    """What a subject returns."""

    tables: Sequence[Table]
    comparisons: Sequence[Comparison] = ()
    unmeasured: Sequence[Unmeasured] = ()


def load() -> float:
    """How many processes wanted to run in the last minute."""
    return os.getloadavg()[0]


def compared(comparisons: Sequence[Comparison], unmeasured: Sequence[Unmeasured] = ()) -> Table:
    """The table that `make bench` ends with."""
    columns = ["what", "ours", "other", "unit", "better", "ratio", "least", "most", "against"]
    rows: list[list[object]] = []
    for comparison in comparisons:
        row = comparison.row()
        numbers = [row[name] for name in ("ours", "other", "unit", "better", "ratio")]
        rows.append([row["name"], *numbers, *row["spread"], comparison.against])
    rows += [[case.name, case.told] for case in unmeasured]
    return Table("ours / other, medians and the rounds' ratios", columns, rows, load())


def keep(subject: str, measured: Measured) -> None:
    """Writes the subject into `build/bench.json`; the other subjects keep what they had, and so does one that failed whole."""
    FILE.parent.mkdir(exist_ok=True)
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    subjects, rows = known.get("subjects", {}), known.get("rows", [])
    if measured.tables:
        told = {"measured_at": datetime.now(UTC).isoformat(timespec="seconds"), "versions": versions(), "load": load()}
        subjects = {**subjects, subject: {**told, "tables": [asdict(table) for table in measured.tables]}}
    rows = [row for row in rows if row["subject"] != subject or not (measured.tables or "error" in row)]
    rows += [{"subject": subject, **comparison.row()} for comparison in measured.comparisons]
    rows += [{"subject": subject, "name": case.name, "error": case.why, "failed": case.failed} for case in measured.unmeasured]
    FILE.write_text(json.dumps({"machine": machine(), "subjects": subjects, "rows": rows}, indent=1))


def machine() -> str:
    """The processor, its cores, the GPU and the system."""
    import torch  # not above: who only reads results needs no second for it

    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{model}, {os.cpu_count()} cores{gpu}, {platform.platform()}"


def versions() -> dict[str, str]:
    """Of Python, of what is compared (`none` where it is not installed), and of this checkout."""
    found = {"python": platform.python_version(), **{package: _version(package) for package in PACKAGES}}
    asked = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return {**found, "agentrl": asked.stdout.strip() or _version("agentrl")}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _cell(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"

"""The rows of all parts as Markdown tables, as `docs/measurements.md` shows them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.gpu import machine


def write(folder: Path) -> Path:
    """Write `summary.md` from the files of the parts in the folder; return its path."""
    results = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json")) if file.name != "machine.json"]
    facts = json.loads((folder / "machine.json").read_text())
    texts = ["\n".join(machine.lines(facts)), *(_part(result) for result in results)]
    (folder / "summary.md").write_text("\n\n".join(texts) + "\n")
    return folder / "summary.md"


def _part(result: dict[str, Any]) -> str:
    columns = list(dict.fromkeys(name for row in result["rows"] for name in row if name not in ("name", "failed")))
    lines = [f"## {result['part']}", "", *_table(["", *columns], [_cells(row, columns) for row in result["rows"]])]
    lines += [f"not measured: {row['name']}: {row['why']}" for row in result["missing"]]
    if result["ended"] != "yes":
        lines.append(f"not complete: {result['ended']}")
    return "\n".join(lines)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows)]


def _cells(row: dict[str, Any], columns: Sequence[str]) -> list[str]:
    failed = f" FAILED: {row['failed'][:200]}".replace("|", "/") if "failed" in row else ""
    return [row["name"] + failed, *(_cell(row.get(name, "")) for name in columns)]


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)

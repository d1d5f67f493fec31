"""The parts' rows as tables for people, in Markdown: what stands in `docs/measurements.md` is one of these."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.gpu import machine


def write(folder: Path) -> Path:
    """Makes `summary.md` of the parts that have a file there."""
    found = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json")) if file.name != "machine.json"]
    known = json.loads((folder / "machine.json").read_text())
    texts = ["\n".join(machine.lines(known))]
    texts += [_part(part) for part in found]
    (folder / "summary.md").write_text("\n\n".join(texts) + "\n")
    return folder / "summary.md"


def _part(part: dict[str, Any]) -> str:
    columns = list(dict.fromkeys(name for row in part["rows"] for name in row if name not in ("name", "failed")))
    lines = [f"## {part['part']}", "", *table(["", *columns], [_cells(row, columns) for row in part["rows"]])]
    lines += [f"not measured: {missed['name']}: {missed['why']}" for missed in part["missing"]]
    if part["ended"] != "yes":
        lines.append(f"broke off: {part['ended']}")
    return "\n".join(lines)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    return [f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows)]


def _cells(row: dict[str, Any], columns: Sequence[str]) -> list[str]:
    failed = f" FAILED: {row['failed'][:200]}".replace("|", "/") if "failed" in row else ""
    return [row["name"] + failed, *(_cell(row.get(name, "")) for name in columns)]


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)

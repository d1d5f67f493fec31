"""A million rows of Parquet: how fast they are read, and with how much memory above an idle process."""

import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow
from pyarrow import parquet

from agentrl.workflow.config import DatasetConfig
from agentrl.workflow.dataset_rows.sources import read_source
from bench.performance.cases import Cases
from bench.performance.report import Comparison, Measured, Table, load
from bench.performance.timing import alternate

ROWS, GROUP = 1_000_000, 10_000
ROUNDS = 3
PEAK = r"""
import re, sys
from agentrl.workflow.config import DatasetConfig
from agentrl.workflow.dataset_rows.sources import read_source
import pyarrow.parquet
def peak():
    return int(re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1])
idle = peak()
for row in read_source(DatasetConfig(name=sys.argv[1], filter=sys.argv[2] or None)):
    pass
print((peak() - idle) / 1024)
"""
FILTER = "level = 'easy'"


def measure() -> Measured:
    """Rows a second of processor time, to pyarrow's `iter_batches` with `to_pylist`; the peak of resident memory."""
    cases = Cases()
    with _file() as file:
        name = str(file)
        ways = {
            "pyarrow": lambda: sum(len(batch.to_pylist()) for batch in parquet.ParquetFile(file).iter_batches()),
            "rows": lambda: sum(1 for _ in read_source(DatasetConfig(name=name))),
            "rows, mapped": lambda: sum(1 for _ in read_source(DatasetConfig(name=name, map={"prompt": "question"}))),
            "rows, filtered": lambda: sum(1 for _ in read_source(DatasetConfig(name=name, filter=FILTER))),
        }
        taken = alternate(ways, ROUNDS, clocks=dict.fromkeys(ways, time.process_time))
        speeds = {way: [ROWS / seconds for seconds in its] for way, its in taken.items()}
        peaks = [[way, _peak(file, condition)] for way, condition in (("rows", ""), ("rows, filtered", FILTER))]
    comparisons = [
        Comparison(f"{way} of Parquet, a million", speeds[way], speeds["pyarrow"], "rows/s", "pyarrow's to_pylist", "more")
        for way in speeds
        if way != "pyarrow"
    ]
    table = Table("memory above an idle process, MiB", ["", "peak"], peaks, load())
    return Measured([table], comparisons, cases.unmeasured)


@contextmanager
def _file() -> Iterator[Path]:
    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        path, writer = Path(folder) / "rows.parquet", None
        for _ in range(ROWS // GROUP):
            table = pyarrow.Table.from_pylist([_row(draw) for _ in range(GROUP)])
            writer = writer or parquet.ParquetWriter(path, table.schema)
            writer.write_table(table)
        assert writer is not None
        writer.close()
        yield path


def _row(draw: random.Random) -> dict[str, object]:
    question = " ".join(str(draw.random()) for _ in range(8))
    return {"question": question, "answer": str(draw.randrange(10**6)), "level": draw.choice(["easy", "hard"])}


def _peak(file: Path, condition: str) -> float:
    done = subprocess.run([sys.executable, "-c", PEAK, file, condition], capture_output=True, text=True, check=True)
    return float(done.stdout)

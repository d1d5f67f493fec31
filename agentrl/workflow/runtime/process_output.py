"""The last part of what a process wrote, in a log file or as captured output."""

import os
from typing import BinaryIO

END_BYTES = 2**16


def read_end(file: BinaryIO, max_bytes: int = END_BYTES) -> bytes:
    """Return the last bytes of an open file. The position is then the end that the file had at the time of the call."""
    end = file.seek(0, os.SEEK_END)
    file.seek(max(end - max_bytes, 0))
    return file.read(end - file.tell())


def output_lines(output: str | bytes) -> list[str]:
    """Return the lines of the output that are not blank, without leading and trailing spaces."""
    text = output.decode(errors="replace") if isinstance(output, bytes) else output
    return [line.strip() for line in text.splitlines() if line.strip()]


def last_line(output: str | bytes, default: str = "") -> str:
    """Return the last line that is not blank; `default` if there is none."""
    return (output_lines(output) or [default])[-1]

"""The last part of what a process wrote."""

from pathlib import Path

from agentrl.workflow.runtime.process_output import END_BYTES, last_line, output_lines, read_end


def test_read_end_returns_last_bytes_and_stops_at_end(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_bytes(b"x" * END_BYTES + b"end")
    with file.open("rb") as log:
        assert read_end(log) == b"x" * (END_BYTES - 3) + b"end"
        assert log.tell() == END_BYTES + 3
        assert read_end(log, 3) == b"end"
        assert read_end(log, 2 * END_BYTES) == file.read_bytes()


def test_last_line_skips_blank_lines_and_invalid_bytes() -> None:
    assert output_lines(" one \n\n\ttwo\r\n \n") == ["one", "two"]
    assert last_line(b"one\n\xfftwo\n\n", "none") == "\ufffdtwo"
    assert last_line("\n \n", "none") == "none"

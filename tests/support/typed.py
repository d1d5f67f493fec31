"""A command as a person types it, run in this process."""

import pytest

from agentrl.cli.main import main


def agentrl(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> tuple[str, str]:
    """Stdout and stderr of one command. Fails the test unless it exits with `code`."""
    capsys.readouterr()
    got = main(words)
    said = capsys.readouterr()
    assert got == code, said.out + said.err
    return said.out, said.err

"""`agentrl` at a real pseudo-terminal: what it shows, and keys as a person types them."""

import fcntl
import os
import pty
import re
import select
import struct
import termios
import time
from collections.abc import Mapping

from bench.faults.fork_server import Nursery

CTRL_C, CTRL_D, UP = "\x03", "\x04", "\x1b[A"
SECONDS = 60.0
_MARKS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")

COMMAND = """
import os, sys
os.close(os.open(os.ttyname(0), os.O_RDWR))  # whoever leads a session gets the terminal that it opens first
from agentrl.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


class Terminal:
    """A command at a terminal of its own, of 24 lines and 80 columns.

    Attributes:
        raw: all that it has shown so far.
    """

    def __init__(self, forks: Nursery, *words: str, environment: Mapping[str, str]) -> None:
        self.raw = ""
        self._place, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        streams = {"stdin": inner, "stdout": inner, "stderr": inner}
        own = {**environment, "TERM": "xterm"}
        self._process = forks.popen(["-c", COMMAND, *words], env=own, start_new_session=True, **streams)
        self._inner = inner

    @property
    def shown(self) -> str:
        """The same without the marks of colours and cursors."""
        return _MARKS.sub("", self.raw).replace("\r\n", "\n")

    def type(self, text: str) -> None:
        """Presses keys."""
        os.write(self._place, text.encode())

    def wait(self, pattern: str, after: int = 0) -> int:
        """Waits until it shows what the pattern matches, behind a place; returns the place behind that."""
        deadline = time.monotonic() + SECONDS
        while not (found := re.compile(pattern).search(self.shown, after)):
            assert time.monotonic() < deadline, f"no {pattern!r} in\n{self.shown[after:]}"
            assert self._process.poll() is None or self._read(0), f"it ended without {pattern!r}\n{self.shown[after:]}"
            self._read(0.2)
        return found.end()

    def press(self, key: str, pattern: str, after: int = 0) -> int:
        """Presses a key, and again each second, until it shows what the pattern matches; returns the place behind that.

        Python waits for the next key where a signal comes between its redrawing of the line and its waiting for keys.
        """
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            self.type(key)
            again = time.monotonic() + 1
            while time.monotonic() < again:
                self._read(0.2)
                if found := re.compile(pattern).search(self.shown, after):
                    return found.end()
        raise AssertionError(f"no {pattern!r} in\n{self.shown[after:]}")

    def end(self) -> int | None:
        """Waits for the program's end; returns its exit code."""
        deadline = time.monotonic() + SECONDS
        while self._process.poll() is None and time.monotonic() < deadline:
            self._read(0.2)
        while self._read(0):
            pass
        return self._process.poll()

    def close(self) -> None:
        """Ends it, if need be."""
        self._process.kill()
        self._process.wait()
        os.close(self._place)
        os.close(self._inner)

    def _read(self, seconds: float) -> bool:
        """Reads what it shows, if it shows something."""
        if not select.select([self._place], [], [], seconds)[0]:
            return False
        self.raw += os.read(self._place, 65536).decode(errors="replace")
        return True

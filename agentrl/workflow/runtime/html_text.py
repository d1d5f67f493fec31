"""Extracts the text of an HTML page in a separate process that may be killed.

A lenient parser takes time quadratic in the length of some broken pages (a megabyte of `<!--` takes hours), and there are too
many kinds of such pages to detect them. This file is run as a script, and imports only the standard library.
"""

import re
import resource
import subprocess
import sys
from html.parser import HTMLParser

CPU_SECONDS = 5
MEMORY_BYTES = 1 << 30


class PageTooLong(Exception):
    """A page that takes too much time or memory to read."""


def text_of(page: str) -> str:
    """Return the text of a page, one line per block. Raise PageTooLong if the page exceeded the limits on time or memory."""
    command = [sys.executable, "-I", __file__]
    try:
        sent, seconds = page.encode(errors="replace"), 20 * CPU_SECONDS
        done = subprocess.run(command, input=sent, capture_output=True, timeout=seconds, check=True)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise PageTooLong(f"{len(page)} characters of HTML") from error
    return done.stdout.decode()


class _Words(HTMLParser):
    """A parser that collects the text of a page, without scripts and styles."""

    SKIPPED = ("script", "style", "noscript", "template")
    BREAKS = ("p", "br", "div", "li", "tr", "h1", "h2", "h3", "h4", "h5", "h6", "section", "article", "pre", "table")

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._skipped = self._kept = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Begin a line. For a script or a style, begin to skip text."""
        self._skipped += tag in self.SKIPPED
        self._kept += tag == "pre"
        self.parts += ["\n"] * (tag in self.BREAKS)

    def handle_endtag(self, tag: str) -> None:
        """Begin a new line after a block, or stop skipping text after a skipped element."""
        self._skipped -= tag in self.SKIPPED and self._skipped > 0
        self._kept -= tag == "pre" and self._kept > 0
        self.parts += ["\n"] * (tag in self.BREAKS)

    def handle_data(self, data: str) -> None:
        """Collect the text, unless it is inside of a skipped element."""
        if not self._skipped:
            self.parts.append(data if self._kept else re.sub(r"\s+", " ", data))


def extract_text(page: str) -> str:
    """Return the text of a page, without limits on time and memory."""
    parser = _Words()
    parser.feed(page)
    parser.close()
    lines = (" ".join(line.split()) for line in "".join(parser.parts).splitlines())
    return "\n".join(line for line in lines if line)


def main() -> None:
    """Read a page from stdin and write its text to stdout."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    text = extract_text(sys.stdin.buffer.read().decode(errors="replace"))
    sys.stdout.buffer.write(text.encode(errors="replace"))


if __name__ == "__main__":
    main()

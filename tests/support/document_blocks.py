"""The fenced blocks of a document: their text, the files that they show, their commands with the output below each."""

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_HEADING = re.compile(r"^##? (.+)$", re.MULTILINE)
_TITLE = re.compile(r"# ([\w./-]+\.\w+)(?: -- .*)?\n")


@dataclass(frozen=True)
class Command:
    """A command as a person types it, of one line or more, and the output that the document shows below it."""

    text: str
    output: str = ""


@dataclass(frozen=True)
class Block:
    """A fenced block of a document.

    Attributes:
        place: `page:line` of its first line.
        section: the heading above it, of the first or second level.
        language: the word behind the fence.
    """

    place: str
    section: str
    language: str
    text: str

    @property
    def file(self) -> str:
        """The file that the block shows: the name in a comment on its first line; empty for none."""
        match = _TITLE.match(self.text) if self.language in ("python", "yaml") else None
        return match[1] if match else ""


def read_blocks(page: Path) -> list[Block]:
    """Return the blocks of a page, in order."""
    text = page.read_text()
    return [_block(page.name, text, match) for match in _FENCE.finditer(text)]


def _block(page: str, text: str, match: re.Match[str]) -> Block:
    before = text[: match.start()]
    headings = _HEADING.findall(_FENCE.sub("", before))
    return Block(f"{page}:{before.count(chr(10)) + 2}", headings[-1] if headings else "", match[1], match[2])


def read_commands(block: Block) -> list[Command]:
    """Return the commands of a block of `sh` or `console`. In a console a command begins with `$ `, all else is output."""
    if block.language == "sh":
        return [Command(text) for text in _split(block.text.splitlines()) if not _is_empty(text)]
    commands = []
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE):
        if part:
            text = next(_split(part.splitlines()))
            commands.append(Command(text, part[len(text) + 1 :]))
    return commands


def _split(lines: list[str]) -> Iterator[str]:
    """Yield the complete commands of a script: a here-document, an open quote or a final backslash continues one."""
    command: list[str] = []
    for line in lines:
        command.append(line)
        if _is_complete("\n".join(command)):
            yield "\n".join(command)
            command = []
    assert not command, f"bash cannot read {command}"


def _is_complete(text: str) -> bool:
    checked = subprocess.run(["bash", "-n"], input=f"{text}\n", capture_output=True, text=True, check=False)
    return not checked.returncode and not checked.stderr and not text.endswith("\\")


def _is_empty(text: str) -> bool:
    return not text.strip() or text.lstrip().startswith("#")


def unprinted_lines(shown: str, printed: str, varying: re.Pattern[str]) -> list[str]:
    """Return the lines that a document shows and a command did not print, in the document's order.

    Lines are compared by their words, without numbers and signs; a line that ends in `...` by its beginning. The command may
    print other lines between them.

    Args:
        varying: lines that may be anything, such as the text of a model.
    """
    missing, rest = [], iter(printed.splitlines())
    for line in shown.splitlines():
        if varying.search(line) or not _words(line):
            continue
        before = list(rest)
        found = [number for number, other in enumerate(before) if _is_printed(line, other)]
        missing += [] if found else [line]
        rest = iter(before[found[0] + 1 :] if found else before)
    return missing


def _is_printed(shown: str, printed: str) -> bool:
    words, other = _words(shown), _words(printed)
    return words == (other[: len(words)] if shown.endswith("...") else other)


def _words(line: str) -> list[str]:
    return re.findall(r"[a-z_]{2,}", re.sub(r"\d[\w.]*(e-\d+)?", " ", line.lower()))

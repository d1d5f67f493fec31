"""A person who types the blocks of a document, from its top to its end, in one folder."""

import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.support.document_blocks import Block, Command, read_commands, unprinted_lines
from tests.support.user_shell import SECONDS, Finished, UserShell

PROMPT = "> "
"""What a command prints when it reads a line, and what such a line begins with in a document."""


@dataclass(frozen=True)
class Replacement:
    """What is run instead of what a document shows; `text` may name the shell's variables."""

    pattern: str
    text: str
    reason: str


@dataclass(frozen=True)
class Rules:
    """What is done otherwise than a document says.

    Attributes:
        replaced: what is run instead.
        not_run: pattern of a command or a `text` block -> why it is neither run nor compared.
        stays_up: pattern of a command that runs until Ctrl-C -> the path that answers under the address that it prints.
        ran: pattern of a command that has been run already -> what it printed. A `text` block that shows one is its output.
        varying: pattern of lines that differ from run to run -> why.
    """

    replaced: Sequence[Replacement] = ()
    not_run: Mapping[str, str] = field(default_factory=dict)
    stays_up: Mapping[str, str] = field(default_factory=dict)
    ran: Mapping[str, str] = field(default_factory=dict)
    varying: Mapping[str, str] = field(default_factory=dict)

    def substitute(self, text: str) -> str:
        """Return what is run instead of a text."""
        for each in self.replaced:
            text = re.sub(each.pattern, each.text, text)
        return text

    def patterns(self) -> list[str]:
        """Return every pattern, each of which matches something in the documents."""
        return [*(each.pattern for each in self.replaced), *self.not_run, *self.stays_up, *self.ran, *self.varying]


@dataclass
class Reader:
    """Runs blocks in a shell by rules, and notes each failure: a place, the command, what it printed."""

    shell: UserShell
    rules: Rules
    failures: list[str] = field(default_factory=list)

    def read(self, blocks: Sequence[Block]) -> list[str]:
        """Run the blocks in order; return the failures. What stays up is stopped at the end of its section."""
        self.failures = []
        for number, block in enumerate(blocks):
            following = blocks[number + 1 :]
            self._read_block(block, following)
            if not following or following[0].section != block.section:
                self._end_section(block, [each for each in blocks if each.section == block.section])
        return self.failures

    def _read_block(self, block: Block, following: Sequence[Block]) -> None:
        if block.file:
            self._write_file(block, following)
        elif block.language in ("sh", "console"):
            for command in read_commands(block):
                self._run_command(block, command)
        elif block.language == "text":
            self._read_output(block)
        elif block.language != "python":  # which runs at the end of its section
            self._fail(block, f"a block of {block.language or 'no language'} cannot be run: show a command that uses it")

    def _write_file(self, block: Block, following: Sequence[Block]) -> None:
        """Save the file that a block shows."""
        (self.shell.folder / block.file).write_text(self.rules.substitute(block.text))
        stem, _, _ = block.file.partition(".")
        if not any(re.search(rf"\b{stem}\b", each.text) for each in following):
            self._fail(block, f"no block below uses {block.file}")

    def _read_output(self, block: Block) -> None:
        outputs = [output for pattern, output in self.rules.ran.items() if re.search(pattern, block.text, re.MULTILINE)]
        if outputs:
            self._compare(block, self.rules.substitute(block.text), outputs[0])
        elif not _matches(self.rules.not_run, block.text):
            self._fail(block, "no command prints this text: show it below its command, in a block of console")

    def _run_command(self, block: Block, command: Command) -> None:
        if _matches(self.rules.not_run, command.text) or _matches(self.rules.ran, command.text):
            return
        text = self.rules.substitute(command.text)
        paths = [path for pattern, path in self.rules.stays_up.items() if re.search(pattern, command.text)]
        lines = re.findall(rf"^{PROMPT}(.*)$", command.output, re.MULTILINE)
        self._check(block, command, self._start(text, paths[0]) if paths else self._finish(text, lines))

    def _finish(self, text: str, lines: Sequence[str]) -> Finished:
        """Run a command to its end, at a terminal if lines are typed."""
        return self.shell.talk(text, lines, PROMPT) if lines else self.shell.run(text)

    def _start(self, text: str, path: str) -> Finished:
        """Start a command that stays up; return what it has printed once it answers."""
        started = self.shell.start(text, r"http://[\w.:]+")
        if started.code is None:
            address = re.findall(r"http://[\w.:]+", started.output)[0]
            _ask(address + path)
        return started

    def _check(self, block: Block, command: Command, done: Finished) -> None:
        """Note a command that failed, unless its failure is what the document shows."""
        shown, last = command.output, "".join(done.output.splitlines()[-1:])
        if done.code and not (shown and not unprinted_lines(last, shown, self._varying)):
            self._fail(block, f"{command.text}: exit {done.code}\n{done.output}")
        self._compare(block, shown, done.output)

    def _compare(self, block: Block, shown: str, printed: str) -> None:
        for line in unprinted_lines(shown, printed, self._varying):
            self._fail(block, f"this line is not printed: {line}\n{printed}")

    def _end_section(self, last: Block, blocks: Sequence[Block]) -> None:
        """Run the section's Python blocks as one script, then press Ctrl-C for what stays up."""
        scripts = [block for block in blocks if block.language == "python" and not block.file]
        if scripts:
            name = f"block_{scripts[0].place.rpartition(':')[2]}.py"
            script = "\n\n".join(block.text for block in scripts)
            (self.shell.folder / name).write_text(self.rules.substitute(script))
            self._check(scripts[0], Command(f"python {name}"), self.shell.run(f"python {name}"))
        for ended in self.shell.interrupt():
            if ended.code:
                self._fail(last, f"exit {ended.code} after Ctrl-C\n{ended.output}")

    @property
    def _varying(self) -> re.Pattern[str]:
        return re.compile("|".join(self.rules.varying) or r"(?!)")

    def _fail(self, block: Block, message: str) -> None:
        self.failures.append(f"{block.place}: {message}")


def _ask(url: str) -> None:
    """Read what a server answers, as soon as it listens."""
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            with urllib.request.urlopen(url, timeout=SECONDS) as response:
                response.read()
            return
        except urllib.error.HTTPError:
            raise
        except urllib.error.URLError:
            assert time.monotonic() < deadline, f"{url} does not answer"
            time.sleep(0.1)


def _matches(patterns: Mapping[str, str], text: str) -> bool:
    return any(re.search(pattern, text, re.MULTILINE) for pattern in patterns)

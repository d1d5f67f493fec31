"""The error classes, one for each boundary.

A message says what is wrong, with the value, and what to type next. Every class has the exit code that the command line
returns. The model's own mistakes are never errors: they become observations or a `stop_reason` (see `agent`).
"""

import re
from collections.abc import Iterable
from difflib import get_close_matches

_SECOND_STOP = re.compile(r"(?:(?<=[?!])|(?<=[^.]\.)|(?<=\.\.\.))\.\Z")
"""A pattern of the full stop at the end of a message that already ends in one."""


class AgentRLError(Exception):
    """The base of all errors that a person can act upon.

    Args:
        message: one sentence: what was requested, and what is wrong with it.
        hint: the next command to type, or the change to make; empty if there is none.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        message = _SECOND_STOP.sub("", message)
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        between = "\n" if "\n" in self.message else " "  # a list ends with its line
        return f"{self.message}{between}{self.hint}".strip()

    def _render_traceback_(self) -> list[str]:
        """Return the lines that a notebook shows: the message and the hint, without a traceback."""
        return [f"{type(self).__name__}: {self.message}", *([f"  {self.hint}"] if self.hint else [])]


def locate_error(error: BaseException) -> str:
    """Return the function and the line that raised the exception. Unlike a traceback, they cannot show a key."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_code.co_name}:{trace.tb_lineno}" if trace is not None else "?"


def join_faults(*faults: AgentRLError) -> AgentRLError:
    """Combine several errors of a request into one. It has the class of the first error, and all messages with their hints."""
    first, *more = faults
    if not more:
        return first
    return type(first)("\n  ".join((f"The request has {len(faults)} errors:", *map(str, faults))))


class ConfigError(AgentRLError):
    """An option, key or value of the experiment that is invalid."""

    exit_code = 2


class DatasetError(AgentRLError):
    """A dataset that cannot be read, or rows that are malformed."""

    exit_code = 2


class ConflictError(AgentRLError):
    """A thing with the requested name exists and differs from the request."""

    exit_code = 3


class ServiceError(AgentRLError):
    """The database, the broker or a worker does not respond, or is not ready."""

    exit_code = 4


class NotFoundError(AgentRLError):
    """A run, episode, policy or plug-in of that name does not exist."""

    exit_code = 5


class StateError(AgentRLError):
    """The state of the thing does not allow the request."""

    exit_code = 6


class AccessDenied(AgentRLError):
    """A query that is not a plain read."""

    exit_code = 7


class ModelError(AgentRLError):
    """A model, tokenizer or chat template that cannot be loaded or does not fit the run."""

    exit_code = 8


class CheckpointError(AgentRLError):
    """A checkpoint that is incomplete, was changed, or belongs to something else."""

    exit_code = 9


class BrokenCheckpoint(CheckpointError):
    """A checkpoint whose files differ from those that were written. A fault of this host never raises it."""


class SandboxUnavailable(AgentRLError):
    """This machine has no sandbox for model-written code, or not the requested one."""

    exit_code = 10


class WorkerError(AgentRLError):
    """The running workers lack something that the run needs, or their settings differ from the command's."""

    exit_code = 11


class DeviceLost(AgentRLError):
    """The GPU failed in this process. Only a new process can use it again.

    Args:
        reason: the report of the device's driver.
    """

    exit_code = 12

    def __init__(self, reason: str) -> None:
        super().__init__(f"This process lost its device: {reason}.", "Restart the process.")
        self.reason = reason


class ToolFailure(AgentRLError):
    """A failed tool call. The message is the observation that the model reads.

    `error_class` is stored in the call's row.
    """

    error_class = "tool_error"


class ToolTimeout(ToolFailure):
    """A call exceeded its tool's time limit."""

    error_class = "timeout"


class CodeFailure(ToolFailure):
    """Model-written code that failed. `status` says how it ended (see `sandbox.Status`)."""

    def __init__(self, message: str, status: str) -> None:
        super().__init__(message)
        self.error_class = "code_error" if status == "error" else status


class UnknownOutcome(ToolFailure):
    """A call that must not run twice was started and has no result. It may or may not have taken effect."""

    error_class = "unknown_outcome"


class RewardError(AgentRLError):
    """A reward function raised an exception, or returned a value that is not a finite number.

    The episode then fails; its reward is never set to 0.
    """


class InfraError(AgentRLError):
    """A failure of the system, not of the model: for example a lost worker, or a sandbox that does not start."""


class Unready(InfraError):
    """A worker lacks a module or a setting that a call needs. Any other call on this worker would fail in the same way."""


class Fenced(AgentRLError):
    """Another worker has claimed the row since. The result of this worker is discarded."""


class Stopped(KeyboardInterrupt):
    """Ctrl-C, handled between two steps of a training. The message says how far the training has come."""


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return the hint for an unknown name: the closest known name, or the list of known names."""
    names = sorted(choices)
    close = [name for name in names if _is_swap(word, name)] or get_close_matches(word, names, n=1)
    if close:
        return f"Did you mean {close[0]!r}?"
    return f"Known: {', '.join(names)}." if names else "None exists."


def _is_swap(word: str, name: str) -> bool:
    """Return True if the words differ only by two neighbouring letters that are swapped."""
    other = [at for at, (left, right) in enumerate(zip(word, name, strict=False)) if left != right]
    if len(word) != len(name) or len(other) != 2:
        return False
    first, last = other
    return last == first + 1 and (word[first], word[last]) == (name[last], name[first])

"""The error classes. Each class stands for one cause, such as an invalid option or an unavailable service.

A message says what is wrong, with the value, and the hint says what to type next. Every class has the exit code that the
command line returns. Mistakes of the model are never errors: they become observations or a `stop_reason` (see `agent`).
"""

import re
from collections.abc import Iterable
from difflib import get_close_matches

_SECOND_STOP = re.compile(r"(?:(?<=[?!])|(?<=[^.]\.)|(?<=\.\.\.))\.\Z")
"""A pattern of a superfluous full stop: one at the end of a message, after a full stop, question mark or exclamation mark."""


LEAST_LIKENESS = 0.65
"""The least likeness, from 0 to 1, of a known name that is proposed for an unknown one (see difflib)."""


class AgentRLError(Exception):
    """The base class of all errors that the user can fix. `message` is one sentence that says what was requested, and what is
    wrong with it. `hint` is the next command to type, or the change to make; empty if there is none.
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
    """Return the function and the line that raised the exception. Unlike a traceback, they cannot contain a secret key."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_code.co_name}:{trace.tb_lineno}" if trace is not None else "?"


def join_faults(*faults: AgentRLError) -> AgentRLError:
    """Combine several errors of one request into one error, which has the class of the first and the text of all."""
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
    """The requested name belongs to an existing object that differs from the requested one."""

    exit_code = 3


class ServiceError(AgentRLError):
    """The database, the broker or a worker that does not respond or is not ready."""

    exit_code = 4


class NotFoundError(AgentRLError):
    """A run, episode, policy or plug-in that does not exist."""

    exit_code = 5


class StateError(AgentRLError):
    """A request that the current state of a run, process or another object does not allow."""

    exit_code = 6


class AccessDenied(AgentRLError):
    """An SQL query that is not a plain read."""

    exit_code = 7


class ModelError(AgentRLError):
    """A model, tokenizer or chat template that cannot be loaded or does not fit the run."""

    exit_code = 8


class RefusedMessages(ModelError):
    """Messages, or options of them, that the chat template refuses."""


class CheckpointError(AgentRLError):
    """A checkpoint that is incomplete, was changed, or belongs to another run or base."""

    exit_code = 9


class BrokenCheckpoint(CheckpointError):
    """A checkpoint whose files changed. Faults of this machine, such as an unreadable disk, do not raise it."""


class SandboxUnavailable(AgentRLError):
    """A sandbox for model-written code that this machine does not have."""

    exit_code = 10


class WorkerError(AgentRLError):
    """Running workers that lack something the run needs, or whose settings differ from the settings of the command."""

    exit_code = 11


class DeviceLost(AgentRLError):
    """A failure of the GPU, which only a new process can use again. `reason` is the driver's report."""

    exit_code = 12

    def __init__(self, message: str, hint: str = "", reason: str = "") -> None:
        super().__init__(message, hint)
        self.reason = reason


class ToolFailure(AgentRLError):
    """A failed tool call. The model reads the message; `error_class` is stored in the call's row."""

    error_class = "tool_error"


class ToolTimeout(ToolFailure):
    """A tool call that exceeded the tool's time limit."""

    error_class = "timeout"


class CodeFailure(ToolFailure):
    """Model-written code that failed. `status` says how the code ended (see `sandbox.Status`)."""

    def __init__(self, message: str, hint: str = "", status: str = "error") -> None:
        super().__init__(message, hint)
        self.error_class = "code_error" if status == "error" else status


class UnknownOutcome(ToolFailure):
    """A call that must not run twice, was started and has no result. It is unknown whether the call took effect."""

    error_class = "unknown_outcome"


class RewardError(AgentRLError):
    """A reward function that failed or returned no finite number. The episode fails; its reward is never 0."""


class InfraError(AgentRLError):
    """A failure of the system, not of the model: for example a lost worker, or a sandbox that does not start."""


class RankLost(InfraError):
    """A rank, one of several processes that train together, that ended, failed or hangs."""

    exit_code = 13


class Unready(InfraError):
    """A worker that lacks a module or a setting which a tool call needs. Other calls of the tool would fail there too."""


class Fenced(AgentRLError):
    """A row that another worker has claimed in the meantime. This worker's result is discarded."""


class Stopped(KeyboardInterrupt):
    """A Ctrl-C that is handled between two steps of a training. The message says how far the training has come."""


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return the hint for an unknown name: the closest known name, or the list of known names."""
    names = sorted(choices)
    return suggest(word, names) or (f"Known: {', '.join(names)}." if names else "None exists.")


def suggest(word: str, choices: Iterable[str]) -> str:
    """Return the hint with the known name that is closest to an unknown one; empty if none is close."""
    name = closest_name(word, choices)
    return f"Did you mean {name!r}?" if name else ""


def closest_name(word: str, choices: Iterable[str]) -> str:
    """Return the known name that is closest to an unknown one; empty if none is close."""
    names = sorted(choices)
    close = [name for name in names if _is_swap(word, name)] or get_close_matches(word, names, n=1, cutoff=LEAST_LIKENESS)
    return close[0] if close else ""


def _is_swap(word: str, name: str) -> bool:
    """Return True if swapping two neighbouring letters turns one word into the other."""
    other = [at for at, (left, right) in enumerate(zip(word, name, strict=False)) if left != right]
    if len(word) != len(name) or len(other) != 2:
        return False
    first, last = other
    return last == first + 1 and (word[first], word[last]) == (name[last], name[first])

"""One error class per boundary. A message says what is wrong, with the value, and what to type next.

Every class carries the exit code that the command line returns for it. The model's own mistakes are never errors: they
become observations or a `stop_reason` (see `agent`).
"""

import re
from collections.abc import Iterable
from difflib import get_close_matches

_SECOND_STOP = re.compile(r"(?:(?<=[?!])|(?<=[^.]\.)|(?<=\.\.\.))\.\Z")
"""The full stop after a cause that brought its own."""


class AgentRLError(Exception):
    """Base of all errors that a person can act upon.

    Args:
        message: one sentence: what was asked and what was found.
        hint: the next command to type, or the change to make; empty where there is none.
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
        """What a notebook shows: the sentence and the next step, without our frames."""
        return [f"{type(self).__name__}: {self.message}", *([f"  {self.hint}"] if self.hint else [])]


def locate_error(error: BaseException) -> str:
    """Return the function and line where an error was raised. Unlike a traceback, they cannot show a key."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_code.co_name}:{trace.tb_lineno}" if trace is not None else "?"


def join_faults(*faults: AgentRLError) -> AgentRLError:
    """Combine several errors of a request, each with its hint, into one of the class of the first."""
    first, *more = faults
    if not more:
        return first
    return type(first)("\n  ".join((f"The request has {len(faults)} errors:", *map(str, faults))))


class ConfigError(AgentRLError):
    """An option, key or value of the experiment that cannot be used as given."""

    exit_code = 2


class DatasetError(AgentRLError):
    """A dataset that cannot be read, or rows that are malformed."""

    exit_code = 2


class ConflictError(AgentRLError):
    """Something of that name exists and differs from what was asked."""

    exit_code = 3


class ServiceError(AgentRLError):
    """The database, the broker or a worker does not answer, or is not ready to be used."""

    exit_code = 4


class NotFoundError(AgentRLError):
    """No run, episode, policy or plug-in of that name."""

    exit_code = 5


class StateError(AgentRLError):
    """The thing exists, but its state does not allow what was asked."""

    exit_code = 6


class AccessDenied(AgentRLError):
    """A query that is not a plain read."""

    exit_code = 7


class ModelError(AgentRLError):
    """A model, tokenizer or chat template that cannot be loaded or does not fit the run."""

    exit_code = 8


class CheckpointError(AgentRLError):
    """A checkpoint that is incomplete, altered or belongs to something else."""

    exit_code = 9


class BrokenCheckpoint(CheckpointError):
    """A checkpoint whose files are not as they were written; never raised for a fault of this host itself."""


class SandboxUnavailable(AgentRLError):
    """Nothing on this machine can hold model-written code, or not what was asked for."""

    exit_code = 10


class WorkerError(AgentRLError):
    """Running workers lack what the run needs, or differ from the command in it."""

    exit_code = 11


class DeviceLost(AgentRLError):
    """The GPU failed under this process: only a new process can use it again.

    Args:
        reason: what the device's driver reported.
    """

    exit_code = 12

    def __init__(self, reason: str) -> None:
        super().__init__(f"This process lost its device: {reason}.", "Restart the process.")
        self.reason = reason


class ToolFailure(AgentRLError):
    """A tool could not do what the model asked; its message is the observation that the model reads.

    `error_class` is what the call's row says of it.
    """

    error_class = "tool_error"


class ToolTimeout(ToolFailure):
    """A call took longer than its tool's time."""

    error_class = "timeout"


class CodeFailure(ToolFailure):
    """Model-written code did not end well; `status` is how it ended (see `sandbox.Status`)."""

    def __init__(self, message: str, status: str) -> None:
        super().__init__(message)
        self.error_class = "code_error" if status == "error" else status


class UnknownOutcome(ToolFailure):
    """A call that must not run twice was lost on its way: it may or may not have taken effect."""

    error_class = "unknown_outcome"


class RewardError(AgentRLError):
    """A reward function raised, or returned what is no finite number. It fails its episode, never scores it 0."""


class InfraError(AgentRLError):
    """The system, not the model, failed an episode: a lost worker, a sandbox that is down."""


class Unready(InfraError):
    """A worker lacks what a call needs, a module or a setting: it is not the call's failure, and any other call fails alike."""


class Fenced(AgentRLError):
    """Another worker holds the row now; what this one computed is discarded."""


class Stopped(KeyboardInterrupt):
    """Ctrl-C, answered between two steps of a training; its text says where that stands."""


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return the sentence that helps after an unknown name: the closest match, or the list of known ones."""
    names = sorted(choices)
    close = [name for name in names if _is_swap(word, name)] or get_close_matches(word, names, n=1)
    if close:
        return f"Did you mean {close[0]!r}?"
    return f"Known: {', '.join(names)}." if names else "None exists."


def _is_swap(word: str, name: str) -> bool:
    """Whether the words differ by two neighbouring letters that changed places."""
    other = [at for at, (left, right) in enumerate(zip(word, name, strict=False)) if left != right]
    if len(word) != len(name) or len(other) != 2:
        return False
    first, last = other
    return last == first + 1 and (word[first], word[last]) == (name[last], name[first])

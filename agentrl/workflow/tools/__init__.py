"""Tools. Each file of this folder defines a tool: a typed function with a docstring, which the model may call. See `Tool`.

A resource that is costly to set up (an index, a connection) is created once per process. Put it into a
`runtime.once_per_process.Once` that the function uses, and pass this as the tool's `opens`. A tool with a parameter (a folder,
a database) is created by a function of its file, such as `search_in(folder)`; put the returned tool into an env. The tool that
a run selects by its plain name reads the machine's settings.
"""

import inspect
import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError

from agentrl.workflow.errors import AgentRLError, ConfigError, ToolFailure, ToolTimeout
from agentrl.workflow.trajectory import ToolResult, storable

Effects = Literal["none", "repeatable", "once"]

SHOWN_PROBLEMS = 5
NAMES = re.compile(r"[A-Za-z0-9_./-]{1,128}")
"""The pattern of tool names that a model can write and the row of a call can store."""
MAX_TOLD = 65536
"""The maximum size of a tool's description and parameters, in bytes. They are a part of every prompt."""
_MANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)


@dataclass(frozen=True)
class Tool:
    """A typed function that the model may call. The model sees the function's signature and docstring.

    A parameter may have any type that pydantic supports (`Literal["a", "b"]`, `list[int]`, a model). `Annotated[int,
    Field(ge=1, description="...")]` restricts and describes it.

    Args:
        function: the function, which returns the text that the model reads (see `answer`). It raises ToolFailure for a mistake
            of the model. It raises InfraError for a failure of the system; the call is then sent again.
        effects: `none` (pure), `repeatable` (may run twice), `once` (a call that was started is never run again).
        timeout_seconds: the time limit of a call, in seconds.
        max_characters: the most characters of the text that the model reads. Longer text is cut, with a note.
        memory_mb: the memory limit of a sandboxed call, in MB; None: the sandbox's own limit. A tool that runs in the worker
            itself has no such limit.
        needs: a function that is called when a run is submitted. It raises ConfigError if the machine lacks something that the
            tool needs.
        opens: a function that creates a long-lived resource (a `Once`). It is called before the time limit of a call starts.
        variables: the environment variables that the tool reads. The command that submits a run warns if a tools worker has
            other values than the command.
    """

    function: Callable[..., object]
    effects: Effects = "none"
    timeout_seconds: float = 10.0
    max_characters: int = 65536
    memory_mb: int | None = None
    needs: Callable[[], object] | None = None
    opens: Callable[[], object] | None = None
    variables: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name that the model writes."""
        return self.function.__name__

    @property
    def title(self) -> str:
        """The tool's name in error messages."""
        return f"The tool {self.name!r:.80}"

    @cached_property
    def _parameters(self) -> tuple[str, ...]:
        return tuple(inspect.signature(self.function).parameters)

    @cached_property
    def _arguments(self) -> Any:
        """The pydantic model of the arguments. Its fields are numbered, because a parameter may have any name."""
        fields: dict[str, Any] = {}
        try:
            for number, parameter in enumerate(inspect.signature(self.function, eval_str=True).parameters.values()):
                fields[f"argument_{number}"] = (self._type_of(parameter), _field(parameter))
            return create_model(self.name, __config__=ConfigDict(extra="forbid"), **fields)
        except (PydanticUserError, NameError, TypeError) as error:
            problem = " ".join(str(error).split())[:300]
            raise ConfigError(
                f"The tool {self.name!r} has a parameter type without a JSON schema: {problem}.", _TYPES
            ) from error

    def _type_of(self, parameter: inspect.Parameter) -> Any:
        if parameter.annotation is inspect.Parameter.empty or parameter.kind in _MANY:
            raise ConfigError(f"The parameter {str(parameter)!r} of the tool {self.name!r} has no type, or no name.", _TYPES)
        return parameter.annotation

    @cached_property
    def schema(self) -> dict[str, Any]:
        """The function's JSON schema, in the format of chat templates."""
        parameters = self._arguments.model_json_schema()
        parameters.pop("title", None)
        for parameter in parameters.get("properties", {}).values():
            parameter.pop("title", None)
        description = (inspect.getdoc(self.function) or "").split("\n\n")[0].replace("\n", " ")
        return function_schema(self.name, description, parameters)

    def described(self, text: str) -> Self:
        """Return a copy of the tool with another description. The model reads the description."""
        tool = copy(self)
        spec = self.schema["function"]
        vars(tool)["schema"] = function_schema(self.name, text, spec["parameters"])
        return tool

    def check_name(self) -> None:
        """Check that a model can write the tool's name, and that the row of a call can store the name. Raise ConfigError if the
        name is invalid.
        """
        if not NAMES.fullmatch(self.name):
            raise ConfigError(f"{self.title} has an invalid name.", "Use up to 128 ASCII letters, digits and _ . / -")

    def check(self) -> None:
        """Check that the tool can be offered on this machine. Raise ConfigError if the tool's types have no JSON schema, its
        description is missing or too long, or this machine lacks something that the tool needs.
        """
        self.check_name()
        self._check_size()
        if not self.schema["function"]["description"]:
            raise ConfigError(f"The tool {self.name!r} has no docstring, which is what a model reads about it.", "Write one.")
        if inspect.iscoroutinefunction(self.function):
            raise ConfigError(
                f"The tool {self.name!r} is an async function.", "Write it as a plain function; calls run in parallel."
            )
        if self.needs is not None:
            self.needs()

    def _check_size(self) -> None:
        spec = self.schema["function"]
        try:
            size = len(json.dumps([spec["description"], spec["parameters"]], ensure_ascii=False, allow_nan=False).encode())
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"{self.title} has a description or parameters that JSON cannot store.", "Use text, numbers, lists and dicts."
            ) from error
        if size > MAX_TOLD:
            raise ConfigError(
                f"{self.title} has a description and parameters of {size} bytes.",
                f"At most {MAX_TOLD} bytes are allowed.",
            )

    def call(self, arguments: Mapping[str, Any]) -> str:
        """Run the tool, and return its text, cut to `max_characters`. Raise ToolFailure if the arguments have wrong names or
        types, or the tool refused the call. Raise InfraError if the system failed.
        """
        return clip(self.answer(arguments), self.max_characters)

    def run(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Run the tool, and return its text as a `ToolResult`.

        Raises:
            ToolFailure, InfraError: see `call`.
        """
        return ToolResult(self.call(arguments))

    def answer(self, arguments: Mapping[str, Any]) -> str:
        """Run the tool, and return the function's value as text, without a limit on its length.

        A dict, list or tuple becomes JSON if possible.

        Raises:
            ToolFailure, InfraError: see `call`.
        """
        value = self.returned(arguments)
        if isinstance(value, dict | list | tuple):
            with suppress(TypeError, ValueError, RecursionError):
                return json.dumps(value, ensure_ascii=False, allow_nan=False, default=str)
        return str(value)

    def returned(self, arguments: Mapping[str, Any]) -> object:
        """Run the tool, and return the value of its function, unconverted.

        Raises:
            ToolFailure, InfraError: see `call`.
        """
        try:
            checked = self._arguments.model_validate(dict(arguments))
        except ValidationError as error:
            raise ToolFailure(f"wrong arguments for {self.name}: {_problems(error)}.", f"It takes {self._usage}.") from error
        values = {name: getattr(checked, f"argument_{number}") for number, name in enumerate(self._parameters)}
        return self.function(**values)

    def overdue(self) -> AgentRLError:
        """Return the error for a call that exceeded the time limit. For most tools, it is a failure of the model."""
        return ToolTimeout(f"{self.name} took longer than {self.timeout_seconds:g} s")

    @property
    def _usage(self) -> str:
        """Return a short list of the parameters: `query (string), k (integer, optional)`."""
        parameters = self.schema["function"]["parameters"]
        needed = parameters.get("required", [])
        parts = [
            f"{name} ({spec.get('type', 'value')}{'' if name in needed else ', optional'})"
            for name, spec in parameters.get("properties", {}).items()
        ]
        return ", ".join(parts) or "no arguments"


_TYPES = "Write each parameter as name: type, with JSON types."


def _field(parameter: inspect.Parameter) -> Any:
    default = ... if parameter.default is inspect.Parameter.empty else parameter.default
    return Field(default, alias=parameter.name)


def _problems(error: ValidationError) -> str:
    errors = error.errors(include_url=False)
    lines = [f"{'.'.join(map(str, item['loc']))[:100]}: {item['msg'][:200]}" for item in errors[:SHOWN_PROBLEMS]]
    more = len(errors) - SHOWN_PROBLEMS
    return "; ".join(lines) + (f"; and {more} more" if more > 0 else "")


def function_schema(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool's schema in the format of chat templates. `parameters` is a JSON schema of an object."""
    return {"type": "function", "function": {"name": name, "description": description, "parameters": dict(parameters)}}


def clip(text: str, limit: int) -> str:
    """Cut the text to `limit` characters, and add a note with the number of removed characters."""
    return text if len(text) <= limit else f"{text[:limit]}\n[cut: {len(text) - limit} more characters]"


def failure(tool: Tool, error: BaseException) -> ToolResult:
    """Return the result that the model reads after a call raised an exception.

    For a mistake of the model, the result is the error message. For any other error, the result says that the tool failed.
    """
    if isinstance(error, ToolFailure):
        return ToolResult(clip(str(error), tool.max_characters), error.error_class)
    return ToolResult(clip(f"{tool.name} failed: {type(error).__name__}: {error}", tool.max_characters), "tool_crash")


def run_within(tool: Tool, run: Callable[[], ToolResult], seconds: float | None) -> ToolResult:
    """Run a call in a separate thread, and return its result. Errors become a result that the model reads.

    Because of the thread, a call that never ends does not block the caller.

    Args:
        run: the function that runs the tool.
        seconds: the time limit, in seconds; None if the call limits its time itself.
    """
    answer, began = Future[ToolResult](), time.monotonic()

    def call() -> None:
        try:
            answer.set_result(run())
        except BaseException as error:  # noqa: BLE001 - the waiting thread raises it
            answer.set_exception(error)

    threading.Thread(target=copy_context().run, args=(call,), daemon=True).start()
    try:
        result = answer.result(seconds)
    except BaseException as error:  # anybody's code, even `exit()`; its errors are shown to the model and the user
        raised = answer.exception() if answer.done() else None
        if raised is not error and not isinstance(error, TimeoutError):
            raise  # ctrl-C in this thread
        result = failure(tool, raised or tool.overdue())
    return replace(result, content=storable(result.content), seconds=time.monotonic() - began)

"""Tools: a file here is a callable tool. See `Tool`."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from pydantic import ConfigDict, ValidationError, create_model

from workflow.errors import ToolFailure

Effects = Literal["none", "repeatable", "once"]


@dataclass(frozen=True)
class Tool:
    """A typed function that the model may call; its signature and docstring are what the model is told.

    Args:
        function: returns the text that the model reads; raises ToolFailure for what the model did wrong.
        effects: `none` (pure), `repeatable` (may run twice), `once` (a call that was started is never run again).
        timeout_seconds: how long one call may take.
    """

    function: Callable[..., str]
    effects: Effects = "none"
    timeout_seconds: float = 10.0

    @property
    def name(self) -> str:
        """The name the model writes."""
        return self.function.__name__

    @cached_property
    def _arguments(self) -> Any:
        parameters = inspect.signature(self.function).parameters.values()
        fields: dict[str, Any] = {
            p.name: (p.annotation, ... if p.default is inspect.Parameter.empty else p.default) for p in parameters
        }
        return create_model(self.name, __config__=ConfigDict(extra="forbid"), **fields)

    @cached_property
    def schema(self) -> dict[str, Any]:
        """The function's JSON schema, in the form chat templates take."""
        parameters = self._arguments.model_json_schema()
        parameters.pop("title", None)
        for parameter in parameters.get("properties", {}).values():
            parameter.pop("title", None)
        description = (inspect.getdoc(self.function) or "").split("\n\n")[0].replace("\n", " ")
        return {
            "type": "function",
            "function": {"name": self.name, "description": description, "parameters": parameters},
        }

    def call(self, arguments: Mapping[str, Any]) -> str:
        """Runs the tool.

        Raises:
            ToolFailure: arguments of the wrong names or types, or the tool's own refusal.
        """
        try:
            checked = self._arguments.model_validate(dict(arguments))
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()[:5])
            raise ToolFailure(f"wrong arguments for {self.name}: {problems}") from error
        return self.function(**{name: getattr(checked, name) for name in type(checked).model_fields})

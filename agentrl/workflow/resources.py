"""Resources: the named texts of a run, such as prompts and descriptions of tools. A prompt search may improve them."""

import re
from collections.abc import Mapping
from typing import Any

SYSTEM_PROMPT = "system_prompt"
TOOL = "tool:"
"""The prefix of the resource name of a tool's description."""
MAX_RESOURCES = 64
MAX_RESOURCE_CHARS = 32_768
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_:./-]{0,127}")
_PLACE = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")


class Prompt(str):
    """A named text of a run. Its placeholders are filled in by an agent."""

    __slots__ = ()

    def format(self, *args: object, **values: object) -> str:
        """Return the text with each placeholder `{name}` replaced by the value of that name. Other braces stay unchanged.

        This is not `str.format`: a model may have written the text, and `{a.b}` would read attributes of objects. Raise
        ValueError if the text has no placeholder for a value, so the model would never read the value.
        """
        if args:
            raise ValueError("pass the values by name: prompt.format(question=...)")
        for name in values:
            if name not in places(self):
                raise ValueError(f"the prompt has no placeholder for {name!r}: add {{{name}}}")
        return _PLACE.sub(lambda match: str(values.get(match[1], match[0])), self)


def places(text: str) -> frozenset[str]:
    """Return the names of the placeholders in the text."""
    return frozenset(_PLACE.findall(text))


def validation_error(text: Any, before: str | None = None) -> str:
    """Return the reason why `text` is not a valid text of a run, or cannot replace the text `before`; empty if it is valid."""
    if not isinstance(text, str):
        return f"it is of type {type(text).__name__:.100}"
    if not text.strip():
        return "it is empty"
    if len(text) > MAX_RESOURCE_CHARS:
        return f"it has {len(text)} characters, at most {MAX_RESOURCE_CHARS} are allowed"
    if "\0" in text or any("\ud800" <= letter <= "\udfff" for letter in text):
        return "it contains an invalid character"
    lost = () if before is None else places(before) - places(text)
    return f"it lacks {', '.join(f'{{{name}}}' for name in sorted(lost))}" if lost else ""


def read_resources(values: Mapping[str, Any]) -> dict[str, str]:
    """Return validated resources as a new dict. Raise ValueError if there are too many, or one is invalid."""
    if len(values) > MAX_RESOURCES:
        raise ValueError(f"a run has at most {MAX_RESOURCES} resources, not {len(values)}")
    for name, text in values.items():
        if not NAME.fullmatch(name):
            raise ValueError(f"a resource's name may have letters, digits and _:./-, not {name!r:.100}")
        if fault := validation_error(text):
            raise ValueError(f"the resource {name!r} is not valid: {fault}")
    return dict(values)

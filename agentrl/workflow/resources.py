"""Resources: the texts that a run works with and that a search may improve, by name: prompts, descriptions of tools.

An agent is given them by name. The built-in loop reads `system_prompt`, and `tool:NAME` for what a tool says of itself. A text
may have places, `{question}`, which an agent fills; whatever is put in place of a text has the same ones.
"""

import re
from collections.abc import Mapping
from typing import Any

SYSTEM_PROMPT = "system_prompt"
TOOL = "tool:"
"""What the name of a tool's description begins with."""
MAX_RESOURCES = 64
MAX_RESOURCE_CHARS = 32_768
"""Characters of a text."""
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_:./-]{0,127}")
_PLACE = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")


class Prompt(str):
    """A text of a run, in whose places an agent puts what it knows."""

    __slots__ = ()

    def format(self, *args: object, **values: object) -> str:
        """Return the text with a value in each place `{name}` that one is named for; other braces stay.

        Never what `str.format` does: the text may be a model's, and `{a.b}` would read what it likes.

        Raises:
            ValueError: a value has no place, so that the model would never read it.
        """
        if args:
            raise ValueError("pass the values by name: prompt.format(question=...)")
        for name in values:
            if name not in places(self):
                raise ValueError(f"the prompt has no placeholder for {name!r}: add {{{name}}}")
        return _PLACE.sub(lambda match: str(values.get(match[1], match[0])), self)


def places(text: str) -> frozenset[str]:
    """Return the names of the text's places."""
    return frozenset(_PLACE.findall(text))


def validation_error(text: Any, before: str | None = None) -> str:
    """Return why that is no text of a run, or cannot take the place of the one `before`; empty if it can."""
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
    """Check the names and texts.

    Raises:
        ValueError: one is none.
    """
    if len(values) > MAX_RESOURCES:
        raise ValueError(f"a run has at most {MAX_RESOURCES} resources, not {len(values)}")
    for name, text in values.items():
        if not NAME.fullmatch(name):
            raise ValueError(f"a resource's name may have letters, digits and _:./-, not {name!r:.100}")
        if fault := validation_error(text):
            raise ValueError(f"the resource {name!r} is not valid: {fault}")
    return dict(values)

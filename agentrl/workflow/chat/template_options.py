"""A client's options for the chat template, such as `enable_thinking`, and the limits of these options."""

import json
from collections.abc import Mapping
from typing import Any

from agentrl.workflow.call_json import nesting
from agentrl.workflow.errors import ModelError

MAX_OPTIONS, MAX_NAME, MAX_CHARACTERS, MAX_NESTING = 32, 64, 16_384, 8

RESERVED = frozenset(
    [
        *("self", "conversation", "conversations", "messages", "message", "tools", "chat", "chat_template", "template"),
        *("add_generation_prompt", "continue_final_message", "tokenize", "tokenizer_kwargs", "sanitize_control_tokens"),
        *("padding", "truncation", "max_length", "raise_exception", "strftime_now", "namespace", "range", "dict", "loop"),
        *("lipsum", "cycler", "joiner", "caller", "varargs", "kwargs", "additional_special_tokens", "image_token"),
    ]
)
"""The names that options must not have: those of rendered values, of settings of rendering, and of functions that templates
call.
"""


def check_options(options: Mapping[str, Any]) -> str:
    """Check the options, and return them as JSON. The same options in the same order give the same text. Raise ModelError if a
    name is reserved or invalid, or the options are too many, too long, too deep, or not JSON.
    """
    if len(options) > MAX_OPTIONS:
        raise _error(f"there are {len(options)}, at most {MAX_OPTIONS} are accepted")
    for name in options:
        _check_name(name)
    if nesting(dict(options)) > MAX_NESTING:
        raise _error(f"they nest more than {MAX_NESTING} objects and arrays within each other")
    try:
        spelled = json.dumps(dict(options), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise _error(f"they are not JSON: {str(error)[:100]}") from error
    if len(spelled) > MAX_CHARACTERS:
        raise _error(f"they have {len(spelled)} characters, at most {MAX_CHARACTERS} are accepted")
    return spelled


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or len(name) > MAX_NAME or not (name.isascii() and name.isidentifier()):
        raise _error(f"{str(name)[:MAX_NAME]!r} is not a variable name")
    if name in RESERVED or name.startswith(("_", "return_")) or name.endswith("_token"):
        raise _error(f"{name!r} cannot be set by a client")


def _error(problem: str) -> ModelError:
    return ModelError(f"Options of the chat template: {problem}.", "Leave them out of chat_template_kwargs.")

"""The fields of a request of `/v1/chat/completions`, for each kind of object, and their effect.

A field has an effect, is accepted without effect, or is refused. An unknown field is refused, as in the API. A refused field is
accepted if its value requests nothing. `docs/serve.md` shows `table()`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentrl.workflow.dialects.fields import Fields

UNSUPPORTED = "it is not supported; leave it out"


@dataclass(frozen=True, slots=True)
class FieldRules:
    """The rules for the fields of one kind of object.

    Args:
        honoured: the fields that have the effect described by the API. The code that reads such a field checks its value.
        ignored: the fields that are accepted without effect, because they change no sampled token.
        refused: the refused fields, each with the values that are accepted nevertheless.
        hints: for a refused field, the advice what to do instead.
        recorded: the fields that are recorded and named as not applied, each with the values that request nothing.
    """

    honoured: tuple[str, ...]
    ignored: tuple[str, ...] = ()
    refused: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    hints: Mapping[str, str] = field(default_factory=dict)
    recorded: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def names_not_applied(self, fields: Fields) -> tuple[str, ...]:
        """Return the names of the recorded fields whose values request something."""
        values = ((name, fields.values.get(name)) for name in self.recorded)
        return tuple(name for name, value in values if value is not None and value not in self.recorded[name])

    def check(self, fields: Fields) -> None:
        """Check that the object has no unknown or refused field. A null is treated as a missing field.

        Raises:
            RequestError: the object has such a field (status 400). The message names the field.
        """
        for name, value in fields.values.items():
            if value is None or name in self.honoured or name in self.ignored or name in self.recorded:
                continue
            if name not in self.refused:
                raise fields.unknown_error(name)
            if value not in self.refused[name]:
                raise fields.error(name, self.hints.get(name, UNSUPPORTED), "unsupported_parameter")


REQUEST = FieldRules(
    honoured=(
        *("messages", "model", "tools", "tool_choice", "n", "stop", "max_tokens", "max_completion_tokens", "temperature"),
        *("top_p", "top_k", "min_p", "seed", "logprobs", "top_logprobs", "return_token_ids", "stream", "stream_options"),
        *("chat_template_kwargs", "response_format", "parallel_tool_calls"),
    ),
    ignored=(
        *("user", "metadata", "store", "service_tier", "safety_identifier", "moderation", "prompt_cache_key"),
        *("prompt_cache_retention", "prompt_cache_options", "reasoning_effort", "reasoning", "include_reasoning", "verbosity"),
        *("prediction", "request_id", "session_id", "priority", "timeout", "usage", "provider", "route", "models", "trace"),
        *("cache_prompt", "id_slot", "keep_alive"),
    ),
    refused={
        **{"functions": ([],), "function_call": ("auto", "none"), "min_tokens": (0,), "best_of": (1,)},
        **{"use_beam_search": (False,), "ignore_eos": (False,), "stop_token_ids": ([],), "bad_words": ([],)},
        **{"include_stop_str_in_output": (False,), "skip_special_tokens": (True,), "return_tokens_as_token_ids": (False,)},
        **{"echo": (False,), "add_generation_prompt": (True,), "continue_final_message": (False,), "modalities": (["text"],)},
        **{"audio": (), "web_search_options": (), "structured_outputs": (), "guided_json": (), "guided_regex": ()},
        **{"guided_choice": (), "guided_grammar": (), "thinking": (), "enable_thinking": (), "chat_template": ()},
        **{"documents": ([],), "plugins": ([],), "transforms": ([],)},
    },
    recorded={
        **{"presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,), "length_penalty": (1,)},
        **{"typical_p": (1,), "logit_bias": ({},)},
    },
    hints={
        "functions": "it is not supported; send the functions as tools",
        "thinking": "send the option of the model's template instead, in chat_template_kwargs",
        "enable_thinking": "send it in chat_template_kwargs",
    },
)
STREAM_OPTIONS = FieldRules(
    honoured=("include_usage",),
    ignored=("include_obfuscation",),
    refused={"continuous_usage_stats": (False,)},
    hints={"continuous_usage_stats": "only include_usage is supported"},
)
MESSAGE = FieldRules(
    honoured=("role", "content", "tool_calls", "tool_call_id", "reasoning", "reasoning_content", "refusal"),
    ignored=(
        *("name", "id", "annotations", "cache_control", "metadata", "parsed", "reasoning_details", "thinking_blocks"),
        *("provider_specific_fields", "is_error", "status"),
    ),
    refused={"function_call": (), "audio": (), "images": ([],), "prefix": (False,)},
    hints={"function_call": "it is not supported; send tool_calls"},
)
PART = FieldRules(
    honoured=("type", "text", "refusal"), ignored=("cache_control", "annotations", "id", "prompt_cache_breakpoint")
)
CALL = FieldRules(
    honoured=("id", "type", "function"),
    ignored=("index", "cache_control", "extra_content", "provider_specific_fields", "thought_signature"),
)
CALL_FUNCTION = FieldRules(
    honoured=("name", "arguments"), ignored=("parsed_arguments", "provider_specific_fields", "thought_signature")
)
TOOL = FieldRules(honoured=("type", "function"), ignored=("cache_control", "strict", "defer_loading"))
FUNCTION = FieldRules(honoured=("name", "description", "parameters", "return", "strict"), ignored=("cache_control",))

OBJECTS: Mapping[str, FieldRules] = {
    "the request": REQUEST,
    "`stream_options`": STREAM_OPTIONS,
    "`messages[]`": MESSAGE,
    "`messages[].content[]`, of type `text` or `refusal`": PART,
    "`messages[].tool_calls[]`": CALL,
    "`messages[].tool_calls[].function`": CALL_FUNCTION,
    "`tools[]`": TOOL,
    "`tools[].function`": FUNCTION,
}


def table() -> str:
    """Return the rules as a Markdown table."""
    heads = ("in", "honoured", "accepted without effect", "named as not applied", "refused, unless the value is")
    rows = [f"| {' | '.join(heads)} |", "|---|---|---|---|---|"]
    for name, rules in OBJECTS.items():
        refused = [f"`{key}`{_values(values)}" for key, values in rules.refused.items()]
        cells = [", ".join(f"`{key}`" for key in keys) for keys in (rules.honoured, rules.ignored, rules.recorded)]
        rows.append(f"| {name} | {' | '.join(cells)} | {', '.join(refused)} |")
    return "\n".join(rows)


def _values(values: tuple[Any, ...]) -> str:
    return f" ({' or '.join(f'`{json.dumps(value)}`' for value in values)})" if values else ""

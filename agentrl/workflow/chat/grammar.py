"""Grammars of turns. A client's requirement, such as a JSON schema, becomes a grammar, and the grammar says which tokens may
come next.

The library `llguidance` (an extra: `agentrl[constraints]`) compiles a grammar and computes the mask of each token. Without the
library, the prompt only asks the model to meet the requirement (`wish_text`), and `is_kept` checks the turn afterwards.

The grammar of tool calls is derived from `ToolFormat.write`, for each format whose arguments are one JSON object. JSON has `, `
and `: ` as separators and no other white space. Otherwise a model could write white space for ever.
"""

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from agentrl.workflow.call_json import dump_json
from agentrl.workflow.chat.endless_schemas import is_endless
from agentrl.workflow.errors import InfraError, ModelError
from agentrl.workflow.tool_formats import Schema, ToolFormat
from agentrl.workflow.trajectory import Message, ToolCall

if TYPE_CHECKING:
    import numpy as np
    from llguidance import LLMatcher
    from numpy.typing import NDArray

    from agentrl.workflow.chat.rendering import Chat

ANY_TOOL = "*"
"""The value of `Constraint.tool` that requires a call of any offered tool."""
MAX_SCHEMA_CHARS = 64 * 1024
"""The most characters of all JSON schemas of a grammar. Compiling takes about 1 ms for each 1,000 characters."""
MAX_GRAMMARS = 64
"""The most compiled grammars that are kept. Clients may send any number of schemas."""
CPU_SECONDS, MEMORY_BYTES, WALL_SECONDS = 2, 2**30, 30.0
"""The limits within which a grammar must compile. The largest schemas that were accepted from real clients take 0.1 s."""
WHOLE_MASS = 1.0 - 1e-6
"""A token trains if the grammar left at least this share of its probability. Below it, the grammar chose, not the policy."""
NO_TEXT = "No text satisfies the constraint."
_PROBE = {"zq": 0}
_COMPACT = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
_TEXT = r"/(.|\n)*/"
_TAG = re.compile(r"<[^<>\s]+>")
_CHECK = f"""
import resource, sys

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_CPU, ({CPU_SECONDS}, {CPU_SECONDS}))
resource.setrlimit(resource.RLIMIT_AS, ({MEMORY_BYTES}, {MEMORY_BYTES}))
from llguidance import LLMatcher

sys.stdout.buffer.write(LLMatcher.validate_grammar(sys.stdin.buffer.read().decode()).encode())
"""
"""The program that compiles a grammar in a process that may be killed. Some schemas of 1,000 characters take hours, such as 20
patterns in an `allOf`, and there are too many kinds of them to detect.
"""


class GrammarError(ModelError):
    """A grammar that cannot be compiled, that no text satisfies, or that became too complex before the first token."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """What a client requires of a turn.

    Args:
        tool: the name of the tool that must be called; `ANY_TOOL`: one of the offered ones; empty: a call is not required.
        schema: the JSON schema of the content, as compact JSON; `{}`: any JSON object; empty: any text.
        strict: the names of the tools whose arguments must follow their schemas, if they are called.
        one_call: True if the turn may have at most one call.
        fields: the names of the request's fields, by the names of these arguments.
    """

    tool: str = ""
    schema: str = ""
    strict: tuple[str, ...] = ()
    one_call: bool = False
    fields: tuple[tuple[str, str], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.tool or self.schema or self.strict or self.one_call)

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> "Constraint":
        """Return the constraint from the values that `stored` returned for it."""
        values = {name: record[name] for name in ("tool", "schema", "one_call") if name in record}
        return cls(**values, strict=tuple(record.get("strict", ())))

    @property
    def needs_grammar(self) -> bool:
        """True if the constraint can be enforced only with a grammar. (To limit a turn to one call, a stop string suffices.)"""
        return bool(self.tool or self.schema or self.strict)

    @property
    def field_names(self) -> tuple[str, ...]:
        """The names of the request's fields that ask for the constraint."""
        return tuple(field for name, field in self.fields if getattr(self, name))

    @property
    def stored(self) -> dict[str, Any]:
        """The values of the constraint for a JSON column, without those that require nothing."""
        return {name: getattr(self, name) for name in ("tool", "schema", "strict", "one_call") if getattr(self, name)}


NO_CONSTRAINT = Constraint()


def library() -> str:
    """Return the name and the version of the installed library, such as `llguidance 1.9.1`; empty without it."""
    try:
        import llguidance
    except ImportError:
        return ""
    return f"llguidance {llguidance.__version__}"


def grammar_hash(grammar: str) -> str:
    """Return the sha256 of a grammar."""
    return hashlib.sha256(grammar.encode()).hexdigest()


def find_obstacle(constraint: Constraint, tools: Sequence[Schema], chat: "Chat") -> str:
    """Return the reason why the constraint cannot be enforced by a grammar with this model; empty if it can."""
    if constraint.needs_grammar and not library():
        return "the package llguidance is not installed"
    if constraint.needs_grammar and not getattr(chat.tokenizer, "is_fast", False):
        return "the model has no fast tokenizer"
    if (constraint.tool or constraint.strict) and _spell_probe(tools, chat.manner.tool_format) is None:
        return f"the tool format {chat.manner.tool_format.name} does not write arguments as JSON"
    if constraint.one_call and not constraint.needs_grammar and not call_end(tools, chat.manner.tool_format):
        return f"calls of the tool format {chat.manner.tool_format.name} have no end mark"
    return ""


def call_end(tools: Sequence[Schema], tool_format: ToolFormat) -> str:
    """Return the mark that ends a call, such as `</tool_call>`, at which a turn can be stopped; empty if there is none."""
    parts = _spell_probe(tools, tool_format)
    end = parts[1].split()[-1] if parts and parts[1].split() else ""
    return end if _TAG.fullmatch(end) else ""


def turn_grammar(constraint: Constraint, tools: Sequence[Schema], chat: "Chat", prompt_ids: Sequence[int]) -> str:
    """Return the grammar that enforces a constraint on the next turn, in llguidance's dialect of Lark.

    Args:
        constraint: the constraint; its `needs_grammar` is True.
        tools: the offered tools.
        chat: the chat format of the model.
        prompt_ids: all tokens before the turn. They show whether the turn begins inside a thought.

    Raises:
        ModelError: the schemas are too large, or a required tool is not offered.
    """
    offered = {tool["function"]["name"]: tool for tool in tools}
    lines: list[str] = []
    if constraint.tool:
        chosen = list(offered) if constraint.tool == ANY_TOOL else [constraint.tool]
        if not chosen or not set(chosen) <= offered.keys():
            raise ModelError("The required tool is not offered.")
        rule = _calls_rule([offered[name] for name in chosen], tools, constraint.one_call, chat, lines)
    elif constraint.schema:
        rule = f"%json {json.dumps((json.loads(constraint.schema) or {'type': 'object'}) | _COMPACT)}"
        if tools:  # the API lets the model call a tool instead of answering
            lines.append(f"answer: {rule}")
            rule = f"(answer | {_calls_rule(list(tools), tools, constraint.one_call, chat, lines)})"
    else:
        rule = _optional_calls_rule(offered, tools, constraint, chat, lines)
    thought = _thought_rule(chat, prompt_ids)
    grammar = "\n".join([f"start: {thought}{rule}", *lines])
    if len(grammar) > MAX_SCHEMA_CHARS:
        raise ModelError(f"The schemas have {len(grammar)} characters as a grammar, at most {MAX_SCHEMA_CHARS} are accepted.")
    return grammar


def check_schemas(constraint: Constraint, tools: Sequence[Schema]) -> None:
    """Raise GrammarError if no finite text satisfies one of the schemas that the constraint enforces. llguidance finds only
    some of these schemas. The schemas are within `MAX_SCHEMA_CHARS`.
    """
    enforced = [json.loads(constraint.schema)] if constraint.schema else []
    for tool in tools:
        name = tool["function"]["name"]
        if constraint.tool in (ANY_TOOL, name) or constraint.schema or name in constraint.strict:
            enforced.append(tool["function"].get("parameters") or {})
    if any(map(is_endless, enforced)):
        raise GrammarError(NO_TEXT)


def recorded_grammar(record: Mapping[str, Any], tools: Sequence[Schema], chat: "Chat", prompt_ids: Sequence[int]) -> str:
    """Build the grammar of a recorded turn again, and return it. `record` is the part of the column `steps.asked` about the
    grammar.

    Raises:
        ModelError: the library here has another version, or the grammar differs from the recorded one. The message says which.
    """
    if record.get("library") != library():
        raise ModelError(f"sampled with {record.get('library')}, here is {library() or 'no llguidance'}")
    grammar = turn_grammar(Constraint.of_record(record), tools, chat, prompt_ids)
    if grammar_hash(grammar) != record.get("sha256"):
        raise ModelError("the grammar that is built now differs from the recorded one")
    return grammar


def _thought_rule(chat: "Chat", prompt_ids: Sequence[int]) -> str:
    """Return the beginning of the rule of a turn that may, or must, have a thought first."""
    end = _literal("</think>", chat)
    if chat.leaves_thought_open(prompt_ids):
        return rf"{_TEXT} {end} /[\n ]*/ "
    if "<think>" in str(chat.tokenizer.chat_template):  # of other models, a turn has no thought
        return rf"({_literal('<think>', chat)} {_TEXT} {end} /[\n ]*/)? "
    return ""


def _calls_rule(chosen: Sequence[Schema], tools: Sequence[Schema], one: bool, chat: "Chat", lines: list[str]) -> str:
    """Add the rules of the chosen tools to `lines`, and return the rule of one call or several."""
    lines += _call_lines([(tool, _arguments(tool)) for tool in chosen], tools, chat)
    between = None if one or not chat.manner.many else _between_calls(chosen[0], tools, chat.manner.tool_format)
    return "call" if between is None else f"call ({_literal(between, chat)} call)*"


def _optional_calls_rule(
    offered: Mapping[str, Schema], tools: Sequence[Schema], constraint: Constraint, chat: "Chat", lines: list[str]
) -> str:
    """Return the rule of a turn of any text in which the arguments of calls of strict tools follow their schemas."""
    any_object = f"%json {json.dumps({'type': 'object'} | _COMPACT)}"
    arguments = [(tool, _arguments(tool) if name in constraint.strict else any_object) for name, tool in offered.items()]
    lines += _call_lines(arguments, tools, chat)
    before, _ = _spell_call(tools[0], tools, chat.manner.tool_format)
    # No text may begin a call outside of the grammar. It cannot, if calls begin with an added token.
    text = _TEXT if before.startswith(tuple(_added_tokens(chat))) else r"/[^{<\[]*/"
    more = "" if constraint.one_call else r" (/[\n ]*/ call)*"
    return f"{text} (call{more})?"


def _call_lines(arguments: Sequence[tuple[Schema, str]], tools: Sequence[Schema], chat: "Chat") -> Iterator[str]:
    """Yield the rule `call`, a call of one of the tools, and its parts. Each tool has the rule of its arguments."""
    for number, (tool, rule) in enumerate(arguments):
        before, after = _spell_call(tool, tools, chat.manner.tool_format)
        yield f"call_{number}: {_literal(before, chat)} {rule} {_literal(after, chat)}"
    yield f"call: {' | '.join(f'call_{number}' for number in range(len(arguments)))}"


def _arguments(tool: Schema) -> str:
    parameters = dict(tool["function"].get("parameters") or {}) or {"type": "object"}
    return f"%json {json.dumps(parameters | _COMPACT)}"


def _spell_call(tool: Schema, tools: Sequence[Schema], tool_format: ToolFormat) -> tuple[str, str]:
    """Return the texts before and after the arguments of a call.

    Raises:
        ModelError: the format does not write the arguments as one JSON object.
    """
    text = tool_format.write("", [ToolCall(tool["function"]["name"], _PROBE)], tools)
    before, separator, after = text.partition(dump_json(_PROBE))
    if not separator:
        raise ModelError(f"The tool format {tool_format.name} does not write arguments as JSON.")
    return before, after


def _spell_probe(tools: Sequence[Schema], tool_format: ToolFormat) -> tuple[str, str] | None:
    with suppress(ModelError):
        return _spell_call(tools[0], tools, tool_format) if tools else None
    return None


def _between_calls(tool: Schema, tools: Sequence[Schema], tool_format: ToolFormat) -> str | None:
    """Return the text between two calls; None if several calls are not simply written one after another."""
    call = ToolCall(tool["function"]["name"], _PROBE)
    one, two = tool_format.write("", [call], tools), tool_format.write("", [call, call], tools)
    if two.startswith(one) and two.endswith(one) and len(two) >= 2 * len(one):
        return two[len(one) : len(two) - len(one)]
    return None


def _literal(text: str, chat: "Chat") -> str:
    """Return a text as a part of a rule. Added tokens in it are named by their ids, because the library spells them apart."""
    added = _added_tokens(chat)
    if not added:
        return json.dumps(text) if text else '""'
    pattern = "|".join(map(re.escape, sorted(added, key=len, reverse=True)))
    parts = [part for part in re.split(f"({pattern})", text) if part]
    return " ".join(f"<[{added[part]}]>" if part in added else json.dumps(part) for part in parts) or '""'


def _added_tokens(chat: "Chat") -> Mapping[str, int]:
    """Return the added tokens that the library treats as single symbols, by their texts."""
    tokens = chat.tokenizer.added_tokens_decoder
    return {token.content: i for i, token in tokens.items() if token.special or _TAG.fullmatch(token.content)}


class TurnMatcher:
    """The state of a grammar in one turn.

    Args:
        matcher: the library's matcher at the beginning of the turn.
    """

    def __init__(self, matcher: "LLMatcher") -> None:
        self._matcher = matcher

    @property
    def has_failed(self) -> bool:
        """True if the grammar became too complex to continue."""
        return bool(self._matcher.is_error())

    def allowed(self, vocabulary: int) -> "NDArray[np.bool_]":
        """Return a mask (vocabulary,): True for tokens that may come next. All are False if the grammar became too complex."""
        import numpy as np  # the endpoint reads constraints without it

        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        mask = np.zeros(vocabulary, bool)
        mask[: len(bits)] = bits[:vocabulary]
        return np.zeros_like(mask) if self.has_failed else mask

    def take(self, token: int) -> None:
        """Continue after this token."""
        self._matcher.consume_token(token)


class GrammarCompiler:
    """Compiles grammars for one tokenizer.

    Args:
        chat: the chat format with the tokenizer.

    Raises:
        ImportError: the package llguidance is missing.
    """

    def __init__(self, chat: "Chat") -> None:
        from llguidance.hf import from_tokenizer

        tokenizer: Any = chat.tokenizer
        self._tokenizer = from_tokenizer(tokenizer, n_vocab=len(tokenizer), eos_token=sorted(chat.end_ids))
        self._compile = lru_cache(MAX_GRAMMARS)(self._compile_fresh)

    def matcher(self, grammar: str) -> TurnMatcher:
        """Compile the grammar, and return its state at the beginning of a turn.

        Raises:
            GrammarError: the grammar is invalid, takes too long to compile, or no text satisfies it.
            InfraError: the process that compiles grammars failed.
        """
        compiled = self._compile(grammar)
        if isinstance(compiled, str):
            raise GrammarError(compiled)
        return TurnMatcher(compiled.deep_copy())

    def _compile_fresh(self, grammar: str) -> "LLMatcher | str":
        from llguidance import LLMatcher

        if fault := _find_fault(grammar):
            return f"The constraint cannot be compiled: {_first_line(fault)}."
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()  # finds out whether a first token exists
        if not matcher.is_error():
            return matcher
        error = _first_line(matcher.get_error())
        return NO_TEXT if error == "NoExtensionBias" else f"The constraint cannot be compiled: {error}."


def _find_fault(grammar: str) -> str:
    """Return why a grammar cannot be compiled within the limits; empty if it can.

    Raises:
        InfraError: the process that compiles it failed.
    """
    command = [sys.executable, "-I", "-c", _CHECK]
    try:
        done = subprocess.run(command, input=grammar.encode(), capture_output=True, timeout=WALL_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"it takes more than {WALL_SECONDS:g} s"
    if done.returncode < 0:  # killed at a limit
        return f"it takes more than {CPU_SECONDS} s of processor time, or more than {MEMORY_BYTES >> 20} MiB"
    if done.returncode:
        raise InfraError(f"The process that compiles grammars failed: {done.stderr.decode(errors='replace')[-300:]}")
    return done.stdout.decode()


def _first_line(text: str) -> str:
    return " ".join(text.partition("\n")[0].split())[:300].rstrip(".")


# wishes


def wish_text(constraint: Constraint) -> str:
    """Return the sentences that tell a model what the client requires."""
    sentences = []
    if constraint.tool == ANY_TOOL:
        sentences.append("Call one of the tools.")
    elif constraint.tool:
        sentences.append(f"Call the tool {constraint.tool}.")
    if constraint.one_call:
        sentences.append("Call at most one tool.")
    if constraint.schema == "{}":
        sentences.append("Answer with a JSON object and nothing else.")
    elif constraint.schema:
        sentences.append(f"Answer with JSON that follows this schema, and nothing else: {constraint.schema}")
    return " ".join(sentences)


def with_wish(messages: Sequence[Message], constraint: Constraint) -> tuple[Message, ...]:
    """Return the messages with the client's wish at the end of the system message."""
    text = wish_text(constraint)
    if not text:
        return tuple(messages)
    if messages and messages[0].role == "system":
        first = messages[0]
        return (Message("system", f"{first.content}\n\n{text}"), *messages[1:])
    return (Message("system", text), *messages)


def is_kept(constraint: Constraint, message: Message, tools: Sequence[Schema], open_call: bool = False) -> bool:
    """Return True if a turn meets its client's requirement. Without llguidance, this checks that
    the text is JSON, but not its schema. `open_call` says whether the turn was cut off within a call.
    """
    if open_call and constraint.strict:
        return False
    calls = [call for call in message.tool_calls if call.error is None]
    names = {call.name for call in calls}
    if constraint.tool and (not calls or (constraint.tool != ANY_TOOL and names != {constraint.tool})):
        return False
    if constraint.one_call and len(calls) > 1:
        return False
    if constraint.schema and not calls:
        try:
            value = json.loads(message.content)
        except (ValueError, RecursionError):
            return False
        return list(_missing_keys(json.loads(constraint.schema), value)) == []
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    strict_calls = [call for call in calls if call.name in constraint.strict]
    return not any(list(_missing_keys(schemas[call.name], dict(call.arguments))) for call in strict_calls)


def has_open_call(message: Message, tool_format: ToolFormat) -> bool:
    """Return True if a turn that was cut off ends within a call: its last call is unreadable, or its text begins one."""
    last_failed = bool(message.tool_calls) and message.tool_calls[-1].error is not None
    return last_failed or tool_format.begins.search(message.content) is not None


def _missing_keys(schema: Mapping[str, Any], value: Any) -> Iterator[str]:
    """Yield what the top level of a value lacks: `type`, or the names of required keys."""
    kinds: dict[str, Any] = {
        "object": dict,
        "array": list,
        "string": str,
        "boolean": bool,
        "integer": int,
        "number": (int, float),
    }
    wanted = schema.get("type", "object" if not schema else None)
    if isinstance(wanted, str) and wanted in kinds and not isinstance(value, kinds[wanted]):
        yield "type"
    elif isinstance(value, dict) and isinstance(required := schema.get("required"), list):
        yield from (name for name in required if isinstance(name, str) and name not in value)

"""A model's chat template before the model is loaded: found in its folder or in a user's file, rendered, and checked.

The template is rendered as transformers would render it (see `template_process`). transformers is not needed, so a command can
check the template before any worker starts. If a template cannot be rendered here (because it is in a tokenizer's code), the
worker that loads the model checks it.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError

from agentrl.workflow.chat.template_probe import (
    Manner,
    Render,
    can_ask_after_results,
    find_trouble,
    is_silent_on_tools,
    manner_of,
    writes_unreadable_calls,
)
from agentrl.workflow.chat.template_process import OTHER_TEMPLATE, check_syntax, render_template
from agentrl.workflow.checkpoints import RECORD
from agentrl.workflow.config import ModelConfig, RunConfig
from agentrl.workflow.errors import ConfigError, ModelError
from agentrl.workflow.plugins import find
from agentrl.workflow.tool_formats import AUTO, Schema

MAX_BYTES = 131_072
"""The largest template that a user may pass, in bytes. The longest templates of models have a fifth of this size."""

MAX_CONFIG_BYTES = 1 << 24
"""The largest tokenizer config or template of a model that is read, in bytes. A config may contain a template."""

_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def renderer(source: str, tokens: Mapping[str, str]) -> Render:
    """Return a function that renders the template.

    If the template asks for the time, it always gets the time of the call to `renderer`. `tokens` are the special tokens that
    the template names.
    """
    clock = datetime.now(UTC)

    def render(messages: Sequence[Mapping[str, Any]], tools: Sequence[Schema], generate: bool) -> str:
        return render_template(source, messages, tools, generate, tokens, clock)

    return render


def read_template(template: str) -> str:
    """Return a chat template, given as a path or a text. Raise ConfigError if it is neither."""
    source = template if "{" in template or "\n" in template else _read_template_file(Path(template).expanduser())
    if len(source.encode(errors="replace")) > MAX_BYTES:
        raise ConfigError(f"The chat template has more than {MAX_BYTES} bytes.", "Is it the right file?")
    try:
        check_syntax(source)
    except TemplateError as error:
        where = f", line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
        problem = f"The chat template is not valid Jinja{where}: {' '.join(str(error).split())[:200]}"
        raise ConfigError(f"{problem.rstrip('.')}.", "Correct it.") from error
    return source


def _read_template_file(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        return data.decode()
    except OSError as error:
        raise ConfigError(f"Cannot read the chat template {str(path)!r}: {error.strerror}.", "Check the path.") from error
    except ValueError as error:
        raise ConfigError(f"The chat template {str(path)!r} is not UTF-8.", "Is it the right file?") from error


def resolve_chat(config: ModelConfig, folder: Path | None) -> ModelConfig:
    """Return the config section with the text of its template and the name of its tool format.

    If the model is not on this machine, a tool format of AUTO stays AUTO. Raise ConfigError if the template cannot be read, or
    the format does not exist.
    """
    chosen: dict[str, Any] = {}
    if config.chat_template is not None:
        chosen["chat_template"] = read_template(config.chat_template)
    if config.tool_format in (None, AUTO):
        source, learned = source_of(folder, chosen.get("chat_template")), "" if chosen else _recorded_format(folder)
        written = manner_of(renderer(*source), source[0]).tool_format.name if source and not learned else AUTO
        chosen["tool_format"] = learned or written
    else:
        find("tool_formats", config.tool_format)
    return config.model_copy(update=chosen)


def resolve_last_turn(config: RunConfig, folder: Path | None) -> RunConfig:
    """Return the config with a value of `rollout.last_turn` in place of `auto`.

    If the model is not on this machine, `auto` stays. `config` is the run's config, with its model as `resolve_chat` returns
    it. Raise ConfigError if the value is `ask`, and the model's chat template does not support it.
    """
    spoken = _renderer_and_manner(config.model, folder) if folder is not None else None
    if spoken is None or config.rollout.last_turn == "plain":
        return config
    can = can_ask_after_results(*spoken)
    if config.rollout.last_turn == "ask" and not can:
        raise ConfigError(
            "The chat template does not accept a user message after a tool's result.", "Set rollout.last_turn=plain."
        )
    chosen = {"last_turn": "ask" if can else "plain"}
    return config.model_copy(update={"rollout": config.rollout.model_copy(update=chosen)})


def _recorded_format(folder: Path | None) -> str:
    """Return the tool format with which a model that agentrl made was trained; empty if no format is recorded."""
    record = read_object(folder / RECORD) if folder else {}
    name = record.get("tool_format")
    return name if isinstance(name, str) else ""


def source_of(folder: Path | None, source: str | None = None) -> tuple[str, dict[str, str]] | None:
    """Return a model's chat template (or `source` instead) and special tokens; None if its files have no template."""
    if folder is None or not folder.is_dir():
        return (source, {}) if source else None
    config = read_object(folder / "tokenizer_config.json")
    tokens = {name: _token_text(config.get(name)) for name in _TOKENS if _token_text(config.get(name))}
    file = folder / "chat_template.jinja"
    if not source:
        source = _read_text(file) if file.is_file() else _template_text(config.get("chat_template"))
    return (source, tokens) if source else None


def _read_text(file: Path) -> str:
    """Return the text of a model's file; empty if it is missing, too large or not UTF-8."""
    try:
        return file.read_text(encoding="utf-8") if file.is_file() and file.stat().st_size <= MAX_CONFIG_BYTES else ""
    except (OSError, ValueError):
        return ""


def _template_text(value: object) -> str:
    """Return the template in a tokenizer's config. If the config has several templates, return the one for tools."""
    if isinstance(value, str):
        return value
    several = [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []
    templates = {str(entry.get("name")): entry.get("template") for entry in several}
    template = templates.get("tool_use") or templates.get("default")
    return template if isinstance(template, str) else ""


def _token_text(value: object) -> str:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else ""


def read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a model; empty if the file is missing, too large or contains something else."""
    try:
        value = json.loads(_read_text(file))
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _renderer_and_manner(config: ModelConfig, folder: Path) -> tuple[Render, Manner] | None:
    source = source_of(folder, config.chat_template)
    if source is None:
        return None
    render = renderer(*source)
    return render, manner_of(render, source[0], config.tool_format or AUTO)


def check_template(config: ModelConfig, folder: Path, system: bool, tools: bool, later_system: bool = False) -> None:
    """Raise ModelError if the template drops parts of messages, cannot be continued token for token, or cannot be rendered.
    `config` is the section `model`, as `resolve_chat` returns it. For the flags see `find_trouble`.
    """
    spoken = _renderer_and_manner(config, folder)
    trouble = find_trouble(*spoken, system, tools, later_system) if spoken else ""
    if trouble:
        raise template_error(str(folder), trouble)


def template_error(model: str, trouble: str) -> ModelError:
    """Return the exception that refuses a model's template. `trouble` is the reason that `find_trouble` returned."""
    return ModelError(f"The chat template of {model!r} {trouble}.", OTHER_TEMPLATE)


def remark_on_tools(config: ModelConfig, folder: Path) -> str:
    """Return remarks if the template leaves out tools, or writes calls that the format cannot parse."""
    spoken = _renderer_and_manner(config, folder)
    if spoken is None:
        return ""
    name = spoken[1].tool_format.name
    remarks = []
    if is_silent_on_tools(*spoken):
        remarks.append(
            "The chat template does not render `tools`: the model only knows tools that a prompt describes, and calls them as"
            f" {name} does. Pass one that renders them: --chat-template FILE"
        )
    if writes_unreadable_calls(*spoken):
        remarks.append(
            f"The chat template writes calls in a form that `{name}` does not read: calls in the model's own form are plain"
            " text. See the formats: docs/tools-and-sandbox.md, or write one: --tool-format my.formats:mine"
        )
    return "\n".join(remarks)

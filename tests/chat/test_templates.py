"""templates: each family's is spoken to in its own way, and one through which nothing can be trained is refused at once."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from agentrl.workers.requests.eval_config import sampling_differences
from agentrl.workers.requests.requirements import requirements_of
from agentrl.workers.requests.submit import prepare
from agentrl.workflow.chat.rendering import Chat
from agentrl.workflow.chat.template_probe import NAME
from agentrl.workflow.chat.templates import (
    MAX_BYTES,
    check_template,
    read_template,
    remark_on_tools,
    renderer,
    resolve_chat,
    resolve_last_turn,
    source_of,
)
from agentrl.workflow.chat.tiny_template import TEMPLATE
from agentrl.workflow.config import ModelConfig, build
from agentrl.workflow.errors import ConfigError, ModelError
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.models.tiny import tiny_tokenizer
from agentrl.workflow.tool_formats import AUTO
from agentrl.workflow.trajectory import Message, ToolCall
from tests.chat.test_rendering import QUESTION, RESULT, SCHEMA, plain
from tests.support.chat_families import FAMILIES, PLAIN, VARIANTS, family_model, family_tokenizer, tokenizer_of
from tests.support.small_models import tiny_random, tokenizer

CALL = ToolCall("calculator", {"expression": "12+7"})
each_family = pytest.mark.parametrize("name", FAMILIES)
calls = st.builds(ToolCall, st.just("calculator"), st.fixed_dictionaries({"expression": plain, "b": plain | st.integers()}))


def section(**values: Any) -> ModelConfig:
    """The config's section with a format of the template's own."""
    return ModelConfig.model_validate({"tool_format": AUTO, **values})


@each_family
def test_format_is_the_one_template_writes(name: str) -> None:
    manner = Chat(family_tokenizer(name), AUTO).manner
    assert (manner.tool_format.name, manner.native, manner.ids) == (name, True, name.startswith("mistral"))
    assert manner.many == (name != "llama3")


@each_family
def test_format_of_template_that_drops_calls_is_found_by_marks(name: str) -> None:
    marks = {"named": '<tool_call name=""></tool_call>', "pythonic": "<|python_start|>", "mistral_args": "[TOOL_CALLS] [ARGS]"}
    marks |= {
        "hermes": "<tool_call>",
        "qwen_coder": "<tool_call> <function=f>",
        "glm": "<tool_call> <arg_key>",
        "llama3": "<|python_tag|>",
        "granite": "<|tool_call|>",
        "phi4_mini": "<|tool|><|/tool|>",
        "deepseek": "<｜tool▁calls▁begin｜> <｜tool▁sep｜> ```json",
        "deepseek_v31": "<｜tool▁calls▁begin｜> <｜tool▁sep｜>",
        "lfm2": "<|tool_list_start|>",
        "olmo3": "<function_calls>",
        "gemma": "<start_of_turn>",
        "function_gemma": "<start_of_turn> <start_function_call>",
        "gemma4": "<|tool_call>",
    }
    source = PLAIN + "{# " + marks.get(name, "[TOOL_CALLS]") + " #}"
    made = Chat(_with_template(source), AUTO).manner
    assert (made.tool_format.name, made.native) == (name, False)


@pytest.mark.parametrize("name", VARIANTS)
def test_format_that_reads_most_of_template_is_chosen(name: str) -> None:
    """Granite's format reads Phi's list too, but not its closing mark."""
    chat = Chat(tokenizer_of(*VARIANTS[name]), AUTO)
    assert (chat.manner.tool_format.name, chat.manner.native, chat.manner.many) == (name, True, True)
    turn = Message("assistant", "so", tool_calls=(CALL, CALL))
    assert chat.parse(chat.turn(turn, [SCHEMA]), [SCHEMA]) == turn


def test_template_may_write_end_of_sequence_after_last_turn(tmp_path: Path) -> None:
    folder = family_model(tmp_path / "phi", "phi4_mini")
    assert (source_of(folder) or ("",))[0].rstrip().endswith("{{ eos_token }}{%- endif -%}")
    check_template(resolve_chat(section(), folder), folder, system=True, tools=True)


def _with_template(source: str) -> Any:
    made = tiny_tokenizer([])
    made.chat_template = source
    return made


def test_format_defaults_to_hermes_and_calls_are_kept() -> None:
    chat = Chat(_with_template(PLAIN), AUTO)
    assert (chat.manner.tool_format.name, chat.manner.native) == ("hermes", False)
    assert CALL.arguments["expression"] in chat.decode(chat.opening([QUESTION, Message("assistant", "so", tool_calls=(CALL,))]))


@each_family
@hypothesis_settings(max_examples=40)
@given(content=plain, made=st.lists(calls, max_size=2))
def test_format_of_family_reads_rendered_turn(name: str, content: str, made: list[ToolCall]) -> None:
    chat = Chat(family_tokenizer(name), AUTO)
    turn = Message("assistant", content, tool_calls=tuple(made))
    ids = chat.turn(turn, [SCHEMA])
    assert chat.has_end_token(ids)
    assert chat.parse(ids, [SCHEMA]) == turn


@each_family
def test_format_of_family_keeps_episode_one_growing_row(name: str) -> None:
    chat = Chat(family_tokenizer(name), AUTO)
    turn = Message("assistant", "", tool_calls=(CALL,))
    ids, reason = chat.continuation([RESULT], [SCHEMA])
    assert ids is not None, reason
    row = chat.decode(chat.opening([QUESTION], [SCHEMA]) + chat.turn(turn, [SCHEMA]) + ids)
    assert row == chat.decode(chat.opening([QUESTION, turn, RESULT], [SCHEMA]))
    assert row.count("19") == 1


def test_format_of_llama_has_own_end_token_for_calls() -> None:
    chat = Chat(family_tokenizer("llama3"), AUTO)
    eom = chat.tokenizer.convert_tokens_to_ids("<|eom_id|>")
    assert eom in chat.end_ids
    ids = (*chat.turn(Message("assistant", "", tool_calls=(CALL,)))[:-1], eom)
    assert chat.parse(ids).tool_calls == (CALL,)


@each_family
def test_format_chosen_by_option_is_written_into_content(name: str) -> None:
    chat = Chat(tokenizer(), name)
    turn = Message("assistant", "so", tool_calls=(CALL, CALL))
    assert chat.manner.native == (name == "hermes")
    assert chat.parse(chat.turn(turn), [SCHEMA]) == turn
    assert chat.manner.tool_format.write("so", turn.tool_calls, ()) in chat.decode(chat.opening([QUESTION, turn, RESULT]))


def test_format_hermes_renders_alike_if_chosen_or_detected() -> None:
    turn = Message("assistant", "Let me see.", thought="hm", tool_calls=(CALL, CALL))
    told = [QUESTION, turn, RESULT, RESULT]
    ways = [Chat(tokenizer(), way) for way in (AUTO, "hermes")]
    assert len({chat.opening(told, [SCHEMA]) for chat in ways}) == 1
    assert len({chat.turn(turn) for chat in ways}) == 1
    assert len({chat.end_ids for chat in ways}) == 1


def test_format_reads_back_call_that_contains_closing_tag() -> None:
    turn = Message("assistant", "", tool_calls=(ToolCall("f", {"a": "x</tool_call>y"}),))
    assert Chat(tokenizer(), AUTO).parse(Chat(tokenizer(), AUTO).turn(turn)) == turn


# --- before a model is loaded -------------------------------------------------------------------------------------------------


@each_family
def test_format_is_read_from_folder_without_transformers(name: str, tmp_path: Path) -> None:
    folder = family_model(tmp_path / name, name)
    assert resolve_chat(section(), folder).tool_format == name
    assert resolve_chat(ModelConfig(), folder).tool_format == name
    check_template(resolve_chat(section(), folder), folder, system=name != "llama3", tools=True)
    assert remark_on_tools(section(), folder) == ""


@each_family
def test_template_renders_as_in_transformers(name: str, tmp_path: Path) -> None:
    folder = family_model(tmp_path / name, name)
    found = source_of(folder)
    assert found
    chat = Chat(family_tokenizer(name), AUTO)
    told = list(chat.manner.plain([QUESTION, Message("assistant", "", tool_calls=(CALL,)), RESULT], [SCHEMA]))
    theirs: Any = chat.tokenizer.apply_chat_template(told, tools=[SCHEMA], add_generation_prompt=True, tokenize=False)
    assert renderer(*found)(told, [SCHEMA], True) == theirs


def test_template_option_is_stored_by_content_and_sets_format(tmp_path: Path) -> None:
    folder, file = tiny_random(tmp_path / "model"), tmp_path / "mine.jinja"
    file.write_text(FAMILIES["named"][0])
    found = resolve_chat(section(chat_template=str(file)), folder)
    assert (found.chat_template, found.tool_format) == (FAMILIES["named"][0], "named")
    file.write_text("changed")
    assert resolve_chat(found, folder) == found
    policy = Policy.load(found, str(folder), "cpu", weights=False)
    assert policy.chat.manner.tool_format.name == "named"
    policy.tokenizer.save_pretrained(tmp_path / "saved")
    assert source_of(tmp_path / "saved") == (FAMILIES["named"][0], source_of(folder)[1])  # type: ignore[index]
    assert resolve_chat(section(), tmp_path / "saved").tool_format == "named"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"{% if %}", "not valid Jinja, line 1: Expected an expression"), 
        (b"\xff\xfe{{", "not UTF-8"), (b"{{ x }" * 10, "not valid Jinja"),
        (b"{{ a }}" * MAX_BYTES, "more than 131072 bytes"), (b"{% nonsense %}", "unknown tag 'nonsense'"),
        (b"{{ " + b"(" * 5000 + b" }}", "not valid Jinja"),
    ],
)  # fmt: skip
def test_template_file_invalid_is_one_sentence(tmp_path: Path, text: bytes, why: str) -> None:
    file = tmp_path / "bad.jinja"
    file.write_bytes(text)
    with pytest.raises(ConfigError, match=why) as caught:
        read_template(str(file))
    assert len(caught.value.message) < 400
    with pytest.raises(ConfigError, match="Cannot read the chat template"):
        read_template(str(tmp_path / "gone.jinja"))


TROUBLES = {
    "system": (FAMILIES["hermes"][0].replace("{{ messages[0].content }}", ""), "drops the system message"),
    "user": (
        TEMPLATE.replace("{{ message.content }}\n{%- for call", "{{ 'hello' }}\n{%- for call"),
        "drops the user's words and",
    ),
    "result": (
        PLAIN.replace("{% for message in messages -%}", "{% for message in messages if message.role != 'tool' -%}"),
        "results",
    ),
    "arguments": (
        PLAIN.replace("message.content }}", "message.content | replace('zqvalue', '') }}"),
        "drops a call's arguments",
    ),
    "refuses": (PLAIN + "{% for m in messages if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endfor %}", "no tools"),
    "breaks": (PLAIN + "{{ messages[0].content + 1 }}", "cannot render"),
    "rewrites": (
        PLAIN.replace("message.content }}", "message.content if loop.last else message.content ~ ' (said before)' }}"),
        "rewrites",
    ),
    "opens": ("<|im_start|>{{ messages | length }}\n" + PLAIN, "rewrites earlier turns before a tool's result"),
}


@pytest.mark.parametrize("case", TROUBLES)
def test_check_template_refuses_untrainable_template(tmp_path: Path, case: str) -> None:
    source, why = TROUBLES[case]
    folder = tiny_random(tmp_path / "model")
    config = resolve_chat(section(chat_template=source), folder)
    with pytest.raises(ModelError, match=why) as caught:
        check_template(config, folder, system=True, tools=True)
    assert "--chat-template" in caught.value.hint


def test_check_template_refuses_dropped_later_system_messages(tmp_path: Path) -> None:
    folder = tiny_random(tmp_path / "model")
    config = resolve_chat(section(), folder)
    check_template(config, folder, system=True, tools=True)
    with pytest.raises(ModelError, match="drops system messages behind the first"):
        check_template(config, folder, system=True, tools=True, later_system=True)


ALTERNATING = """{%- set ns = namespace(user=true) -%}
{%- for message in messages if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) -%}
{%- if (message.role == 'user') != ns.user -%}{{ raise_exception('roles must alternate') }}{%- endif -%}
{%- set ns.user = not ns.user -%}{%- endfor -%}
"""


def test_last_turn_asks_if_template_takes_question_after_result(tmp_path: Path) -> None:
    def settled(source: str, **rollout: str) -> str:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": source}))
        asked = build({f"rollout.{name}": value for name, value in rollout.items()})
        config = asked.model_copy(update={"model": resolve_chat(asked.model, tmp_path)})
        return resolve_last_turn(config, tmp_path).rollout.last_turn

    (tmp_path / "config.json").write_text("{}")
    assert settled(TEMPLATE) == settled(TEMPLATE, last_turn="ask") == "ask"
    assert settled(TEMPLATE, last_turn="plain") == "plain"
    assert settled(ALTERNATING + TEMPLATE) == settled(ALTERNATING + TEMPLATE, last_turn="plain") == "plain"
    with pytest.raises(ConfigError, match=r"not accept a user message after a tool's result\. Set rollout\.last_turn=plain"):
        settled(ALTERNATING + TEMPLATE, last_turn="ask")


def test_check_template_allows_dropping_unused_parts(tmp_path: Path) -> None:
    folder = tiny_random(tmp_path / "model")
    for case in ("result", "refuses", "rewrites", "opens", "arguments"):
        check_template(resolve_chat(section(chat_template=TROUBLES[case][0]), folder), folder, True, tools=False)
    check_template(resolve_chat(section(chat_template=TROUBLES["system"][0]), folder), folder, system=False, tools=True)


def test_remark_on_tools_names_template_without_tools(tmp_path: Path) -> None:
    folder = tiny_random(tmp_path / "model")
    said = remark_on_tools(section(chat_template=PLAIN, tool_format="pythonic"), folder)
    assert "does not render `tools`" in said
    assert "pythonic" in said
    assert NAME not in said


AS_TEXT = TEMPLATE.replace(
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}",
    "{{ call.function.name + ' ' + call.function.arguments }}",
)
"""It takes arguments as text, and fails on a mapping."""

UNREAD = TEMPLATE.replace("<tool_call>", "<|call_begins|>function<|sep|>").replace("</tool_call>", "<|call_ends|>")


def test_remark_on_tools_names_a_template_with_unreadable_calls(tmp_path: Path) -> None:
    folder = tiny_random(tmp_path / "model")
    said = remark_on_tools(resolve_chat(section(chat_template=UNREAD), folder), folder)
    assert "writes calls in a form that `hermes` does not read" in said
    said = remark_on_tools(resolve_chat(section(chat_template=AS_TEXT), folder), folder)
    assert "writes calls in a form that `hermes` does not read" in said
    other = resolve_chat(section(chat_template=TEMPLATE, tool_format="pythonic"), folder)
    assert "`pythonic` does not read" in remark_on_tools(other, folder)
    assert "does not read" not in remark_on_tools(section(chat_template=PLAIN), folder)


def test_template_missing_in_folder_is_left_to_loader(tmp_path: Path) -> None:
    assert resolve_chat(section(), tmp_path).tool_format == AUTO
    assert resolve_chat(section(), None).tool_format == AUTO
    check_template(section(), tmp_path, True, True)
    for broken in ("{", "[]", '{"chat_template": 7}', '{"chat_template": [{"name": "default"}]}'):
        (tmp_path / "tokenizer_config.json").write_text(broken)
        assert source_of(tmp_path) is None
    several = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": TEMPLATE}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several, "eos_token": {"content": "x"}}))
    assert source_of(tmp_path) == (TEMPLATE, {"eos_token": "x"})


def test_format_unknown_is_refused_with_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"No tool format is called 'herms'. Did you mean 'hermes'"):
        resolve_chat(section(tool_format="herms"), None)


# --- submitting ---------------------------------------------------------------------------------------------------------------


def test_submit_refuses_template_that_would_spoil_run(tmp_path: Path, home: Path) -> None:
    folder, file = tiny_random(tmp_path / "model"), tmp_path / "bad.jinja"
    asked = {"model.path": str(folder), "dataset.name": "arithmetic", "model.chat_template": str(file)}
    for case in ("result", "user", "opens", "refuses"):
        file.write_text(TROUBLES[case][0])
        with pytest.raises(ModelError, match=TROUBLES[case][1]):
            prepare(None, build(asked))
    file.write_text(TROUBLES["system"][0])  # the env says nothing before the question
    assert prepare(None, build(asked)).config.model.chat_template == TROUBLES["system"][0]
    with pytest.raises(ModelError, match="drops the system message"):
        prepare(None, build(asked | {"env": "math"}))
    with pytest.raises(ModelError, match="drops the system message"):
        prepare(
            None, build(asked | {"env": "plain", "rewards": {"numeric_answer": 1}, "resources": {"system_prompt": "Be brief."}})
        )


def test_run_stores_format_and_template_text(tmp_path: Path, home: Path) -> None:
    folder, file = family_model(tmp_path / "model", "llama3"), tmp_path / "plain.jinja"
    asked = {"model.path": str(folder), "dataset.name": "arithmetic"}
    prepared = prepare(None, build(asked))
    assert prepared.submission.config["model"]["tool_format"] == "llama3"
    assert not any("does not read" in remark for remark in prepared.remarks)
    assert prepare(None, build(asked | {"model.tool_format": "hermes"})).submission.config["model"]["tool_format"] == "hermes"
    file.write_text(PLAIN)
    prepared = prepare(None, build(asked | {"model.chat_template": str(file), "model.tool_format": "pythonic"}))
    assert prepared.submission.config["model"]["chat_template"] == PLAIN
    assert any("does not render `tools`" in remark for remark in prepared.remarks)
    assert prepare(None, prepared.config).config == prepared.config


def test_compare_names_different_formats() -> None:
    before, now, other = (build({"model.tool_format": way}).model_dump() for way in (None, "hermes", "llama3"))
    assert sampling_differences(before, now) == {}
    assert sampling_differences(before, other) == {"model.tool_format": ("hermes", "llama3")}
    assert "model.chat_template" in sampling_differences(now, build({"model.chat_template": PLAIN}).model_dump())


def test_worker_check_compares_own_format_file() -> None:
    config = build({"model.tool_format": "tests.support.own_format:shouted", "env": "arithmetic"}).model_dump(mode="json")
    asked = requirements_of(config, {}, "base", "out", rolls_out=True)
    assert asked.own
    assert "tool_formats tests.support.own_format:shouted" in asked.code

"""Where a sampled turn ends by its template, tokenizer and generation_config.json, and what continues it."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken

from agentrl.workflow.chat.rendering import Chat
from agentrl.workflow.chat.tiny_template import TEMPLATE
from agentrl.workflow.errors import ModelError
from agentrl.workflow.inference.open_policy import open_policy
from agentrl.workflow.models.loading import read_stop_ids
from agentrl.workflow.models.tiny import tiny_tokenizer
from agentrl.workflow.tool_formats import AUTO
from agentrl.workflow.training.demonstrations import Demonstration
from agentrl.workflow.training.supervised import segments_of
from agentrl.workflow.trajectory import Message, ToolCall
from tests.chat.test_rendering import CALLING, QUESTION, RESULT, SCHEMA
from tests.support.chat_families import ENDINGS, FAMILIES, family_model, family_tokenizer
from tests.support.small_models import tiny_random

ANSWER, AGAIN = Message("assistant", "19"), Message("user", "Are you sure?")
EVERY = [*FAMILIES, *ENDINGS]


def chat_of(name: str) -> Chat:
    """The chat of a family or of a way to end turns."""
    return Chat(family_tokenizer(name), AUTO)


def ids_of(chat: Chat, text: str) -> tuple[int, ...]:
    """The text's tokens."""
    return tuple(chat.tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("name", EVERY)
def test_continuation_of_an_answer_is_what_the_template_renders(name: str) -> None:
    chat = chat_of(name)
    turn = chat.turn(ANSWER)
    ids, reason = chat.continuation([AGAIN], (), turn)
    assert ids is not None, reason
    assert chat.opening([QUESTION]) + turn + ids == chat.opening([QUESTION, ANSWER, AGAIN])
    unended, _ = chat.continuation([AGAIN], (), turn[:-1])
    assert unended == (turn[-1], *ids)


@pytest.mark.parametrize("name", EVERY)
def test_continuation_contains_no_text_of_the_probe(name: str) -> None:
    chat = chat_of(name)
    for messages in ([AGAIN], [RESULT]):
        ids, _ = chat.continuation(messages, [SCHEMA])
        assert "zq" not in chat.decode(ids or ())


def test_continuation_gives_no_ids_if_a_template_repeats_turns() -> None:
    echoing = tiny_tokenizer([])
    repeat = "{% if messages | length > 2 %}{{ messages[-2].content }}{% endif %}{%- if add_generation_prompt -%}"
    echoing.chat_template = TEMPLATE.replace("{%- if add_generation_prompt -%}", repeat)
    assert echoing.chat_template != TEMPLATE
    ids, reason = Chat(echoing).continuation([AGAIN])
    assert ids is None
    assert reason == "the template repeats earlier turns after a user message"


def test_end_ids_hold_the_next_roles_token_without_an_end_token() -> None:
    chat = chat_of("next role")
    user, observation, end = ids_of(chat, "<|user|><|observation|><|im_end|>")
    assert {user, observation} <= chat.end_ids
    assert chat.turn(ANSWER)[-1] == user
    assert chat.turn(CALLING)[-1] == observation
    assert chat.parse(chat.turn(CALLING), [SCHEMA]) == CALLING
    for last, messages in ((user, [RESULT]), (observation, [AGAIN]), (end, [AGAIN])):
        ids, reason = chat.continuation(messages, [SCHEMA], (*ids_of(chat, "19"), last))
        assert ids is None
        assert chat.decode([last]) in reason


def chat_with(template: str, *special: str) -> Chat:
    """The chat of a template with tokens of its own."""
    made = tiny_tokenizer([])
    made.add_tokens([AddedToken(token, special=True, normalized=False) for token in special], special_tokens=True)
    made.chat_template = template
    return Chat(made, AUTO)


def test_end_ids_hold_no_token_that_stands_inside_of_turns() -> None:
    template = (
        "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
        "{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    )
    chat = chat_with(
        template.replace("assistant{% endif", "assistant<|message|>{% endif"),
        "<|start|>",
        "<|message|>",
        "<|end|>",
        "<|return|>",
    )
    (inside, last) = ids_of(chat, "<|end|><|return|>")
    assert last in chat.end_ids
    assert inside not in chat.end_ids


def test_continuation_writes_no_end_token_twice() -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|closed|><|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    chat = chat_with(template, "<|closed|>")
    for turn, begin in (("19<|closed|>", "<|im_end|><|im_start|>user"), ("19<|im_end|>", "<|im_start|>user")):
        ids, reason = chat.continuation([AGAIN], (), ids_of(chat, turn))
        assert ids is not None, reason
        assert chat.decode(ids).startswith(begin)


def test_demonstration_trains_the_token_that_ends_its_turns() -> None:
    chat = chat_of("next role")
    messages = (QUESTION, CALLING, RESULT, ANSWER)
    segments = segments_of(chat, Demonstration(messages, (SCHEMA,)))
    row = tuple(token for ids, _ in segments for token in ids)
    assert row == (*chat.opening(messages, [SCHEMA])[: -len(ids_of(chat, "<|assistant|>\n"))], *ids_of(chat, "<|user|>"))
    assert [chat.decode(ids[-1:]) for ids, said in segments if said] == ["<|observation|>", "<|user|>"]


def test_turn_is_not_cut_at_a_text_like_an_end_token() -> None:
    chat = chat_of("hermes")
    turn = Message("assistant", "so <|im_end|> and on", tool_calls=(ToolCall("calculator", {"expression": "1"}),))
    assert chat.decode(chat.turn(turn, [SCHEMA])).endswith("</tool_call><|im_end|>")


def test_chat_refuses_a_template_that_drops_answers() -> None:
    silent = tiny_tokenizer([])
    silent.chat_template = "{% for m in messages if m.role == 'user' %}{{ m.content }}<|im_end|>{% endfor %}"
    with pytest.raises(ModelError, match="drops the assistant's messages"):
        Chat(silent)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [({"eos_token_id": [0, 3]}, {}, (0, 3)), ({"eos_token_id": 3}, {}, (3,)), ({}, {"eos_token_id": 1}, (1,)), ({}, {}, ()),
     ({"eos_token_id": [True, "3", None]}, {"eos_token_id": None}, ())],
)  # fmt: skip
def test_read_stop_ids_reads_the_models_files(
    tmp_path: Path, generation: dict[str, object], config: dict[str, object], expected: tuple[int, ...]
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_stop_ids(tmp_path) == expected


def test_turn_ends_at_each_token_of_generation_config(tmp_path: Path) -> None:
    folder = tiny_random(tmp_path / "model")
    file = folder / "generation_config.json"
    everything = list(range(100))
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": [*everything, 10**9]}))
    with open_policy(str(folder), max_new_tokens=40) as policy:
        assert set(everything) <= policy.chat.end_ids
        assert 10**9 not in policy.chat.end_ids
        step = policy.generate([QUESTION])
    assert step.finish_reason == "stop"
    assert [token in everything or token == 2 for token in step.sampled_ids] == [False] * (len(step.sampled_ids) - 1) + [True]


def test_episode_without_end_tokens_has_no_other_text_in_prompts(tmp_path: Path) -> None:
    with open_policy(str(family_model(tmp_path / "model", "next role")), max_new_tokens=8) as policy:
        first = policy.generate([QUESTION])
        second = policy.generate([AGAIN], before=[first])
        prompt = second.prompt_ids if second.new_row else (*first.prompt_ids, *first.sampled_ids, *second.prompt_ids)
        text = policy.chat.decode(prompt)
    assert "zq" not in text
    assert text.count(QUESTION.content) == text.count(AGAIN.content) == 1

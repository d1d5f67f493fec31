"""Turns of a model are read from spans by the names of each convention; spans of one rollout belong together."""

import json
from dataclasses import replace
from typing import Any

import pytest

from agentrl.workflow.adapters import Turn, parsed
from agentrl.workflow.adapters.agentlightning import agentlightning
from agentrl.workflow.adapters.genai import genai
from agentrl.workflow.inference.traced_steps import OTHER, traced_steps
from agentrl.workflow.plugins import find, names
from agentrl.workflow.spans.traces import traces_of
from agentrl.workflow.token_chains import chains_of
from agentrl.workflow.trajectory import Episode, Message, Task
from tests.support.small_models import chat, tokenizer
from tests.support.traces import ANSWER, ASKED, CALL, RESULT, TOOLS, flat, parts, span, tokens

HISTORY = (Message("system", "Be brief."), ASKED, CALL, RESULT)


def read(adapter: Any, **attributes: Any) -> Turn:
    found = adapter.turn(span(1, "chat", {key.replace("__", "."): value for key, value in attributes.items()}))
    assert isinstance(found, Turn)
    return found


def test_adapters_are_found_by_name() -> None:
    assert names("adapters") == ["agentlightning", "genai"]
    assert [find("adapters", name).name for name in names("adapters")] == names("adapters")


@pytest.mark.parametrize("told", [flat, parts])
def test_adapter_reads_turn_with_history_calls_and_tools(told: Any) -> None:
    adapter = agentlightning if told is flat else genai
    found = adapter.turn(span(1, "chat", told(HISTORY, ANSWER)))
    assert found is not None
    assert (found.messages, found.said, found.tools) == (HISTORY, ANSWER, TOOLS)
    assert not found.exact
    called = adapter.turn(span(1, "chat", told(HISTORY[:2], CALL)))
    assert called is not None
    assert called.said == CALL


def test_adapter_reads_exact_tokens_in_each_form() -> None:
    exact = tokens(chat(), HISTORY, ANSWER)
    found = agentlightning.turn(span(1, "chat", flat(HISTORY, ANSWER) | exact))
    assert found is not None
    assert found.exact
    assert (found.prompt_ids, found.sampled_ids) == (tuple(exact["prompt_token_ids"]), tuple(exact["response_token_ids"]))
    assert set(found.logprobs) == {-0.5}
    vllm = {
        "llm.hosted_vllm.prompt_token_ids": json.dumps(exact["prompt_token_ids"]),
        "llm.hosted_vllm.response_token_ids": json.dumps([exact["response_token_ids"]]),
        "logprobs.content": json.dumps([-0.5] * len(exact["response_token_ids"])),
    }
    again = genai.turn(span(1, "chat", parts(HISTORY, ANSWER) | vllm))
    assert again is not None
    assert (again.prompt_ids, again.sampled_ids, again.logprobs) == (found.prompt_ids, found.sampled_ids, found.logprobs)
    short = agentlightning.turn(span(1, "chat", flat(HISTORY, ANSWER) | exact | {"logprobs.content": "[-0.5]"}))
    assert short is not None
    assert not short.exact


def test_adapter_reads_thought_system_text_and_finish_reason() -> None:
    said = replace(ANSWER, thought="two and three")
    told = parts((ASKED,), said)
    told |= {"gen_ai.system_instructions": json.dumps([{"type": "text", "content": "Be brief."}])}
    told["gen_ai.output.messages"] = told["gen_ai.output.messages"].replace('"stop"', '"length"')
    found = genai.turn(span(1, "chat", told))
    assert found is not None
    assert (found.said, found.messages[0], found.finish_reason) == (said, Message("system", "Be brief."), "length")
    listed = flat((ASKED,), ANSWER) | {"gen_ai.prompt.0.content": json.dumps([{"type": "text", "text": "What?"}])}
    flattened = agentlightning.turn(span(1, "chat", listed))
    assert flattened is not None
    assert flattened.messages[0].content == "What?"


def test_adapter_keeps_error_of_unreadable_call() -> None:
    told = flat((ASKED,), CALL) | {"gen_ai.completion.0.tool_calls.0.arguments": "{"}
    found = agentlightning.turn(span(1, "chat", told))
    assert found is not None
    assert found.said.tool_calls[0].error


@pytest.mark.parametrize("adapter", [genai, agentlightning])
@pytest.mark.parametrize("attributes", [{}, {"gen_ai.operation.name": "execute_tool"}, {"http.url": "x"}])
def test_adapter_ignores_other_spans(adapter: Any, attributes: dict[str, Any]) -> None:
    assert adapter.turn(span(1, "x", attributes)) is None


DEEP = "[" * 60 + "]" * 60
HOSTILE: dict[str, dict[str, Any]] = {
    "no list": {"gen_ai.input.messages": "{}", "gen_ai.output.messages": "[]"},
    "no answer": {"gen_ai.input.messages": "[]", "gen_ai.output.messages": "[]"},
    "no question": {"gen_ai.input.messages": "[]", "gen_ai.output.messages": '[{"role": "assistant", "parts": []}]'},
    "texts for messages": {"gen_ai.input.messages": '["a"]', "gen_ai.output.messages": '["b"]'},
    "another role": parts((ASKED,), ANSWER) | {"gen_ai.input.messages": '[{"role": "judge", "parts": []}]'},
    "another part": parts((ASKED,), ANSWER) | {"gen_ai.input.messages": '[{"role": "user", "parts": [{"type": "image"}]}]'},
    "a user answers": parts((ASKED,), ANSWER) | {"gen_ai.output.messages": '[{"role": "user", "parts": []}]'},
    "depth": parts((ASKED,), ANSWER) | {"gen_ai.input.messages": DEEP},
    "no first completion": {"gen_ai.prompt.0.role": "user", "gen_ai.completion.1.content": "x"},
    "no role": {"gen_ai.prompt.0.content": "x", "gen_ai.completion.0.content": "x"},
    "much text": flat((Message("user", "x" * 4_000_001),), ANSWER),
    "tokens that are none": flat((ASKED,), ANSWER) | {"prompt_token_ids": ["a"], "response_token_ids": [1]},
    "negative tokens": flat((ASKED,), ANSWER) | {"prompt_token_ids": [-1]},
    "huge tokens": flat((ASKED,), ANSWER) | {"prompt_token_ids": [2**40]},
    "a logprob above 0": flat((ASKED,), ANSWER) | {"response_token_ids": [1], "logprobs.content": "[1.0]"},
    "a logprob of nothing": flat((ASKED,), ANSWER) | {"response_token_ids": [1], "logprobs.content": "[null]"},
    "a logprob of NaN": flat((ASKED,), ANSWER) | {"response_token_ids": [1], "logprobs.content": "[NaN]"},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_adapter_refuses_invalid_turn_in_a_sentence(name: str) -> None:
    told = span(1, "chat", HOSTILE[name])
    adapter = genai if "gen_ai.output.messages" in told.attributes else agentlightning
    with pytest.raises(ValueError, match=r"\w+ \w+") as caught:
        adapter.turn(told)
    assert len(str(caught.value)) < 300


# traces


def test_traces_of_groups_by_rollout_conversation_or_trace() -> None:
    named = {"agentlightning.rollout_id": "ro-1"}
    spans = [
        span(3, "b", {}, trace=2, resource=named),
        span(1, "a", {}, trace=1, resource=named),
        span(5, "d", {"gen_ai.conversation.id": "talk"}, trace=3),
        span(7, "f", {"gen_ai.conversation.id": "talk"}, trace=4),
        span(6, "e", {}, trace=3),
        span(4, "c", {}, trace=5),
    ]
    found = traces_of([*spans, spans[0]])
    assert [(trace.key, [each.name for each in trace.spans]) for trace in found] == [
        ("ro-1", ["a", "b"]),
        (f"{5:032x}", ["c"]),
        ("talk", ["d", "e", "f"]),
    ]


def test_traces_of_keeps_last_attempt_of_rollout() -> None:
    first, second = ({"rollout_id": "ro-1", "attempt_id": name} for name in ("one", "two"))
    (trace,) = traces_of([span(1, "a", first, trace=1), span(2, "b", second, trace=2)])
    assert [each.name for each in trace.spans] == ["b"]


# steps


def turns(*told: tuple[tuple[Message, ...], Message]) -> list[Turn]:
    made = [agentlightning.turn(span(1, "chat", flat(history, said) | tokens(chat(), history, said))) for history, said in told]
    return [each for each in made if each is not None]


def test_traced_steps_join_exact_continuations_into_chain() -> None:
    given = turns(((ASKED,), CALL), ((ASKED, CALL, RESULT), ANSWER))
    first, second = traced_steps(given, [0.5, None], chat(), len(tokenizer()), exact=True)
    assert (first.step.prompt, second.step.prompt) == ((ASKED,), (RESULT,))
    assert second.earlier_results == {(0, 0): "5"}
    assert (second.step.parent, second.step.shared, second.step.new_row) == (0, None, None)
    episode = Episode(Task("k", (ASKED,), ""), steps=(first.step, second.step))
    assert [len(chain) for chain in chains_of(episode)] == [2]
    assert episode.tokens_of(1) == (*given[1].prompt_ids, *given[1].sampled_ids)
    assert second.step.behavior_logprobs == (-0.5,) * len(second.step.sampled_ids)


def test_traced_steps_open_chain_for_changed_history() -> None:
    other = Message("user", "What is 9 plus 9?")
    given = turns(((ASKED,), ANSWER), ((other,), ANSWER))
    _, second = traced_steps(given, [None, None], chat(), len(tokenizer()), exact=True)
    assert second.step.new_row == OTHER
    assert second.step.prompt == (other,)
    episode = Episode(
        Task("k", (ASKED,), ""), steps=tuple(each.step for each in traced_steps(given, [0, 0], chat(), 10**6, True))
    )
    assert episode.tokens_of(1) == (*given[1].prompt_ids, *given[1].sampled_ids)


def test_traced_steps_render_turns_without_tokens() -> None:
    plain = [replace(each, prompt_ids=(), sampled_ids=(), logprobs=()) for each in turns(((ASKED,), CALL))]
    (made,) = traced_steps(plain, [None], chat(), len(tokenizer()), exact=False)
    assert made.step.sampled_ids == chat().turn(CALL, TOOLS)
    assert all(value != value for value in made.step.behavior_logprobs)


def test_traced_steps_refuse_tokens_of_larger_model() -> None:
    with pytest.raises(ValueError, match="a turn has a token that is not in the model's vocabulary of 7 tokens"):
        traced_steps(turns(((ASKED,), ANSWER)), [None], chat(), 7, exact=True)


HALF = r'{"a": "\ud800", "\udc00": ["\ud83d\ude00"]}'


def test_adapter_accepts_surrogates_of_json() -> None:
    said = {"gen_ai.completion.0.tool_calls.0.name": "f", "gen_ai.completion.0.tool_calls.0.arguments": HALF}
    tool = {"llm.request.functions.0.name": "f", "llm.request.functions.0.parameters": HALF}
    listed = {"gen_ai.input.messages": r'[{"role": "user", "parts": ["\ud800"]}]', "gen_ai.output.messages": json.dumps([ONE])}
    for read in (agentlightning.turn(span(1, "x", flat((ASKED,), ANSWER) | said | tool)), genai.turn(span(1, "x", listed))):
        assert read is not None
        (made,) = traced_steps([read], [None], chat(), 10**6, exact=False)
        assert made.text.encode()
    assert parsed(HALF) == {"a": "?", "?": ["\U0001f600"]}


ONE = {"role": "assistant", "parts": ["x"]}


@pytest.mark.parametrize("logprob", ["-1" + "0" * 400, "-1e300", "-1e999", "NaN", "0.1"])
def test_adapter_refuses_logprob_beyond_float32(logprob: str) -> None:
    told = {"prompt_token_ids": [1], "response_token_ids": [1], "logprobs.content": f"[{logprob}]"}
    with pytest.raises(ValueError, match="a token's logprob must be a number from"):
        agentlightning.turn(span(1, "x", flat((ASKED,), ANSWER) | told))


def test_adapter_reads_tools_of_any_shape_partly() -> None:
    told = {"gen_ai.tool.definitions": '[{"function": 1, "name": "f"}, 2, {"name": ["a"], "parameters": [[]]}]'}
    read = genai.turn(span(1, "x", parts((ASKED,), ANSWER) | told))
    assert read is not None
    assert [each["function"]["name"] for each in read.tools] == ["f", "['a']"]

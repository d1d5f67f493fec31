# /// script
# dependencies = ["litellm==1.110.2"]
# ///
"""litellm: chat completions, Responses, Messages and text completions, by its names of providers."""

import asyncio
import json
import os

os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
from typing import Any

import litellm
from scenario import KEY, MODEL, URL, Number, calculator, report

WHERE = {"model": f"openai/{MODEL}", "api_base": URL, "api_key": KEY}
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Computes an arithmetic expression exactly.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}


def turns(question: str, stream: bool = False, **options: Any) -> str:
    messages: list[Any] = [{"role": "user", "content": question}]
    while True:
        made = litellm.completion(**WHERE | options, messages=messages, tools=[CALCULATOR], stream=stream)
        made = litellm.stream_chunk_builder(list(made), messages=messages) if stream else made
        said = made.choices[0].message
        messages.append(said.model_dump())
        if not said.tool_calls:
            return said.content
        for call in said.tool_calls:
            result = calculator(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def chat(question: str) -> str:
    return turns(question)


def streamed(question: str) -> str:
    return turns(question, stream=True)


def hosted_vllm(question: str) -> str:
    return turns(question, model=f"hosted_vllm/{MODEL}")


def anthropic(question: str) -> str:
    return turns(question, model=f"anthropic/{MODEL}", api_base=URL.removesuffix("/v1"))


def required(question: str) -> str:
    tools = {"tools": [CALCULATOR], "tool_choice": "required"}
    made = litellm.completion(**WHERE, **tools, messages=[{"role": "user", "content": question}])
    return calculator(**json.loads(made.choices[0].message.tool_calls[0].function.arguments))


def structured(question: str) -> Number:
    made = litellm.completion(**WHERE, messages=[{"role": "user", "content": question}], response_format=Number)
    return Number.model_validate_json(made.choices[0].message.content)


def json_object(question: str) -> Number:
    asked = [{"role": "user", "content": f"{question} Answer with JSON: an object with a key value."}]
    made = litellm.completion(**WHERE, messages=asked, response_format={"type": "json_object"})
    return Number.model_validate_json(made.choices[0].message.content)


def responses(question: str) -> str:
    made = litellm.responses(**WHERE, input=question)
    return made.output[-1].content[0].text


def responses_streamed(question: str) -> str:
    events = list(litellm.responses(**WHERE, input=question, stream=True))
    return events[-1].response.output[-1].content[0].text


def text(question: str) -> str:
    return litellm.text_completion(**WHERE, prompt=question).choices[0].text


def messages(question: str) -> str:
    made = asyncio.run(
        litellm.anthropic.messages.acreate(
            **WHERE | {"model": f"anthropic/{MODEL}", "api_base": URL.removesuffix("/v1")},
            max_tokens=1000,
            messages=[{"role": "user", "content": question}],
        )
    )
    return made["content"][0]["text"]


report(chat, streamed, hosted_vllm, anthropic, required, structured, json_object, responses, responses_streamed, text, messages)

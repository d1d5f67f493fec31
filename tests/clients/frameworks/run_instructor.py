# /// script
# dependencies = ["instructor[anthropic]==1.17.0"]
# ///
"""Instructor: one structured output in each of its modes."""

import instructor
from anthropic import Anthropic
from openai import OpenAI
from scenario import KEY, MODEL, URL, Number, report


def ask(mode: instructor.Mode, question: str) -> Number:
    client = instructor.from_openai(OpenAI(base_url=URL, api_key=KEY), mode=mode)
    return client.chat.completions.create(
        model=MODEL, response_model=Number, messages=[{"role": "user", "content": question}], max_retries=0
    )


def tools(question: str) -> Number:
    return ask(instructor.Mode.TOOLS, question)


def tools_strict(question: str) -> Number:
    return ask(instructor.Mode.TOOLS_STRICT, question)


def json(question: str) -> Number:
    return ask(instructor.Mode.JSON, question)


def json_schema(question: str) -> Number:
    return ask(instructor.Mode.JSON_SCHEMA, question)


def md_json(question: str) -> Number:
    return ask(instructor.Mode.MD_JSON, question)


def provider(question: str) -> Number:
    """The way of its manual today, in its default mode, with the environment variables."""
    client = instructor.from_provider(f"openai/{MODEL}")
    return client.create(response_model=Number, messages=[{"role": "user", "content": question}], max_retries=0)


def streamed(question: str) -> Number:
    client = instructor.from_openai(OpenAI(base_url=URL, api_key=KEY))
    parts = client.chat.completions.create_partial(
        model=MODEL, response_model=Number, messages=[{"role": "user", "content": question}], max_retries=0
    )
    return list(parts)[-1]


def responses(question: str) -> Number:
    client = instructor.from_openai(OpenAI(base_url=URL, api_key=KEY), mode=instructor.Mode.RESPONSES_TOOLS)
    return client.responses.create(model=MODEL, input=question, response_model=Number, max_retries=0)


def messages(question: str) -> Number:
    client = instructor.from_anthropic(Anthropic(base_url=URL.removesuffix("/v1"), api_key=KEY))
    asked = [{"role": "user", "content": question}]
    return client.messages.create(model=MODEL, max_tokens=1000, response_model=Number, messages=asked, max_retries=0)


report(tools, tools_strict, json, json_schema, md_json, provider, streamed, responses, messages)

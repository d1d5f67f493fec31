# /// script
# dependencies = ["google-adk==2.13.0", "litellm==1.110.2"]
# ///
"""Google's ADK: an LlmAgent on litellm, complete and streamed, and with an output schema."""

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import json
from typing import Any

from google.adk.agents import LlmAgent, RunConfig
from google.adk.agents.run_config import StreamingMode
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai.types import Content, Part
from scenario import KEY, MODEL, URL, Number, calculator, report


async def ask(question: str, mode: StreamingMode = StreamingMode.NONE, **options: Any) -> str:
    agent = LlmAgent(name="counter", model=LiteLlm(f"openai/{MODEL}", api_base=URL, api_key=KEY), **options)
    runner = InMemoryRunner(agent)
    session = await runner.session_service.create_session(app_name=runner.app_name, user_id="user")
    message = Content(role="user", parts=[Part(text=question)])
    said = ""
    async for event in runner.run_async(
        user_id="user", session_id=session.id, new_message=message, run_config=RunConfig(streaming_mode=mode)
    ):
        if event.is_final_response() and event.content:
            said = "".join(part.text or "" for part in event.content.parts)
    return said


async def agent(question: str) -> str:
    return await ask(question, tools=[calculator])


async def streamed(question: str) -> str:
    return await ask(question, StreamingMode.SSE, tools=[calculator])


async def schema(question: str) -> Any:
    return json.loads(await ask(question, output_schema=Number))


async def tool_and_schema(question: str) -> Any:
    return json.loads(await ask(question, tools=[calculator], output_schema=Number))


report(agent, streamed, schema, tool_and_schema)

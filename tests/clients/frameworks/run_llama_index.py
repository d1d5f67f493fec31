# /// script
# dependencies = ["llama-index-core==0.14.25", "llama-index-llms-openai-like==0.8.1"]
# ///
"""LlamaIndex: a FunctionAgent and its structured outputs, with OpenAILike."""

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from scenario import KEY, MODEL, URL, Number, calculator, report

llm = OpenAILike(model=MODEL, api_base=URL, api_key=KEY, is_chat_model=True, is_function_calling_model=True, max_retries=0)


async def agent(question: str) -> str:
    return str(await FunctionAgent(tools=[calculator], llm=llm).run(question))


async def agent_output(question: str) -> Number:
    made = await FunctionAgent(tools=[calculator], llm=llm, output_cls=Number).run(question)
    return made.get_pydantic_model(Number)


def complete(question: str) -> str:
    return llm.complete(question).text


def streamed(question: str) -> str:
    return list(llm.stream_chat([ChatMessage(question)]))[-1].message.content


def structured(question: str) -> Number:
    return llm.as_structured_llm(Number).chat([ChatMessage(question)]).raw


def predict(question: str) -> Number:
    return llm.structured_predict(Number, PromptTemplate("{question}"), question=question)


def predict_and_call(question: str) -> str:
    return str(llm.predict_and_call([FunctionTool.from_defaults(calculator)], user_msg=question))


report(agent, agent_output, complete, streamed, structured, predict, predict_and_call)

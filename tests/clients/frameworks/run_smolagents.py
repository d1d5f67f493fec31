"""smolagents: a ToolCallingAgent and a CodeAgent with their defaults."""

from scenario import KEY, MODEL, URL, report
from scenario import calculator as calculate
from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool

calculator = tool(calculate)
model = OpenAIModel(model_id=MODEL, api_base=URL, api_key=KEY)


def calls(question: str) -> str:
    return str(ToolCallingAgent([calculator], model, max_steps=3, verbosity_level=0).run(question))


def streamed(question: str) -> str:
    agent = ToolCallingAgent([calculator], model, max_steps=3, verbosity_level=0, stream_outputs=True)
    return str(agent.run(question))


def code(question: str) -> str:
    return str(CodeAgent([], model, max_steps=3, verbosity_level=0).run(question))


def structured_code(question: str) -> str:
    agent = CodeAgent([], model, max_steps=3, verbosity_level=0, use_structured_outputs_internally=True)
    return str(agent.run(question))


report(calls, streamed, code, structured_code)

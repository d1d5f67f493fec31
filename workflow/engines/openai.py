"""An OpenAI-compatible server that returns token ids and logprobs, such as vLLM: see `workflow.openai`."""

from workflow.engines import Backend

openai = Backend(
    name="openai",
    start="workflow.openai:start",
    keyed=False,
    logprobs=True,
    weights=frozenset({"lora"}),
    quantised=False,
    options=frozenset({"temperature", "top_k", "top_p", "min_p", "stop"}),
    local=False,
    at_url=True,
)

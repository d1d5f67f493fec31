"""An OpenAI-compatible server that returns token ids and logprobs, such as vLLM; see `inference.openai_engine`."""

from agentrl.workflow.engines import Backend

openai = Backend(
    name="openai",
    start="agentrl.workflow.inference.openai_engine:start",
    check="agentrl.workflow.inference.http:check_bases",
    keyed=False,
    logprobs=True,
    weights=frozenset({"lora"}),
    quantised=False,
    options=frozenset({"temperature", "top_k", "top_p", "min_p", "stop"}),
    local=False,
    at_url=True,
    top_logprobs=True,
)

"""An OpenAI-compatible server that returns only texts; see `inference.openai_text_engine`. Its turns cannot train."""

from agentrl.workflow.engines import Backend

openai_text = Backend(
    name="openai_text",
    start="agentrl.workflow.inference.openai_text_engine:start",
    check="agentrl.workflow.inference.http:check_urls",
    keyed=False,
    logprobs=False,
    weights=frozenset(),
    quantised=False,
    options=frozenset({"temperature", "top_p", "stop"}),
    local=False,
    at_url=True,
)

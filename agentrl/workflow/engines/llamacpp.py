"""A llama.cpp server, for eval and chat with an untrained base; see `inference.llamacpp_engine`."""

from agentrl.workflow.engines import Backend

llamacpp = Backend(
    name="llamacpp",
    start="agentrl.workflow.inference.llamacpp_engine:start",
    check="agentrl.workflow.inference.http:check_urls",
    keyed=False,
    logprobs=True,
    weights=frozenset(),
    quantised=False,
    options=frozenset({"top_k", "top_p", "min_p"}),  # no temperature: its logprobs are those at 1
    local=False,
    at_url=True,
    top_logprobs=True,
)

"""agentrl's own engine, for every transformers model: see `inference.rolling_engine`."""

from agentrl.workflow.engines import Backend

rolling = Backend(
    name="rolling",
    start="agentrl.workflow.inference.rolling_engine:start",
    keyed=True,
    logprobs=True,
    weights=frozenset({"lora", "full"}),
    quantised=True,
    options=frozenset({"temperature", "top_k", "top_p", "min_p", "stop"}),
    local=True,
    top_logprobs=True,
)

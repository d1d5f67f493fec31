"""agentrl's own engine, for every transformers model; see `inference.sampler`."""

from agentrl.workflow.engines import Backend

rolling = Backend(
    name="rolling",
    start="agentrl.workflow.inference.sampler:start",
    keyed=True,
    logprobs=True,
    weights=frozenset({"lora", "full"}),
    quantised=True,
    options=frozenset({"temperature", "top_k", "top_p", "min_p", "stop"}),
    local=True,
    top_logprobs=True,
    grammars=True,
)

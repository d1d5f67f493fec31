"""Our own engine, for every transformers model: see `workflow.rolling`."""

from workflow.engines import Backend

rolling = Backend(
    name="rolling",
    start="workflow.rolling:start",
    keyed=True,
    logprobs=True,
    weights=frozenset({"lora", "full"}),
    quantised=True,
    options=frozenset({"temperature", "top_k", "top_p", "min_p", "stop"}),
    local=True,
)

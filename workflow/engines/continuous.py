"""transformers' continuous batching over a paged cache, meant for GPUs: see `inference.continuous_engine`."""

from agentrl.workflow.engines import Backend

continuous = Backend(
    name="continuous",
    start="agentrl.workflow.inference.continuous_engine:start",
    keyed=False,
    logprobs=True,
    weights=frozenset({"lora", "full"}),
    quantised=True,
    options=frozenset({"temperature"}),  # its logprobs are taken after top_k and top_p; it has neither min_p nor stop strings
    local=True,
)

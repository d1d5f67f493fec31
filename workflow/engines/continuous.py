"""transformers' continuous batching over a paged cache, meant for GPUs: see `workflow.continuous`."""

from workflow.engines import Backend

continuous = Backend(
    name="continuous",
    start="workflow.continuous:start",
    keyed=False,
    logprobs=True,
    weights=frozenset({"lora", "full"}),
    quantised=True,
    options=frozenset({"temperature"}),  # its logprobs are taken after top_k and top_p; it has neither min_p nor stop strings
    local=True,
)

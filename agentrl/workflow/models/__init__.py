"""Models: lookup, loading, the policy and its trainable weights, logprobs, export for other programs."""

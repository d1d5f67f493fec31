"""Models: lookup, loading, the policy and its trainable weights, logprobs, and export for other programs."""

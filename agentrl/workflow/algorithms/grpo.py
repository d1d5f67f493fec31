"""GRPO: group-relative advantages, clipped surrogate, and, if kl_coef is not 0, a KL to the reference in the loss.

Source: DeepSeekMath, arXiv 2402.03300, equations 3 and 4. verl's convention is the default: epsilon 1e-6, dual clip at 3, mean
over all trained tokens. With the paper's mean of sequence means (TRL's `grpo`), a longer wrong answer costs less per token.
"""

from agentrl.workflow.algorithms import Algorithm

grpo = Algorithm(
    name="grpo",
    credit="agentrl.workflow.training.advantages:relative_to_group",
    surrogate="agentrl.workflow.training.losses:clipped",
    needs_group=True,
    options={"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0, "scale": "group", "aggregation": "token-mean"},
    trl={"dual_clip": 0.0, "aggregation": "seq-mean-token-mean"},
)

"""CISPO: GRPO's credit, and the loss -A log pi weighted by the clipped ratio, so every token keeps its gradient.

Source: MiniMax-M1, arXiv 2506.13585, equations 4 and 5. verl's convention limits the weight to 1 - clip_low and 1 + clip_high.
In TRL's convention, clip_high is the largest weight itself, by default 5, and there is no lower bound.
"""

from agentrl.workflow.algorithms import Algorithm

cispo = Algorithm(
    name="cispo",
    credit="agentrl.workflow.training.advantages:relative_to_group",
    surrogate="agentrl.workflow.training.losses:clipped_weight",
    needs_group=True,
    options={"clip_low": 0.2, "clip_high": 0.28, "scale": "group", "aggregation": "token-mean"},
    trl={"clip_high": 5.0, "clip_low": None},
)

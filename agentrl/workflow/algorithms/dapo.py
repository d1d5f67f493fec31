"""DAPO: GRPO's credit, a wider upper clip, and the mean over all tokens.

Source: arXiv 2503.14476, equations 8 to 12. The wider upper clip lets unlikely tokens become more likely, which preserves
entropy. The paper's other two parts are options of the run: `rollout.dynamic_sampling` samples until enough groups have unequal
rewards, and the reward `overlong` is the soft penalty for answers that are nearly too long. configs/dapo.yaml has all four
parts.
"""

from agentrl.workflow.algorithms import Algorithm

dapo = Algorithm(
    name="dapo",
    credit="agentrl.workflow.training.advantages:relative_to_group",
    surrogate="agentrl.workflow.training.losses:clipped",
    needs_group=True,
    options={"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0, "scale": "group", "aggregation": "token-mean"},
    trl={"dual_clip": 0.0},
)

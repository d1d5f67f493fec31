"""DAPO: GRPO's credit, a wider upper clip, and the mean over all tokens.

Source: arXiv 2503.14476, equations 8 to 12. The paper's other two parts are options: `rollout.dynamic_sampling` and the reward
`overlong`. configs/dapo.yaml has all four.
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

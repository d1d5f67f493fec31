"""OPO: rewards minus the group's length-weighted mean, and the plain policy gradient.

Source: arXiv 2505.23585. There is no ratio, so with several optimizer steps per iteration the later ones are off-policy without
a correction.
"""

from agentrl.workflow.algorithms import Algorithm

opo = Algorithm(
    name="opo",
    credit="agentrl.workflow.training.advantages:optimal_baseline",
    surrogate="agentrl.workflow.training.losses:policy_gradient",
    needs_group=True,
    options={"aggregation": "token-mean"},
)

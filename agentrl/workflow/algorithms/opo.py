"""OPO: rewards minus the group's length-weighted mean, and the plain policy gradient.

Source: arXiv 2505.23585. This baseline has the least variance if a gradient's size grows with the answer's length and if the
steps are strictly on-policy. There is no ratio, so if an iteration has several optimizer steps, the later ones are off-policy
without a correction.
"""

from agentrl.workflow.algorithms import Algorithm

opo = Algorithm(
    name="opo",
    credit="agentrl.workflow.training.advantages:optimal_baseline",
    surrogate="agentrl.workflow.training.losses:policy_gradient",
    needs_group=True,
    options={"aggregation": "token-mean"},
)

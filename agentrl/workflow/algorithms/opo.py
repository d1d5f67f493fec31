"""OPO: rewards minus the group's length-weighted mean, and the plain policy gradient.

Source: arXiv 2505.23585: the baseline of least variance if a gradient's size grows with the answer's length, and strictly
on-policy steps. Several steps per iteration are off-policy here, for there is no ratio.
"""

from agentrl.workflow.algorithms import Algorithm

opo = Algorithm(
    name="opo",
    credit="agentrl.workflow.training.advantages:optimal_baseline",
    surrogate="agentrl.workflow.training.losses:policy_gradient",
    needs_group=True,
    options={"aggregation": "token-mean"},
)

"""REINFORCE: -log pi times the discounted return, without a baseline.

Source: Williams (1992), "Simple statistical gradient-following algorithms". It is the simplest algorithm, and the others are
compared with it. Its gradient is unbiased and noisy. If all rewards are positive, every sampled token becomes more likely, and
the better ones more so. There is no ratio, so if an iteration has several optimizer steps, the later ones are off-policy
without a correction.
"""

from agentrl.workflow.algorithms import Algorithm

reinforce = Algorithm(
    name="reinforce",
    credit="agentrl.workflow.training.advantages:returns_to_go",
    surrogate="agentrl.workflow.training.losses:policy_gradient",
    options={"discount": 1.0, "aggregation": "token-mean"},
)

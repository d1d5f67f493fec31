"""REINFORCE: -log pi times the discounted return, without a baseline.

Source: Williams (1992), "Simple statistical gradient-following algorithms". There is no ratio, so with several optimizer steps
per iteration the later ones are off-policy without a correction.
"""

from agentrl.workflow.algorithms import Algorithm

reinforce = Algorithm(
    name="reinforce",
    credit="agentrl.workflow.training.advantages:returns_to_go",
    surrogate="agentrl.workflow.training.losses:policy_gradient",
    options={"discount": 1.0, "aggregation": "token-mean"},
)

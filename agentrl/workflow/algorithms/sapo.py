"""SAPO: GRPO's credit, and a soft gate in place of the clip.

Source: arXiv 2511.20347, equations 5 and 6. The loss is the mean of the training rows' means, as in the paper.
"""

from agentrl.workflow.algorithms import Algorithm

sapo = Algorithm(
    name="sapo",
    credit="agentrl.workflow.training.advantages:relative_to_group",
    surrogate="agentrl.workflow.training.losses:soft_gate",
    needs_group=True,
    options={"tau_positive": 1.0, "tau_negative": 1.05, "scale": "group", "aggregation": "seq-mean-token-mean"},
)

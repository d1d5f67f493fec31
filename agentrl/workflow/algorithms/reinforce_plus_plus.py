"""REINFORCE++: returns to go, whitened over all tokens of the update, and PPO's clip.

Source: arXiv 2501.03262. The algorithm needs no group and no critic. In verl, the return ends at the text of a tool; here, it
continues across that text, see `training.advantages`.
"""

from agentrl.workflow.algorithms import Algorithm

reinforce_plus_plus = Algorithm(
    name="reinforce_plus_plus",
    credit="agentrl.workflow.training.advantages:returns_whitened",
    surrogate="agentrl.workflow.training.losses:clipped",
    options={"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0, "discount": 1.0, "aggregation": "token-mean"},
    trl={"dual_clip": 0.0},
)

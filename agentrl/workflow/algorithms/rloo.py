"""RLOO: each reward minus the mean of the other rewards in its group.

Source: arXiv 2402.14740, equation 8; Kool et al. (2019). verl's convention, which is the default, clips the ratio of each
token. TRL's convention clips the ratio of the whole answer, a product of hundreds of ratios, and averages over answers.
"""

from agentrl.workflow.algorithms import Algorithm

rloo = Algorithm(
    name="rloo",
    credit="agentrl.workflow.training.advantages:leave_one_out",
    surrogate="agentrl.workflow.training.losses:clipped",
    needs_group=True,
    options={"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0, "aggregation": "token-mean"},
    trl={"dual_clip": 0.0, "aggregation": "seq-mean-token-mean"},
    trl_surrogate="agentrl.workflow.training.losses:clipped_sequence",
)

"""RLOO: each reward against the mean of the others of its group.

Source: arXiv 2402.14740, equation 8; Kool et al. (2019). verl clips each token's ratio; TRL takes the whole answer's, the
product of its tokens', and averages over answers. The default is verl's: a product of hundreds of ratios leaves the clip at
once when an iteration has several steps; with one step both have the paper's gradient, where the ratio is 1.
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

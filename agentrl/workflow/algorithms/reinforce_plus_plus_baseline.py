"""REINFORCE++ with baseline: R - mean of the group, then whitened over all tokens of the update, and PPO's clip.

Source: arXiv 2501.03262, equation 9. The algorithm is like GRPO, but divides by one standard deviation over all tokens of the
update. So a group whose rewards hardly differ is not amplified.
"""

from agentrl.workflow.algorithms import Algorithm

reinforce_plus_plus_baseline = Algorithm(
    name="reinforce_plus_plus_baseline",
    credit="agentrl.workflow.training.advantages:group_baseline_whitened",
    surrogate="agentrl.workflow.training.losses:clipped",
    needs_group=True,
    options={"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0, "aggregation": "token-mean"},
    trl={"dual_clip": 0.0},
)

"""Pass@k: only the best episode of a group has an advantage: its reward minus the second best.

Source: arXiv 2503.19595. The algorithm raises the chance that one of k answers is right, rather than the mean reward, so it is
for hard tasks. On easy tasks the mean reward stays lower than with GRPO (measured on arithmetic: 0.50 to 0.70, and 0.96 with
GRPO).
"""

from agentrl.workflow.algorithms import Algorithm

pass_at_k = Algorithm(
    name="pass_at_k",
    credit="agentrl.workflow.training.advantages:best_of_group",
    surrogate="agentrl.workflow.training.losses:clipped",
    needs_group=True,
    options={"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0, "aggregation": "token-mean"},
    trl={"dual_clip": 0.0},
)

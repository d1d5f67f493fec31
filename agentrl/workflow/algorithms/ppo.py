"""PPO: advantages from a critic (GAE over sampled tokens), clipped surrogate, value loss.

Source: arXiv 1707.06347, equation 9; GAE arXiv 1506.02438. The critic is a linear head on the policy's own body (`critic.*`).
Discount and lambda are 1, because an episode has one reward, at its end.
"""

from agentrl.workflow.algorithms import Algorithm

ppo = Algorithm(
    name="ppo",
    credit="agentrl.workflow.training.advantages:gae",
    surrogate="agentrl.workflow.training.losses:clipped",
    critic=True,
    options={
        **{"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0},
        **{"discount": 1.0, "gae_lambda": 1.0, "aggregation": "token-mean"},
    },
    trl={"dual_clip": 0.0},
)

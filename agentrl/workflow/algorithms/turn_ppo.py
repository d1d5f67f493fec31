"""Turn PPO: PPO with a critic, whose advantages are computed over turns, and then over the tokens inside each turn.

Source: VAGEN, arXiv 2510.16907, Bi-Level GAE. The algorithm is for agents, also for agents whose steps earn rewards. Discount
and lambda apply once per turn, so a long turn does not reduce the effect of a later reward.
"""

from agentrl.workflow.algorithms import Algorithm

turn_ppo = Algorithm(
    name="turn_ppo",
    credit="agentrl.workflow.training.advantages:turn_gae",
    surrogate="agentrl.workflow.training.losses:clipped",
    critic=True,
    options={
        **{"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0},
        **{"discount": 1.0, "gae_lambda": 0.95, "aggregation": "token-mean"},
    },
    trl={"dual_clip": 0.0},
)

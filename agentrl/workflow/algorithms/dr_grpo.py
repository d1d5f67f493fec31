"""Dr.GRPO: GRPO without two divisions. The advantage is R - mean, and the loss is the sum over tokens, divided by the maximum
number of tokens of an episode.

Source: arXiv 2503.20783, section 3.2. GRPO divides the advantage by the deviation, which favours tasks that are nearly always
or nearly never solved. GRPO also divides the loss of an answer by the answer's length, which favours long wrong answers. The
paper, TRL and verl (since 0.9) average over answers.
"""

from agentrl.workflow.algorithms import Algorithm

dr_grpo = Algorithm(
    name="dr_grpo",
    credit="agentrl.workflow.training.advantages:relative_to_group",
    surrogate="agentrl.workflow.training.losses:clipped",
    needs_group=True,
    options={
        **{"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0, "scale": "none"},
        "aggregation": "seq-mean-token-sum-norm",
    },
    trl={"dual_clip": 0.0},
)

"""GSPO: GRPO's credit, and one ratio per row: the geometric mean of its tokens' ratios.

Source: arXiv 2507.18071, equations 5 and 7. A reward belongs to a whole answer, and so does its weight. The mean keeps the
ratio near 1 however long the answer is, so that the clip is narrow: the paper's 3e-4 and 4e-4. Each row of an episode has one
ratio.
"""

from agentrl.workflow.algorithms import Algorithm

gspo = Algorithm(
    name="gspo",
    credit="agentrl.workflow.training.advantages:relative_to_group",
    surrogate="agentrl.workflow.training.losses:clipped_sequence_mean",
    needs_group=True,
    options={
        **{"clip_low": 3e-4, "clip_high": 4e-4, "dual_clip": 0.0, "scale": "group"},
        "aggregation": "seq-mean-token-mean",
    },
)

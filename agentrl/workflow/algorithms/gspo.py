"""GSPO: GRPO's credit, and one ratio per training row: the geometric mean of the ratios of its tokens.

Source: arXiv 2507.18071, equations 5 and 7. The mean keeps the ratio near 1, so the clip range is narrow: 3e-4 and 4e-4, as in
the paper.
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

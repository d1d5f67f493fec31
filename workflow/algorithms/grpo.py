"""GRPO: group-relative advantages, clipped surrogate, k3 KL to the reference in the loss.

Source: DeepSeekMath, arXiv 2402.03300, equations 3 and 4. Where its two common implementations differ, this is verl's
convention: epsilon 1e-6, dual clip at 3, mean over all trained tokens. The token mean weighs every token of a minibatch
alike; the paper's mean of sequence means makes a wrong answer cheaper by being longer, which matters most for agents,
whose turns differ much in length. TRL's convention is a matter of other arguments to the same functions.
"""

from workflow.algorithms import Algorithm

grpo = Algorithm(
    name="grpo",
    credit="workflow.advantages:relative_to_group",
    loss="workflow.losses:clipped_with_kl",
    needs_group=True,
)

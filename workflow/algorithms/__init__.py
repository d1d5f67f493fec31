"""Algorithms: a file here names how episodes are credited and what is minimised. See `Algorithm`.

It only names them, so that the command line can check a run's options without loading torch.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Algorithm:
    """How to credit and what to minimise.

    Args:
        name: the file's name.
        credit: `module:function` of groups of finished episodes -> one advantage per episode (`workflow.advantages.Credit`).
        loss: `module:function` of a microbatch's tokens, the run's options and the minibatch's counts -> its share of the
            loss (`workflow.losses.Loss`).
        needs_group: whether an episode is compared with the others of its group, so that a group of one teaches nothing.
    """

    name: str
    credit: str
    loss: str
    needs_group: bool

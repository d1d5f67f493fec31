"""A training of `agentrl sft` or `dpo` on several devices, as the command sees it: ranks train, and it shows their progress."""

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

from agentrl.workers.ranks.rank_group import RankGroup
from agentrl.workers.ranks.rank_messages import RankCommand
from agentrl.workers.ranks.training_command import decode_result, encode_training
from agentrl.workflow.errors import RankLost
from agentrl.workflow.models.parameters import Parameters
from agentrl.workflow.training.offline_checkpoint import AGAIN_HINT, catch_interrupt, remove_empty_folder
from agentrl.workflow.training.offline_training import ProgressListener, TrainedModel


class _Link:
    """The link between a command and the ranks that train for it: progress in one direction, Ctrl-C in the other."""

    def __init__(self, group: RankGroup, progress: ProgressListener) -> None:
        self._group = group
        self._progress = progress
        self._takes_steps = False

    def report(self, values: dict[str, Any]) -> None:
        """Pass progress on to the listener."""
        self._takes_steps = values["done"] < values["steps"]
        if "parameters" in values:
            self._progress.begins(**{**values, "parameters": Parameters(**values["parameters"])})
        else:
            self._progress.step(**values)

    def interrupt(self) -> None:
        """Pass Ctrl-C on to rank 0. Raise KeyboardInterrupt if the ranks take no steps: then there is nothing to complete."""
        if not self._takes_steps:
            raise KeyboardInterrupt
        self._group.interrupt()


def train_on_ranks(devices: Sequence[str], training: "partial[TrainedModel]", progress: ProgressListener) -> TrainedModel:
    """Run a training on several devices, one process each, and return what it returns. See `encode_training`.

    Raises:
        RankLost: a rank ended, failed or hangs. All ranks have been killed.
        Stopped: Ctrl-C was pressed, and a checkpoint has been written.
        AgentRLError: the error of the training.
    """
    group, never = RankGroup.start(devices), threading.Event()
    link = _Link(group, progress)
    try:
        with catch_interrupt(link.interrupt):
            group.call(RankCommand("start"), never)  # a long message is sent only to ranks that read
            results = group.call(encode_training(training), never, link.report)
    except RankLost as error:
        raise RankLost(error.message, f"To continue from the last checkpoint, {AGAIN_HINT}.") from error
    finally:
        group.close()
        remove_empty_folder(training.keywords["target"])
    return decode_result(results[0])

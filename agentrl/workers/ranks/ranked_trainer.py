"""A trainer whose updates are computed by the ranks of this worker. The train job uses it like a `Trainer`."""

import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from statistics import fmean

from agentrl.workers.ranks.rank_group import RankGroup
from agentrl.workers.ranks.rank_messages import RankCommand, decode_update, encode_groups
from agentrl.workflow.checkpoints import Part
from agentrl.workflow.config import RunConfig
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.training.reports import Metrics, Update
from agentrl.workflow.trajectory import Group


class RankedTrainer:
    """A trainer of a run on several devices. The ranks hold the weights; this process may hold none.

    Args:
        group: the ranks. They hold the state of the `RankedTrainer` whose `load` was called last.
        policy: the policy of this process, from which the folder and the hash of the base model are read.
        base: the name of the base model, which may be in different folders on several hosts; empty: the folder.
    """

    def __init__(self, group: RankGroup, policy: Policy, config: RunConfig, iterations: int, base: str = "") -> None:
        self._group = group
        self._run = {
            "config": config.model_dump(mode="json"),
            "base": base or str(policy.folder),
            "base_hash": policy.base_hash,
            "iterations": iterations,
        }
        self.learning_rate = 0.0
        self.parameters = ""
        """A text with the number of parameters of the model and the number of its trainable parameters; empty before `load`."""
        self.fenced = threading.Event()
        """The event of the current claim. When it is set, the ranks are killed, and `Fenced` is raised."""

    @property
    def is_alive(self) -> bool:
        """True if all ranks run."""
        return self._group.is_alive

    def load(self, path: Path | str | None, sha256: str = "", part: Part = "all") -> None:
        """Load the state of a checkpoint into all ranks; None: start from the untrained base.

        On each host, the first rank checks the files, and fetches a checkpoint at a URL, before the others read them. Raises
        what `checkpoints.checked_part` and `Trainer.load` raise.

        Args:
            path, sha256, part: see `checkpoints.local_part`. With the part `start`, the ranks load only the weights.
        """
        checkpoint = None if path is None else (str(path), sha256, part)
        results = self._group.call(RankCommand("load", {**self._run, "checkpoint": checkpoint}), self.fenced)
        self.parameters = results[0]["parameters"]

    def update(self, groups: Sequence[Group], iteration: int) -> Update:
        """Update the policy on the groups' trainable episodes. See `Trainer.update`.

        Raise RankLost if a rank was lost or hangs, or if the ranks computed different results. Raise Fenced if the claim was
        taken over.
        """
        encoded, tensors = encode_groups(groups)
        results = self._group.call(RankCommand("update", {"groups": encoded, "iteration": iteration}, tensors), self.fenced)
        self.learning_rate = results[0]["learning_rate"]
        costs = _combine_costs([result["update"]["costs"] for result in results])
        return decode_update({**results[0]["update"], "costs": costs})

    def save(self, folder: Path) -> Collection[str]:
        """Write the checkpoint's files, by rank 0. The layout is that of `Trainer.save`: any number of ranks can load it."""
        names: list[str] = self._group.call(RankCommand("save", {"folder": str(folder)}), self.fenced)[0]
        return names


def _combine_costs(costs: Sequence[Metrics]) -> dict[str, float]:
    """Combine the ranks' costs: `tflops` is the sum, `mfu` the mean, `peak_memory_bytes` that of the fullest device."""
    columns = {name: [cost[name] for cost in costs] for name in costs[0]}
    combined = {name: sum(values) for name, values in columns.items()}
    combined |= {name: max(values) for name, values in columns.items() if name == "peak_memory_bytes"}
    return combined | {name: fmean(values) for name, values in columns.items() if name == "mfu"}

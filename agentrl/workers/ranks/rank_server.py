"""The commands of a rank: load a state, update, save; or a complete training of `sft` or `dpo`. Each command returns the value
that the rank sends as its reply.
"""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from agentrl.workers.ranks.rank_messages import ErrorOfRank, RankCommand, decode_groups, encode_error, encode_update
from agentrl.workflow import checkpoints
from agentrl.workflow.errors import ConfigError, ModelError
from agentrl.workflow.experiment import Experiment
from agentrl.workflow.models.parameters import count_parameters
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.settings import is_url, settings
from agentrl.workflow.training.ranks import Ranks
from agentrl.workflow.training.trainer import Trainer

MAX_ERROR_TEXT = 600
"""The most characters of an error's text that a rank sends to the other ranks (see `MAX_VALUE_BYTES`)."""


class RankServer:
    """The policy and the trainer of one rank. If the next run has the same base model, the policy stays loaded.

    Args:
        has_other_hosts: whether some ranks are on other hosts. This host may then lack a folder that the train worker has.
        report: sends a line of JSON with the progress of a training.
    """

    def __init__(self, ranks: Ranks, device: str, has_other_hosts: bool, report: Callable[[Mapping[str, Any]], None]) -> None:
        self._ranks = ranks
        self._device = device
        self._has_other_hosts = has_other_hosts
        self._report = report
        self._key = ""
        self._policy: Policy | None = None
        self._trainer: Trainer | None = None

    def run(self, command: RankCommand) -> Any:
        """Run the command, and return its result as JSON. Raise what it raises.

        `load`, `update` and `save` call the `Trainer`'s method of that name. `training` runs `sft` or `dpo`. `start` does
        nothing: its reply says that this rank has joined the others.
        """
        commands: Mapping[str, Callable[[], Any]] = {
            "start": lambda: None,
            "load": lambda: self._load(**command.arguments),
            "update": lambda: self._update(command),
            "save": lambda: self._save(**command.arguments),
            "training": lambda: self._train(command),
        }
        return commands[command.name]()

    def _load(
        self, config: Any, base: str, base_hash: str, iterations: int, checkpoint: tuple[str, str, checkpoints.Part] | None
    ) -> dict[str, Any]:
        run = Experiment.load(config).config
        path, sha256, part = checkpoint or ("", "", "all")
        self._trainer = None
        folder = self._check_once_per_host(path, sha256, part) if path else None
        policy = self._load_policy(run.model.model_dump_json(exclude={"path"}), run, base, base_hash)
        trainer = Trainer(policy, run, iterations, self._ranks)
        trainer.load(folder, fresh=part == "start", checked=True)
        self._trainer = trainer
        with policy.training() as module:
            return {"parameters": str(count_parameters(module))}

    def _check_once_per_host(self, path: str, sha256: str, part: checkpoints.Part) -> Path:
        """Check a checkpoint in the first rank of each host, and return the folder on this host. The other ranks wait.

        All ranks raise the error of a first rank.
        """
        reply: dict[str, Any] = {}
        if self._ranks.local_rank == 0:
            try:
                reply = {"folder": str(self._check_checkpoint(path, sha256, part))}
            except Exception as error:  # noqa: BLE001 - all ranks raise it
                reply = {"error": {name: text[:MAX_ERROR_TEXT] for name, text in encode_error(error).items()}}
        replies = self._ranks.gather(reply)
        for rank, values in enumerate(replies):
            if "error" in values:
                raise ErrorOfRank(rank, values["error"])
        return Path(replies[self._ranks.rank - self._ranks.local_rank]["folder"])

    def _check_checkpoint(self, path: str, sha256: str, part: checkpoints.Part) -> Path:
        if self._has_other_hosts and not is_url(path) and not Path(path).is_dir():
            message = f"There is no folder {path!r}, which has the run's checkpoint."
            raise ConfigError(message, "The hosts of an update must share that folder, or keep checkpoints at a URL.")
        return checkpoints.checked_part(path, sha256, part)

    @property
    def _threads(self) -> int:
        """The CPU threads of this process; 0: torch's choice."""
        return settings().threads if self._device.startswith("cuda") else torch.get_num_threads()

    def _load_policy(self, options: str, run: Any, base: str, base_hash: str) -> Policy:
        key = f"{base}|{base_hash}|{options}"
        if self._policy is None or self._key != key:
            self._policy, self._key = None, ""  # frees its memory first
            self._policy = Policy.load(run.model, base, self._device, self._threads)
            if self._policy.base_hash != base_hash:
                raise ModelError(f"The files of the model in {base!r} changed while they were loaded.", "Submit a new run.")
            self._key = key
        return self._policy

    def _update(self, command: RankCommand) -> dict[str, Any]:
        assert self._trainer is not None
        assert self._policy is not None
        groups = decode_groups(command.arguments["groups"], command.tensors)
        update = encode_update(self._trainer.update(groups, command.arguments["iteration"]))
        # The weights alone do not suffice: gradients are added up, so a rank with other advantages has the same weights.
        self._ranks.agree(_digest_update(update), "updates")
        self._ranks.compare_weights(self._policy.trainable().values())
        return {"update": update, "learning_rate": self._trainer.learning_rate}

    def _save(self, folder: str) -> list[str]:
        """Write the checkpoint's files. All ranks have the same state, so only rank 0 writes."""
        assert self._trainer is not None
        return list(self._trainer.save(Path(folder))) if self._ranks.rank == 0 else []

    def _train(self, command: RankCommand) -> dict[str, Any]:
        from agentrl.workers.ranks.training_command import run_training  # here and not above: updates do not need it

        return run_training(command, self._ranks, self._device, self._threads, self._report)


def _digest_update(update: Mapping[str, Any]) -> str:
    """Return a hash of what all ranks must have computed equally: all but costs and times."""
    metrics = {name: value for name, value in update["metrics"].items() if name != "seconds"}
    return hashlib.sha256(repr({**update, "metrics": metrics, "costs": None}).encode()).hexdigest()

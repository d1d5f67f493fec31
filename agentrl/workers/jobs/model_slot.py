"""The model of a worker process: one base at a time, loaded at first use, kept between jobs, and shared by sampler and trainer.

A job that needs another base waits until no job uses the loaded one. Jobs that arrive later wait behind that job, even if they
need the loaded base. So two runs with different bases take turns. When a base has been loaded, all jobs that wait for this base
start. A folder whose files were replaced (`agentrl sft --force`) is another base.
"""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from logging import getLogger
from pathlib import Path

from agentrl.workers.ranks.rank_group import close_group
from agentrl.workers.ranks.ranked_trainer import RankedTrainer
from agentrl.workers.stack.metrics import PrometheusMetric, add_collector
from agentrl.workflow import engines
from agentrl.workflow.config import RunConfig
from agentrl.workflow.engines import Backend, Engine
from agentrl.workflow.experiment import Experiment
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.settings import settings
from agentrl.workflow.training.trainer import Trainer

log = getLogger("agentrl.models")


@dataclass
class LoadedModel:
    """A loaded base with its engine and its trainer. The base's trainable weights have the values that are in the trainer's
    state.
    """

    policy: Policy
    backend: Backend
    trainer: Trainer | RankedTrainer | None = None
    trainer_holds: tuple[int, str] | None = None
    """The (run id, checkpoint path) whose state the trainable weights and the optimizer in memory exactly equal. None after a
    failed update.
    """
    _engine: Engine | None = None
    _starting: threading.Lock = field(default_factory=threading.Lock)

    @property
    def engine(self) -> Engine:
        """The engine of the base, started at first use. A worker that only trains never starts it, so it needs no memory or
        server for an engine. Raise ConfigError if the engine lacks a setting. Raise ModelError if the engine cannot run this
        model.
        """
        with self._starting:
            if self._engine is None:
                self._engine = engines.start(self.backend, self.policy, settings())
            return self._engine

    def release(self) -> None:
        """Free the memory that the engine reserves for later episodes. Do nothing if the engine was not started."""
        if self._engine is not None:
            self._engine.release()

    def count_turns(self) -> dict[str, int]:
        """Return how many turns the engine samples and how many wait (`RollingEngine.counts`); empty if the engine does not
        count turns.
        """
        counts = getattr(self._engine, "counts", None)
        return counts() if counts is not None else {}

    def close(self) -> None:
        """End the engine if it was started, and the ranks that hold the base."""
        if isinstance(self.trainer, RankedTrainer):
            close_group()
        if self._engine is not None:
            self._engine.close()


@dataclass
class Models:
    """The slot for the loaded base. See the module's docstring for the order of waiting jobs."""

    _key: str = ""
    _loaded: LoadedModel | None = None
    _users: int = 0
    _line: "deque[tuple[int, str]]" = field(default_factory=deque)
    _tickets: int = 0
    _invited: int = 0
    _changed: threading.Condition = field(default_factory=threading.Condition)

    @contextmanager
    def use(self, experiment: Experiment, base: str, weights: bool = True) -> Iterator[LoadedModel]:
        """Load the base for the experiment if necessary, and yield it with its engine. Several jobs may use the base at once.
        Raise ModelError if the base cannot be loaded. Raise ConfigError if the experiment's engine does not exist.

        If `weights` is True, the weights are loaded now. Otherwise, they are loaded at their first use in this process.
        """
        with self._changed:
            loaded = self._enter(_loading_key(experiment.config, base), experiment, base, weights)
        try:
            yield loaded
        finally:
            with self._changed:
                self._users -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """Unload the base. The caller ensures that no job uses it."""
        with self._changed:
            if self._loaded is not None:
                self._loaded.close()
            self._loaded, self._key = None, ""

    def collect(self) -> Iterator[PrometheusMetric]:
        """Yield the metrics of the sampler's slots, for `/metrics`."""
        loaded = self._loaded
        counts = loaded.count_turns() if loaded is not None else {}
        yield PrometheusMetric(
            "sampler_turns",
            "Turns: being sampled, waiting for a slot, and the maximum at once.",
            [({"of": name}, count) for name, count in counts.items()],
        )

    def _enter(self, key: str, experiment: Experiment, base: str, weights: bool) -> LoadedModel:
        self._tickets += 1
        ticket = (self._tickets, key)
        self._line.append(ticket)
        try:
            self._changed.wait_for(lambda: self._may_enter(ticket))
            if self._key != key or self._loaded is None:
                self._replace(experiment, base, weights)
            assert self._loaded is not None
            self._users += 1
            return self._loaded
        finally:
            self._line.remove(ticket)
            self._changed.notify_all()

    def _may_enter(self, ticket: tuple[int, str]) -> bool:
        # Jobs that already waited for this base when it was loaded: they enter before anything that stands in front.
        invited = [other for other in self._line if other[0] <= self._invited and other[1] == self._key]
        first = self._line[0] == ticket
        return ticket in invited or (first and (ticket[1] == self._key or not (self._users or invited)))

    def _replace(self, experiment: Experiment, base: str, weights: bool) -> None:
        if self._loaded is not None:
            log.info("changing base models: unloading %s", self._key.split("|")[0])
            self._loaded.close()
            self._loaded, self._key = None, ""
        log.info("loading %s", base)
        where, config, backend = settings(), experiment.config, experiment.engine
        key = ""
        while key != (present := _loading_key(config, base)):  # a folder that is replaced while it is read is read again
            key = present
            policy = Policy.load(config.model, base, where.device, where.threads, weights=weights and backend.local)
        self._loaded = LoadedModel(policy, backend)
        self._key, self._invited = key, self._tickets


def _loading_key(config: RunConfig, base: str) -> str:
    """Return the key of a loaded base. Two jobs with equal keys share one loaded base."""
    return f"{base}|{config.model.model_dump_json(exclude={'path'})}|{config.rollout.engine}|{_folder_stamp(Path(base))}"


def _folder_stamp(folder: Path) -> str:
    """Return the names, sizes and times of the folder's files as text: hashing gigabytes per job would be too slow."""
    files = sorted(file for file in folder.glob("*") if file.suffix in (".safetensors", ".json", ".jinja", ".txt", ".py"))
    try:
        return " ".join(f"{file.name}:{stat.st_size}:{stat.st_mtime_ns}" for file in files for stat in [file.stat()])
    except FileNotFoundError:
        return "being replaced"


models = Models()
add_collector(models.collect)

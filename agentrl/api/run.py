"""A run of a store: its progress, rows and policies."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.api import episode, html
from agentrl.api.curve import Curve
from agentrl.api.episode import Episodes, StoredEpisode
from agentrl.api.lists import Rows
from agentrl.workflow.errors import ConfigError, did_you_mean
from agentrl.workflow.runtime.shown_text import format_count
from agentrl.workflow.store import run_names
from agentrl.workflow.store.driver_reader import Reader
from agentrl.workflow.store.reads import eval_results, event_rows, group_rows, iteration_rows, resource_rows, run_rows
from agentrl.workflow.store.reads.episode_rows import EpisodeFilter
from agentrl.workflow.store.reads.eval_results import EvalFilter
from agentrl.workflow.store.reads.event_rows import EventFilter, EventRow
from agentrl.workflow.store.reads.group_rows import GroupFilter
from agentrl.workflow.store.reads.iteration_rows import IterationFilter, UpdateFilter
from agentrl.workflow.store.reads.resource_rows import CriticCallFilter, ResourceFilter
from agentrl.workflow.tables.views import CriticCallRow, EvalRow, GroupRow, IterationRow, ResourceRow, RunRow, UpdateRow
from agentrl.workflow.trajectory import Message, PolicyRef, Role

if TYPE_CHECKING:
    from agentrl.workflow.experiment import Experiment
    from agentrl.workflow.inference.open_policy import OpenPolicy


class Run:
    """A run of a store. Every access reads the current rows, so a running run may return more each time."""

    def __init__(self, db: Reader, row: RunRow) -> None:
        """Store the database reader, and the name and id from the run's row."""
        self._db = db
        self.name = row.run
        self.id = row.id

    @property
    def store_url(self) -> str:
        """The URL of the run's database."""
        return self._db.url

    @property
    def row(self) -> RunRow:
        """The run's current columns, as in `v_runs`: status, iterations, last and best reward, seconds."""
        return run_rows.describe_run(self._db, self.name)

    @property
    def status(self) -> str:
        """The status: running, paused, done, failed or cancelled."""
        return self.row.status

    @property
    def config(self) -> Mapping[str, Any]:
        """The complete config, as submitted."""
        config: Mapping[str, Any] = run_names.find_run(self._db, self.name)["config"]
        return config

    def curve(self) -> Curve:
        """Return the mean rewards of the finished iterations, and the held-out rewards of the run's policies."""
        return Curve.of(self.name, list(self.iterations().rows()), list(self.evals().rows()))

    def episodes(self, **chosen: Any) -> Episodes:
        """Return the run's episodes that match the filter.

        Args:
            chosen: fields of `EpisodeFilter`: `status`, `task`, `min_reward` and others.

        Raises:
            ConfigError: the filter has no such field or, raised when the list is read, the field has no such value.
        """
        return Episodes(self._db, filter_of(EpisodeFilter, {"run": self.name, **chosen}))

    def episode(self, number: int) -> StoredEpisode:
        """Load an episode of the store by its id. The episode may belong to another run.

        Raises:
            NotFoundError: no episode has this id.
        """
        return episode.find(self._db, number)

    def iterations(self, **chosen: Any) -> Rows[IterationRow, IterationRow]:
        """Return the run's iterations that match the filter, with the metrics of their updates."""
        return _rows(IterationRow, self._db, iteration_rows.list_iterations, IterationFilter, self.name, chosen)

    def updates(self, **chosen: Any) -> Rows[UpdateRow, UpdateRow]:
        """Return the run's optimizer steps that match the filter."""
        return _rows(UpdateRow, self._db, iteration_rows.list_updates, UpdateFilter, self.name, chosen)

    def groups(self, **chosen: Any) -> Rows[GroupRow, GroupRow]:
        """Return the run's groups that match the filter. A group is the episodes of one task in one iteration."""
        return _rows(GroupRow, self._db, group_rows.list_groups, GroupFilter, self.name, chosen)

    def events(self, **chosen: Any) -> Rows[EventRow, EventRow]:
        """Return the run's events that match the filter."""
        return _rows(EventRow, self._db, event_rows.list_events, EventFilter, self.name, chosen)

    def prompts(self, **chosen: Any) -> Rows[ResourceRow, ResourceRow]:
        """Return the versions of the run's prompts, with their origin and mean rewards."""
        return _rows(ResourceRow, self._db, resource_rows.list_resources, ResourceFilter, self.name, chosen)

    def critic_calls(self) -> Rows[CriticCallRow, CriticCallRow]:
        """Return the requests to the critic of a prompt search, with the critic's answers."""
        return _rows(CriticCallRow, self._db, resource_rows.list_critic_calls, CriticCallFilter, self.name, {})

    @property
    def resources(self) -> dict[str, str]:
        """The run's prompts by name: the versions that its search chose, or, without a search, the texts of its config.

        Pass them to another run as `resources`.
        """
        return resource_rows.load_current_texts(self._db, self.name, self.config)

    def evals(self) -> Rows[EvalRow, EvalRow]:
        """Return the evaluations of the policies of this run."""
        chosen = EvalFilter(measures=self.name)
        return Rows(EvalRow, lambda paging: eval_results.list_evals(self._db, chosen, paging), lambda row: row)

    @property
    def best(self) -> "StoredPolicy":
        """The policy with the highest held-out reward.

        Raises:
            NotFoundError: no version was evaluated (set `eval.every`).
        """
        return self._policy("best")

    @property
    def last(self) -> "StoredPolicy":
        """The newest policy."""
        return self._policy(None)

    def policy(self, version: int | str) -> "StoredPolicy":
        """Return a policy version of the run.

        Args:
            version: a number, "best", or the last version of an epoch, such as "epoch2".

        Raises:
            NotFoundError: the run has no such version.
            ConfigError: the text is not a version.
            CheckpointError: `agentrl gc` removed the weights of this version.
        """
        return self._policy(run_names.parse_version(str(version)))

    def _policy(self, version: run_names.Version) -> "StoredPolicy":
        return StoredPolicy(self._db, self.name, run_names.find_stored_policy(self._db, self.name, version))

    def __repr__(self) -> str:
        row = self.row
        done = f"{row.iterations_done} of {format_count(row.iterations, 'iteration')}"
        return f"<run {row.run}: {row.status}, {done}, reward {row.last_reward}>"

    def _repr_html_(self) -> str:
        return f"<p><b>{html.text(repr(self))}</b></p>{self.curve()._repr_html_()}"


@dataclass
class StoredPolicy:
    """A policy that a run published. The first call of `generate` loads the weights.

    Args:
        run: the run's name.
        ref: the identity of the policy's weights.
    """

    _db: Reader = field(repr=False)
    run: str
    ref: PolicyRef
    _opened: "OpenPolicy | None" = field(default=None, repr=False)

    @property
    def version(self) -> int:
        """The version's number in the run."""
        return self.ref.version

    def open(self, **limits: Any) -> "OpenPolicy":
        """Load the policy, to generate text or to compute logits. The caller must close it.

        Args:
            limits: options of the config's section `rollout`.
        """
        from agentrl.workflow.inference.open_policy import open_policy

        return open_policy(self._experiment.config, self.ref, **limits)

    @cached_property
    def _experiment(self) -> "Experiment":
        from agentrl.workflow.experiment import Experiment

        run = Run(self._db, run_rows.describe_run(self._db, self.run))
        return Experiment.load(run.config).reading(run.resources)

    def generate(self, messages: "str | Sequence[Message | Mapping[str, Any]]", **limits: Any) -> Message:
        """Sample one turn in reply to a user's text, or to messages in the format of the chat API.

        The prompt is as in the run's episodes: a text gets the system prompt of the env, and the run's tools are offered. After
        a prompt search, their texts are those that the search chose. For a run with an agent, the prompt has only the
        messages. If the turn calls a tool, the call is in `tool_calls` of the message, and the tool is not run.

        Args:
            messages: the text, or the messages.
            limits: options of the section `rollout` for this turn: `max_new_tokens`, `temperature` and others.

        Raises:
            ConfigError: the env of the run, or one of its tools, is not here. `open` needs neither.
        """
        tools = tuple(self._experiment.tools.values())
        self._opened = self._opened or self.open()
        return self._opened.generate(self._prompt(messages), tools, **limits).message

    def _prompt(self, messages: "str | Sequence[Message | Mapping[str, Any]]") -> Sequence[Message]:
        from agentrl.workflow.envs import with_system_prompt

        if not isinstance(messages, str):
            return [message_of(message) for message in messages]
        system = "" if self._experiment.config.agent is not None else self._experiment.env.system_prompt
        return with_system_prompt(system, (Message("user", messages),))

    def save(self, folder: str | Path, overwrite: bool = False) -> Path:
        """Save the policy as an ordinary model folder, with LoRA merged into the base model.

        Raises:
            ConflictError: the folder exists, and `overwrite` is False or agentrl did not write the folder.
            ModelError, CheckpointError: the policy cannot be saved; the message says why.
        """
        from agentrl.workflow.experiment import Experiment
        from agentrl.workflow.models.lookup import refuse_existing
        from agentrl.workflow.settings import settings
        from agentrl.workflow.training.merging import merge

        target = Path(folder).expanduser()
        refuse_existing(target, overwrite, "Pass overwrite=True")
        row, here = run_names.find_run(self._db, self.run), settings()
        merge(self.ref, Experiment.load(row["config"]).config.model, row["manifest"], target, here.device, here.threads)
        return target

    def close(self) -> None:
        """Unload the policy."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()


def message_of(message: "Message | Mapping[str, Any]") -> Message:
    """Convert a message from the format of the chat API.

    Raises:
        ConfigError: the message has no valid role, or no text.
    """
    if isinstance(message, Message):
        return message
    role, content = message.get("role"), message.get("content")
    roles: dict[str, Role] = {"system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
    if role not in roles or not isinstance(content, str):
        raise ConfigError(f"A message needs a text and a role ({', '.join(roles)}), not {message!r:.100}.")
    return Message(roles[role], content)


def filter_of(kind: type[Any], chosen: Mapping[str, Any]) -> Any:
    """Create a filter of the class `kind` with the given fields.

    Raises:
        ConfigError: the class does not have one of the fields.
    """
    fields = kind.__dataclass_fields__
    for name in chosen:
        if name not in fields:
            raise ConfigError(f"Unknown filter {name!r:.60}.", did_you_mean(name[:60], fields))
    return kind(**chosen)


def _rows(kind: type[Any], db: Reader, listed: Any, of: type[Any], run: str, chosen: Mapping[str, Any]) -> Rows[Any, Any]:
    row_filter = filter_of(of, {"run": run, **chosen})
    return Rows(kind, lambda paging: listed(db, row_filter, paging), lambda row: row)

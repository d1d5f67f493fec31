"""Episodes and lists of episodes: messages, tokens, calls and rewards."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentrl.api import html
from agentrl.api.lists import PAGE, Rows
from agentrl.workflow.annotations import Annotation
from agentrl.workflow.store.driver_reader import Reader
from agentrl.workflow.store.reads import episode_rows
from agentrl.workflow.store.reads.episode_rows import EpisodeRecord
from agentrl.workflow.tables.views import CallRow, EpisodeRow
from agentrl.workflow.training.demonstrations import message_row
from agentrl.workflow.trajectory import Episode, Message, messages_of

if TYPE_CHECKING:
    import datasets

SHOWN_CALLS = 50


@dataclass(frozen=True)
class StoredEpisode:
    """An episode of a store.

    Args:
        row: the episode's columns, as in `v_episodes`: run, task, status, reward and others.
        calls: the tool calls of the episode's steps, with results and times.
        rewards: for each reward set, the value of each reward part, summed over the steps.
        agent_error: the agent's error message; empty if the agent did not fail or left no message.
        agent_output: the end of the agent's printed output.
    """

    row: EpisodeRow
    calls: Sequence[CallRow]
    rewards: Mapping[str, Mapping[str, float]]
    agent_error: str
    agent_output: str
    _record: EpisodeRecord = field(repr=False)

    @property
    def value(self) -> Episode:
        """The episode as rewards receive it: every step with its exact token ids and logprobs.

        Raises:
            StateError: `agentrl gc --tokens` removed the tokens.
        """
        if self._record.removed:
            raise self._record.removed.error()
        return self._record.episode

    @property
    def id(self) -> int:
        """The id of the episode."""
        return self.row.id

    @property
    def reward(self) -> float | None:
        """The episode's reward; None if it has not ended or was not scored."""
        return self.row.reward

    @property
    def annotations(self) -> Sequence[Annotation]:
        """The annotations of the agent, the tools and the hooks, oldest first."""
        return self._record.episode.annotations

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation that led to the last turn, as chat messages."""
        return chat_messages(_last_line(self._record.episode))

    def __repr__(self) -> str:
        ended = self.row.stop_reason or self.row.error_class or "has not ended"
        return f"<episode {self.id} of {self.row.run}: {self.row.status} ({ended}), reward {self.row.reward}>"

    def _repr_html_(self) -> str:
        parts = [f"<p><b>{html.text(repr(self))}</b>, task {html.text(self.row.task)}</p>"]
        for message in _last_line(self._record.episode):
            if message.thought:
                parts.append(html.folded("thought", html.pre(message.thought)))
            name = f" ({message.name})" if message.name else ""
            parts.append(f"<div><i>{html.text(message.role + name)}</i>{html.pre(message.content)}</div>")
            parts += [
                f"<div>call <b>{html.text(call.name)}</b>{html.pre(json.dumps(dict(call.arguments), ensure_ascii=False))}</div>"
                for call in message.tool_calls[:SHOWN_CALLS]
            ]
        for annotation in self.annotations[:SHOWN_CALLS]:
            data = json.dumps(dict(annotation.data), ensure_ascii=False)
            parts.append(
                f"<div>{html.text(f'{annotation.source} said: {annotation.kind} {annotation.name}')}{html.pre(data)}</div>"
            )
        for name, earned in self.rewards.items():
            parts.append(html.table(["reward set", *earned], [[name, *earned.values()]]))
        return "".join(parts)


class Episodes(Rows[EpisodeRow, EpisodeRow]):
    """A list of episode rows. A row has no steps; `store.episode(row.id)` loads the episode with its steps."""

    def __init__(self, db: Reader, chosen: episode_rows.EpisodeFilter) -> None:
        """Store the database reader and the filter."""
        super().__init__(EpisodeRow, lambda paging: episode_rows.list_episodes(db, chosen, paging), lambda row: row)
        object.__setattr__(self, "_db", db)

    def to_dataset(self, messages: bool = True) -> "datasets.Dataset":
        """Return the episodes as a dataset, for example to train with another framework.

        Args:
            messages: add the column `messages` with the conversation of each episode.
        """
        import datasets
        import pyarrow

        if not messages:
            return super().to_dataset()
        table = self.to_arrow()
        ids = table.column("id").to_pylist()
        column = pyarrow.chunked_array(
            [
                pyarrow.array([self._messages(number) for number in ids[start : start + PAGE]], _messages_type())
                for start in range(0, len(ids), PAGE)
            ],
            _messages_type(),
        )
        return datasets.Dataset(table.append_column("messages", column))

    def _messages(self, number: int) -> list[dict[str, Any]]:
        db: Reader = getattr(self, "_db")  # noqa: B009 - a frozen dataclass's
        return chat_messages(_last_line(episode_rows.find_episode(db, number).episode))


def find(db: Reader, number: int) -> StoredEpisode:
    """Load the episode with this id.

    Raises:
        NotFoundError: no episode has this id.
    """
    record = episode_rows.find_episode(db, number)
    rewards: dict[str, dict[str, float]] = {}
    for part in record.rewards:
        earned = rewards.setdefault(part.reward_set, {})
        earned[part.part] = earned.get(part.part, 0.0) + part.value
    return StoredEpisode(record.row, record.calls, rewards, record.agent_error, record.agent_output, record)


def chat_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages in the format of the chat API, in which the arguments of a tool call are a JSON text."""
    rows = []
    for message in messages:
        row = message_row(message)
        for call in row.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        rows.append(row)
    return rows


def _last_line(episode: Episode) -> Sequence[Message]:
    return messages_of(episode.steps, len(episode.steps) - 1) if episode.steps else episode.task.messages


def _messages_type() -> Any:
    import pyarrow as pa

    call = pa.struct([("type", pa.string()), ("function", pa.struct([("name", pa.string()), ("arguments", pa.string())]))])
    texts = [(name, pa.string()) for name in ("role", "content", "name", "reasoning_content")]
    return pa.list_(pa.struct([*texts, ("tool_calls", pa.list_(call))]))

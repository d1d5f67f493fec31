"""The data types of agentrl: Task, Message, ToolCall, ToolResult, Step, Episode, Group, and their states.

Nothing here knows a database, a process or a tensor: rewards, losses, replay and export run on these values alone.
"""

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from agentrl.workflow.annotations import Annotation

if TYPE_CHECKING:
    from agentrl.workflow.config import RolloutConfig

Role = Literal["system", "user", "assistant", "tool"]
Status = Literal["planned", "running", "done", "failed", "infra_error", "cancelled"]
StopReason = Literal["answered", "max_steps", "max_tokens", "parse_error", "tool_error", "timeout", "agent_error"]
TRUNCATED: tuple[StopReason, ...] = ("max_steps", "max_tokens", "timeout")
"""The reasons of an episode that a limit cut off."""
FinishReason = Literal["stop", "length"]

TRANSITIONS: Mapping[str, frozenset[str]] = {
    "planned": frozenset({"running", "infra_error", "cancelled"}),
    "running": frozenset({"running", "done", "failed", "infra_error", "cancelled"}),
    "done": frozenset(),
    "failed": frozenset(),
    "infra_error": frozenset(),
    "cancelled": frozenset(),
}
"""Which status an episode may take after which; the database enforces that terminal ones stay terminal."""

TERMINAL = frozenset(status for status, following in TRANSITIONS.items() if not following)
OPEN = ("planned", "running")
"""The statuses that are not terminal."""


def storable(text: str) -> str:
    """Return the text with NUL and lone surrogates replaced, so that any database can store it (token ids stay exact)."""
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode("utf-8")


WHOLE = -1
"""The step of a reward that the whole episode earned: no null, which no unique key would hold to be the same as another."""

ROOT = -1
"""The parent of a step that continues no other step's tokens."""


UNCLOSED = "<tool_call> was not closed"
"""The `error` of a call inside of which the policy stopped: the episode ends as parse_error, since no answer can follow."""

UNFINISHED = "the call was not finished"
"""The same where a call has no closing tag."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that the policy wrote.

    Args:
        name: of the tool; it may be empty where the call could not be read.
        error: why the call could not be read.
        loose: it was written as bare JSON, without what the tool format puts around a call.
    """

    name: str
    arguments: Mapping[str, Any]
    error: str | None = None
    loose: bool = False


@dataclass(frozen=True, slots=True)
class Exit:
    """How the code of a call ended, as its sandbox saw it from outside.

    Args:
        sandbox: its kind: bwrap, landlock, docker, unsafe.
        status: see `sandbox.Status`.
        code: the exit code, negative for a signal; None where it was killed from outside.
    """

    sandbox: str
    status: str
    code: int | None


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a call as the model reads it, and its costs, which the model does not see.

    Args:
        error_class: None for success.
        seconds: on the clock.
        cpu_seconds: processor time, of the sandbox where there is one, else of the worker's thread; None: not known.
        exit: where a sandbox ran it.
        annotations: what the tool said of its episode; none once these are rows.
    """

    content: str
    error_class: str | None = None
    seconds: float = 0.0
    cpu_seconds: float | None = None
    exit: Exit | None = None
    annotations: tuple[Annotation, ...] = ()


@dataclass(frozen=True, slots=True)
class Message:
    """One message of the conversation. `name` is the tool's, where the role is `tool`."""

    role: Role
    content: str
    thought: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    name: str = ""

    @property
    def is_rich(self) -> bool:
        """True if the message has more than a role and content."""
        return bool(self.thought or self.tool_calls or self.name)


@dataclass(frozen=True, slots=True)
class Task:
    """One dataset row. `key` names it within its dataset for ever (`train/17`); `reference` is the gold answer."""

    key: str
    messages: tuple[Message, ...]
    reference: str
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def content_hash(self) -> str:
        """The hash of the row's content: an edited row is another task."""
        messages = [
            [
                m.role,
                m.content,
                *([m.thought, m.name, [(c.name, dict(c.arguments)) for c in m.tool_calls]] if m.is_rich else []),
            ]
            for m in self.messages
        ]
        text = json.dumps([messages, self.reference, dict(self.metadata)], sort_keys=True)
        return hashlib.sha256(f"{self.key}\0{text}".encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Step:
    """One policy turn: the prompt tokens that were new, the tokens that were sampled, the calls, their results.

    Token ids are exact and never re-tokenised. `prompt_ids` continues the tokens of `parent` (with its end token, where a stop
    string ended it), or the first `shared` of them. `behavior_logprobs` has one natural-log value per sampled token, at the
    sampling temperature and over the whole vocabulary. `results` is None until they are all observed. `reward` is what this
    very step earned, weighted; it is part of its episode's reward.

    Args:
        new_row: why the step could not continue the one before it, where it begins a new chain.
        prompt: the messages that are new to its line; all messages of its request, where it parts from its parent (`shared`).
        chain: the number of its chain: steps each of which continues the one before token for token.
        parent: the index of the step that it continues, ROOT for none; unset: the one before it, or none where `new_row` is.
        shared: how many tokens of the parent's line it continues; None: all.
        delivered: whether whoever asked for the turn was sent all of it.
        draw: how often its prompt was asked before, where that is not how many earlier steps have it.
    """

    index: int
    prompt: tuple[Message, ...]
    prompt_ids: tuple[int, ...]
    sampled_ids: tuple[int, ...]
    behavior_logprobs: tuple[float, ...]
    finish_reason: FinishReason
    message: Message
    policy_version: int
    seconds: float = 0.0
    results: tuple[ToolResult, ...] | None = None
    new_row: str | None = None
    reward: float = 0.0
    chain: int = 0
    parent: int | None = None
    shared: int | None = None
    delivered: bool = True
    draw: int | None = None

    def __post_init__(self) -> None:
        if self.parent is None:
            object.__setattr__(self, "parent", self.index - 1 if self.new_row is None else ROOT)

    @property
    def pending(self) -> bool:
        """True if the policy has not yet seen the tool results."""
        return bool(self.message.tool_calls) and self.results is None


@dataclass(frozen=True, slots=True)
class CallRecord:
    """A call of a step, with the values that only its row has; `result` is set if the call could not be sent at all."""

    call: ToolCall
    effects: str
    result: ToolResult | None


@dataclass(frozen=True, slots=True)
class StepRequest:
    """The request of an agent that a step answers.

    Args:
        id: names the request, and the answer among those to the same request.
        body_hash: sha256 of its body.
        asked: the sampling that the client asked for, and when.
        tools: the tools that the request brought, as schemas.
        template_options: the options for the chat template that it brought.
    """

    id: str
    body_hash: str
    asked: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[Mapping[str, Any], ...] = ()
    template_options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step with the values that only its rows have: no reward and no update reads them.

    Args:
        episode, policy_id: the ids of the rows of its episode and of the policy that sampled it; 0 until these rows exist.
        text: the sampled text, readable.
        calls: the calls of the step, in order.
        request: the agent's request that the step answers; None for the built-in loop. The commit of an answer sets the index
            and the chain of its step.
        shared_messages: how many of the first messages of its prompt are those of its parent's line.
        beside: the id of a request that is committed with this step; the step of that request becomes its parent.
        shown: (step, call) -> the result of an earlier call, as the request shows it.
    """

    episode: int
    step: Step
    policy_id: int
    text: str
    calls: tuple[CallRecord, ...]
    request: StepRequest | None = None
    shared_messages: int = 0
    beside: str = ""
    shown: Mapping[tuple[int, int], str] = field(default_factory=dict)


def messages_of(steps: Sequence[Step], index: int) -> tuple[Message, ...]:
    """Return the messages of the step at that index and of the steps that it continues, oldest first; empty for ROOT.

    A step that parts from its parent somewhere within (`shared`) has all messages of its request itself.
    """
    found: list[tuple[Message, ...]] = []
    while index != ROOT:
        step = steps[index]
        found.append((*step.prompt, step.message))
        index = step.parent if step.parent is not None and step.shared is None else ROOT
    return tuple(message for part in reversed(found) for message in part)


@dataclass(frozen=True, slots=True)
class Episode:
    """One attempt at one task: its steps so far and, at the end, why it stopped and what it earned.

    A fork begins with `inherited` steps of its parent, and trains from step `fork_step` on; `tainted` says that a tool gave
    another output when its state was rebuilt, so that the record is no longer what one policy and one world would do. `limits`
    are its run's, where it is scored. `answer` is what an agent from outside said at its end, where that is not its last turn.
    `annotations` are what its agent, its tools and its hooks said of it, in the order in which they did.
    """

    task: Task
    sample: int = 0
    steps: tuple[Step, ...] = ()
    status: Status = "planned"
    stop_reason: StopReason | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)
    reward: float | None = None
    id: int = 0
    error: str = ""
    parent_id: int | None = None
    fork_step: int = 0
    inherited: int = 0
    tainted: bool = False
    limits: "RolloutConfig | None" = None
    answer: str | None = None
    annotations: tuple[Annotation, ...] = ()

    def with_step(self, step: Step) -> "Episode":
        """Return the episode with this step added, or replaced if the index exists."""
        return replace(self, steps=(*self.steps[: step.index], step), status="running")

    def line(self, index: int) -> tuple[Step, ...]:
        """Return the step at that index and the steps that it continues, oldest first."""
        found: list[Step] = []
        while index != ROOT:
            found.append(self.steps[index])
            index = found[-1].parent if found[-1].parent is not None else ROOT
        return tuple(reversed(found))

    def tokens_of(self, index: int) -> tuple[int, ...]:
        """Return all token ids up to the end of that step, prompt and sampled; empty for ROOT."""
        ids: list[int] = []
        for step in self.line(index):
            del ids[len(ids) if step.shared is None else step.shared :]
            ids += step.prompt_ids
            ids += step.sampled_ids
        return tuple(ids)

    def times_asked(self, prompt_ids: tuple[int, ...], before: int | None = None) -> int:
        """Return how many steps (before that index, if given) were sampled from exactly this prompt."""
        ends, count = {ROOT: 0}, 0
        for index, step in enumerate(self.steps[:before]):
            start = ends[step.parent if step.parent is not None else ROOT] if step.shared is None else step.shared
            asked = start + len(step.prompt_ids)
            ends[index] = asked + len(step.sampled_ids)
            count += asked == len(prompt_ids) and self.tokens_of(index)[:asked] == prompt_ids
        return count

    @property
    def context_ids(self) -> tuple[int, ...]:
        """The token ids that a continuation of the last step starts with."""
        return self.tokens_of(len(self.steps) - 1)

    @property
    def sampled_count(self) -> int:
        """The number of tokens sampled so far."""
        return sum(len(step.sampled_ids) for step in self.steps)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation, in the order of the steps."""
        return tuple(message for step in self.steps for message in (*step.prompt, step.message))

    @property
    def last_turn(self) -> Step | None:
        """The last step that reached its client: it was delivered, or another step continues it."""
        continued = {step.parent for step in self.steps if step.shared is None}
        return next((step for step in reversed(self.steps) if step.delivered or step.index in continued), None)

    @property
    def final_answer(self) -> str:
        """The agent's answer, if any; else the last turn's text if it has no tool call; else empty.

        A step is numbered when it ends, so that this is the last turn of the chain that ended last.
        """
        if self.answer is not None:
            return self.answer
        last = self.last_turn
        return "" if last is None or last.message.tool_calls else last.message.content

    @property
    def begun(self) -> bool:
        """True if the episode has sampled a step of its own."""
        return len(self.steps) > self.inherited

    @property
    def trainable(self) -> bool:
        """Done, whatever the stop_reason, with a reward, and not tainted."""
        return self.status == "done" and self.reward is not None and not self.tainted


@dataclass(frozen=True, slots=True)
class Group:
    """The episodes of one task in one iteration: they share a baseline. `slot` is its place in the iteration."""

    task: Task
    episodes: tuple[Episode, ...]
    slot: int = 0


@dataclass
class Rollout:
    """A mutable summary of an episode: an agent returns it, or a hook sets its reward.

    Args:
        input: what was asked.
        output: what is the answer.
        metadata: anybody's notes; its `reward` is the rollout's.
        traces: anything, for the eyes of whoever reads it.
        episode: the whole, where a hook is given it.
    """

    input: Any = None
    output: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    traces: Sequence[Any] = ()
    episode: Episode | None = None

    @property
    def reward(self) -> Any:
        """The reward that was set; None if none was set."""
        return self.metadata.get("reward")

    @reward.setter
    def reward(self, value: Any) -> None:
        self.metadata["reward"] = value


@dataclass(frozen=True, slots=True)
class PolicyRef:
    """The identity of weights: a base by its hash, and the weights trained on it by the sha256 of their file.

    Args:
        base: name or folder of the base model.
        base_hash: hash of the base's weights and tokenizer files.
        path: checkpoint folder; empty for the base as it is (version 0).
        sha256: of the checkpoint's trained weights; empty for the base.
        version: the run's policy_version.
    """

    base: str
    base_hash: str
    path: str = ""
    sha256: str = ""
    version: int = 0

    @property
    def weights(self) -> tuple[str, str]:
        """The key that tells these weights from others: base and sha256."""
        return self.base_hash, self.sha256


@dataclass(frozen=True, slots=True)
class SamplingKey:
    """The key of an episode's random draws; attempt, worker and batch row are not in it.

    Every turn has a key of its own, made of its whole prompt and of how often the episode asked it before: so the order in
    which turns arrive changes no draw.

    Args:
        seed: the run's seed.
        purpose: `train`, `eval` or `fork:EPISODE:STEP`.
        iteration: index of the iteration.
        task: the task's key.
        sample: number of the episode within its group; it counts on when forks add some.
    """

    seed: int
    purpose: str
    iteration: int
    task: str
    sample: int

    @classmethod
    def of(cls, episode: Episode, seed: int, kind: str, iteration: int) -> "SamplingKey":
        """Return the key of an episode, from the run's seed, the iteration and the kind of its group."""
        purpose = kind if episode.parent_id is None else f"fork:{episode.parent_id}:{episode.fork_step}"
        return cls(seed, purpose, iteration, episode.task.key, episode.sample)

    @property
    def bits(self) -> int:
        """The episode's key as 64 bits."""
        return _bits(self._text)

    def of_turn(self, prompt_ids: tuple[int, ...], asked: int) -> int:
        """Return the key of a turn, 64 bits.

        Args:
            prompt_ids: its whole prompt, each id below 2**31.
            asked: how often the episode sampled from this very prompt before.
        """
        prompt = hashlib.sha256(struct.pack(f"<{len(prompt_ids)}i", *prompt_ids)).hexdigest()
        return _bits(f"{self._text}|{prompt}|{asked}")

    def of_next(self, episode: Episode, prompt_ids: tuple[int, ...]) -> int:
        """Return the key of the episode's next turn, after its recorded steps."""
        return self.of_turn(prompt_ids, episode.times_asked(prompt_ids))

    def of_step(self, episode: Episode, index: int) -> int:
        """Return the key of a recorded step."""
        ids, step = episode.tokens_of(index), episode.steps[index]
        prompt = ids[: len(ids) - len(step.sampled_ids)]
        return self.of_turn(prompt, episode.times_asked(prompt, index) if step.draw is None else step.draw)

    @property
    def _text(self) -> str:
        return f"{self.seed}|{self.purpose}|{self.iteration}|{self.task}|{self.sample}"


def _bits(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")

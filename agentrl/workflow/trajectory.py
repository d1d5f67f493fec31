"""The data types of agentrl: Task, Message, ToolCall, ToolResult, Step, Episode, Group, and the states of an episode."""

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from agentrl.workflow.annotations import Annotation

if TYPE_CHECKING:
    from agentrl.workflow.config import RolloutConfig

Role = Literal["system", "user", "assistant", "tool", "prompt", "prompt_ids"]
RAW_ROLES = ("prompt", "prompt_ids")
"""The roles of messages that no chat template renders: the text of a complete prompt, and token ids as JSON."""
Status = Literal["planned", "running", "done", "failed", "infra_error", "cancelled"]
StopReason = Literal["answered", "max_steps", "max_tokens", "parse_error", "tool_error", "timeout", "agent_error"]
TRUNCATED: tuple[StopReason, ...] = ("max_steps", "max_tokens", "timeout")
FinishReason = Literal["stop", "length"]

TRANSITIONS: Mapping[str, frozenset[str]] = {
    "planned": frozenset({"running", "infra_error", "cancelled"}),
    "running": frozenset({"running", "done", "failed", "infra_error", "cancelled"}),
    "done": frozenset(),
    "failed": frozenset(),
    "infra_error": frozenset(),
    "cancelled": frozenset(),
}
"""The statuses that may follow each status of an episode. The database refuses to change a terminal status."""

TERMINAL = frozenset(status for status, following in TRANSITIONS.items() if not following)
OPEN = ("planned", "running")
"""The statuses that are not terminal."""


def storable(text: str) -> str:
    """Replace NUL and lone surrogates in the text, so any database can store it. Token ids are stored unchanged."""
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode("utf-8")


WHOLE = -1
"""The step of a reward that the whole episode earned. It is not null, because a unique key treats two nulls as different."""

ROOT = -1
"""The parent of a step that continues no other step's tokens."""


UNCLOSED = "<tool_call> was not closed"
"""The `error` of a call if the policy stopped before `</tool_call>`.

The episode then ends as `parse_error`, because no answer can follow.
"""

UNFINISHED = "the call was not finished"
"""The `error` of a call if the policy stopped within the call, in formats without a closing tag.

The episode then ends in the same way as for `UNCLOSED`.
"""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call that the policy wrote.

    Args:
        name: the name of the tool; it may be empty if the call could not be parsed.
        arguments: the arguments by name.
        error: why the call could not be parsed; None if it could be parsed.
        loose: True if the policy wrote bare JSON, without the markers that the tool format puts around a call.
    """

    name: str
    arguments: Mapping[str, Any]
    error: str | None = None
    loose: bool = False


@dataclass(frozen=True, slots=True)
class Exit:
    """How the code of a tool call ended, as the sandbox observed it from outside.

    Args:
        sandbox: the kind of sandbox: bwrap, landlock, docker, unsafe.
        status: see `sandbox.Status`.
        code: the exit code, negative for a signal; None if the sandbox killed the code.
    """

    sandbox: str
    status: str
    code: int | None


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a tool call, which the model reads, and the costs of the call, which the model does not see.

    Args:
        content: the text that the model reads.
        error_class: the class of the error; None if the call succeeded.
        seconds: the wall-clock time, in seconds.
        cpu_seconds: the processor time of the sandbox, or of the worker's thread if there is no sandbox, in seconds; None:
            unknown.
        exit: how the code ended, if a sandbox ran it.
        annotations: the annotations that the tool emitted; empty once they are stored as rows.
    """

    content: str
    error_class: str | None = None
    seconds: float = 0.0
    cpu_seconds: float | None = None
    exit: Exit | None = None
    annotations: tuple[Annotation, ...] = ()


@dataclass(frozen=True, slots=True)
class Message:
    """One message of the conversation. In a message with the role `tool`, `name` is the name of the tool."""

    role: Role
    content: str
    thought: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    name: str = ""

    @property
    def is_rich(self) -> bool:
        """True if the message has more fields than a role and content."""
        return bool(self.thought or self.tool_calls or self.name)


@dataclass(frozen=True, slots=True)
class Task:
    """One row of a dataset.

    `key` identifies the task within its dataset and never changes (`train/17`). `reference` is the correct answer.
    """

    key: str
    messages: tuple[Message, ...]
    reference: str
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def content_hash(self) -> str:
        """The hash of the row's key and content. An edited row has another hash, so it is a different task."""
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


GRAMMAR = "grammar"
"""The key in `steps.asked` for the constraint of a turn, the grammar that kept it, and what the grammar chose."""


@dataclass(frozen=True, slots=True)
class Step:
    """One turn of the policy: the new prompt tokens, the sampled tokens, the tool calls and their results.

    Token ids are exact and are never tokenized again. A step's *line* is all tokens from the start of its prompt to its end,
    including the lines of the steps that it continues.

    Args:
        prompt_ids: the new ids of the prompt: those after the parent's line, or after the line's first `shared` tokens. If a
            stop string ended the parent, the new ids begin with the end token that the parent lacks.
        behavior_logprobs: one natural log-probability per sampled token, at the sampling temperature and over all tokens.
        results: the results of the tool calls; None until all of them are known.
        reward: the weighted reward of this step, which is a part of the episode's reward.
        new_row: why the step could not continue the previous step; None if it could. A step with a reason begins a new chain.
        prompt: the messages that are new in this step's line. If `shared` is set, these are all messages of the request.
        chain: the number of the step's chain.
        parent: the index of the step that this step continues, or `ROOT`. If unset: the previous step, or `ROOT` if `new_row`
            is set.
        shared: the number of tokens of the parent's line that this step continues; None: all of them.
        delivered: True if the client received the complete turn.
        draw: the number of earlier samples from the same prompt; None: the number of earlier steps with the same prompt.
        side_call: True if the agent marked its call as one that does not train.
        grammar: the sha256 of the grammar that limited the sampling; empty without a grammar.
        guided: the indices of the sampled tokens that the grammar chose (`engines.Completion`). They do not train.
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
    side_call: bool = False
    grammar: str = ""
    guided: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.parent is None:
            object.__setattr__(self, "parent", self.index - 1 if self.new_row is None else ROOT)

    @property
    def trainable_tokens(self) -> int:
        """The number of sampled tokens that the policy chose, not a grammar. Only these may train."""
        return len(self.sampled_ids) - len(self.guided)

    @property
    def pending(self) -> bool:
        """True if the policy has not yet seen the tool results."""
        return bool(self.message.tool_calls) and self.results is None


@dataclass(frozen=True, slots=True)
class CallRecord:
    """A tool call of a step, with the values of its database row. `result` is set if the call is refused, so that it does not
    run.
    """

    call: ToolCall
    effects: str
    result: ToolResult | None


@dataclass(frozen=True, slots=True)
class StepRequest:
    """The request of an agent to which a step is the response.

    Args:
        id: the id of the request. If the request asked for several choices, the id also tells which choice the step is.
        body_hash: the sha256 of the request's body.
        asked: the sampling options that the client requested, and the time of the request.
        tools: the tools in the request, as schemas.
        template_options: the options for the chat template in the request.
    """

    id: str
    body_hash: str
    asked: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[Mapping[str, Any], ...] = ()
    template_options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step with the values that only its database rows have. Rewards and updates do not use these values.

    Args:
        episode, policy_id: the row ids of the step's episode and of the policy that sampled it; 0 until these rows exist.
        text: the sampled text, readable.
        calls: the calls of the step, in order.
        request: the agent's request to which the step is the response; None for the built-in loop. The commit of such a step
            sets its index and chain.
        shared_messages: the number of messages that the prompt has in common with the conversation of the parent step.
        beside: the id of the request whose step becomes this step's parent. Both steps are committed together.
        earlier_results: a mapping from (step, call) to the result of that earlier call, as the request contains it.
        replayed: True if the step was copied from the record of a lost attempt.
    """

    episode: int
    step: Step
    policy_id: int
    text: str
    calls: tuple[CallRecord, ...]
    request: StepRequest | None = None
    shared_messages: int = 0
    beside: str = ""
    earlier_results: Mapping[tuple[int, int], str] = field(default_factory=dict)
    replayed: bool = False


def messages_of(steps: Sequence[Step], index: int) -> tuple[Message, ...]:
    """Return the messages of the step with this index and of all steps that it continues, oldest first; empty for `ROOT`.

    A step with `shared` has all messages of its request, so the messages of earlier steps are not added.
    """
    parts: list[tuple[Message, ...]] = []
    while index != ROOT:
        step = steps[index]
        parts.append((*step.prompt, step.message))
        index = step.parent if step.parent is not None and step.shared is None else ROOT
    return tuple(message for part in reversed(parts) for message in part)


@dataclass(frozen=True, slots=True)
class Episode:
    """One attempt at one task: the steps so far and, at the end, the stop reason and the reward.

    A fork begins with `inherited` steps of its parent, and trains from step `fork_step` on. If `tainted` is True, a tool
    returned other results when its state was rebuilt; such an episode never trains. `limits` are the run's rollout options,
    which rewards may read. `answer` is the answer that an agent returned, if it differs from the last turn. `annotations` are
    the annotations of the agent, tools and hooks, in the order of writing.
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
        """Return the episode with `step` as its last step. Old steps with this index or a later one are dropped."""
        return replace(self, steps=(*self.steps[: step.index], step), status="running")

    def line(self, index: int) -> tuple[Step, ...]:
        """Return the step with this index and all steps that it continues, oldest first."""
        steps: list[Step] = []
        while index != ROOT:
            steps.append(self.steps[index])
            index = steps[-1].parent if steps[-1].parent is not None else ROOT
        return tuple(reversed(steps))

    def tokens_of(self, index: int) -> tuple[int, ...]:
        """Return all token ids up to the end of the step with this index, prompts and sampled tokens; empty for `ROOT`."""
        ids: list[int] = []
        for step in self.line(index):
            del ids[len(ids) if step.shared is None else step.shared :]
            ids += step.prompt_ids
            ids += step.sampled_ids
        return tuple(ids)

    def times_asked(self, prompt_ids: tuple[int, ...], before: int | None = None) -> int:
        """Return the number of steps that were sampled from exactly this prompt.

        Args:
            before: count only steps with a lower index; None: count all steps.
        """
        ends, count = {ROOT: 0}, 0
        for index, step in enumerate(self.steps[:before]):
            start = ends[step.parent if step.parent is not None else ROOT] if step.shared is None else step.shared
            prompt_end = start + len(step.prompt_ids)
            ends[index] = prompt_end + len(step.sampled_ids)
            count += prompt_end == len(prompt_ids) and self.tokens_of(index)[:prompt_end] == prompt_ids
        return count

    @property
    def context_ids(self) -> tuple[int, ...]:
        """The token ids with which a continuation of the last step starts."""
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
        """The last step that the client received or that another step continues; None if there is no such step."""
        continued = {step.parent for step in self.steps if step.shared is None}
        return next((step for step in reversed(self.steps) if step.delivered or step.index in continued), None)

    @property
    def final_answer(self) -> str:
        """The answer that the agent returned. Without one, it is the text of the last turn, or empty if that turn has a tool
        call.

        Steps are numbered in the order in which they end. So the last turn belongs to the chain that ended last.
        """
        if self.answer is not None:
            return self.answer
        last = self.last_turn
        return "" if last is None or last.message.tool_calls else last.message.content

    @property
    def answer_step(self) -> int | None:
        """The index of the step whose content is the final answer; None if there is no such step or it is inherited."""
        last = None if self.answer is not None else self.last_turn
        return None if last is None or last.message.tool_calls or last.index < self.inherited else last.index

    @property
    def begun(self) -> bool:
        """True if the episode has sampled a step itself. Inherited steps of a fork are not its own."""
        return len(self.steps) > self.inherited

    @property
    def trainable(self) -> bool:
        """True if the episode is done, has a reward and is not tainted. Its `stop_reason` has no influence."""
        return self.status == "done" and self.reward is not None and not self.tainted


@dataclass(frozen=True, slots=True)
class Group:
    """The episodes of one task in one iteration. They share a baseline. `slot` is the group's position in the iteration."""

    task: Task
    episodes: tuple[Episode, ...]
    slot: int = 0


@dataclass
class Rollout:
    """A mutable summary of an episode. An agent returns it, or a hook sets its reward.

    Args:
        input: the question.
        output: the answer.
        metadata: any notes; the key `reward` holds the reward of the rollout.
        traces: any values for people to read.
        episode: the episode; only hooks receive it.
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
    """The identity of a policy's weights: the hash of the base, and the sha256 of the file with the trained weights.

    Args:
        base: the name or folder of the base model.
        base_hash: the hash of the base's weights and tokenizer files.
        path: the checkpoint folder; empty for the unchanged base (version 0).
        sha256: the sha256 of the checkpoint's trained weights; empty for the unchanged base.
        version: the `policy_version` within the run.
    """

    base: str
    base_hash: str
    path: str = ""
    sha256: str = ""
    version: int = 0

    @property
    def weights(self) -> tuple[str, str]:
        """The key that identifies these weights: `base_hash` and `sha256`."""
        return self.base_hash, self.sha256


@dataclass(frozen=True, slots=True)
class SamplingKey:
    """The key of an episode's random draws. It does not depend on the attempt, the worker or the position in a batch.

    Every turn has its own key. It is made from the whole prompt and the number of times that the episode sampled this prompt
    before. So the draws do not depend on the order in which turns arrive.

    Args:
        seed: the run's seed.
        purpose: `train`, `eval` or `fork:EPISODE:STEP`.
        iteration: the index of the iteration.
        task: the task's key.
        sample: the number of the episode within its group. Forks that are added later get the next numbers.
    """

    seed: int
    purpose: str
    iteration: int
    task: str
    sample: int

    @classmethod
    def of(cls, episode: Episode, seed: int, kind: str, iteration: int) -> "SamplingKey":
        """Make the key of an episode. `kind` and `iteration` are those of the episode's group."""
        purpose = kind if episode.parent_id is None else f"fork:{episode.parent_id}:{episode.fork_step}"
        return cls(seed, purpose, iteration, episode.task.key, episode.sample)

    @property
    def bits(self) -> int:
        """The key of the episode as a 64-bit integer."""
        return _bits(self._text)

    def of_turn(self, prompt_ids: tuple[int, ...], repeats: int) -> int:
        """Return the key of a turn as a 64-bit integer. `prompt_ids` is the whole prompt, each id below 2**31. `repeats` is the
        number of earlier samples of the episode from exactly this prompt.
        """
        prompt = hashlib.sha256(struct.pack(f"<{len(prompt_ids)}i", *prompt_ids)).hexdigest()
        return _bits(f"{self._text}|{prompt}|{repeats}")

    def of_next(self, episode: Episode, prompt_ids: tuple[int, ...]) -> int:
        """Return the key of the turn that follows the episode's recorded steps."""
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

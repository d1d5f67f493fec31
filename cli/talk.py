"""A conversation with a policy in this process: the same chat template, sampler, parser and tools as an episode has.

What was sampled is kept as token ids, so that the next turn continues it exactly.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from cli.output import Line
from workflow import engines
from workflow.agent import refusal
from workflow.chat import Chat
from workflow.config import RolloutConfig, RunConfig
from workflow.engine import GenerateRequest
from workflow.engines import Backend
from workflow.envs import Env
from workflow.models import local_folder, resolve_model
from workflow.plugins import find
from workflow.policy import Policy
from workflow.settings import settings
from workflow.templates import settled
from workflow.tools import Tool, failure
from workflow.tools.python import Notebook
from workflow.trajectory import Episode, Message, PolicyRef, SamplingKey, Step, Task, ToolCall, ToolResult

CHAT_DATASET = "arithmetic"
"""The dataset whose tiny model the name `tiny` means here."""


def open_policy(config: RunConfig, ref: PolicyRef | None) -> tuple[Policy, PolicyRef]:
    """The loaded model, and the weights to sample from: the run's, or the base as it is.

    Raises:
        ModelError: it cannot be loaded.
        ConfigError: the engine that `config` names cannot sample from such weights, or in such a way.
    """
    backend: Backend = find("engines", config.rollout.engine)
    engines.check_options(backend, config.rollout)
    base = ref.base if ref else resolve_model(config.model.path, CHAT_DATASET)
    model = settled(config.model, local_folder(base), ref is None)
    policy = Policy.load(model, base, settings().device, settings().threads, weights=backend.local)
    engines.check_weights(backend, policy.kind, trained=ref is not None and bool(ref.path))
    return policy, ref or PolicyRef(base, policy.base_hash)


class Talk:
    """A conversation: `answer` takes the user's words and gives what the policy and its tools say, line by line."""

    def __init__(
        self,
        policy: Policy,
        ref: PolicyRef,
        env: Env,
        limits: RolloutConfig,
        seed: int,
        tools: Mapping[str, Tool] | None = None,
    ) -> None:
        """`tools`: unset, the env's own."""
        self.chat: Chat = policy.chat
        self.window = policy.max_context
        self.engine = engines.start(find("engines", limits.engine), policy, settings())
        self.ref = replace(ref, base_hash=ref.base_hash or policy.base_hash)
        self.env = env
        self.limits = limits
        self.tools = env.toolset() if tools is None else tools
        self.schemas = [tool.schema for tool in self.tools.values()]
        self.key = SamplingKey(seed, "chat", 0, "chat", 0).bits
        self.messages: list[Message] = [Message("system", env.system_prompt)] if env.system_prompt else []
        self.ids: tuple[int, ...] = ()
        self.sampled = 0
        self.notebook = Notebook()

    def close(self) -> None:
        """Ends the sampler and what keeps a tool's names."""
        self.engine.close()
        self.notebook.close()

    def answer(self, words: str) -> Iterator[Line]:
        """The policy's turns until it calls no tool, at most `max_steps`."""
        new: Sequence[Message] = (Message("user", words),)
        episode = Episode(Task("chat", tuple(new), ""))
        for number in range(self.limits.max_steps):
            message, cut = self._turn(new)
            yield from _lines(message)
            if cut:
                yield f"(cut at {cut})", "yellow"
            if not message.tool_calls or cut:
                return
            results = [self._call(index, call) for index, call in enumerate(message.tool_calls)]
            for result in results:
                yield f"  -> {result.content}", "red" if result.error_class else "blue"
            made = Step(number, tuple(new), (), (), (), "stop", message, self.ref.version, results=tuple(results))
            episode = episode.with_step(made)
            new = self.env.step(episode)
            if not new:
                return
        yield f"(stopped after {self.limits.max_steps} turns)", "yellow"

    def _turn(self, new: Sequence[Message]) -> tuple[Message, str]:
        """The policy's message, and what cut it short; empty if it came to its end."""
        following = self.chat.continuation(new, self.schemas, self.chat.ended(self.ids))[0] if self.ids else None
        self.messages += new
        prompt = self.chat.opening(self.messages, self.schemas) if following is None else self.ids + following
        request = GenerateRequest.within(self.limits, prompt, self.ref, self.key, self.sampled)
        completion = self.engine.submit(request).result()
        message = self.chat.parse(completion.token_ids, self.schemas)
        self.messages.append(message)
        cut = "" if completion.finish_reason == "stop" else self._limit(len(prompt), len(completion.token_ids))
        self.ids = () if cut else prompt + completion.token_ids
        self.sampled += len(completion.token_ids)
        return message, cut

    def _limit(self, prompt: int, sampled: int) -> str:
        if sampled >= self.limits.max_new_tokens:
            return "--max-new-tokens"
        whole = prompt + sampled >= self.window
        return f"the model's window of {self.window} tokens" if whole else "the server's window"

    def _call(self, index: int, call: ToolCall) -> ToolResult:
        refused = refusal(call, index, self.tools, self.limits)
        if refused is not None:
            return refused
        try:
            return self.notebook.run(self.tools[call.name], call.arguments)
        except Exception as error:  # noqa: BLE001 - a tool is anybody's code; its fault is shown to the model and the user
            return failure(self.tools[call.name], error)


def _lines(message: Message) -> Iterator[Line]:
    if message.thought:
        yield f"(thinks) {message.thought}", "italic dim"
    if message.content:
        yield message.content, ""
    for call in message.tool_calls:
        shown: Any = call.error if call.error else json.dumps(dict(call.arguments), ensure_ascii=False)
        yield f"  {call.name or '(unreadable call)'} {shown}", "bold blue"

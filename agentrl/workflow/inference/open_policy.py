"""A policy opened in this process: `open_policy`, then `generate`, `stream` and `forward`.

    with open_policy("tiny") as policy: step = policy.generate([Message("user", "What is 15 minus 8?")], [calculator])

The policy samples as in a rollout: with the same engine, chat template and parser, and from the same published weights.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, Self
from weakref import finalize

import torch
from torch import Tensor, nn

from agentrl.workflow import checkpoints, engines
from agentrl.workflow.chat.templates import resolve_chat, resolve_last_turn
from agentrl.workflow.config import RolloutConfig, RunConfig, build
from agentrl.workflow.engines import Backend, Completion, Engine, GenerateRequest
from agentrl.workflow.errors import ModelError
from agentrl.workflow.inference.prompt_draft import draft_turn
from agentrl.workflow.inference.sampling import scale_logits
from agentrl.workflow.inference.streaming import Stream
from agentrl.workflow.models.critic import FILE, load_critic, make_critic
from agentrl.workflow.models.lookup import TINY_DATASET, local_folder, resolve_model
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.plugins import find
from agentrl.workflow.settings import settings
from agentrl.workflow.tool_formats import Schema
from agentrl.workflow.tools import Tool
from agentrl.workflow.trajectory import Episode, Message, PolicyRef, SamplingKey, Step, Task


class PolicyOutput(NamedTuple):
    """The policy's outputs for rows of tokens (B, T), all on the policy's device.

    Args:
        logits: (B, T, V), at temperature 1. The logits at position t predict the token at t + 1.
        logprobs: (B, T) float32, the logprob of each token given the tokens before it, in nats, at the temperature of `limits`.
            A sampler records the same numbers (`Step.behavior_logprobs`). 0 for a row's first token and for padding.
        values: (B, T), the critic's value after the token at t, in units of the reward; None if the policy has no critic.
    """

    logits: Tensor
    logprobs: Tensor
    values: Tensor | None


class OpenPolicy:
    """A loaded policy with its sampler; thread-safe. Call `close` after use, or use it in a `with` statement.

    Args:
        policy: the model.
        ref: the weights to use; None: the untrained base.
        limits: the sampling options (`max_new_tokens`, `temperature`, `top_k`, `top_p`, `min_p`, `stop`, `engine`).
        seed: the seed of all draws.

    Raises:
        ConfigError: the engine cannot sample from these weights or with these limits, or the engine needs a setting that is
            missing.
        ModelError: the engine cannot run this model.
    """

    def __init__(
        self, policy: Policy, ref: PolicyRef | None = None, limits: RolloutConfig | None = None, seed: int = 0
    ) -> None:
        self.policy = policy
        self.chat = policy.chat
        self.ref = replace(ref, base_hash=ref.base_hash or policy.base_hash) if ref else _base_of(policy)
        self.limits = limits or RolloutConfig()
        self.seed = seed
        backend: Backend = find("engines", self.limits.engine)
        engines.check_options(backend, self.limits)
        engines.check_weights(backend, policy.kind, trained=bool(self.ref.path))
        self.engine: Engine = engines.start(backend, policy, settings())
        self._end = finalize(self, self.engine.close)  # the engine's thread must not run when the process ends

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the sampler. Unfinished turns fail."""
        self._end()

    def generate(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool | Schema] = (),
        before: Sequence[Step] = (),
        sample: int = 0,
        **limits: Any,
    ) -> Step:
        """Sample one turn. The returned step has the parsed `message`, the exact ids and their logprobs.

        The turn ends at the model's end token, at a stop string, after `max_new_tokens` (`finish_reason` is then `length`), or
        when the model's window is full. Tool calls are not run: run them, and call `generate` again with their results.

        Args:
            messages: the complete conversation; with `before`, only the messages after the last of these turns.
            tools: the offered tools, the same in every turn of a conversation.
            before: the earlier turns of the conversation; their exact tokens are continued.
            sample: the number of the draw. Different numbers draw different turns. With a keyed engine, the same number draws
                the same turn again.
            limits: `max_new_tokens`, `temperature` and other options, only for this turn.

        Raises:
            ConfigError: a limit is invalid, or the engine does not support it.
            ModelError: the template refuses the messages, or the model cannot sample.
            AgentRLError: see the engine's `submit`.
        """
        return self._ask(messages, tools, before, sample, limits).result()

    def stream(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool | Schema] = (),
        before: Sequence[Step] = (),
        sample: int = 0,
        **limits: Any,
    ) -> Stream:
        """Sample one turn as `generate` does, and stream it. Iterate over the pieces of text, then read `result`."""
        return self._ask(messages, tools, before, sample, limits)

    @torch.no_grad()
    def forward(
        self, input_ids: Tensor | Sequence[Sequence[int]], attention_mask: Tensor | Sequence[Sequence[int]] | None = None
    ) -> PolicyOutput:
        """Run the published weights on rows of tokens, without a gradient.

        Args:
            input_ids: (B, T), padded on the left or on the right.
            attention_mask: (B, T), 1 for a token and 0 for padding; None: 1 everywhere.

        Raises:
            ModelError: there are no tokens, an id is outside of the vocabulary, or a row exceeds the model's window.
            CheckpointError: the weights or the critic cannot be read.
        """
        ids, mask = self._check_inputs(input_ids, attention_mask)
        self.policy.publish(self.ref)
        critic = self._critic
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        with self.policy.sampling() as model:
            output = model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                use_cache=False,
                output_hidden_states=critic is not None,
            )
        logprobs = torch.zeros(ids.shape, device=ids.device)
        predicted = scale_logits(output.logits[:, :-1].flatten(0, 1), self.limits.temperature).log_softmax(-1)
        own_logprobs = predicted.gather(-1, ids[:, 1:].reshape(-1, 1)).view(len(ids), -1)
        logprobs[:, 1:] = torch.where((mask[:, 1:] * mask[:, :-1]) > 0, own_logprobs, 0.0)
        values = None if critic is None else critic(output.hidden_states[-1].to(critic.weight.dtype))[..., 0]
        return PolicyOutput(output.logits, logprobs, values)

    def _ask(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool | Schema],
        before: Sequence[Step],
        sample: int,
        limits: dict[str, Any],
    ) -> Stream:
        call_limits = self.within(**limits) if limits else self.limits
        episode = Episode(Task("chat", (), ""), steps=tuple(before))
        schemas = [tool.schema if isinstance(tool, Tool) else tool for tool in tools]
        drafted = draft_turn(self.chat, episode, tuple(messages), schemas)
        keys = SamplingKey(self.seed, "chat", 0, "chat", sample)
        key = keys.of_next(episode, drafted.context)
        request = GenerateRequest.within(call_limits, drafted.context, self.ref, key, session=keys.bits)

        def step(completion: Completion) -> Step:
            message = self.chat.parse(completion.token_ids, schemas)
            return drafted.step(len(episode.steps), completion, message, self.ref.version)

        return Stream(self.engine, request, self.chat, step)

    def within(self, **changes: Any) -> RolloutConfig:
        """Return this policy's limits with the given changes.

        Raises:
            ConfigError: a limit is invalid, or the engine does not support it.
        """
        values = self.limits.model_dump() | changes
        limits = build({f"rollout.{key}": value for key, value in values.items()}).rollout
        engines.check_options(find("engines", limits.engine), limits)
        return limits

    def _check_inputs(self, input_ids: Any, attention_mask: Any) -> tuple[Tensor, Tensor]:
        ids = torch.as_tensor(input_ids, dtype=torch.int64, device=self.policy.device)
        if ids.dim() != 2 or not ids.numel() or ids.shape[1] > self.policy.max_context:
            raise ModelError(
                f"forward takes ids of shape (B, T), T from 1 to {self.policy.max_context}, not {tuple(ids.shape)}."
            )
        if not 0 <= int(ids.min()) <= int(ids.max()) < self.policy.vocabulary:
            raise ModelError(f"forward takes ids between 0 and {self.policy.vocabulary - 1}.")
        if attention_mask is None:
            return ids, torch.ones_like(ids)
        mask = torch.as_tensor(attention_mask, dtype=torch.int64, device=ids.device)
        if mask.shape != ids.shape:
            raise ModelError(f"The mask has the shape {tuple(mask.shape)} and the ids {tuple(ids.shape)}.")
        return ids, mask

    @cached_property
    def _critic(self) -> nn.Linear | None:
        if not self.ref.path:
            return None
        return checkpoints.read(self.ref.path, self.ref.sha256, "start", partial(_read_critic, self.policy))


def open_policy(model: str | RunConfig, ref: PolicyRef | None = None, seed: int = 0, **limits: Any) -> OpenPolicy:
    """Load a model and start its sampler.

    Args:
        model: `tiny`, a folder or a hub name. For a run's policy, pass the run's config as `model` and the policy as `ref`:
            `open_policy(*find_policy("RUN@best"))` with `cli.resolve_targets.find_policy`.
        ref: the weights to use; None: the untrained model.
        seed: the seed of all draws.
        limits: options of the config's section `rollout`, such as `max_new_tokens`, `temperature`, `top_p`, `engine`.

    Raises:
        ModelError: the model cannot be loaded.
        ConfigError: a limit is invalid, or the engine cannot sample from these weights or with these limits.
        CheckpointError: the weights belong to another base.
    """
    config = build({"model.path": model}) if isinstance(model, str) else model
    if limits:
        config = build(config.flat() | {f"rollout.{key}": value for key, value in limits.items()})
    backend: Backend = find("engines", config.rollout.engine)
    engines.check_options(backend, config.rollout)
    base = ref.base if ref else resolve_model(config.model.path, TINY_DATASET)
    folder = local_folder(base)
    config = resolve_last_turn(config.model_copy(update={"model": resolve_chat(config.model, folder)}), folder)
    policy = Policy.load(config.model, base, settings().device, settings().threads, weights=backend.local)
    if ref is not None:
        policy.check(ref)
    return OpenPolicy(policy, ref or PolicyRef(base, policy.base_hash), config.rollout, seed)


def _base_of(policy: Policy) -> PolicyRef:
    return PolicyRef(str(policy.folder), policy.base_hash)


def _read_critic(policy: Policy, folder: Path) -> nn.Linear | None:
    if not (folder / FILE).is_file():
        return None
    critic = make_critic(policy)
    load_critic(critic, folder)
    return critic.requires_grad_(False)

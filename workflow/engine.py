"""What samples: prompts in, token ids with behavior logprobs out, many episodes at once.

A request names its weights, its key and its position, and with a `keyed` engine nothing else decides what is sampled: one
uniform number per token comes from (key, position), and picks a token by the inverse of the cumulative distribution in
vocabulary order. So an episode's tokens do not depend on who else is in the batch, in which order, or on the attempt that
samples them (up to the rounding of the model's own sums; `numerics: exact` leaves none that matter).

The engines are the files of `workflow/engines`, each of which names a class that is an `Engine`.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from workflow.config import RolloutConfig
from workflow.errors import AgentRLError, InfraError, ModelError
from workflow.trajectory import FinishReason, PolicyRef


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One turn to sample.

    Args:
        prompt_ids: the whole training row so far, exact ids; at least one.
        policy: which weights.
        key: 64 bits (`SamplingKey.bits`), one per episode: its next turn comes with the same one.
        position: tokens of the episode that were sampled before this turn.
        max_new_tokens: at most this many; the end token counts.
        temperature: logits are divided by it.
        top_k: only the so many likeliest tokens are drawn from; 0: all.
        top_p: only the likeliest tokens that together reach this probability (arXiv 1904.09751).
        min_p: only tokens at least this share as likely as the likeliest (arXiv 2407.01082).
        stop: the turn ends with the token that completes one of these texts; that token stays.
        follows: whether another turn of its episode may follow.
        heard: called with each token when it is drawn, by an engine that samples here; False ends the turn there, as `length`.
    """

    prompt_ids: tuple[int, ...]
    policy: PolicyRef
    key: int
    position: int
    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    follows: bool = True
    heard: Callable[[int], bool] | None = None

    @classmethod
    def within(
        cls,
        limits: RolloutConfig,
        prompt_ids: tuple[int, ...],
        policy: PolicyRef,
        key: int,
        position: int,
        follows: bool = True,
    ) -> "GenerateRequest":
        """The turn as a run's limits have it sampled."""
        return cls(
            prompt_ids,
            policy,
            key,
            position,
            limits.max_new_tokens,
            limits.temperature,
            limits.top_k,
            limits.top_p,
            limits.min_p,
            limits.stop,
            follows,
        )


@dataclass(frozen=True, slots=True)
class Completion:
    """What was sampled.

    Args:
        token_ids: with the end token, where one was sampled.
        logprobs: one per token, natural log at the sampling temperature over the whole vocabulary (top_k, top_p and min_p
            decide what is drawn from and change no logprob: the trainer computes these); float32 values.
        finish_reason: `stop` at an end token or a stop string, `length` at the limit or at the end of the model's context.
        seconds: from joining the batch to leaving it; with a server from asking it, whose own queue cannot be told apart.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    seconds: float


class Engine(Protocol):
    """Whatever samples. What it can is said by its `workflow.engines.Backend`."""

    def submit(self, request: GenerateRequest) -> Future[Completion]:
        """Asks for one completion; errors come out of the future."""

    def release(self, key: int | None = None) -> None:
        """Frees what is kept for an episode's next turn, since there will be none; without a key, for everybody's."""

    def close(self) -> None:
        """Ends the sampler; what is not finished fails."""


def fail(futures: Iterable[Future[Completion]], error: Exception) -> None:
    """Gives the error to those that are not answered; one that is none of ours is the system's."""
    if not isinstance(error, AgentRLError):
        cause = error
        error = InfraError(f"Sampling failed: {type(cause).__name__}: {cause}.")
        error.__cause__ = cause
    for future in futures:
        over = future.done() and not future.cancelled()
        if future.running() or (not over and future.set_running_or_notify_cancel()):
            future.set_exception(error)


def closed() -> InfraError:
    """What a turn is told that an engine's end leaves unsampled."""
    return InfraError("The sampler was closed before this turn was sampled.")


def not_a_number() -> ModelError:
    """What a turn is told whose distribution is none."""
    return ModelError("The model returned NaN instead of logits.")

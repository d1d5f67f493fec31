"""Engines sample: prompts in, token ids with behavior logprobs out, for many episodes at once.

A request names its weights, its key and its position, and with a `keyed` engine nothing else decides the sampled tokens: one
uniform number per token comes from (key, position), and picks a token by the inverse of the cumulative distribution in
vocabulary order. So an episode's tokens do not depend on the other episodes in the batch, on their order, or on the attempt (up
to the rounding of the model's own sums; under `numerics: exact` none of it matters).

Each file here names an engine and its capabilities (`Backend`). The engines themselves are in `inference`, so that the command
line can check a run's options without loading torch.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from agentrl.workflow.config import RolloutConfig, RunConfig
from agentrl.workflow.errors import AgentRLError, ConfigError, InfraError, ModelError
from agentrl.workflow.plugins import find
from agentrl.workflow.settings import Settings
from agentrl.workflow.trajectory import FinishReason, PolicyRef

if TYPE_CHECKING:
    from agentrl.workflow.models.policy import Policy


MAX_TOP_LOGPROBS = 20
"""The most tokens beside the sampled one that a request may ask for, at each place."""

Likeliest = tuple[tuple[int, float], ...]
"""The likeliest tokens at one place, as (id, logprob), likeliest first."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A request to sample one turn.

    Args:
        prompt_ids: the whole training row so far, exact ids; at least one.
        policy: the weights to sample from.
        key: 64 bits that key its draws (`SamplingKey.of_turn`), and `position`: of its first token's draw, 0 for a whole turn.
        max_new_tokens: the most tokens to sample; the end token counts.
        temperature: logits are divided by it.
        top_k: the number of likeliest tokens to draw from; 0: all.
        top_p: only the likeliest tokens that together reach this probability (arXiv 1904.09751).
        min_p: only tokens at least this share as likely as the likeliest (arXiv 2407.01082).
        stop: the turn ends with the token that completes one of these texts; that token stays.
        follows: whether another turn of its episode may follow; `follows_length`: also after one that ends at a limit, as an
            agent may go on from any.
        session: under which an engine may keep what it computed, for an episode's next turn of the same session; no part of the
            draws. None: nothing is kept.
        heard: called with each token as it is drawn, by an engine in this process; False ends the turn there, as `length`.
        top_logprobs: how many of the likeliest tokens to tell for each sampled one, at most `MAX_TOP_LOGPROBS`; no part of the
            draws.

    Raises:
        ConfigError: more of the likeliest tokens are asked for.
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
    follows_length: bool = False
    heard: Callable[[int], bool] | None = None
    session: int | None = None
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
            raise ConfigError(f"top_logprobs must be between 0 and {MAX_TOP_LOGPROBS}.")

    @classmethod
    def within(
        cls,
        limits: RolloutConfig,
        prompt_ids: tuple[int, ...],
        policy: PolicyRef,
        key: int,
        follows: bool = True,
        session: int | None = None,
    ) -> "GenerateRequest":
        """Return the request for a turn under a run's limits."""
        return cls(
            prompt_ids,
            policy,
            key,
            0,
            limits.max_new_tokens,
            limits.temperature,
            limits.top_k,
            limits.top_p,
            limits.min_p,
            limits.stop,
            follows,
            session=session,
        )


@dataclass(frozen=True, slots=True)
class Completion:
    """A sampled turn, as an engine returns it.

    An engine knows neither messages nor episodes: a draft makes the `Step` of a completion (`prompt_draft.Draft.step`).

    Args:
        token_ids: the sampled ids, including the end token if one was sampled.
        logprobs: one per token, natural log at the sampling temperature over the whole vocabulary, as the trainer computes
            it (top_k, top_p and min_p restrict the draw and change no logprob); float32 values.
        finish_reason: `stop` at an end token or a stop string, `length` at the limit or at the end of the model's context.
        seconds: from joining the batch to leaving it; with a server, from the request on, its own queue included.
        top: the likeliest tokens at each token's place, their logprobs of the same kind; empty where none were asked for.
            Tokens of probability 0 are left out.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    seconds: float
    top: tuple[Likeliest, ...] = ()


class Engine(Protocol):
    """A sampler; its `engines.Backend` lists its capabilities."""

    def submit(self, request: GenerateRequest) -> Future[Completion]:
        """Submit a request; errors are raised by the future."""

    def release(self, session: int | None = None) -> None:
        """Free the memory kept for a session's next turn, since there will be none; without one, for all sessions."""

    def close(self) -> None:
        """End the sampler; unfinished turns fail."""


def fail_futures(futures: Iterable[Future[Completion]], error: Exception) -> None:
    """Set the error on all unfinished futures; an error that is not ours becomes an InfraError."""
    if not isinstance(error, AgentRLError):
        cause = error
        error = InfraError(f"Sampling failed: {type(cause).__name__}: {cause}.")
        error.__cause__ = cause
    for future in futures:
        over = future.done() and not future.cancelled()
        if future.running() or (not over and future.set_running_or_notify_cancel()):
            future.set_exception(error)


def closed_error() -> InfraError:
    """Return the error of a turn that was not sampled before its engine was closed."""
    return InfraError("The sampler was closed before this turn was sampled.")


def nan_error() -> ModelError:
    """Return the error of a turn whose logits are NaN."""
    return ModelError("The model returned NaN instead of logits.")


@dataclass(frozen=True, slots=True)
class Backend:
    """An engine's name and capabilities.

    Args:
        name: the file's name.
        start: `module:function`; called with a `Policy` and the machine's `Settings`, it returns an `Engine`.
        keyed: whether a request alone decides its tokens.
        logprobs: whether every token comes with its logprob, which training needs.
        weights: the weights it can sample from besides the base: `lora` adapters, `full` sets of weights, both or neither.
        quantised: whether it runs the base with the config's quantisation (4 or 8 bits); else its server decides.
        options: those of `temperature`, `top_k`, `top_p`, `min_p`, `stop` that it honours.
        local: whether it computes in this process with the policy's own weights; else they need not be read to sample.
        at_url: whether it samples with the server at the machine's `engine_url`.
        top_logprobs: whether it can tell the likeliest tokens at each place.
    """

    name: str
    start: str
    keyed: bool
    logprobs: bool
    weights: frozenset[str]
    quantised: bool
    options: frozenset[str]
    local: bool
    at_url: bool = False
    top_logprobs: bool = False


def start(backend: Backend, policy: "Policy", settings: Settings) -> Engine:
    """Start the engine for this policy.

    Raises:
        ConfigError: a required setting is missing.
        ModelError: the engine cannot run this model.
    """
    engine: Engine = find("engine", backend.start)(policy, settings)
    return engine


def window(engine: Engine, max_tokens: int) -> int:
    """Return the tokens of prompt and answer together: `max_tokens`, or the model's own or the engine's `window()`, if that is
    less.

    Raises:
        ServiceError, ModelError, InfraError: its server is away, or serves another model.
    """
    own_window = getattr(engine, "window", None)
    return max_tokens if own_window is None else min(max_tokens, own_window())


def check(backend: Backend, config: RunConfig, trains: bool, trained: bool = False) -> None:
    """Refuse options that the engine cannot honour, as far as the config shows them.

    Args:
        trains: whether the run trains.
        trained: whether it starts from weights that another run trained.

    Raises:
        ConfigError: naming the option.
    """
    hint = "Use --engine rolling."
    if config.model.numerics == "exact" and not backend.keyed:
        raise ConfigError(f"numerics: exact needs repeatable draws; the engine {backend.name!r} has none.", hint)
    if trains and not backend.logprobs:
        raise ConfigError(f"Training needs the sampler's logprobs; the engine {backend.name!r} returns none.", hint)
    check_options(backend, config.rollout)
    if not backend.weights or config.model.lora_r is not None:
        check_weights(backend, "full" if config.model.lora_r == 0 else "lora", trains or trained)
    if (config.model.load_in_4bit or config.model.load_in_8bit) and not backend.quantised:
        raise ConfigError(f"The engine {backend.name!r} does not quantise the base; its server does.", hint)
    if config.model.sampler_dtype != "auto" and not backend.local:
        raise ConfigError(f"The engine {backend.name!r} ignores model.sampler_dtype; its server decides.", hint)


def check_options(backend: Backend, rollout: RolloutConfig) -> None:
    """Refuse sampling options that the engine does not support.

    Raises:
        ConfigError: naming the option.
    """
    for name in ("temperature", "top_k", "top_p", "min_p", "stop"):
        if name not in backend.options and getattr(rollout, name) != RolloutConfig.model_fields[name].default:
            message = f"The engine {backend.name!r} does not know rollout.{name}."
            raise ConfigError(message, "Leave it out, or use --engine rolling.")


def check_weights(backend: Backend, kind: str, trained: bool) -> None:
    """Refuse trained weights that the engine cannot sample from; it can always sample from the base.

    Args:
        kind: `lora` or `full`, as the policy trains.
        trained: whether the run trains, or starts from weights that another run trained.

    Raises:
        ConfigError: the engine samples from the base alone, or from another kind of weights.
    """
    if not trained or kind in backend.weights:
        return
    if not backend.weights:
        message = f"The engine {backend.name!r} cannot train: it samples only from unchanged base models."
        raise ConfigError(message, "Use --engine rolling.")
    message = f"The engine {backend.name!r} cannot sample from trained weights of the kind {kind!r}."
    raise ConfigError(message, "Use --engine rolling, or set model.lora_r above 0.")

"""Engines sample many episodes at once: they take prompts, and return the sampled token ids with their logprobs.

A request has the policy's weights, a key and a position. For a `keyed` engine, nothing outside the request influences the
sampled tokens. The engine computes one uniform number per token from (key, position), and selects a token by the inverse of the
cumulative distribution in vocabulary order. So an episode's tokens do not depend on the other episodes in the batch, on their
order, or on the attempt. The only exception is the rounding of the model's own sums, which has no effect under `numerics:
exact`.

Each file of this folder names an engine and its capabilities (`Backend`). The engines themselves are in `inference`, so the
command line can check a run's options without loading torch.
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
"""The largest `top_logprobs` of a request: the number of most likely tokens at each position."""

Likeliest = tuple[tuple[int, float], ...]
"""The most likely tokens at a position, as (id, logprob), ordered by falling probability."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A request to sample one turn.

    Args:
        prompt_ids: the exact ids of the complete training row so far; at least one.
        policy: the weights to sample from.
        key: the key of the random draws, 64 bits (`SamplingKey.of_turn`).
        position: the position of the first token's draw; 0 for a complete turn.
        max_new_tokens: the most tokens to sample, including the end token.
        temperature: the divisor of the logits.
        top_k: the number of most likely tokens to draw from; 0: all tokens.
        top_p: draw only from the most likely tokens that together reach this probability (arXiv 1904.09751).
        min_p: draw only from tokens whose probability is at least this share of the most likely token's (arXiv 2407.01082).
        stop: texts that end the turn. The token that completes such a text is the turn's last token.
        follows: True if another turn of the episode may follow.
        follows_length: True if another turn may follow even a turn that ends at a limit, because an agent may continue from any
            turn.
        heard: a function that an engine in this process calls with each drawn token. If it returns False, the turn ends with
            `length`.
        session: the session to which the turn belongs. The engine may keep the turn's computation for the next turn of the
            session, which does not affect the draws. None: nothing is kept.
        top_logprobs: the number of most likely tokens to return for each sampled token, at most `MAX_TOP_LOGPROBS`. It does not
            affect the draws.
        grammar: the grammar of the turn (`chat.grammar`), which limits the draw of each token; empty: none.

    Raises:
        ConfigError: `top_logprobs` is out of range.
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
    grammar: str = ""

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
        """Return the request for a turn from its first token on, with the run's sampling options (`limits`)."""
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

    An engine has no messages or episodes. `prompt_draft.Draft.step` makes a `Step` from a completion.

    Args:
        token_ids: the sampled ids, including the end token if one was sampled.
        logprobs: one natural logprob per token, at the sampling temperature and over the whole vocabulary, as the trainer
            computes it (top_k, top_p and min_p restrict the draw and change no logprob); float32 values.
        finish_reason: `stop` at an end token or a stop string, `length` at the limit or at the end of the model's context.
        seconds: the time from joining the batch to leaving it, in seconds. With a server, the time from sending the request,
            including the server's queue.
        top: the most likely tokens at the place of each sampled token, with logprobs as in `logprobs`; empty if the request
            asked for none. Tokens of probability 0 are left out.
        guided: the indices of the tokens that the grammar chose rather than the policy, because the policy gave all tokens that
            the grammar allowed a total probability below `WHOLE_MASS`. These tokens do not train.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    seconds: float
    top: tuple[Likeliest, ...] = ()
    guided: tuple[int, ...] = ()


class Engine(Protocol):
    """A sampler of turns. The engine's `engines.Backend` lists its capabilities."""

    def submit(self, request: GenerateRequest) -> Future[Completion]:
        """Submit a request, and return a future. Errors are set on the future."""

    def release(self, session: int | None = None) -> None:
        """Free the memory that is kept for a session's next turn; without `session`, the memory of all sessions."""

    def close(self) -> None:
        """Stop the sampler. Unfinished turns fail."""


def fail_futures(futures: Iterable[Future[Completion]], error: Exception) -> None:
    """Set the error on all unfinished futures. An error that is not an AgentRLError becomes an InfraError."""
    if not isinstance(error, AgentRLError):
        cause = error
        error = InfraError(f"Sampling failed: {type(cause).__name__}: {cause}.")
        error.__cause__ = cause
    for future in futures:
        over = future.done() and not future.cancelled()
        if future.running() or (not over and future.set_running_or_notify_cancel()):
            future.set_exception(error)


def closed_error() -> InfraError:
    """Return the error for a turn that was not sampled before the engine was closed."""
    return InfraError("The sampler was closed before this turn was sampled.")


def nan_error() -> ModelError:
    """Return the error for a turn whose logits are NaN."""
    return ModelError("The model returned NaN instead of logits.")


@dataclass(frozen=True, slots=True)
class Backend:
    """An engine's name and capabilities.

    Args:
        name: the name of the file.
        start: `module:function` of a function from a `Policy` and the machine's `Settings` to an `Engine`.
        check: `module:function` of a function that each rollout worker calls before a run is written. The function gets the
            machine's `Settings` and the names of the base, and raises an error if the engine cannot work there. Empty: none.
        keyed: True if the sampled tokens depend only on the request.
        logprobs: True if the engine returns the sampled ids and a logprob for each. If False, only `agentrl serve` can use the
            engine.
        weights: the kinds of trained weights that the engine can sample from: `lora` adapters, `full` sets of weights, both or
            neither.
        quantised: True if the engine quantises the base as the config says (4 or 8 bits). Otherwise the server decides.
        options: the supported options among `temperature`, `top_k`, `top_p`, `min_p` and `stop`.
        local: True if the engine computes in this process with the policy's own weights. Otherwise the weights need not be
            loaded to sample.
        at_url: True if the engine samples with the server at the machine's `engine_url`.
        top_logprobs: True if the engine can return the most likely tokens at each position.
        grammars: True if the engine draws within a grammar.
    """

    name: str
    start: str
    keyed: bool
    logprobs: bool
    weights: frozenset[str]
    quantised: bool
    options: frozenset[str]
    local: bool
    check: str = ""
    at_url: bool = False
    top_logprobs: bool = False
    grammars: bool = False


def start(backend: Backend, policy: "Policy", settings: Settings) -> Engine:
    """Start the engine. Raise ConfigError if a setting is missing, ModelError if the engine cannot run this model."""
    engine: Engine = find("engine", backend.start)(policy, settings)
    return engine


def window(engine: Engine, max_tokens: int) -> int:
    """Return the most tokens of prompt and answer together: `max_tokens`, or the engine's `window()` if it has one that is
    smaller. Raise ServiceError, ModelError, InfraError if the engine's server does not respond, or serves another model.
    """
    own_window = getattr(engine, "window", None)
    return max_tokens if own_window is None else min(max_tokens, own_window())


def check(backend: Backend, config: RunConfig, trains: bool, trained: bool = False) -> None:
    """Check that the engine supports the options of the config. Raise ConfigError if an option is not supported; the message
    names it.

    Args:
        backend: the engine's capabilities.
        config: the run's config.
        trains: True if the run trains.
        trained: True if the run starts from weights that another run trained.
    """
    hint = "Use --engine rolling."
    if config.model.numerics == "exact" and not backend.keyed:
        raise ConfigError(f"numerics: exact needs repeatable draws, which the engine {backend.name!r} does not have.", hint)
    if not backend.logprobs:
        raise ConfigError(f"The engine {backend.name!r} returns no logprobs: only `agentrl serve` can use it.", hint)
    check_options(backend, config.rollout)
    if not backend.weights or config.model.lora_r is not None:
        check_weights(backend, "full" if config.model.lora_r == 0 else "lora", trains or trained)
    if (config.model.load_in_4bit or config.model.load_in_8bit) and not backend.quantised:
        raise ConfigError(f"The engine {backend.name!r} does not quantise the base; its server does.", hint)
    if config.model.sampler_dtype != "auto" and not backend.local:
        raise ConfigError(f"The engine {backend.name!r} ignores model.sampler_dtype; its server decides.", hint)


def check_options(backend: Backend, rollout: RolloutConfig) -> None:
    """Raise ConfigError, naming the option, if the engine does not support a sampling option."""
    for name in ("temperature", "top_k", "top_p", "min_p", "stop"):
        if name not in backend.options and getattr(rollout, name) != RolloutConfig.model_fields[name].default:
            message = f"The engine {backend.name!r} does not know rollout.{name}."
            raise ConfigError(message, "Leave it out, or use --engine rolling.")


def check_weights(backend: Backend, kind: str, trained: bool) -> None:
    """Check that the engine can sample from trained weights, if there are any. Every engine can sample from the base. Raise
    ConfigError if the engine can sample only from the base, or only from another kind of weights.

    Args:
        backend: the engine's capabilities.
        kind: the kind of weights that the policy trains, `lora` or `full`.
        trained: True if the run trains, or starts from weights that another run trained.
    """
    if not trained or kind in backend.weights:
        return
    if not backend.weights:
        message = f"The engine {backend.name!r} cannot train: it samples only from unchanged base models."
        raise ConfigError(message, "Use --engine rolling.")
    message = f"The engine {backend.name!r} cannot sample from trained weights of the kind {kind!r}."
    raise ConfigError(message, "Use --engine rolling, or set model.lora_r above 0.")

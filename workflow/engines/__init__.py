"""Engines: a file here names what samples and says what that can do. See `Backend`.

It only names it, so that the command line can check a run's options without loading torch.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from workflow.config import RolloutConfig, RunConfig
from workflow.engine import Engine
from workflow.errors import ConfigError
from workflow.plugins import find
from workflow.settings import Settings

if TYPE_CHECKING:
    from workflow.policy import Policy


@dataclass(frozen=True, slots=True)
class Backend:
    """One way to sample.

    Args:
        name: the file's name.
        start: `module:function`; called with a `Policy` and the machine's `Settings`, gives an `Engine`.
        keyed: a request alone decides its tokens.
        logprobs: every token comes with its logprob, without which nothing can be trained.
        weights: what it can sample from besides the base: `lora` adapters, `full` sets of weights, both or neither.
        quantised: it runs the base as the config says (4 or 8 bits); else whatever serves it decides.
        options: which of `temperature`, `top_k`, `top_p`, `min_p`, `stop` it honours.
        local: it computes with the policy's own weights, in this process; else the process need not read them to sample.
        at_url: it samples with the server at the machine's `engine_url`.
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


def start(backend: Backend, policy: "Policy", settings: Settings) -> Engine:
    """The engine that samples for this policy.

    Raises:
        ConfigError: a setting that it needs is missing.
        ModelError: it cannot run such a model.
    """
    engine: Engine = find("engine", backend.start)(policy, settings)
    return engine


def check(backend: Backend, config: RunConfig, trains: bool, trained: bool = False) -> None:
    """Refuses what the engine cannot honour, as far as the config tells.

    Args:
        trains: whether the run trains.
        trained: whether it starts from weights that another trained.

    Raises:
        ConfigError: naming the option.
    """
    hint = "Use --engine rolling."
    if config.model.numerics == "exact" and not backend.keyed:
        raise ConfigError(f"numerics: exact needs draws that can be repeated; the engine {backend.name!r} has none.", hint)
    if trains and not backend.logprobs:
        raise ConfigError(f"Training needs the sampler's logprobs; the engine {backend.name!r} gives none.", hint)
    check_options(backend, config.rollout)
    if not backend.weights or config.model.lora_r is not None:
        check_weights(backend, "full" if config.model.lora_r == 0 else "lora", trains or trained)
    if (config.model.load_in_4bit or config.model.load_in_8bit) and not backend.quantised:
        raise ConfigError(f"The engine {backend.name!r} does not quantise the base; what serves it does.", hint)
    if config.model.sampler_dtype != "auto" and not backend.local:
        raise ConfigError(f"The engine {backend.name!r} does not heed model.sampler_dtype; what serves the base decides.", hint)


def check_options(backend: Backend, rollout: RolloutConfig) -> None:
    """Refuses a way to draw, or to end a turn, that the engine does not know.

    Raises:
        ConfigError: naming the option.
    """
    for name in ("temperature", "top_k", "top_p", "min_p", "stop"):
        if name not in backend.options and getattr(rollout, name) != RolloutConfig.model_fields[name].default:
            said = f"The engine {backend.name!r} does not know rollout.{name}."
            raise ConfigError(said, "Leave it out, or use --engine rolling.")


def check_weights(backend: Backend, kind: str, trained: bool) -> None:
    """Refuses trained weights that the engine cannot sample from; the base it always can.

    Args:
        kind: `lora` or `full`, as the policy trains.
        trained: whether the run trains, or starts from what another trained.

    Raises:
        ConfigError: it samples from the base alone, or from another kind of weights.
    """
    if not trained or kind in backend.weights:
        return
    if not backend.weights:
        said = f"The engine {backend.name!r} samples from a base as it is: for eval and chat, not for training."
        raise ConfigError(said, "Use --engine rolling.")
    said = f"The engine {backend.name!r} cannot sample from trained weights of the kind {kind!r}."
    raise ConfigError(said, "Use --engine rolling, or set model.lora_r above 0.")

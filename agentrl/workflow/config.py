"""`RunConfig`, the frozen config of a run.

Unknown keys are errors. `resolve` builds the config from files, flags and environment variables.
"""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from agentrl.workflow.errors import ConfigError
from agentrl.workflow.resources import read_resources

MAX_INT = 2**31 - 1
"""The largest count. Rows, arrays and servers store counts as 32-bit integers."""
NAME_PATTERN = r"^[a-z0-9][a-z0-9._-]{0,63}$"
ALL_LINEAR = "all-linear"
"""The default target of LoRA: every linear layer of the decoder except the head, routers and convolutions."""
MAX_PATTERN = 1000
"""The most characters of a pattern of `agent.replay_ignore`."""
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The default targets of LoRA in runs of format 4 and older. Targets that the model does not have are skipped."""


def _as_tuple(value: Any) -> Any:
    if value is None:
        return ()
    return (value,) if isinstance(value, str | int) else value


Texts = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_as_tuple)]
"""A tuple of non-empty texts. A single text becomes a tuple with one item; null becomes the empty tuple, as in `-s tools=`."""

Numbers = Annotated[tuple[Annotated[int, Field(ge=1, lt=2**63)], ...], BeforeValidator(_as_tuple)]
"""A tuple of row ids of the database. A single number becomes a tuple with one item."""


def _as_resources(value: Any) -> Any:
    return read_resources({str(name): text for name, text in value.items()}) if isinstance(value, Mapping) else value


def _as_columns(value: Any) -> Any:
    """Parse `question=prompt,answer=solution` as a mapping. Return a mapping unchanged."""
    if not isinstance(value, str):
        return value or {}
    pairs = [part.partition("=") for part in value.split(",")]
    if not all(field.strip() and column.strip() for field, _, column in pairs):
        raise ValueError("write FIELD=COLUMN,FIELD=COLUMN, for example question=prompt,answer=solution")
    return {field.strip(): column.strip() for field, _, column in pairs}


def _as_devices(value: Any) -> Any:
    """Return a number of devices, or `auto`."""
    number = int(value) if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 9 else value
    if number != "auto" and (not isinstance(number, int) or not 1 <= number <= MAX_DEVICES):
        raise ValueError(f"write a number from 1 to {MAX_DEVICES}, or auto")
    return number


MAX_DEVICES = 64
"""The most devices of one machine."""

Devices = Annotated[int | Literal["auto"], BeforeValidator(_as_devices)]
"""A number of devices of one machine; `auto`: all that the machine has."""

MAX_HOSTS = 64
"""The most hosts of an update."""

Columns = dict[Annotated[str, Field(min_length=1)], Annotated[str, Field(min_length=1)]]
"""A mapping from a task's field to the dataset column from which the field is read."""

Weights = dict[Annotated[str, Field(min_length=1)], Annotated[float, Field(strict=True)]]
"""A mapping from a name to a weight."""

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
"""How the losses of tokens are combined; see `training.losses.aggregate`."""


def _is_stored(info: ValidationInfo) -> bool:
    """Return True if the config is that of a stored run. Such a config skips the checks that were added after the run."""
    return bool(info.context and info.context.get("stored"))


@dataclass(frozen=True)
class Flag:
    """The option of `agentrl submit` that sets a config key. The option's first name is also a keyword of `agentrl.Trainer`.

    Args:
        names: the names of the option on the command line.
        metavar: the placeholder for the value in the help; None: the name of the value's type.
        type: the type of the value on the command line; None: the field's type.
        panel: the heading in the help; None: the section's heading.
    """

    names: tuple[str, ...]
    metavar: str | None = None
    type: Any = None
    panel: str | None = None

    @property
    def keyword(self) -> str:
        """The first name as a Python keyword."""
        return self.names[0].partition("/")[0].lstrip("-").replace("-", "_")


def option(
    default: Any, *names: str, metavar: str | None = None, type: Any = None, panel: str | None = None, **limits: Any
) -> Any:
    """Return a config field that is an option of `submit`. `limits` are those of pydantic's `Field`. See `Flag`."""
    return Field(default, json_schema_extra={"flag": Flag(names, metavar, type, panel)}, **limits)  # type: ignore[dict-item]


class Section(BaseModel):
    """A part of the config. It is frozen and refuses unknown keys."""

    PANEL: ClassVar = "The run"
    """The heading of the section's options in `submit --help`."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, field: ValidationInfo) -> Any:
        assert field.field_name is not None
        annotation = cls.model_fields[field.field_name].annotation
        if isinstance(value, bool) and bool not in (annotation, *get_args(annotation)):
            raise ValueError("expected a number or text, not true or false")
        return value


class DatasetConfig(Section):
    """The tasks of a run."""

    PANEL: ClassVar = "What it trains on"

    name: str = option("gsm8k", "--dataset", min_length=1, description="Name, file, folder, OWNER/NAME; A=0.7,B=0.3")
    split: str = option("train", "--split", description="train, test or another split of the dataset")
    max_tasks: int | None = option(
        None,
        "--max-tasks",
        "--max-samples",
        ge=1,
        le=MAX_INT,
        description="Only the first N tasks",
        validation_alias=AliasChoices("max_tasks", "max_samples"),
    )
    map: Annotated[Columns, BeforeValidator(_as_columns)] = option(
        {}, "--map", type=str, description="Columns to read: question=A,answer=B.C"
    )
    filter: str | None = option(None, "--filter", min_length=1, description="SQL condition on the columns of rows to keep")
    keep_solved: str | None = option(None, "--keep-solved", description="Share solved in stored episodes: LOW..HIGH")
    order: Literal["shuffled", "easy_first"] = Field(
        "shuffled", description="Order of tasks in an epoch; easy_first: by the share solved in stored episodes"
    )
    skip_bad_rows: bool = Field(False, description="Skip malformed rows of a file, and list them")

    @field_validator("keep_solved")
    @classmethod
    def _is_a_range(cls, text: str | None) -> str | None:
        if text is not None:
            solved_range(text)
        return text


def solved_range(text: str) -> tuple[float, float]:
    """Parse `LOW..HIGH`. Raise ValueError if these are not two numbers from 0 to 1, the lower one first."""
    low, _, high = text.partition("..")
    try:
        ends = float(low), float(high)
    except ValueError:
        ends = 1.0, 0.0
    if not 0 <= ends[0] <= ends[1] <= 1:
        raise ValueError("write LOW..HIGH with shares from 0 to 1, for example 0.1..0.9")
    return ends


class ModelConfig(Section):
    """The model's weights, and which of them train."""

    PANEL: ClassVar = "The model"

    path: str = option(
        "Qwen/Qwen2.5-0.5B-Instruct",
        "--model",
        "--model-path",
        min_length=1,
        description="Hub name, folder, a model of `agentrl sft`, RUN@N",
    )
    lora: Literal["continue", "new"] = option(
        "continue", "--lora", description="LoRA of --model RUN@N: continue it, or merge it and start a new one"
    )
    trust_remote_code: bool = option(False, "--trust-remote-code", description="Run code from the model's folder")
    load_in_4bit: bool = option(
        False,
        "--load-in-4bit/--no-load-in-4bit",
        description="Train LoRA on a 4-bit base (NF4)",
    )
    load_in_8bit: bool = Field(False, description="Train LoRA on an 8-bit base")
    lora_r: int | None = option(
        None, "--lora-r", ge=0, le=1024, description="LoRA rank; 0 trains all weights; unset: 8, or 0 below 50M parameters"
    )
    lora_alpha: float = Field(16.0, gt=0, description="LoRA scale is alpha / r")
    lora_dropout: float = Field(0.0, ge=0, lt=1, description="Dropout on the LoRA input while training")
    lora_targets: Texts = Field(
        (ALL_LINEAR,),
        min_length=1,
        max_length=64,
        description="Names of linear layers that LoRA trains; all-linear: all of the decoder except head and routers",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="auto: on a GPU LoRA in half precision, and all weights in bfloat16 with float32 masters; else float32",
    )
    sampler_dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Precision of the sampler's weights if all weights train; auto: the trainer's"
    )
    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2"] = Field(
        "auto", description="Attention implementation of transformers; auto: its default for the model"
    )
    tool_format: str | None = option(
        None,
        "--tool-format",
        min_length=1,
        max_length=256,
        description="Tool call format [that of the template]",
    )
    strict_calls: bool = option(False, "--strict-calls/--no-strict-calls", description="Read calls in the tool format only")
    chat_template: str | None = option(
        None, "--chat-template", min_length=1, max_length=131_072, description="Jinja file to use as the chat template"
    )
    numerics: Literal["fast", "exact"] = Field("fast", description="exact: float64 on one CPU thread, repeatable bit for bit")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.load_in_4bit and self.load_in_8bit:
            raise ValueError("load_in_4bit and load_in_8bit exclude each other")
        if (self.load_in_4bit or self.load_in_8bit) and self.lora_r == 0:
            raise ValueError("a quantised base cannot train all weights: set lora_r above 0")
        if self.sampler_dtype != "auto" and (self.lora_r or self.load_in_4bit or self.load_in_8bit):
            raise ValueError("sampler_dtype has no effect with LoRA: the sampler shares the trainer's base; set dtype instead")
        if self.numerics == "exact" and (
            self.load_in_4bit or self.load_in_8bit or not self.dtype == self.sampler_dtype == "auto"
        ):
            raise ValueError("numerics: exact computes in float64 and takes neither a quantised base nor another dtype")
        if self.attn_implementation == "flash_attention_2" and (self.numerics == "exact" or self.dtype == "float32"):
            raise ValueError("flash_attention_2 computes in bfloat16 or float16 only")
        return self


class RolloutConfig(Section):
    """The options of rollouts.

    `top_k`, `top_p` and `min_p` limit which tokens are drawn, but change no logprob. Sampler and trainer both compute logprobs
    over the whole vocabulary, so the ratio of an update compares the full distributions. Tokens that these options exclude are
    never sampled, so they never train.
    """

    PANEL: ClassVar = "Sampling"

    engine: str = option("rolling", "--engine", description="Sampling engine: a name, or package.module:name")
    group_size: int = option(
        8, "--group-size", "--samples-per-prompt", ge=1, le=1024, description="Episodes per task and iteration"
    )
    tasks_per_iteration: int = option(16, "--tasks-per-iteration", ge=1, le=4096, description="Groups per iteration")
    temperature: float = option(1.0, "--temperature", gt=0, le=10, description="Temperature of sampling and training")
    top_k: int = Field(
        0, ge=0, le=MAX_INT, description="Sample from the K likeliest tokens; 0: all. Probability ratios still use all tokens"
    )
    top_p: float = Field(
        1.0, gt=0, le=1, description="Sample from the likeliest tokens up to this total probability; ratios use all tokens"
    )
    min_p: float = Field(0.0, ge=0, le=1, description="Minimum probability of a token, as a share of the likeliest token's")
    stop: Texts = Field((), description="Texts that end a turn, besides the end token; they are part of the turn")
    max_new_tokens: int = option(256, "--max-new-tokens", ge=1, le=131072, description="Maximum tokens sampled per turn")
    max_steps: int = option(4, "--max-steps", ge=1, le=1000, description="Maximum turns per episode")
    last_turn: Literal["auto", "ask", "plain"] = Field(
        "auto", description="ask: ask for the answer before the last turn and after a repeated call; auto: if the template can"
    )
    max_tool_calls: int = Field(8, ge=1, le=1000, description="Maximum calls per turn; further calls get an error")
    timeout_seconds: float = Field(
        600.0, gt=0, description="Seconds of sampling and tools in one episode, and of waiting in a server's own queue"
    )
    max_attempts: int = Field(3, ge=1, le=100, description="System failures after which an episode ends as infra_error")
    max_staleness: int = option(0, "--max-staleness", ge=0, le=8, description="Iterations sampled ahead of updates")
    dynamic_sampling: int = Field(
        1,
        ge=1,
        le=64,
        description="Sample more groups, at most N times tasks_per_iteration, until enough have unequal rewards; 1: off",
    )

    @model_validator(mode="after")
    def _groups_can_vary(self) -> Self:
        if self.dynamic_sampling > 1 and self.group_size == 1:
            raise ValueError("dynamic_sampling needs groups of two or more episodes, because it compares their rewards")
        return self


class AlgorithmConfig(Section):
    """The options of the advantages and the loss.

    An unset option has the algorithm's default. An option that has no effect is an error (`algorithms.resolve_options`).
    `importance` corrects for tokens whose probability differs between trainer and sampler. The probability differs if the
    sampler's weights are older than the trainer's, or if the sampler computes logprobs in another way. See
    `RunConfig.importance_method`.
    """

    PANEL: ClassVar = "Learning"

    name: str = option("grpo", "--algorithm", description="Name of an algorithm, or package.module:name")
    convention: Literal["verl", "trl"] = Field(
        "verl", description="Details (epsilon, clipping, normalisation) to follow where verl and TRL differ"
    )
    clip_low: float | None = Field(None, gt=0, lt=1, description="The ratio is clipped below 1 - clip_low")
    clip_high: float | None = Field(None, gt=0, description="The ratio is clipped above 1 + clip_high")
    dual_clip: float | None = Field(
        None, ge=0, description="If the advantage A < 0: the loss is at most -A times this; 0: no bound"
    )
    scale: Literal["group", "batch", "none"] | None = Field(None, description="Standard deviation that divides advantages")
    aggregation: Aggregation | None = Field(
        None, description="How the losses of tokens are combined: " + ", ".join(get_args(Aggregation))
    )
    discount: float | None = Field(None, ge=0, le=1, description="Discount of a reward per token (turn_ppo: per turn)")
    gae_lambda: float | None = Field(None, ge=0, le=1, description="Lambda of GAE: 0 relies on the critic, 1 on the rewards")
    tau_positive: float | None = Field(None, gt=0, description="SAPO: temperature of the gate if A > 0")
    tau_negative: float | None = Field(None, gt=0, description="SAPO: temperature of the gate if A < 0")
    kl_coef: float = Field(0.0, ge=0, description="Weight of the KL to the reference; 0: none is computed")
    kl_estimator: Literal["k1", "k2", "k3", "k3-corrected"] = Field("k3", description="How the KL of a token is estimated")
    kl_in: Literal["loss", "reward"] = Field("loss", description="Add the KL to the loss, or subtract it from the rewards")
    kl_target: float | None = Field(None, gt=0, description="Move kl_coef after each update so that the KL stays near this")
    kl_horizon: int | None = Field(None, ge=1, le=MAX_INT, description="Episodes in which kl_coef may grow by a fifth [10000]")
    entropy_coef: float = Field(0.0, ge=0, description="Weight of the entropy bonus")
    importance: Literal["auto", "truncate", "mask", "none"] = Field(
        "auto", description="Importance weights for tokens on which sampler and trainer differ; auto: truncate, if allowed"
    )
    importance_level: Literal["token", "sequence"] = Field("token", description="Ratio per token, or per training row")
    importance_cap: float = Field(2.0, ge=1, description="Larger ratios are truncated to this value, or masked out")

    @model_validator(mode="before")
    @classmethod
    def _reads_formats_up_to_4(cls, tree: Any, info: ValidationInfo) -> Any:
        """Convert the keys `importance_beyond` and null `importance_cap` of stored runs up to format 4."""
        if not _is_stored(info) or "importance_beyond" not in tree:
            return tree
        tree = dict(tree)
        method, cap = tree.pop("importance_beyond"), tree.pop("importance_cap", 2.0)
        return tree | {"importance": "none"} if cap is None else tree | {"importance": method, "importance_cap": cap}

    @model_validator(mode="after")
    def _does_something(self, info: ValidationInfo) -> Self:
        defaults = type(self).model_fields
        for name in ("kl_estimator", "kl_in", "kl_target", "kl_horizon"):
            if not self.kl_coef and getattr(self, name) != defaults[name].default:
                raise ValueError(f"{name} has no effect if kl_coef is 0")
        if self.kl_horizon is not None and self.kl_target is None:
            raise ValueError("kl_horizon has no effect without kl_target")
        stored = _is_stored(info)  # an older run may have it, and stays readable
        if self.kl_coef and self.kl_in == "loss" and self.kl_estimator == "k1" and not stored:
            raise ValueError("k1 in the loss has no effect: its expected gradient is 0. Set kl_estimator=k3 or kl_in=reward")
        if self.kl_in == "reward" and self.kl_estimator == "k3-corrected":
            raise ValueError("k3-corrected works only in the loss: the reward has no gradient to correct")
        for name in ("importance_level", "importance_cap"):
            if self.importance == "none" and getattr(self, name) != defaults[name].default:
                raise ValueError(f"{name} has no effect if importance is none")
        return self


ALGORITHM_OPTIONS = (
    *("clip_low", "clip_high", "dual_clip", "scale", "aggregation", "discount", "gae_lambda", "tau_positive", "tau_negative"),
)
"""The keys of `algorithm.*` that only some algorithms read."""


class CriticConfig(Section):
    """The value head of an algorithm that has a critic: a linear layer on the policy's last hidden states."""

    learning_rate: float = Field(
        1e-3, gt=0, le=1, description="Learning rate of the critic's head; the body uses update.learning_rate"
    )
    loss_coef: float = Field(0.5, gt=0, description="Weight of the value loss relative to the policy loss")
    clip: float = Field(0.2, ge=0, description="Maximum change of a value in an update; 0: unlimited")
    warmup: int = Field(0, ge=0, le=MAX_INT, description="Number of first iterations in which only the head trains")


class UpdateConfig(Section):
    """The options of an update."""

    PANEL: ClassVar = "Learning"

    trainer: str = option("agentrl", "--trainer", description="agentrl, trl (TRL's GRPOTrainer), or package.module:name")
    optimizer: Literal["adamw", "adamw_8bit"] = Field(
        "adamw", description="adamw, or adamw_8bit with moments in 8 bits (bitsandbytes)"
    )
    devices: Devices = Field(1, description="Devices of the train worker that update together; auto: all of its GPUs")
    hosts: int = Field(1, ge=1, le=MAX_HOSTS, description="Hosts that update together, each with `devices` devices")
    learning_rate: float = option(1e-4, "--learning-rate", gt=0, le=1, description="Learning rate")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradient norm is clipped to this")
    batch_size: int | None = option(None, "--batch-size", ge=1, le=MAX_INT, description="Episodes per optimizer step [all]")
    gradient_accumulation_steps: int = option(
        1, "--gradient-accumulation-steps", ge=1, le=MAX_INT, description="Minimum microbatches per optimizer step"
    )
    microbatch_tokens: int | None = Field(
        None,
        ge=1,
        le=MAX_INT,
        description="Tokens in one forward/backward, padding included [what a GPU holds, else 1536]",
    )
    gradient_checkpointing: bool = Field(False, description="Compute layers again in the backward pass: less memory, slower")
    max_sampler_difference: float | None = Field(
        None, gt=0, description="Skip episodes whose sampler and trainer logprobs differ on average by more than this"
    )
    epochs: int = Field(1, ge=1, le=100, description="Passes over the episodes of an iteration")
    max_kl: float | None = Field(None, gt=0, description="Stop further passes if the KL to the starting policy is above this")
    warmup: int = Field(0, ge=0, le=MAX_INT, description="Number of first iterations in which the learning rate rises")
    decay: Literal["none", "linear", "cosine"] = Field(
        "none", description="How the learning rate falls after the warm-up, to 0 at the end"
    )
    save_every: int | None = option(
        None,
        "--save-every",
        ge=1,
        le=MAX_INT,
        description="Keep every Nth checkpoint, ends of epochs, the best and the last [all]",
    )
    mask_truncated: bool = Field(
        False, description="Do not train on episodes cut off at a limit; their rewards still count in the group"
    )
    max_bad_updates: int = Field(3, ge=1, le=1000, description="Updates with a NaN in a row before the run fails")

    @model_validator(mode="after")
    def _does_something(self) -> Self:
        if self.max_kl is not None and self.epochs == 1:
            raise ValueError("max_kl has no effect if update.epochs is 1")
        return self


class SourceConfig(Section):
    """The stored episodes that a run trains on instead of sampling its own."""

    runs: Texts = Field((), description="Train on the finished groups of these runs")
    groups: Numbers = Field((), description="Train on these groups, by their numbers")
    reward_set: str = Field("default", pattern=NAME_PATTERN, description="Reward set to train on; `agentrl rescore` makes sets")

    @property
    def given(self) -> bool:
        """True if the run trains only on stored episodes."""
        return bool(self.runs or self.groups)


class SearchConfig(Section):
    """The options of a prompt search. An unset option has the algorithm's default. `resolve_search` refuses options that have
    no effect.
    """

    critic: str | None = Field(None, min_length=1, max_length=256, description="The critic's model, at AGENTRL_CRITIC_URL")
    critic_tokens: int = Field(2048, ge=1, le=131_072, description="Maximum tokens of the critic's answer")
    critic_temperature: float = Field(1.0, ge=0, le=10, description="Sampling temperature of the critic")
    group_size: int = Field(
        1,
        ge=1,
        le=1024,
        description="Episodes for each task and each candidate",
        validation_alias=AliasChoices("group_size", "samples"),
    )
    choose_tasks: int = Field(16, ge=1, le=4096, description="Number of tasks that choose among candidates")
    held_out_tasks: int = Field(32, ge=2, le=4096, description="Number of held-out tasks, used only to report the gain")
    batch_tasks: int | None = Field(None, ge=1, le=1024, description="Number of tasks shown to the critic at once")
    rounds: int | None = Field(None, ge=1, le=1000, description="apo: rounds of critique and edit")
    beam_width: int | None = Field(None, ge=1, le=64, description="apo: candidates kept after a round")
    branch_factor: int | None = Field(None, ge=1, le=64, description="apo: edits per candidate")
    max_rollouts: int | None = Field(None, ge=1, le=MAX_INT, description="gepa: maximum episodes for choosing")


SEARCH_OPTIONS = ("batch_tasks", "rounds", "beam_width", "branch_factor", "max_rollouts")
"""The keys of `search.*` that only some algorithms read."""


class EvalConfig(Section):
    """The evaluation of a training run on held-out tasks. It measures the first, every Nth and the last policy version."""

    PANEL: ClassVar = "Learning"

    every: int | None = option(
        None, "--eval-every", ge=1, le=MAX_INT, description="Evaluate every Nth version on held-out tasks"
    )
    dataset: str | None = Field(None, description="Dataset of the held-out tasks [the run's]")
    split: str = Field("test", description="Split of the held-out tasks")
    tasks: int | None = Field(128, ge=1, le=4096, description="Only the first N held-out tasks; null: all")
    group_size: int = Field(
        1,
        ge=1,
        le=1024,
        description="Episodes for each held-out task",
        validation_alias=AliasChoices("group_size", "samples"),
    )

    @model_validator(mode="after")
    def _does_something(self) -> Self:
        for name, field in type(self).model_fields.items():
            if self.every is None and getattr(self, name) != field.default:
                raise ValueError(f"{name} has no effect without eval.every")
        return self


def _as_names(value: Any) -> Any:
    names = value.split(",") if isinstance(value, str) else value
    return _as_tuple([name.strip() for name in names] if isinstance(names, list) else names)


class ReportConfig(Section):
    """The trackers that the run's metrics are sent to."""

    to: Annotated[Texts, BeforeValidator(_as_names)] = option(
        (), "--report-to", type=str, description="Trackers: wandb,trackio,tensorboard,mlflow"
    )
    samples: int = option(0, "--report-samples", ge=0, le=100, description="Episodes per iteration that trackers show")

    @model_validator(mode="after")
    def _does_something(self) -> Self:
        if self.samples and not self.to:
            raise ValueError("samples has no effect without report.to")
        return self


PROGRAM = "cmd:"
"""The prefix of an agent's name if the agent is a program."""

CLIENTS = "clients"
"""The agent of a run of the kind `serve`: any client that sends requests to the run."""

EXTERNAL = "external"
"""The agent of a run whose agents run elsewhere and ask the endpoint for tasks."""

LOOP_LIMITS = {
    "max_steps": "use agent.max_calls",
    "max_tool_calls": "it runs its own tools",
    "last_turn": "it writes its own prompts",
}
"""The keys of `rollout` that only the built-in loop uses, each with the hint for a run with an agent."""

_FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


class AgentConfig(Section):
    """The user's agent, which replaces the built-in loop, and its limits."""

    PANEL: ClassVar = "Your own agent"

    name: str = option(..., "--agent", max_length=4096, description="module:function, cmd:PROGRAM ARGUMENTS, or external")
    sandbox: bool | None = option(
        None, "--agent-sandbox", description="Run the agent in the sandbox; unset: if it is a program"
    )
    network: Literal["endpoint", "all"] = option(
        "endpoint", "--agent-network", description="What an agent in the sandbox can reach: endpoint or all"
    )
    unsafe: bool = option(False, "--agent-unsafe", description="Run a program without the sandbox")
    timeout_seconds: float = Field(600.0, gt=0, le=86_400, description="Time limit per episode")
    memory_mb: int = Field(2048, ge=64, le=MAX_INT, description="Memory of the agent's processes, in MB")
    processes: int = Field(256, ge=1, le=65_536, description="Maximum processes at once")
    output_bytes: int = Field(1_000_000, ge=1, le=1 << 30, description="Maximum output; its head and tail are kept")
    max_calls: int = Field(200, ge=1, le=100_000, description="Maximum model calls per episode")
    resume: Literal["replay", "restart"] = option(
        "replay", "--resume-agent", description="A lost agent: replay its recorded turns, or restart without them"
    )
    replay_ignore: Texts = option(
        (), "--replay-ignore", metavar="REGEX", max_length=32, description="Text that may differ in replayed requests"
    )
    reuse: bool = Field(False, description="A function's process runs several episodes, one after another")
    frozen_clock: bool = Field(False, description="A function reads the time at which its first attempt began")
    side_calls: bool = Field(False, description="Let the agent mark calls as not training: x-agentrl-train: 0")
    strict_api: bool = option(
        False, "--strict-api", description="Refuse request fields that cannot be applied, instead of naming them"
    )
    own_rewards: bool = Field(False, description="Weight 1 for the rewards that the agent returns; false: weight 0")
    show_reference: bool = Field(False, description="Let the agent read the task's reference")

    @property
    def command(self) -> tuple[str, ...]:
        """The program and its arguments; empty if the agent is a function."""
        return tuple(shlex.split(self.name.removeprefix(PROGRAM))) if self.name.startswith(PROGRAM) else ()

    @property
    def is_external(self) -> bool:
        """True if the agents run elsewhere and ask the endpoint for tasks."""
        return self.name == EXTERNAL

    @property
    def sandboxed(self) -> bool:
        """True if the agent runs in the sandbox. By default, a program runs there and a function does not."""
        return not self.unsafe and (bool(self.command) if self.sandbox is None else self.sandbox)

    @field_validator("name")
    @classmethod
    def _leads_somewhere(cls, name: str) -> str:
        if "\0" in name:
            raise ValueError("an agent's name cannot contain NUL")
        if name.startswith(PROGRAM):
            try:
                args = shlex.split(name.removeprefix(PROGRAM))
            except ValueError as error:
                raise ValueError(f"the command cannot be read ({error}): quote it as for a shell") from error
            if not args or not args[0]:
                raise ValueError("missing program after cmd: write cmd:PROGRAM ARGUMENTS")
        elif name not in (CLIENTS, EXTERNAL) and not _FUNCTION.fullmatch(name):
            raise ValueError("write package.module:function, cmd:PROGRAM ARGUMENTS, or external")
        return name

    @field_validator("replay_ignore")
    @classmethod
    def _are_patterns(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            import regex  # only if needed: the commands start faster without it

            if len(pattern) > MAX_PATTERN:
                raise ValueError(f"a pattern may have at most {MAX_PATTERN} characters")
            try:
                regex.compile(pattern)
            except regex.error as error:
                raise ValueError(f"{pattern!r:.80} is not a regular expression: {error}") from error
        return patterns

    @model_validator(mode="after")
    def _does_something(self) -> Self:
        if self.is_external and (self.unsafe or self.sandbox or self.network != "endpoint"):
            raise ValueError("sandbox, unsafe and network have no effect on external agents, which run elsewhere")
        if self.is_external and self.show_reference:
            raise ValueError("external agents receive no references: leave show_reference out")
        if self.unsafe and self.sandbox:
            raise ValueError("sandbox and unsafe exclude each other")
        if self.unsafe and not self.command:
            raise ValueError("unsafe applies only to programs: functions run without a sandbox by default")
        if self.sandbox is False and self.command:
            raise ValueError("sandbox: false is only for functions; for a program, unsafe: true runs it without the sandbox")
        if self.network != "endpoint" and not self.sandboxed:
            raise ValueError("network has no effect without the sandbox: the agent has the worker's network")
        if self.reuse and (self.command or self.is_external or self.sandboxed):
            raise ValueError("agent.reuse works only for an agent that is a function and has no sandbox")
        if self.reuse and self.frozen_clock:
            raise ValueError("frozen_clock stops the clock of a process that reuse shares: leave reuse or frozen_clock out")
        return self


class ServedTool(Section):
    """A tool of an MCP server, as the server described it when the run was submitted. All episodes use this description."""

    server: str = Field(description="Name of the server in `tools`: mcp:COMMAND")
    name: str = Field(min_length=1, description="Name that the model uses")
    description: str = Field("", description="Description for the model")
    parameters: dict[str, Any] = Field(description="JSON schema of the arguments")
    effects: Literal["none", "repeatable", "once"] = Field("once", description="Effects of a call, from the server's hints")


class RunConfig(Section):
    """The config of a run."""

    name: str | None = option(None, "--name", pattern=NAME_PATTERN, description="Unique name [made from dataset, model]")
    seed: int = option(0, "--seed", ge=0, lt=2**31, description="Seed of the task order and of all random draws")
    epochs: int | None = option(
        3, "--epochs", "--total-epochs", panel="Learning", ge=1, le=100_000, description="Passes over the dataset"
    )
    iterations: int | None = option(
        None, "--iterations", panel="Learning", ge=1, le=MAX_INT, description="Length in iterations, instead of epochs"
    )
    env: str | None = option(
        None, "--env", panel="What it trains on", description="Name of an env, or package.module:name [the dataset's]"
    )
    tools: Texts = option((), "--tools", panel="What it trains on", description="More tools: a name, mcp:COMMAND")
    rewards: Weights = option(
        {},
        "--reward",
        metavar="NAME[=WEIGHT]",
        type=list[str],
        panel="What it trains on",
        description="Rewards and weights; other rewards of the env get weight 0 [the env's]",
    )
    resources: Annotated[dict[str, str], BeforeValidator(_as_resources)] = Field(
        {}, description="Prompts by name: system_prompt, tool:NAME or a name for the agent"
    )
    served_tools: tuple[ServedTool, ...] = Field(
        (), description="Tools of each mcp:COMMAND in `tools`; unset: the server is asked"
    )
    agent: AgentConfig | None = None
    output_dir: str | None = option(None, "--output-dir", description="Folder for checkpoints [in AGENTRL_HOME]")
    hooks: Texts = option((), "--hook", metavar="MODULE:CLASS", description="Hook classes, package.module:ClassName")
    dataset: DatasetConfig = DatasetConfig()
    model: ModelConfig = ModelConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    update: UpdateConfig = UpdateConfig()
    critic: CriticConfig = CriticConfig()
    source: SourceConfig = SourceConfig()
    search: SearchConfig = SearchConfig()
    eval: EvalConfig = EvalConfig()
    report: ReportConfig = ReportConfig()

    @model_validator(mode="before")
    @classmethod
    def _iterations_say_how_long(cls, tree: Any) -> Any:
        """Set `epochs` to None if the config has `iterations` and no `epochs`."""
        has_iterations = isinstance(tree, Mapping) and tree.get("iterations") is not None and "epochs" not in tree
        return {**tree, "epochs": None} if has_iterations else tree

    @model_validator(mode="before")
    @classmethod
    def _trl_in_its_own_convention(cls, tree: Any) -> Any:
        """Set the convention "trl" for the trainer "trl", which supports no other."""
        if not isinstance(tree, Mapping):
            return tree
        update, algorithm = tree.get("update"), tree.get("algorithm", {})
        if isinstance(update, Mapping) and update.get("trainer") == "trl" and isinstance(algorithm, Mapping):
            return {**tree, "algorithm": {"convention": "trl", **algorithm}}
        return tree

    @field_validator("agent", mode="before")
    @classmethod
    def _agent_by_its_name(cls, section: Any) -> Any:
        """Convert the value of the section `agent`.

        A text is the agent's name. A section with only default values, which `flat` returns for a run without an agent, becomes
        None.
        """
        if isinstance(section, str):
            return {"name": section}
        if not isinstance(section, Mapping) or section.get("name") is not None:
            return section
        for key, value in section.items():
            if key not in NO_AGENT:
                raise ValueError(f"unknown option agent.{key}")
            if (tuple(value) if isinstance(value, list) else value) != NO_AGENT[key]:
                raise ValueError(f"agent.{key} has no effect without agent.name")
        return None

    @model_validator(mode="after")
    def _agent_decides(self) -> Self:
        """Refuse options that only the built-in loop uses, if the run has an agent."""
        if self.agent is None:
            return self
        if self.tools or self.served_tools:
            raise ValueError("tools have no effect with an agent, which has its own tools")
        defaults = RolloutConfig.model_fields
        for name, reason in LOOP_LIMITS.items():
            if getattr(self.rollout, name) != defaults[name].default:
                raise ValueError(f"rollout.{name} has no effect with an agent: {reason}")
        return self

    @model_validator(mode="after")
    def _importance_does_something(self, info: ValidationInfo) -> Self:
        stored = _is_stored(info)
        if self.source.given and self.algorithm.importance in ("truncate", "mask") and not stored:
            raise ValueError("importance has no effect with stored episodes: their ratio is already relative to the sampler")
        return self

    @model_validator(mode="after")
    def _exact_on_a_fixed_number(self) -> Self:
        if self.model.numerics == "exact" and self.update.devices == "auto":
            raise ValueError("numerics: exact needs a fixed number of devices, for example update.devices=2, and not auto")
        return self

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.epochs is None) == (self.iterations is None):
            raise ValueError("epochs and iterations exclude each other: pass one of them")
        return self

    def flat(self) -> dict[str, Any]:
        """Return the config as dotted keys: `{"rollout.group_size": 8, ...}`. Without an agent, its keys have defaults."""
        tree = self.model_dump(mode="json")
        return dict(flatten(tree if self.agent else tree | {"agent": NO_AGENT}))

    def importance_method(self, same_numbers: bool) -> Literal["truncate", "mask"] | None:
        """Return how an update treats importance ratios above `importance_cap`; None if the update uses no importance ratios.
        `same_numbers` is True if sampler and trainer compute the same logprobs, up to the rounding of float32.
        """
        method = self.algorithm.importance
        if method == "auto":
            differs = bool(self.rollout.max_staleness) or not same_numbers
            return "truncate" if differs and not self.source.given and self.update.trainer == "agentrl" else None
        return None if method == "none" else method

    @property
    def lean(self) -> bool:
        """True if updates use less memory and more time, because the base is quantised or gradient checkpointing is on."""
        return self.model.load_in_4bit or self.model.load_in_8bit or self.update.gradient_checkpointing


NO_AGENT: dict[str, Any] = {name: None if name == "name" else field.default for name, field in AgentConfig.model_fields.items()}
"""The section `agent` of a run without an agent: every key has its default, and `name` is None."""

NAMED = ("rewards", "resources", "dataset.map")
"""The keys whose value is a mapping with keys that the user chooses."""


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys of the tree and their values. A mapping whose keys the user chooses (`NAMED`) is one value."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and f"{prefix}{key}" not in NAMED:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


KEYS = tuple(RunConfig().flat())
"""Every dotted key of the config."""

SECTIONS: dict[str, type[Section]] = {
    **{name: type(value) for name, value in RunConfig() if isinstance(value, Section)},
    "agent": AgentConfig,
}
"""The sections of the config, by name."""

_ALL: dict[str, type[Section]] = {"": RunConfig, **SECTIONS}
FIELDS = {
    f"{name}.{field}" if name else field: (section, info)
    for name, section in _ALL.items()
    for field, info in section.model_fields.items()
    if (f"{name}.{field}" if name else field) in KEYS
}
"""A mapping from each dotted key to its section and its field."""

DESCRIPTIONS = {key: field.description or "" for key, (_, field) in FIELDS.items()}


def _flag_of(section: type[Section], extra: Any) -> Flag | None:
    flag = extra["flag"] if extra else None
    return replace(flag, panel=flag.panel or section.PANEL) if flag else None


FLAG_OF: dict[str, Flag] = {
    key: flag for key, (section, field) in FIELDS.items() if (flag := _flag_of(section, field.json_schema_extra))
}
"""A mapping from a dotted key to its option of `submit`."""

FLAGS = {flag.keyword: key for key, flag in FLAG_OF.items()}
"""A mapping from an option of `submit`, which is also a keyword of the Trainer, to its config key."""

OLDER_KEYS = {
    f"{key.rpartition('.')[0]}.{other}": key
    for key, (_, field) in FIELDS.items()
    if isinstance(field.validation_alias, AliasChoices)
    for other in field.validation_alias.choices
    if not key.endswith(f".{other}")
}
"""A mapping from the older name of a dotted key to its current name."""


def build(values: Mapping[str, Any]) -> RunConfig:
    """Build the config from dotted keys. Raise ConfigError if values are invalid; the message names the key of each."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        section, _, leaf = key.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[leaf] = value
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, item['loc']))}: {message} (found {item['input']!r:.80})" if item["loc"] else message
            for item in error.errors()
            for message in [item["msg"].removeprefix("Value error, ")]
        )
        raise ConfigError(f"Invalid config: {problems}.", "See `agentrl config show`.") from error

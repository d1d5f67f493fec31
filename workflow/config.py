"""RunConfig: the whole experiment as one frozen value, from YAML, flags and `-s key=value`. Unknown keys are refused.

Precedence: flags > environment (`AGENTRL_RUN_<KEY>`, dots as `__`) > file > defaults. `origins` remembers where each value
came from.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from workflow.errors import ConfigError, did_you_mean

MOST = 2**31 - 1
"""Of what is counted; the rows, the arrays and the servers have no room for more."""
NAME_PATTERN = r"^[a-z0-9][a-z0-9._-]{0,63}$"
ENV_PREFIX = "AGENTRL_RUN_"


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


Texts = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_listed)]
"""One text or several, none of them empty."""


class Section(BaseModel):
    """A part of the config: frozen, and strict about its keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, field: ValidationInfo) -> Any:
        assert field.field_name is not None
        if isinstance(value, bool) and cls.model_fields[field.field_name].annotation is not bool:
            raise ValueError("true and false are neither number nor text")
        return value


class DatasetConfig(Section):
    """Which tasks."""

    name: str = Field("gsm8k", description="gsm8k, arithmetic, a .jsonl file, or package.module:name")
    split: str = Field("train", description="train, test, or another that the dataset has")
    max_samples: int | None = Field(None, ge=1, le=MOST, description="Only the first N tasks")
    skip_bad_rows: bool = Field(False, description="Leave malformed rows of a .jsonl file out, and say which")


class ModelConfig(Section):
    """Which weights, and which part of them trains."""

    path: str = Field(
        "Qwen/Qwen2.5-0.5B-Instruct", min_length=1, description="Hub name, folder, or a model made by `agentrl sft`"
    )
    load_in_4bit: bool = Field(False, description="Quantise the frozen base to 4 bits (bitsandbytes NF4); LoRA trains")
    load_in_8bit: bool = Field(False, description="Quantise the frozen base to 8 bits; LoRA trains")
    lora_r: int | None = Field(
        None, ge=0, le=1024, description="LoRA rank; 0 trains all weights; unset: 8, or 0 below 50M parameters"
    )
    lora_alpha: float = Field(16.0, gt=0, description="LoRA scale is alpha / r")
    lora_dropout: float = Field(0.0, ge=0, lt=1, description="Dropout on the LoRA input while training")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="auto: bfloat16 on GPUs, else float32")
    sampler_dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Where all weights train, what the sampler's copy of them computes in; auto: dtype"
    )
    numerics: Literal["fast", "exact"] = Field("fast", description="exact: CPU, float64, one thread, bit for bit repeatable")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.load_in_4bit and self.load_in_8bit:
            raise ValueError("load_in_4bit and load_in_8bit exclude each other")
        if (self.load_in_4bit or self.load_in_8bit) and self.lora_r == 0:
            raise ValueError("a quantised base cannot train all weights: set lora_r above 0")
        if self.sampler_dtype != "auto" and (self.lora_r or self.load_in_4bit or self.load_in_8bit):
            raise ValueError("with LoRA the sampler shares the trainer's base: set dtype instead of sampler_dtype")
        if self.numerics == "exact" and (
            self.load_in_4bit or self.load_in_8bit or not self.dtype == self.sampler_dtype == "auto"
        ):
            raise ValueError("numerics: exact computes in float64 and takes neither a quantised base nor another dtype")
        return self


class RolloutConfig(Section):
    """How episodes are made.

    `top_k`, `top_p` and `min_p` decide what is drawn and change no logprob: sampler and trainer both give those of the whole
    vocabulary, so the ratio of an update is that of the full distributions, and what truncation never draws is never trained.
    """

    engine: str = Field("rolling", description="What samples: a file of workflow/engines, or package.module:name")
    group_size: int = Field(8, ge=1, le=1024, description="Episodes per task and iteration")
    tasks_per_iteration: int = Field(16, ge=1, le=4096, description="Groups per iteration")
    temperature: float = Field(1.0, gt=0, le=10, description="Sampling temperature; the trainer divides by it too")
    top_k: int = Field(
        0, ge=0, le=MOST, description="Draw from the K likeliest tokens; 0: all. Ratios stay those of all tokens"
    )
    top_p: float = Field(1.0, gt=0, le=1, description="Draw from the likeliest that reach this probability; ratios likewise")
    min_p: float = Field(0.0, ge=0, le=1, description="Draw from those at least this share as likely as the likeliest")
    stop: Texts = Field((), description="Texts that end a turn, beside the end token; they stay in it")
    max_new_tokens: int = Field(256, ge=1, le=131072, description="Sampled tokens per step")
    max_steps: int = Field(4, ge=1, le=1000, description="Policy turns per episode")
    max_tool_calls: int = Field(8, ge=1, le=1000, description="Calls accepted in one turn; the rest are told so")
    timeout_seconds: float = Field(
        600.0, gt=0, description="Seconds of sampling and tools in one episode, and of waiting in a server's own queue"
    )
    max_attempts: int = Field(3, ge=1, le=100, description="Failures of the system before an episode ends as infra_error")
    max_staleness: int = Field(0, ge=0, le=8, description="Iterations sampled ahead of the updates, by older policies")


class AlgorithmConfig(Section):
    """How episodes are credited and what is minimised.

    `importance_cap` does nothing where max_staleness is 0: there sampler and trainer hold the same weights, and how far
    rounding parts them is measured (`sampler_difference_mean`, `_max`) and not corrected.
    """

    name: str = Field("grpo", description="A file of workflow/algorithms, or package.module:name")
    clip_low: float = Field(0.2, gt=0, lt=1, description="Ratio is clipped below 1 - clip_low")
    clip_high: float = Field(0.2, gt=0, description="Ratio is clipped above 1 + clip_high")
    kl_coef: float = Field(0.0, ge=0, description="Weight of the k3 KL to the reference in the loss")
    importance_cap: float | None = Field(
        2.0, ge=1, description="With max_staleness > 0: cap of the policy's ratio to the sampler, null: no correction"
    )


class UpdateConfig(Section):
    """How one train step runs."""

    learning_rate: float = Field(1e-4, gt=0, le=1, description="AdamW step size")
    weight_decay: float = Field(0.0, ge=0, description="AdamW decoupled weight decay")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradient norm is clipped to this")
    batch_size: int | None = Field(None, ge=1, le=MOST, description="Episodes per optimizer step; unset: all of the iteration")
    gradient_accumulation_steps: int = Field(1, ge=1, le=MOST, description="Microbatches per optimizer step, at least")
    microbatch_tokens: int = Field(1536, ge=1, le=MOST, description="Tokens in one forward/backward, padding included, at most")
    gradient_checkpointing: bool = Field(False, description="Compute layers again in the backward pass: less memory, slower")
    max_sampler_difference: float | None = Field(
        None, gt=0, description="Do not train on episodes whose sampler's logprobs are on average this far from the trainer's"
    )
    max_bad_updates: int = Field(3, ge=1, le=1000, description="Updates with a NaN in a row before the run fails")


class SourceConfig(Section):
    """Stored episodes to train on, instead of rolling out."""

    runs: tuple[str, ...] = Field((), description="Train on the finished groups of these runs")
    groups: tuple[Annotated[int, Field(ge=1, lt=2**63)], ...] = Field((), description="Train on these groups, by their numbers")
    reward_set: str = Field("default", pattern=NAME_PATTERN, description="Whose rewards train; `agentrl rescore` makes sets")

    @property
    def given(self) -> bool:
        """Whether the run makes no episode of its own."""
        return bool(self.runs or self.groups)


class ServedTool(Section):
    """A tool that a server of the Model Context Protocol offered when the run was submitted: every episode reads the same."""

    server: str = Field(description="Its name in `tools`: mcp:COMMAND")
    name: str = Field(min_length=1, description="What the model writes")
    description: str = Field("", description="What the model is told")
    parameters: dict[str, Any] = Field(description="JSON schema of the arguments")
    effects: Literal["none", "repeatable", "once"] = Field("once", description="From the server's hints")


class RunConfig(Section):
    """One experiment."""

    name: str | None = Field(None, pattern=NAME_PATTERN, description="Unique name; unset: made from dataset and model")
    seed: int = Field(0, ge=0, lt=2**31, description="Orders tasks and keys every random draw")
    epochs: int = Field(3, ge=1, le=100_000, description="Passes over the dataset")
    env: str | None = Field(None, description="A file of workflow/envs [the dataset's own]")
    tools: Texts = Field((), description="More tools: a name, mcp:COMMAND")
    served_tools: tuple[ServedTool, ...] = Field((), description="What mcp:COMMAND of `tools` offers; unset: it is asked")
    output_dir: str | None = Field(None, description="Where checkpoints go; unset: inside AGENTRL_HOME")
    hooks: tuple[str, ...] = Field((), description="Hook classes, package.module:ClassName")
    dataset: DatasetConfig = DatasetConfig()
    model: ModelConfig = ModelConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    update: UpdateConfig = UpdateConfig()
    source: SourceConfig = SourceConfig()

    def flat(self) -> dict[str, Any]:
        """`{"rollout.group_size": 8, ...}`, in the order of the fields."""
        return dict(_flatten(self.model_dump(mode="json")))

    @property
    def lean(self) -> bool:
        """Whether an update is to take less memory rather than less time: a quantised base, or layers computed again."""
        return self.model.load_in_4bit or self.model.load_in_8bit or self.update.gradient_checkpointing


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


KEYS = tuple(RunConfig().flat())
"""Every dotted key of the config."""

DESCRIPTIONS = {
    prefix + name: field.description or ""
    for prefix, section in [("", RunConfig), *((f"{n}.", type(getattr(RunConfig(), n))) for n in RunConfig.model_fields)]
    if isinstance(section, type) and issubclass(section, Section)
    for name, field in section.model_fields.items()
    if prefix + name in KEYS
}


def resolve(
    file: Path | None = None,
    flags: Mapping[str, Any] | None = None,
    assignments: tuple[str, ...] = (),
    environ: Mapping[str, str] | None = None,
) -> tuple[RunConfig, dict[str, str]]:
    """The config and, for every dotted key, where its value came from (`default`, the file, `AGENTRL_RUN_...`, `flag`).

    Args:
        file: a YAML file with nested or dotted keys.
        flags: dotted key -> value, None where the flag was not given.
        assignments: `key=value` strings; values are read as YAML.
        environ: environment variables.

    Raises:
        ConfigError: an unknown key (with a suggestion), a value of the wrong kind, an unreadable file.
    """
    layers = [
        (str(file), _read_yaml(file) if file else {}),
        ("environment", _from_environ(environ or {})),
        ("flag", {key: value for key, value in (flags or {}).items() if value is not None}),
        ("flag", dict(_parse_assignment(text) for text in assignments)),
    ]
    values: dict[str, Any] = {}
    origins = dict.fromkeys(KEYS, "default")
    for origin, layer in layers:
        for key, value in layer.items():
            if key not in KEYS:
                raise ConfigError(f"Unknown option {key!r} ({origin}).", _suggest(key))
            values[key] = value
            origins[key] = origin
    return build(values), origins


def build(values: Mapping[str, Any]) -> RunConfig:
    """The config from dotted keys.

    Raises:
        ConfigError: naming each key whose value does not fit.
    """
    tree: dict[str, Any] = {}
    for key, value in values.items():
        section, _, leaf = key.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[leaf] = value
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(str(part) for part in item['loc']) or 'config'}: {item['msg'].removeprefix('Value error, ')}"
            f" (found {item['input']!r:.80})"
            for item in error.errors()
        )
        raise ConfigError(f"The config does not fit: {problems}.", "See `agentrl config show`.") from error


class _OnceLoader(yaml.SafeLoader):
    """Refuses a key that is written twice, where YAML would quietly take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping of a node."""
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is written twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _OnceLoader)
    except OSError as error:
        raise ConfigError(f"Cannot read the config {str(path)!r}: {error.strerror}.") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that is none, bytes that are no UTF-8
        raise ConfigError(f"{str(path)!r} is not YAML: {' '.join(str(error).split())}.") from error
    if tree is None:
        return {}
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{str(path)!r} must hold keys and values, not a {type(tree).__name__}.")
    return dict(_flatten(tree))


def _from_environ(environ: Mapping[str, str]) -> dict[str, Any]:
    return {
        name.removeprefix(ENV_PREFIX).lower().replace("__", "."): _yaml_value(name, value)
        for name, value in environ.items()
        if name.startswith(ENV_PREFIX)
    }


def _parse_assignment(text: str) -> tuple[str, Any]:
    key, separator, value = text.partition("=")
    if not separator:
        raise ConfigError(f"{text!r} is no assignment.", "Write -s key=value, for example -s rollout.group_size=4.")
    return key.strip(), _yaml_value(key.strip(), value)


def _yaml_value(name: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"The value of {name!r} is not YAML: {text!r:.80}.", "Quote it as YAML text.") from error


def _suggest(key: str) -> str:
    same_leaf = [known for known in KEYS if known.rpartition(".")[2] == key.rpartition(".")[2]]
    if same_leaf:
        return f"Did you mean {same_leaf[0]!r}?"
    hint = did_you_mean(key, KEYS)
    if hint.startswith("Did"):
        return hint
    leaf = did_you_mean(key.rpartition(".")[2], [known.rpartition(".")[2] for known in KEYS])
    if leaf.startswith("Did"):
        word = leaf.split("'")[1]
        return f"Did you mean {next(known for known in KEYS if known.rpartition('.')[2] == word)!r}?"
    return "`agentrl config show` lists them."

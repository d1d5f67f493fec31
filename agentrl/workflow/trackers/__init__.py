"""Trackers: services and files outside of agentrl that plot the metrics of runs. Each file of this folder defines one; see
`Tracker`.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from agentrl.workflow.config import flatten

ITERATION = "iteration"
EVALUATION = "eval/version"
PROJECT = "agentrl"
"""The default project or experiment of the runs. The tracker's own environment variable may name another."""
SAMPLES = "rollout/samples"
"""The name under which texts of sampled episodes are written."""


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """A run in the form that trackers receive.

    Args:
        key: an identifier that is unique over all stores.
        name: the run's name.
        config: the run's config values by dotted key, from `masked_config`.
        tags: tags by which the run can be found.
        page: the URL of the run on the page of `agentrl ui`.
        folder: the folder for the files of a tracker without a server.
    """

    key: str
    name: str
    config: Mapping[str, Any]
    tags: tuple[str, ...]
    page: str
    folder: Path


@dataclass(frozen=True, slots=True)
class TrackedStep:
    """The metrics of an iteration or of an evaluation. A tracker writes either all of them or none.

    Args:
        series: ITERATION or EVALUATION, which is also the name of the metric with the step's number. Steps are written in
            increasing order.
        number: the iteration, counted from 1, or the policy version, counted from 0.
        at: the time at which the iteration or evaluation ended.
        metrics: finite numbers by name, without the metric named by `series`.
        text: sampled episodes as Markdown; empty if there are none.
    """

    series: str
    number: int
    at: datetime
    metrics: Mapping[str, float]
    text: str = ""

    @property
    def numbers(self) -> dict[str, float]:
        """All metrics, including the one named by `series`."""
        return {**self.metrics, self.series: float(self.number)}


class TrackerSession(Protocol):
    """A run that is open in a tracker.

    Attributes:
        handle: the tracker's own id of the run, with which a later session continues the run.
        url: the URL of the run; for files, the command that shows them.
    """

    handle: str
    url: str

    def last_numbers(self) -> Mapping[str, int]:
        """Return, for each series, the number of the last step that the tracker has. A series without a step is left out."""

    def log(self, step: TrackedStep) -> None:
        """Write a step."""

    def finish(self, status: str) -> None:
        """Write all buffered data, and close the session. `status` is the status of the run."""


@dataclass(frozen=True, slots=True)
class Tracker:
    """A service or file format that plots the metrics of runs.

    Args:
        package: the module that the tracker imports, which is also the name of the extra that installs it.
        open: a function that opens a session for a run. Its second argument is the handle of an earlier session; empty if there
            is none.
    """

    package: str
    open: Callable[[TrackedRun, str], TrackerSession]


TEXT_KEYS = ("resources", "served_tools", "model.chat_template")
"""The config keys whose values are prompts and descriptions. A tracker receives only the lengths of these texts."""
MASK = "***"
_SECRETS = (
    (re.compile(r"(?<=://)[^/\s@]+(?=@)"), MASK),  # the user and password of a URL
    (
        re.compile(
            r"(?i)((?:[\w-]*(?:token|secret|pass(?:w(?:or)?d|phrase)?|pwd|(?:api|access|private)[_-]?key|credentials?)"
            r"|bearer|authorization['\"]?\s*[=:]\s*['\"]?basic)['\"]?(?:\s*[=:]\s*|\s+))(?:\"[^\"]*\"|'[^']*'|[^\s'\"&]+)"
        ),
        rf"\g<1>{MASK}",
    ),
    (re.compile(r"\b(?:sk-|hf_|gh[pousr]_|github_pat_|glpat-|xox[a-z]-|AKIA)[\w-]{12,}"), MASK),  # well-known forms of keys
    (re.compile(r"\beyJ[\w-]{5,}\.[\w-]{5,}\.[\w-]+"), MASK),  # a JSON web token
    (re.compile(r"(?s)-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*-----|\Z)"), MASK),
)
_SECRET_NAME = re.compile(r"(?i)token|secret|passw|key$|credential")
MIN_SECRET_CHARS = 8
"""The fewest characters of a secret that is masked. Shorter values also occur in harmless texts."""


def masked_config(config: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of a stored config by dotted key, without secrets and prompts.

    Args:
        config: the stored config.
        environ: this process's environment variables. If the name of a variable looks like the name of a secret, the variable's
            value is masked everywhere.
    """
    secrets, values = _secrets_of(environ), dict(flatten(config))
    return {key: _length(value) if key in TEXT_KEYS else _masked(value, secrets) for key, value in values.items()}


def mask_text(text: str, environ: Mapping[str, str]) -> str:
    """Mask the secrets in a text, such as a tracker's URL or message, as `masked_config` does."""
    return str(_masked(text, _secrets_of(environ)))


def _secrets_of(environ: Mapping[str, str]) -> list[str]:
    return [value for name, value in environ.items() if _SECRET_NAME.search(name) and len(value) >= MIN_SECRET_CHARS]


def _length(value: Any) -> str:
    return f"{len(str(value))} characters" if value else ""


def _masked(value: Any, secrets: list[str]) -> Any:
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, MASK)
        for pattern, replacement in _SECRETS:
            value = pattern.sub(replacement, value)
        return value
    if isinstance(value, Mapping):
        return {_masked(name, secrets): _masked(item, secrets) for name, item in value.items()}
    return [_masked(item, secrets) for item in value] if isinstance(value, list | tuple) else value


METRICS: Mapping[str, str] = {
    "reward": "train/reward",
    "reward_spread": "train/reward_std",
    **{
        name: f"train/{name}"
        for name in (
            *("loss", "kl", "policy_kl", "entropy", "clip_fraction", "grad_norm", "value_loss", "explained_variance"),
            *("sampler_difference_mean", "sampler_difference_max", "importance_outside", "importance_weight"),
            *("importance_truncated", "effective_sample_size", "log_ratio_clamped"),
        )
    },
    **{
        name: f"rollout/{name}"
        for name in (
            *("episodes", "trainable", "groups", "flat_groups", "dropped_groups", "tokens", "prompt_tokens", "sampled_tokens"),
            *("length", "tool_calls", "tool_errors", "tool_error_rate", "staleness"),
        )
    },
    **{
        name: f"perf/{name}"
        for name in ("seconds", "rollout_seconds", "update_seconds", "tokens_per_second", "peak_memory_bytes", "tflops", "mfu")
    },
}
"""A mapping from a column of a run's curves to the name of the metric."""
EVAL_METRICS: Mapping[str, str] = {
    "mean_reward": "eval/reward", "low": "eval/reward_low", "high": "eval/reward_high", "accuracy": "eval/accuracy",
    "episodes": "eval/episodes", "errors": "eval/errors",
}  # fmt: skip
"""A mapping from a column of an evaluation to the name of the metric. pass@k has the name `eval/pass_at_K`."""


def iteration_metrics(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of an iteration from a row of the curves (`store.reads.curves.COLUMNS`)."""
    values = dict(row)
    if row["seconds"] and row["tokens"] is not None:
        values["tokens_per_second"] = row["tokens"] / row["seconds"]
    if row["reward_high"] is not None:
        values["reward_spread"] = row["reward_high"] - row["reward"]
    return dict(_finite((name, values.get(column)) for column, name in METRICS.items()))


def eval_metrics(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of an evaluation."""
    passes = {f"eval/pass_at_{k}": value for k, value in (row["pass_at"] or {}).items()}
    return dict(_finite([*((name, row[column]) for column, name in EVAL_METRICS.items()), *passes.items()]))


def _finite(pairs: Any) -> Iterator[tuple[str, float]]:
    """Yield the pairs whose value is a finite number. Some trackers cannot store other values."""
    return ((name, float(value)) for name, value in pairs if isinstance(value, int | float) and math.isfinite(value))

"""Trackers: pages and files outside of agentrl that plot the metrics of runs. Each file here is one; see `Tracker`.

A tracker is written in a process of its own, from the database's rows. Its package is imported when a session is opened, so
that nobody else pays for the import.
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
"""The project or experiment that runs belong to, unless a tracker's own environment variable names another."""
SAMPLES = "rollout/samples"
"""The name of the texts of sampled episodes."""


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """A run as its trackers show it.

    Args:
        key: no other run has it, in any store.
        config: dotted key -> value, as `masked_config` makes it.
        tags: words by which the run is found.
        page: address of the run in the page of `agentrl ui`.
        folder: where a tracker without a server keeps its files.
    """

    key: str
    name: str
    config: Mapping[str, Any]
    tags: tuple[str, ...]
    page: str
    folder: Path


@dataclass(frozen=True, slots=True)
class TrackedStep:
    """The metrics of an iteration, or of an evaluation. A tracker writes all of them or none.

    Args:
        series: ITERATION or EVALUATION: the metric that numbers these steps; they are written in increasing order.
        number: the iteration from 1, or the policy version from 0.
        at: when it ended.
        metrics: finite numbers by name, without the one that is called like the series.
        text: sampled episodes as Markdown; empty: none.
    """

    series: str
    number: int
    at: datetime
    metrics: Mapping[str, float]
    text: str = ""

    @property
    def numbers(self) -> dict[str, float]:
        """All metrics, the one that is called like the series included."""
        return {**self.metrics, self.series: float(self.number)}


class TrackerSession(Protocol):
    """A run that is open in a tracker.

    Attributes:
        handle: the tracker's own id of the run, with which a later session continues it.
        url: where a person sees the run; for files, the command that shows them.
    """

    handle: str
    url: str

    def last_numbers(self) -> Mapping[str, int]:
        """Return the number of the last step that the tracker has, by series; a series without a step is left out."""

    def log(self, step: TrackedStep) -> None:
        """Write a step."""

    def finish(self, status: str) -> None:
        """Write everything that is buffered, and close the session; `status` is the run's."""


@dataclass(frozen=True, slots=True)
class Tracker:
    """A tracker.

    Args:
        package: the module that it imports, which is also the extra that installs it.
        open: opens a session on a run. The second argument is the handle of an earlier session; empty: none.
    """

    package: str
    open: Callable[[TrackedRun, str], TrackerSession]


TEXT_KEYS = ("resources", "served_tools", "model.chat_template")
"""Keys of a config that hold prompts and descriptions: a tracker gets their lengths only."""
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
"""Shorter values of environment variables are not searched for: they occur in harmless texts."""


def masked_config(config: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the dotted keys and values of a stored config, without secrets and prompts.

    Args:
        environ: variables of this process; the values of those that are named like secrets are masked wherever they occur.
    """
    secrets, values = _secrets_of(environ), dict(flatten(config))
    return {key: _length(value) if key in TEXT_KEYS else _masked(value, secrets) for key, value in values.items()}


def mask_text(text: str, environ: Mapping[str, str]) -> str:
    """Return the text without secrets, as `masked_config` does it: a tracker's address or message may show its key."""
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
"""Column of a run's curves -> name of its metric."""
EVAL_METRICS: Mapping[str, str] = {
    "mean_reward": "eval/reward", "low": "eval/reward_low", "high": "eval/reward_high", "accuracy": "eval/accuracy",
    "episodes": "eval/episodes", "errors": "eval/errors",
}  # fmt: skip
"""Column of an evaluation -> name of its metric; pass@k is `eval/pass_at_K`."""


def iteration_metrics(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a row of the curves (`store.reads.curves.COLUMNS`)."""
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
    """The pairs whose value is a finite number: not every tracker can store others."""
    return ((name, float(value)) for name, value in pairs if isinstance(value, int | float) and math.isfinite(value))

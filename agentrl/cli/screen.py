"""Shows a run on one screen: its progress, its curves and its newest iterations. A larger screen shows more curves and
iterations.
"""

from collections.abc import Callable, Iterator, Sequence
from textwrap import wrap

from agentrl.cli.console import format_decimals, format_duration, format_interval
from agentrl.cli.plot import plot, sparkline
from agentrl.cli.run_view import OPEN_STATUSES, Row, RunView, iteration_numbers, iteration_seconds
from agentrl.workflow.runtime.shown_text import cell, clean, format_count

LABEL, VALUES, BAR = 14, 24, 40
MIN_CURVE_LINES = 6
"""The height, in lines, above which a blank line follows the head of the display."""
TALL_SCREEN = 36
"""The height, in lines, above which all curves are shown and the reward is also shown as a plot."""


def _length(row: Row) -> float | None:
    return row["sampled_tokens"] / row["episodes"] if row["episodes"] else None


def _errors(row: Row) -> float | None:
    return row["tool_errors"] / row["tool_calls"] if row["tool_calls"] else None


def _effective_samples(row: Row) -> float | None:
    """Return the effective sample size as a share, from 0 to 1; None if all token weights are 1 up to rounding."""
    share = row["effective_sample_size"]
    return None if share is None or share > 0.9999 else share


CURVES: dict[str, Callable[[Row], float | None]] = {
    "reward": lambda row: row["mean_reward"],
    "KL to base": lambda row: row["kl"],
    "KL of update": lambda row: row["policy_kl"],
    "entropy": lambda row: row["entropy"],
    "tokens/episode": _length,
    "tool errors": _errors,
    "loss": lambda row: row["loss"],
    "gradient": lambda row: row["grad_norm"],
    "clipped": lambda row: row["clip_fraction"],
    "explained": lambda row: row["explained_variance"],
    "effective samples": _effective_samples,
    "sampler differs": lambda row: row["sampler_difference_max"],
    "MFU": lambda row: row["mfu"],
    "GPU memory, GiB": lambda row: row["peak_memory_bytes"] and row["peak_memory_bytes"] / 2**30,
}
"""The curves over the finished iterations, the most important first. A small screen shows only the first curves. A curve
without values is left out.
"""

MAX_CURVES = 7
MAX_HOSTS = 3
"""The most hosts whose load is shown."""
MAX_REASON_LINES = 3
"""The most lines for one remark, such as the reason why the run is waiting."""

COLUMNS: dict[str, Callable[[Row], float | None]] = {
    "iteration": lambda row: row["iteration"],
    "reward": CURVES["reward"],
    "KL": lambda row: row["policy_kl"] if row["kl"] is None else row["kl"],
    "entropy": CURVES["entropy"],
    "tokens": _length,
    "calls": lambda row: row["tool_calls"],
    "errors": lambda row: row["tool_errors"],
    "held out": lambda row: row["eval_reward"],
}
"""The columns of the table of the newest iterations. Numbers of tokens are per episode."""


def live_lines(view: RunView, width: int = 80, height: int = 24) -> list[str]:
    """Return the display in at most `height - 1` lines of `width` characters; the last line is for the cursor."""
    tall = height > TALL_SCREEN
    lines = [*_head_lines(view), ""] if height > MIN_CURVE_LINES else list(_head_lines(view))
    lines += list(_curve_lines(view, width, len(CURVES) if tall else MAX_CURVES))
    remarks = (view.sampled_on, *view.flat[:1], view.warning, *view.trackers)
    below = [line for text in remarks for line in wrap(clean(text), width)[:MAX_REASON_LINES]]
    room = height - 1 - len(lines) - len(below)
    if tall and len(view.rewards) > 1:
        drawn = ["", *plot(view.rewards, width - 12, min(8, room // 3))]
        lines, room = lines + drawn, room - len(drawn)
    newest = _newest_table(view, room - 1)
    lines += ["", *newest] if newest else []
    return [clean(line)[:width] for line in (*lines[: max(0, height - 1 - len(below))], *below)]


def _head_lines(view: RunView) -> Iterator[str]:
    run, now = view.run, view.progress
    done, total = run["iterations_done"], run["iterations"]
    epoch = f"  epoch {view.iterations[-1]['epoch']} of {run['epochs']}" if view.iterations else ""
    yield f"{run['run']}  {run['status']}{epoch}"
    filled = BAR * done // max(total, 1)
    bar = f"[{'#' * filled}{'.' * (BAR - filled)}] {done}/{format_count(total, 'iteration')}"
    left = view.seconds_left
    yield bar + (f", about {format_duration(left)} left" if left else "")
    if now:
        yield (
            f"{iteration_numbers(now)}: {now['finished']}/{format_count(now['episodes'], 'episode')}, "
            f"{format_count(now['sampled_tokens'], 'token')} sampled, {format_count(now['tool_calls'], 'tool call')}"
        )
    if view.tokens_per_second is not None:
        yield f"{view.tokens_per_second:.0f} tokens/s"
    for row in view.machines[:MAX_HOSTS]:
        yield _load_line(row, len(view.machines) > 1)


def _load_line(row: Row, is_one_of_several: bool) -> str:
    """Return one line about the present load of a host."""
    gpus = row["gpus"] or []
    waiting = [
        format_count(row[column], word)
        for column, word in (("waiting_rollout", "group"), ("waiting_train", "update"), ("waiting_tools", "tool call"))
        if row[column]
    ]
    parts = [
        _share_text("cpu", row["cpu_share"]),
        _memory_text("memory", row["memory_used"], row["memory_total"]),
        *(_share_text("GPU", gpu["share"]) for gpu in gpus),
        *(_memory_text("GPU memory", gpu["memory_used"], gpu["memory_total"]) for gpu in gpus),
        f"sampling {row['tokens_per_second']:.0f} tokens/s" if row["tokens_per_second"] is not None else "",
        f"waiting: {', '.join(waiting)}" if waiting else "",
    ]
    return f"{row['host'] if is_one_of_several else 'now'}: {'  '.join(filter(None, parts))}".rstrip()


def _share_text(name: str, share: float | None) -> str:
    return "" if share is None else f"{name} {share:.0%}"


def _memory_text(name: str, used: int | None, total: int | None) -> str:
    return "" if used is None or total is None else f"{name} {used / 2**30:.1f}/{total / 2**30:.1f} GiB"


def _curve_lines(view: RunView, width: int, max_curves: int) -> Iterator[str]:
    drawn = 0
    for label, of in CURVES.items():
        values = [value for row in view.iterations if (value := of(row)) is not None]
        if values and drawn < max_curves:
            drawn += 1
            yield _curve_line(label, values, width)
        if label == "reward" and view.scores:
            yield _curve_line("held out", view.scores, width)
            yield f"{'':<{LABEL}} {_eval_line(view)}"


def _curve_line(label: str, values: Sequence[float], width: int) -> str:
    room = max(8, width - LABEL - VALUES - 2)
    went = f"{_short_number(values[0])} -> {_short_number(values[-1])}" if len(values) > 1 else _short_number(values[0])
    return f"{label:<{LABEL}} {sparkline(values, room):<{min(room, len(values))}} {went}"


def _short_number(value: float) -> str:
    return cell(value) if 0 < abs(value) < 0.01 else format_decimals(value)


def _eval_line(view: RunView) -> str:
    run, scored = view.run, [row for row in view.evals if row["mean_reward"] is not None]
    newest = scored[-1]
    parts = [f"version {newest['policy_version']}: {format_interval(newest)}"]
    if run["best_version"] is not None:
        parts.append(f"best {format_decimals(run['best_reward'])} @{run['best_version']}")
    waiting = sum(row["status"] in OPEN_STATUSES for row in view.evals)
    return ", ".join([*parts, *([f"{waiting} open"] if waiting else [])])


def _newest_table(view: RunView, room: int) -> list[str]:
    rows = view.iterations[-(room - 1) :] if room > 1 else []
    if not rows:
        return []
    seconds = iteration_seconds(view.iterations)[-len(rows) :]
    series = {name: [of(row) for row in rows] for name, of in COLUMNS.items()} | {"seconds": seconds}
    columns = [[name, *map(cell, values)] for name, values in series.items() if any(value is not None for value in values)]
    widths = [max(map(len, column)) for column in columns]
    return ["  ".join(text.rjust(size) for text, size in zip(line, widths, strict=True)) for line in zip(*columns, strict=True)]

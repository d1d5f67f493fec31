"""`agentrl replay EPISODE --diff OTHER`: compares two episodes, and shows the first token at which they differ."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.cli.console import show_json, show_lines
from agentrl.cli.resolve_targets import stored_database
from agentrl.cli.verify import full_number, line_style, parting_lines, quote
from agentrl.workflow.runtime.shown_text import Line, cell
from agentrl.workflow.trajectory import Episode

if TYPE_CHECKING:
    from agentrl.workflow.analysis.episode_diff import EpisodeComparison, TokenDifference
    from agentrl.workflow.store.reads.provenance import Origin


def diff(episode: int, other: int, as_json: bool) -> int:
    """Print the first token at which the episodes differ, and all other differences. Return 0 if there are none, else 1."""
    from agentrl.workflow.analysis.episode_diff import compare
    from agentrl.workflow.store.reads.provenance import find_origin

    sides = (find_origin(stored_database(), episode), find_origin(stored_database(), other))
    comparison = compare(*map(_with_reward_parts, sides))
    if comparison.token is not None:
        comparison = replace(comparison, token=_with_token_texts(comparison.token, sides))
    if as_json:
        show_json({"left": episode, "right": other, "same": comparison.same, **asdict(comparison)})
    else:
        show_lines(_report_lines(comparison, (episode, other)))
    return 0 if comparison.same else 1


def _with_reward_parts(origin: "Origin") -> Episode:
    from agentrl.workflow.rewards import part_sum

    parts = origin.reward_sets["default"].parts
    return replace(origin.record.episode, rewards={name: part_sum(part) for name, part in parts.items()})


def _with_token_texts(token: "TokenDifference", sides: "tuple[Origin, Origin]") -> "TokenDifference":
    left, right = (_token_text(origin.base, number) for origin, number in zip(sides, token.ids, strict=True))
    return replace(token, texts=(left, right))


def _token_text(base: str, token: int | None) -> str:
    from huggingface_hub import try_to_load_from_cache
    from tokenizers import Tokenizer

    file = Path(base) / "tokenizer.json"
    cached = None if Path(base).is_absolute() else try_to_load_from_cache(base, "tokenizer.json")
    file = Path(cached) if isinstance(cached, str) else file
    if token is None or not file.is_file():
        return ""
    return str(Tokenizer.from_file(str(file)).decode([token], skip_special_tokens=False))


def _report_lines(comparison: "EpisodeComparison", ids: tuple[int, int]) -> Iterator[Line]:
    left, right = (f"episode {number}:" for number in ids)
    if comparison.tasks is not None:
        yield f"The episodes have different tasks: {comparison.tasks[0]} and {comparison.tasks[1]}.", "yellow"
    yield (
        f"tokens   {comparison.common} of {comparison.tokens[0]} and {comparison.tokens[1]} in common",
        line_style(comparison.token is None),
    )
    if comparison.token is not None:
        yield from parting_lines(comparison.token, left, right)
    yield f"results  {len(comparison.results) or 'none'} differ", line_style(not comparison.results)
    for result in comparison.results:
        yield f"  step {result.step}, call {result.call}", "red"
        for name, text in ((left, result.left), (right, result.right)):
            yield f"    {name} {'(none)' if text is None else quote(text)}", ""
    yield f"rewards  {len(comparison.rewards) or 'none'} differ", line_style(not comparison.rewards)
    for part, one, other in comparison.rewards:
        yield f"  {part}: {full_number(one)} and {full_number(other)}", "red"
    if comparison.stop_reasons is not None:
        yield f"ended    {cell(comparison.stop_reasons[0])} and {cell(comparison.stop_reasons[1])}", "red"
    yield ("the same", "green") if comparison.same else ("NOT the same", "bold red")

"""`agentrl replay EPISODE --diff OTHER`: compares two episodes, and shows the first token at which they differ."""

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from agentrl.cli.console import show_json, show_lines
from agentrl.cli.resolve_targets import stored_database
from agentrl.cli.verify import MAX_QUOTED, full_number, line_style, parting_lines, quote
from agentrl.workflow.call_json import json_key
from agentrl.workflow.runtime.shown_text import Line, cell, one_line, plain
from agentrl.workflow.trajectory import Episode

if TYPE_CHECKING:
    from agentrl.workers.page.shown.token_texts import FoundTexts
    from agentrl.workflow.analysis.episode_diff import ArgumentsDifference, Decode, EpisodeComparison, WrittenCall
    from agentrl.workflow.store.reads.provenance import Origin

COMMON_CHARS = 24
"""The most characters of a long text that are shown before its first difference."""


def diff(episode: int, other: int, as_json: bool) -> int:
    """Print the first token at which the episodes differ, and all other differences. Return 0 if there are none, else 1."""
    from agentrl.workflow.analysis.episode_diff import compare
    from agentrl.workflow.store.reads.provenance import find_origin

    sides = (find_origin(stored_database(), episode), find_origin(stored_database(), other))
    comparison = compare(*map(_with_reward_parts, sides))
    why_no_texts = None
    if comparison.token is not None:
        texts = [_find_texts(origin) for origin in sides]
        comparison = replace(comparison, token=comparison.token.with_texts(*map(_decoder, texts)))
        why_no_texts = next((side.why_none for side in texts if side.texts is None), None)
    if as_json:
        document = {"left": episode, "right": other, "same": comparison.same, "why_no_texts": why_no_texts}
        show_json({**document, **asdict(comparison)})
    else:
        show_lines(_report_lines(comparison, (episode, other), why_no_texts))
    return 0 if comparison.same else 1


def _with_reward_parts(origin: "Origin") -> Episode:
    from agentrl.workflow.rewards import part_sum

    parts = origin.reward_sets["default"].parts
    return replace(origin.record.episode, rewards={name: part_sum(part) for name, part in parts.items()})


def _find_texts(origin: "Origin") -> "FoundTexts":
    from agentrl.workers.page.shown.episode_tokens import find_checked_texts
    from agentrl.workflow.settings import settings
    from agentrl.workflow.store.reads.episode_shape import load_shape

    db, episode = stored_database(), origin.record.episode.id
    return find_checked_texts(db, settings(), origin.base, load_shape(db, episode))


def _decoder(found_texts: "FoundTexts") -> "Decode":
    return found_texts.texts.whole if found_texts.texts else lambda ids: ""


def _report_lines(comparison: "EpisodeComparison", ids: tuple[int, int], why_no_texts: str | None) -> Iterator[Line]:
    left, right = (f"episode {number}:" for number in ids)
    if comparison.tasks is not None:
        yield f"The episodes have different tasks: {comparison.tasks[0]} and {comparison.tasks[1]}.", "yellow"
    yield (
        f"tokens   {comparison.common} of {comparison.tokens[0]} and {comparison.tokens[1]} in common",
        line_style(comparison.token is None),
    )
    if comparison.token is not None:
        yield from parting_lines(comparison.token, left, right)
    if why_no_texts is not None:
        yield f"  {why_no_texts} Tokens are shown by their ids.", "yellow"
    yield from _call_lines(comparison, left, right)
    yield f"rewards  {len(comparison.rewards) or 'none'} differ", line_style(not comparison.rewards)
    for part, one, other in comparison.rewards:
        yield f"  {part}: {full_number(one)} and {full_number(other)}", "red"
    if comparison.stop_reasons is not None:
        yield f"ended    {cell(comparison.stop_reasons[0])} and {cell(comparison.stop_reasons[1])}", "red"
    yield ("the same", "green") if comparison.same else ("NOT the same", "bold red")


Texts = tuple[str | None, str | None]
"""A text of the left episode and one of the right; None if that episode has none."""


def _call_lines(comparison: "EpisodeComparison", left: str, right: str) -> Iterator[Line]:
    """Yield the number of calls and results that differ, and both texts of each difference."""
    yield f"calls    {len(comparison.calls) or 'none'} differ", line_style(not comparison.calls)
    for call in comparison.calls:
        for name, texts in _differing_parts(call):
            yield from _text_lines(f"step {call.step}, call {call.call}{name}", texts, left, right)
    yield f"results  {len(comparison.results) or 'none'} differ", line_style(not comparison.results)
    for result in comparison.results:
        yield from _text_lines(f"step {result.step}, call {result.call}", (result.left, result.right), left, right)


def _differing_parts(call: "ArgumentsDifference") -> Iterator[tuple[str, Texts]]:
    one, other = call.left, call.right
    if one is None or other is None:
        yield "", (_call_text(one), _call_text(other))
        return
    if one.tool != other.tool:
        yield ", tool", (one.tool, other.tool)
    for name in dict.fromkeys((*one.arguments, *other.arguments)):
        keys = [json_key(call.arguments[name]) if name in call.arguments else None for call in (one, other)]
        if keys[0] != keys[1]:
            texts = (_argument_text(one, name), _argument_text(other, name))
            yield f", {one_line(name)}", texts if texts[0] != texts[1] else (keys[0], keys[1])  # 1 and "1" have equal texts


def _call_text(call: "WrittenCall | None") -> str | None:
    return None if call is None else f"{call.tool} {_json_text(call.arguments)}"


def _argument_text(call: "WrittenCall", name: str) -> str | None:
    if name not in call.arguments:
        return None
    value = call.arguments[name]
    return value if isinstance(value, str) else _json_text(value)


def _json_text(value: Any) -> str:
    return json.dumps(plain(value), ensure_ascii=False)


def _text_lines(title: str, texts: Texts, left: str, right: str) -> Iterator[Line]:
    """Yield both texts. Long texts begin shortly before their first difference."""
    from agentrl.workflow.analysis.episode_diff import common_prefix

    yield f"  {title}", "red"
    start = common_prefix(texts[0] or "", texts[1] or "") - COMMON_CHARS
    for name, text in ((left, texts[0]), (right, texts[1])):
        if text is not None and len(text) > MAX_QUOTED and start > 0:
            text = f"...{text[start:]}"
        yield f"    {name} {'(none)' if text is None else quote(text)}", ""

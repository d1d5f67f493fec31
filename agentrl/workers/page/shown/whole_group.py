"""Builds the response about a group: its episodes side by side, and the places at which their tokens diverge."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.workers.page.shown.credit_answers import CreditReader, explain_members
from agentrl.workers.page.shown.episode_tokens import packed_line, place_in_line
from agentrl.workers.page.shown.shown_texts import ShownTexts, cut_texts, new_messages, shown_message, shown_task
from agentrl.workers.page.shown.token_texts import FoundTexts, TokenTexts
from agentrl.workflow.analysis.alignment import Alignment, TokenBranch, align
from agentrl.workflow.store.reads.credit_rows import load_group_members
from agentrl.workflow.store.reads.episode_relations import load_run_of, load_task_of
from agentrl.workflow.store.reads.episode_shape import EpisodeShape
from agentrl.workflow.store.reads.group_rows import (
    GroupOf,
    load_group,
    load_short_results,
    load_short_steps,
    load_sibling_fates,
    load_sibling_parts,
    load_sibling_readers,
    load_sibling_shapes,
)
from agentrl.workflow.store.reads.turn_rows import TOKEN_BYTES, find_removed_tokens, unpack_ids
from agentrl.workflow.store.solved_rule import is_solved

Row = Mapping[str, Any]
TEXT_CHARS = 4000
MAX_SEGMENTS = 400
"""The most texts of an episode in the response."""
ALIGNED_TOKENS = 65_536
"""The most tokens of each episode that are compared with those of the other episodes."""
COMMON_CHARS = 4000
BRANCH_TOKENS = 32
"""The most tokens whose text is returned: for a branch, and for the continuation after the position at which an episode
diverges.
"""


@dataclass(frozen=True, slots=True)
class GroupAnswer:
    """The response about a group, still without the texts of its tokens, and the data from which `describe_parting` makes these
    texts. If the tokens of an episode were removed, `tokens_removed` is a sentence about it, and `lines` is empty.
    """

    document: dict[str, Any]
    base: str
    shapes: Mapping[int, EpisodeShape]
    lines: Mapping[int, bytes]
    alignment: Alignment
    tokens_removed: str | None


def load_group_answer(tx: Any, group: int) -> GroupAnswer:
    """Return the response about the group, with its episodes. Raise NotFoundError if the group does not exist."""
    loaded = load_group(tx, group)
    run = load_run_of(tx, loaded.run_id)
    shapes = load_sibling_shapes(tx, loaded)
    removed = find_removed_tokens(tx, [row["id"] for shape in shapes.values() for row in shape.rows])
    lines = {} if removed else {id: packed_line(tx, shape, ALIGNED_TOKENS) for id, shape in shapes.items()}
    texts = ShownTexts(TEXT_CHARS)
    task = load_task_of(tx, loaded.task_id)
    credit, advantages = _explain(tx, loaded, run)
    document = {
        "group": {**cut_texts({**loaded.row}), "run_id": loaded.run_id, "task_id": loaded.task_id},
        "solved": is_solved(tx, loaded.run_id, loaded.row.id),
        "task": shown_task(task, texts),
        "siblings": list(_siblings(tx, loaded, shapes, advantages, texts)),
        "left_out": loaded.left_out,
        "credit": credit,
        "aligned_tokens": ALIGNED_TOKENS,
    }
    return GroupAnswer(document, run["base"], shapes, lines, align(lines), removed.sentence if removed else None)


def _explain(tx: Any, group: GroupOf, run: Row) -> tuple[dict[str, Any], dict[int, Any]]:
    """Return how and by which run the advantages were computed, and each advantage's explanation by episode id."""
    readers = load_sibling_readers(tx, [episode.id for episode in group.episodes], group.run_id)
    trained = load_run_of(tx, readers[0]["run_id"]) if readers and readers[0]["run_id"] != group.run_id else run
    reader = CreditReader(trained, readers[0] if readers else None)
    members = load_group_members(tx, group.row.id, trained["reward_set"])
    recorded = {row["episode_id"]: row["advantage"] for row in readers}
    advantages = explain_members(tx, reader, members, recorded)
    names = ("algorithm", "group_mean", "group_std", "group_size")
    first = next(iter(advantages.values()), dict.fromkeys(names))
    return {**{name: first[name] for name in names}, "run": trained["name"], "run_id": trained["id"]}, advantages


def _siblings(
    tx: Any, group: GroupOf, shapes: Mapping[int, EpisodeShape], advantages: Mapping[int, Any], texts: ShownTexts
) -> Iterator[dict[str, Any]]:
    ids = [episode.id for episode in group.episodes]
    parts, fates = load_sibling_parts(tx, ids), load_sibling_fates(tx, group.row.run, ids)
    step_ids = [row["id"] for shape in shapes.values() for row in shape.rows[:MAX_SEGMENTS]]
    steps, results = load_short_steps(tx, step_ids), load_short_results(tx, step_ids)
    for episode in group.episodes:
        row = cut_texts({**episode}, TEXT_CHARS)
        for name in ("final_answer", "error", "reference"):
            path = "task/reference" if name == "reference" else f"episode/{name}"
            texts.put(row, name, getattr(episode, name), path=path)
        segments = list(_segments(shapes[episode.id], steps, results, texts))
        yield {
            "episode": row,
            "parts": parts.get(episode.id, []),
            "fate": fates.get(episode.id),
            "advantage": advantages.get(episode.id),
            "text": segments[:MAX_SEGMENTS],
            "text_left_out": len(segments[MAX_SEGMENTS:]) + len(shapes[episode.id].rows[MAX_SEGMENTS:]),
        }


def _segments(
    shape: EpisodeShape, steps: Mapping[int, Row], results: Mapping[int, Sequence[Row]], texts: ShownTexts
) -> Iterator[dict[str, Any]]:
    """Yield the episode's texts turn by turn: new messages, sampled text, results of calls."""
    for row in shape.rows[:MAX_SEGMENTS]:
        step, number = steps.get(row["id"]), row["step"]
        if step is None:
            continue
        parent = row["parent_step"]
        before = results.get(shape.rows[parent]["id"], ()) if parent is not None and 0 <= parent < len(shape.rows) else ()
        for place, message in new_messages(step["prompt"], before)[1]:
            fields = shown_message(message, "", texts)
            path = f"steps/{number}/messages/{place}/content"
            yield _segment(number, "message", fields["content"], None, path, texts, fields)
        yield _segment(number, "sampled", step["text"], step["text_chars"], f"steps/{number}/text", texts)
        for call in results.get(row["id"], ()):
            fields = {"name": call["tool"], "error_class": call["error_class"]}
            path = f"calls/{call['id']}/result"
            yield _segment(number, "tool", call["result"], call["result_chars"], path, texts, fields)


def _segment(
    step: int, kind: str, text: str | None, chars: int | None, path: str, texts: ShownTexts, more: Row | None = None
) -> dict[str, Any]:
    more = more or {}
    segment = {"step": step, "kind": kind, **{name: more[name] for name in ("role", "name", "error_class") if name in more}}
    if kind == "message":  # it is counted and cut already
        whole = more.get("cut", {}).get("content")
        return {**segment, "text": text, **({"cut": {"text": whole}, "of": {"text": path}} if whole else {})}
    texts.put(segment, "text", text, chars, path)
    return segment


def describe_parting(answer: GroupAnswer, token_texts: FoundTexts) -> dict[str, Any]:
    """Return the places at which the episodes diverge, as tokens and, if texts are available, also as texts."""
    alignment, texts = answer.alignment, token_texts.texts
    common = alignment.common
    first = next(iter(answer.lines.values()), b"")
    text = None if texts is None else texts.whole(unpack_ids(first, 0, common))
    return {
        "common_tokens": common,
        "common_text": None if text is None else text[:COMMON_CHARS],
        "common_chars": None if text is None else len(text),
        "why_no_texts": token_texts.why_none or None,
        "tokens_removed": answer.tokens_removed,
        "at": [_part_of(answer, episode, texts) for episode in answer.lines],
        "tree": [_branch(answer, branch, texts) for branch in alignment.branches],
    }


def _part_of(answer: GroupAnswer, episode: int, texts: TokenTexts | None) -> dict[str, Any]:
    line, shape, at = answer.lines[episode], answer.shapes[episode], answer.alignment.common
    alone = answer.alignment.alone_from[episode]
    ended = at * TOKEN_BYTES >= len(line)
    step, kind = place_in_line(shape, at)
    branch = [] if texts is None or ended else texts.of(unpack_ids(line, at, at + 1 + BRANCH_TOKENS))
    return {
        "episode": episode,
        "step": step,
        "kind": kind,
        "token_index": at,
        "token": None if ended else unpack_ids(line, at, at + 1)[0],
        "token_text": branch[0] if branch else None,
        "next": "".join(branch[1:]) if branch else None,
        "alone_from": alone,
        "alone_step": place_in_line(shape, alone)[0],
        "tokens": len(line) // TOKEN_BYTES,
    }


def _branch(answer: GroupAnswer, branch: TokenBranch, texts: TokenTexts | None) -> dict[str, Any]:
    ids = unpack_ids(answer.lines[branch.members[0]], branch.start, min(branch.end, branch.start + BRANCH_TOKENS))
    text = None if texts is None else texts.whole(ids)
    return {"from_token": branch.start, "to_token": branch.end, "episodes": list(branch.members), "text": text}

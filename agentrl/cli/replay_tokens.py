"""`agentrl replay EPISODE --tokens`: the sampled tokens of an episode, each with its text, logprob and advantage."""

from collections.abc import Iterator, Mapping, Sequence
from math import exp
from typing import Any

from agentrl.cli.console import format_decimals, say, show_cells, show_json, show_lines
from agentrl.cli.verify import quote
from agentrl.workflow.runtime.shown_text import Line, cell, format_count, one_line

MAX_TOKENS = 200
"""The most tokens that are printed if no limit is given. The JSON document has all tokens."""
TEXT_CHARS = 80


def show_tokens(db: Any, episode: int, step: int | None, limit: int | None, as_json: bool) -> None:
    """Print the first `limit` sampled tokens of the episode or of one of its steps.

    Raise NotFoundError if there is no such episode or step. Raise StateError if the tokens were removed.
    """
    from agentrl.workers.page.shown.episode_tokens import EpisodeTokens, find_checked_texts
    from agentrl.workflow.settings import settings
    from agentrl.workflow.store.reads.episode_relations import load_row
    from agentrl.workflow.store.row_codecs import no_step_error

    def read(tx: Any) -> tuple[EpisodeTokens, Any, dict[str, Any]]:
        tokens = EpisodeTokens(tx, episode)
        if step is not None and step >= len(tokens.shape.rows):
            raise no_step_error(episode, step, len(tokens.shape.rows))
        size = limit if as_json else limit or MAX_TOKENS
        return tokens, load_row(tx, episode), tokens.read_sampled(size, step)

    tokens, row, sampled = db.ask(read)
    texts, why_no_texts = tokens.texts(find_checked_texts(db, settings(), tokens.run["base"], tokens.shape), sampled)
    rows = list(_token_rows(sampled, texts))
    if as_json:
        document = {"episode": episode, "run": row.run, "total": sampled["total"], "why_no_texts": why_no_texts}
        show_json({**document, "metrics": sampled["metrics"], "tokens": rows})
        return
    show_lines(_head_lines(row, sampled, rows, why_no_texts))
    if rows:
        show_cells(*_table(rows))
    if len(rows) < sampled["total"]:
        remark = f"Only the first {len(rows)} of {sampled['total']} sampled tokens are shown."
        say(f"{remark} All: --limit {sampled['total']}; one step: --step N")
    say(f"Why it has this advantage, or none: agentrl why {episode}")


def find_decoder(db: Any, episode: int) -> Any:
    """Return a function that returns the texts of tokens of the episode; None if their tokenizer is not on this machine."""
    from agentrl.workers.page.shown.episode_tokens import find_checked_texts
    from agentrl.workflow.settings import settings
    from agentrl.workflow.store.reads.episode_relations import load_run_of
    from agentrl.workflow.store.reads.episode_shape import EpisodeShape, load_shape

    def read(tx: Any) -> tuple[EpisodeShape, str]:
        shape = load_shape(tx, episode)
        return shape, load_run_of(tx, shape.run_id)["base"]

    shape, base = db.ask(read)
    texts = find_checked_texts(db, settings(), base, shape).texts
    return texts and texts.of


def _token_rows(sampled: Mapping[str, Any], texts: Sequence[str] | None) -> Iterator[dict[str, Any]]:
    advantages, place, step, first = sampled["advantages"], 0, None, 0
    for segment in sampled["segments"]:
        if segment["step"] != step:
            step, first = segment["step"], place
        for _ in range(segment["start"], segment["end"]):
            yield {
                "step": step,
                "token": place - first,
                "id": sampled["ids"][place],
                "text": texts[place] if texts else None,
                "logprob": sampled["logprobs"][place],
                "advantage": advantages[place] if advantages else segment["advantage"],
                "trains": segment["trains"],
                "why_not": segment["why_not"],
                "chain": segment["chain"],
            }
            place += 1


def _head_lines(
    row: Any, sampled: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], why_no_texts: str | None
) -> Iterator[Line]:
    yield f"episode {row.id}  of {row.run}, iteration {row.iteration}, task {row.task}, sample {row.sample}", "bold"
    yield f"  {format_count(sampled['total'], 'sampled token')}", ""
    metrics = {metric["name"]: metric for metric in sampled["metrics"]}
    yield f"  advantage: {metrics['advantage']['how']}", ""
    if rows and metrics["logprob"]["source"] == "missing":
        yield f"  logprob: {metrics['logprob']['how']}", "yellow"
    if scored := [token for token in rows if token["logprob"] is not None]:
        least = min(scored, key=lambda token: token["logprob"])
        text = "" if least["text"] is None else f" {quote(least['text'], TEXT_CHARS)}"
        yield f"  lowest logprob: {format_decimals(least['logprob'])} at step {least['step']}, token {least['token']}{text}", ""
    missing = [name for name in metrics if name not in ("logprob", "advantage") and metrics[name]["source"] == "missing"]
    yield f"  not stored per token: {', '.join(missing)}", "dim"
    if why_no_texts and rows:
        yield f"  {why_no_texts} Tokens are shown by their ids.", "yellow"
    for reason in dict.fromkeys(token["why_not"] for token in rows if token["why_not"]):
        steps = dict.fromkeys(str(token["step"]) for token in rows if token["why_not"] == reason)
        yield f"  does not train (step {one_line(', '.join(steps))}): {reason}", "yellow"
    yield "", ""


def _table(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the titles and cells of the table of tokens. The texts come last, because their widths on a terminal vary."""
    columns = {
        "step": [cell(row["step"]) for row in rows],
        "token": [cell(row["token"]) for row in rows],
        "id": [cell(row["id"]) for row in rows],
        "logprob": ["" if row["logprob"] is None else format_decimals(row["logprob"]) for row in rows],
        "prob": ["" if row["logprob"] is None else format_decimals(exp(row["logprob"])) for row in rows],
        "advantage": ["" if row["advantage"] is None else cell(row["advantage"]) for row in rows],
        "trains": ["" if row["trains"] else "no" for row in rows],
        "text": ["" if row["text"] is None else quote(row["text"], TEXT_CHARS) for row in rows],
    }
    titles = [title for title, cells in columns.items() if any(cells)]
    return titles, [list(cells) for cells in zip(*(columns[title] for title in titles), strict=True)]

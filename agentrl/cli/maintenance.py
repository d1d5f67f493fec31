"""`agentrl gc` and `agentrl vacuum`: remove files that no database row needs, or the tokens of chosen runs, and return the
database's unused space to the disk.
"""

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from agentrl.cli.console import Json, say, show, show_json, show_table
from agentrl.cli.resolve_targets import existing_database, stored_database
from agentrl.workflow.errors import ConfigError
from agentrl.workflow.runtime.shown_text import format_count

SPACE_HINTS = {
    True: "The file keeps its size until you type: agentrl vacuum",
    False: "Postgres uses the space again after its next vacuum: autovacuum, or agentrl vacuum.",
}
"""What to do after a removal of rows. The key is True for SQLite."""


def gc(
    runs: Annotated[list[str] | None, typer.Argument(metavar="[RUN]...", help="Only these runs.", show_default=False)] = None,
    keep_last: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Keep only the newest N adapters of finished runs, even if episodes refer to others.",
            metavar="N",
            show_default=False,
        ),
    ] = None,
    tokens: Annotated[
        bool,
        typer.Option("--tokens", help="Remove the token ids and logprobs of these runs from the database, and no files."),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="With --tokens: do not ask.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be removed, and remove nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Remove the files from the checkpoint folders that no database row needs.

    These are leftovers of killed trainers, the optimizer state of all but the last two checkpoints, and adapters that no
    episode refers to.

    With --tokens, remove the token ids and logprobs of the named runs from the database, for good. Texts, tool calls, rewards
    and curves stay. What needs the tokens is refused from then on: verifying, resuming, forking, rescoring, training on the
    episodes.
    """
    if tokens:
        _remove_tokens(runs or (), keep_last, yes, dry_run, as_json)
        return
    if yes:
        raise ConfigError("--yes has no effect without --tokens.", "Leave it out.")
    from agentrl.workflow.checkpoints.checkpoint_gc import KINDS
    from agentrl.workflow.store import retention

    db = stored_database() if runs else existing_database()
    places = retention.list_checkpoint_folders(db, tuple(runs or ())) if db else []
    freed = {place.run: _collect_run(db, place, keep_last, dry_run) for place in places}
    totals = {kind: sum(run[kind] for run in freed.values()) for kind in KINDS}
    if as_json:
        show_json(
            {"dry_run": dry_run, "bytes": totals, "runs": {run: part for run, part in freed.items() if any(part.values())}}
        )
        return
    rows = [(run, *(_format_bytes(part[kind]) for kind in KINDS)) for run, part in freed.items() if any(part.values())]
    if rows:
        show_table(("run", *KINDS), [*rows, ("all", *(_format_bytes(totals[kind]) for kind in KINDS))])
    show(f"{_format_bytes(sum(totals.values()))} {'would be' if dry_run else 'were'} freed.")


def _collect_run(db: Any, place: Any, keep_last: int | None, dry_run: bool) -> dict[str, int]:
    """Remove the files of one run that no row needs. Return the freed bytes by kind."""
    from agentrl.workflow.checkpoints import checkpoint_gc
    from agentrl.workflow.checkpoints.epoch_links import unlink_epochs
    from agentrl.workflow.store import epoch_ends, retention

    folders = checkpoint_gc.list_folders(place.output_dir, place.key)
    present = {folder.name for folder in folders}
    decide = retention.find_needs if dry_run else retention.collect
    waste = checkpoint_gc.find_waste(folders, decide(db, place.run_id, present, keep_last), place.key)
    if not dry_run:
        unlink_epochs(epoch_ends.load_epoch_ends(db, place.run_id))  # so that no link leads to a removed folder
    for item in () if dry_run else waste:
        checkpoint_gc.remove(place.output_dir, item)
    return {kind: sum(item.bytes for item in waste if item.kind == kind) for kind in checkpoint_gc.KINDS}


def _remove_tokens(runs: Sequence[str], keep_last: int | None, yes: bool, dry_run: bool, as_json: bool) -> None:
    from agentrl.workflow.store import token_removal
    from agentrl.workflow.store.row_codecs import RemovedTokens

    if not runs:
        raise ConfigError("--tokens removes the tokens of the runs that you name.", "Type agentrl gc --tokens RUN.")
    if keep_last is not None:
        raise ConfigError("--tokens and --keep-last exclude each other.", "Type one command for each.")
    db = stored_database()
    counts = token_removal.count_tokens(db, runs)
    for count in counts:
        if count.removed_at is not None:
            say(RemovedTokens(count.run, count.removed_at).sentence)
        of = f"{format_count(count.steps, 'step')} of {format_count(count.episodes, 'episode')}"
        say(f"{count.run}: token ids and logprobs of {of}, {_format_bytes(count.bytes)}")
    total = sum(count.bytes for count in counts)
    removes = not dry_run and (yes or _confirm(total))
    for count in counts if removes else ():
        token_removal.remove_tokens(db, count)
    if as_json:
        documents = {count.run: {name: getattr(count, name) for name in ("episodes", "steps", "bytes")} for count in counts}
        show_json({"dry_run": not removes, "bytes": {"tokens": total}, "runs": documents})
    else:
        what = f"{_format_bytes(total)} {'were' if removes else 'would be'} removed from the database."
        show(what if removes or dry_run else "Nothing was removed.")
    if removes:
        say(SPACE_HINTS[db.is_sqlite])


def _confirm(total: int) -> bool:
    """Ask, and return whether the user agrees. Raise ConfigError if nobody can answer."""
    if not sys.stdin.isatty():
        raise ConfigError("Nothing was removed: this command asks first, and stdin is not a terminal.", "Add --yes.")
    return typer.confirm(f"Remove {_format_bytes(total)} for good?", err=True)


def vacuum(as_json: Json = False) -> None:
    """Compact the database; runs may continue meanwhile."""
    from agentrl.workflow.store import vacuum

    done = vacuum.vacuum(stored_database())
    if as_json:
        show_json({"before": done.before, "after": done.after})
    else:
        show(f"{_format_bytes(done.before)} -> {_format_bytes(done.after)}")
    if done.left:
        say("Another process still reads an older state: the write-ahead log shrinks at the next vacuum.")


def _format_bytes(count: int) -> str:
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << power:
            return f"{count / (1 << power):.1f} {unit}"
    return format_count(count, "byte")

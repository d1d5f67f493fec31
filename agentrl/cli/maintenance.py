"""`agentrl gc` and `agentrl vacuum`: remove files that no database row needs, and return the database's unused space to the
disk.
"""

from typing import Annotated, Any

import typer

from agentrl.cli.console import Json, say, show, show_json, show_table
from agentrl.cli.resolve_targets import existing_database, stored_database


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
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be removed, and remove nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Remove the files from the checkpoint folders that no database row needs.

    These are leftovers of killed trainers, the optimizer state of all but the last two checkpoints, and adapters that no
    episode refers to.
    """
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
    return f"{count} bytes"

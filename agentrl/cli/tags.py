"""`agentrl tag` and `agentrl note`: tags and notes that users attach to a run."""

from typing import Annotated

import typer

from agentrl.cli.console import Json, say, show, show_json
from agentrl.cli.options import MAX_INTEGER, RunName
from agentrl.cli.resolve_targets import stored_database, stored_reader
from agentrl.workflow.errors import ConfigError
from agentrl.workflow.runtime.shown_text import cell


def tag(
    run: RunName,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[WORD...]", help="Tags to give the run.", show_default=False)
    ] = None,
    remove: Annotated[
        list[str] | None,
        typer.Option("--remove", "-r", metavar="WORD", help="Tag to remove; repeatable.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Add tags to a run, remove some, or list them. `agentrl runs` and the page show them."""
    from agentrl.workflow.store.reads import label_rows, run_rows

    if words or remove:
        from agentrl.workflow.store import tags_and_notes

        tags = tags_and_notes.change_tags(stored_database(), run, words or [], remove or [])
    else:
        tags = label_rows.list_tags(stored_reader(), run)
    if as_json:
        show_json({"run": run_rows.describe_run(stored_reader(), run).run, "tags": tags})
        return
    for text in tags:
        show(text)
    if not tags:
        say(f"{run} has no tag. Give it one: agentrl tag {run} good")


def note(
    run: RunName,
    text: Annotated[str | None, typer.Argument(metavar="[TEXT]", help="Text of the note.", show_default=False)] = None,
    remove: Annotated[
        int | None,
        typer.Option(
            "--remove", "-r", metavar="NUMBER", min=1, max=MAX_INTEGER, help="Number of a note to remove.", show_default=False
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Add a note to a run, remove one, or list the newest."""
    from agentrl.workflow.store.reads import label_rows

    if text is not None and remove is not None:
        raise ConfigError("Pass a text to write or --remove NUMBER, not both.", "Leave one out.")
    if text is not None or remove is not None:
        from agentrl.workflow.store import tags_and_notes

        if remove is not None:
            tags_and_notes.remove_note(stored_database(), run, remove)
        else:
            tags_and_notes.add_note(stored_database(), run, text or "")
    notes = label_rows.list_notes(stored_reader(), run)
    if as_json:
        show_json(notes)
        return
    for row in notes:
        show(f"{row['id']}  {cell(row['created_at'])}  " + row["text"].replace("\n", "\n    "))
    if not notes:
        say(f'{run} has no notes. Write one: agentrl note {run} "TEXT"')

"""Tags and notes that people attach to a run. They do not affect the run."""

from collections.abc import Sequence

from sqlalchemy import Connection, delete, func, select

from agentrl.workflow.errors import ConfigError, ConflictError, NotFoundError
from agentrl.workflow.store.connect import insert, transaction
from agentrl.workflow.store.row_codecs import MAX_ID
from agentrl.workflow.store.run_names import find_run
from agentrl.workflow.tables import schema
from agentrl.workflow.trajectory import storable

MAX_TAG_CHARS = 64
MAX_NOTE_CHARS = 10_000
MAX_TAGS = 100
MAX_NOTES = 1000
_TAGS, _NOTES = schema.run_tags.c, schema.run_notes.c


@transaction
def change_tags(tx: Connection, run: str, add: Sequence[str], remove: Sequence[str] = ()) -> list[str]:
    """Add and remove tags of the run, and return its tags. Idempotent. Raise NotFoundError if there is no such run. Raise
    ConfigError if a tag is invalid. Raise ConflictError if the run would have too many tags.
    """
    number = find_run(tx, run, "id")["id"]
    added = [check_tag(tag) for tag in add]
    gone = [tag.strip()[: MAX_TAG_CHARS + 1] for tag in remove]
    tx.execute(delete(schema.run_tags).where(_TAGS.run_id == number, _TAGS.tag.in_([storable(tag) for tag in gone])))
    if added:
        rows = [{"run_id": number, "tag": tag} for tag in dict.fromkeys(added)]
        tx.execute(insert(tx, schema.run_tags).on_conflict_do_nothing(index_elements=["run_id", "tag"]), rows)
    tags = [*tx.execute(select(_TAGS.tag).where(_TAGS.run_id == number)).scalars()]
    if len(tags) > MAX_TAGS:
        raise ConflictError(
            f"A run has at most {MAX_TAGS} tags; this one would have {len(tags)}.", f"Remove some: agentrl tag {number} -r WORD"
        )
    return sorted(tags)


@transaction
def add_note(tx: Connection, run: str, text: str) -> int:
    """Add a note to the run, and return the note's id. Raise NotFoundError if there is no such run. Raise ConfigError if the
    text is empty or too long. Raise ConflictError if the run has too many notes.
    """
    number = find_run(tx, run, "id")["id"]
    note = storable(text.strip())
    if not 0 < len(note) <= MAX_NOTE_CHARS:
        raise ConfigError(
            f"A note has 1 to {MAX_NOTE_CHARS} characters; this one has {len(note)}.", "Write a text of that length."
        )
    count = tx.execute(select(func.count()).select_from(schema.run_notes).where(_NOTES.run_id == number)).scalar_one()
    if count >= MAX_NOTES:
        raise ConflictError(
            f"A run has at most {MAX_NOTES} notes; this one has {count} already.",
            f"Remove some: agentrl note {number} -r NUMBER",
        )
    inserted = tx.execute(insert(tx, schema.run_notes).values(run_id=number, text=note).returning(_NOTES.id))
    return int(inserted.scalar_one())


@transaction
def remove_note(tx: Connection, run: str, note: int) -> None:
    """Delete a note of the run. Raise NotFoundError if there is no such run, or it has no such note."""
    number = find_run(tx, run, "id")["id"]
    mine = (_NOTES.run_id == number) & (_NOTES.id == min(note, MAX_ID))
    if not tx.execute(delete(schema.run_notes).where(mine)).rowcount:
        raise NotFoundError(f"Run {number} has no note {note}.", f"List them: agentrl note {number}")


def check_tag(tag: str) -> str:
    """Return a tag without space around it. Raise ConfigError if it is empty, too long or not printable."""
    word = tag.strip()
    if not word.isprintable() or not 0 < len(word) <= MAX_TAG_CHARS:
        raise ConfigError(f"{tag[:100]!r} is not a valid tag.", f"A tag has 1 to {MAX_TAG_CHARS} printable characters.")
    return word

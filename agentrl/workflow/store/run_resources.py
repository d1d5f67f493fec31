"""The texts of a run (such as prompts). Each version of a text is stored once, and is linked to the groups whose episodes use
that version.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

from sqlalchemy import Connection, func, select

from agentrl.workflow.tables import schema

_VERSIONS, _LINKS = schema.resources.c, schema.group_resources.c


@dataclass(frozen=True, slots=True)
class VersionOrigin:
    """The origin of a version of a text: a note, and the texts from which it was made, by name."""

    note: str = ""
    before: Mapping[str, str] | None = None


def link_resources(
    tx: Connection, run_id: int, groups: Sequence[int], texts: Mapping[str, str], origin: VersionOrigin | None = None
) -> None:
    """Record that the groups' episodes use these texts. A text that the run does not have yet becomes a new version."""
    origin = origin or VersionOrigin()
    ids = [version_of(tx, run_id, name, text, origin) for name, text in texts.items()]
    rows = [{"group_id": group, "resource_id": version} for group in groups for version in ids]
    if rows:
        tx.execute(schema.group_resources.insert(), rows)


def version_of(tx: Connection, run_id: int, name: str, text: str, origin: VersionOrigin) -> int:
    """Return the id of the version with this text. If the run does not have the text yet, insert a new version."""
    mine = (_VERSIONS.run_id == run_id) & (_VERSIONS.name == name)
    digest = sha256(text.encode()).hexdigest()
    stored_id = tx.execute(select(_VERSIONS.id).where(mine, _VERSIONS.content_hash == digest)).scalar_one_or_none()
    if stored_id is not None:
        return int(stored_id)
    version = tx.execute(select(func.coalesce(func.max(_VERSIONS.version) + 1, 0)).where(mine)).scalar_one()
    parent = None
    if origin.before is not None and name in origin.before:
        old = sha256(origin.before[name].encode()).hexdigest()
        parent = tx.execute(select(_VERSIONS.version).where(mine, _VERSIONS.content_hash == old)).scalar_one_or_none()
    values = {"run_id": run_id, "name": name, "version": version, "content_hash": digest, "text": text}
    statement = schema.resources.insert().values(**values, parent_version=parent, note=origin.note).returning(_VERSIONS.id)
    return int(tx.execute(statement).scalar_one())


def resources_of_group(tx: Connection, group: int) -> dict[str, str]:
    """Return the texts that a group's episodes use, by name."""
    query = select(_VERSIONS.name, _VERSIONS.text).join(schema.group_resources, _LINKS.resource_id == _VERSIONS.id)
    rows = tx.execute(query.where(_LINKS.group_id == group).order_by(_VERSIONS.name))
    return {row.name: row.text for row in rows}


def copy_links(tx: Connection, source: int, target: int) -> None:
    """Link the group `target` to the same texts as the group `source`."""
    ids = tx.execute(select(_LINKS.resource_id).where(_LINKS.group_id == source)).scalars().all()
    if ids:
        tx.execute(schema.group_resources.insert(), [{"group_id": target, "resource_id": version} for version in ids])

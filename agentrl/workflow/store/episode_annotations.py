"""Annotations of episodes. An annotation is written once per attempt and never changed. An annotation that names no step is
assigned to the newest step.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, bindparam, func, select

from agentrl.workflow.annotations import MAX_OF_ATTEMPT, Annotation
from agentrl.workflow.errors import ConflictError, StateError
from agentrl.workflow.store.connect import insert, read_transaction, transaction
from agentrl.workflow.store.rollout_claims import Fence, check_claim
from agentrl.workflow.store.row_codecs import annotation_value, clean_tree
from agentrl.workflow.tables import schema
from agentrl.workflow.trajectory import OPEN, storable

_ROWS, _EPISODES, _STEPS = schema.annotations.c, schema.episodes.c, schema.steps.c
_OF_EPISODES = (
    select(schema.annotations)
    .join(schema.episodes, (_EPISODES.id == _ROWS.episode_id) & (_EPISODES.attempt == _ROWS.attempt))
    .where(_ROWS.episode_id.in_(bindparam("episodes", expanding=True)))
    .order_by(_ROWS.id)
)


@transaction
def add_annotations(tx: Connection, episode: int, attempt: int, annotations: Sequence[Annotation]) -> None:
    """Write annotations of the episode's attempt. Annotations that are already stored are not written again. Raise StateError
    if the episode has ended, or has a newer attempt. Raise ConflictError if the attempt would have too many annotations, or an
    annotation names a step that does not exist yet.
    """
    current = select(_EPISODES.attempt, _EPISODES.status, schema.runs.c.name).where(_EPISODES.id == episode)
    row = tx.execute(current.join(schema.runs, schema.runs.c.id == _EPISODES.run_id)).one_or_none()
    if row is None or row.attempt != attempt or row.status not in OPEN:
        raise StateError("This episode has ended, or has a newer attempt.")
    mine = (_ROWS.episode_id == episode) & (_ROWS.attempt == attempt)
    count = tx.execute(select(func.count()).select_from(schema.annotations).where(mine)).scalar_one()
    if count + len(annotations) > MAX_OF_ATTEMPT:
        raise ConflictError(f"An episode has at most {MAX_OF_ATTEMPT} annotations; this request would exceed that.")
    newest = select(func.max(_STEPS.number)).where(_STEPS.episode_id == episode, _STEPS.attempt == attempt)
    step = tx.execute(newest).scalar_one()
    for annotation in annotations:
        if annotation.step is not None and (step is None or annotation.step > step):
            raise ConflictError(f"The episode has no step {annotation.step} yet: steps are counted from 0.")
    insert_annotations(tx, episode, attempt, step, row.name, annotations)


@transaction
def note_annotations(tx: Connection, fence: Fence, episode: int, steps: int, annotations: Sequence[Annotation]) -> None:
    """Write annotations as the worker that holds the episode's group. Annotations that are already stored are not written
    again. `steps` is the number of steps so far. An annotation that names no step is assigned to the last of these steps. Raise
    Fenced if another worker holds the group.
    """
    held = check_claim(tx, fence)
    insert_annotations(tx, episode, held.attempts[episode], steps - 1 if steps else None, held.run, annotations)


def insert_annotations(
    tx: Connection, episode: int, attempt: int, step: int | None, run: str, annotations: Sequence[Annotation]
) -> None:
    """Insert the annotations that are not stored yet. An annotation that names no step is assigned to `step`."""
    of_all = {"episode_id": episode, "attempt": attempt, "run": run}
    rows = [
        {
            **of_all,
            "source": annotation.source,
            "step": step if annotation.step is None else annotation.step,
            **_row(annotation),
        }
        for annotation in annotations
    ]
    keys = ["episode_id", "attempt", "emission"]
    if rows:  # without rows SQLAlchemy would insert a row of defaults
        tx.execute(insert(tx, schema.annotations).on_conflict_do_nothing(index_elements=keys), rows)


@read_transaction
def load_annotations(tx: Connection, episodes: Sequence[int]) -> dict[int, tuple[Annotation, ...]]:
    """Return the annotations of the episodes' current attempts, in order, by episode id. Episodes without annotations are left
    out.
    """
    return annotations_of(tx, episodes)


def annotations_of(tx: Connection, episodes: Sequence[int]) -> dict[int, tuple[Annotation, ...]]:
    """Return the annotations of each episode, read in the transaction `tx`. See `load_annotations`."""
    annotations: dict[int, tuple[Annotation, ...]] = {}
    for row in tx.execute(_OF_EPISODES, {"episodes": list(episodes)}).mappings():
        annotations[row["episode_id"]] = (*annotations.get(row["episode_id"], ()), annotation_value(row))
    return annotations


def annotation_rows(annotations: Sequence[Annotation]) -> list[dict[str, Any]]:
    """Encode the annotations of a tool as JSON values for the row of the tool's call."""
    return [_row(annotation) for annotation in annotations]


def tools_annotations(rows: Sequence[Mapping[str, Any]] | None) -> tuple[Annotation, ...]:
    """Decode the annotations of a tool from the JSON values in the row of the tool's call."""
    return tuple(annotation_value({"step": None, "source": "tool", **row}) for row in rows or ())


def _row(annotation: Annotation) -> dict[str, Any]:
    return {
        "emission": annotation.id,
        "kind": annotation.kind,
        "name": storable(annotation.name),
        "data": clean_tree(dict(annotation.data)),
        "seconds": annotation.seconds,
    }

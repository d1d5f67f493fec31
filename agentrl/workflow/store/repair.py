"""Repair of a published checkpoint. The checkpoint is marked as broken and rebuilt from the previous version. Then all rows
with its path are changed to the path of the rebuilt checkpoint.

Version k was made from version k - 1 and the recorded episodes of iteration k, so the same update makes version k again. The
fence is the train token of the run's open iteration. The state of episodes, consumptions and iterations does not change.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Select, func, select, update

from agentrl.workflow.errors import Fenced
from agentrl.workflow.store.connect import read_transaction, transaction
from agentrl.workflow.store.iterations import wanted_groups
from agentrl.workflow.store.planning import log, newest_version, select_sampled_policies
from agentrl.workflow.store.train_claims import IterationWork
from agentrl.workflow.store.training_groups import load_groups
from agentrl.workflow.tables import schema
from agentrl.workflow.tables.columns import now_ms
from agentrl.workflow.trajectory import OPEN, Group, PolicyRef, storable


@dataclass(frozen=True)
class Rebuild:
    """The inputs of the update that made a broken checkpoint.

    Args:
        start: the policy with which the update started.
        groups: the groups on which the update trained; empty if the checkpoint came from another run.
        advantages: the advantages that the update recorded, by episode id.
    """

    broken: PolicyRef
    start: PolicyRef
    groups: tuple[Group, ...]
    advantages: Mapping[int, float]
    max_groups: int = 0


@transaction
def mark_broken(tx: Connection, run_id: int, path: str, fault: str) -> int | None:
    """Mark the checkpoint as broken, so the run does not use it until it is rebuilt.

    A run that does not train (such as an evaluation) waits for the run that made the checkpoint, if that run is running.

    An outdated report changes nothing. A report is outdated in two cases: the checkpoint has already been rebuilt in another
    folder, or nobody needs its version (it is not the newest, and no open group samples with it).

    Args:
        path: the checkpoint's path.
        fault: what is wrong with the checkpoint.

    Returns:
        The id of the iteration whose train job rebuilds the checkpoint; None if no run rebuilds it.
    """
    policies = schema.policies.c
    kind = tx.execute(select(schema.runs.c.kind).where(schema.runs.c.id == run_id)).scalar_one()
    if kind == "train" or not tx.execute(select(policies.id).where(policies.run_id == run_id, policies.path == path)).first():
        return _mark(tx, run_id, path, fault)  # its own; or it was made again meanwhile, elsewhere
    maker = _find_maker(tx, path)
    if maker is None or (maker["kind"], maker["status"]) != ("train", "running"):
        return None
    return _mark(tx, maker["id"], path, fault) if tx.execute(_select_needed_path(maker["id"], path)).first() else None


def _mark(tx: Connection, run_id: int, path: str, fault: str) -> int | None:
    # Locked, as by the commit of an update: one of the two sees the other.
    tx.execute(select(schema.runs.c.kind).where(schema.runs.c.id == run_id).with_for_update(key_share=True)).one()
    policies = schema.policies.c
    marked = tx.execute(
        update(schema.policies)
        .where(policies.run_id == run_id, policies.path.in_(_select_needed_path(run_id, path)), policies.broken == "")
        .values(broken=storable(fault))
        .returning(policies.version)
    ).scalars()
    for version in sorted(marked)[:1]:
        log(tx, run_id, "checkpoint_broken", f"version {version}", fault)
    waiting = select(schema.iterations.c.id).where(schema.iterations.c.run_id == run_id, schema.iterations.c.status.in_(OPEN))
    return tx.execute(waiting.order_by(schema.iterations.c.number).limit(1)).scalar_one_or_none()


def _select_needed_path(run_id: int, path: str) -> Select[tuple[str]]:
    """Select the path if it is the newest version's, or open groups of the training run sample with it."""
    policies = schema.policies.c
    used = (policies.version == newest_version(run_id)) | policies.id.in_(select_sampled_policies(run_id))
    return select(policies.path).where(policies.run_id == run_id, policies.path == path, used)


def _find_maker(tx: Connection, path: str) -> Mapping[str, Any] | None:
    """Return the run that first published the checkpoint; None if it was rebuilt elsewhere meanwhile."""
    publishers = (
        select(schema.runs)
        .join(schema.policies, schema.policies.c.run_id == schema.runs.c.id)
        .where(schema.policies.c.path == path)
    )
    row = tx.execute(publishers.order_by(schema.policies.c.id).limit(1)).mappings().one_or_none()
    return dict(row) if row else None


@read_transaction
def recovery_hint(tx: Connection, run: str, path: str) -> str:
    """Return advice for a run that does not train and that failed because of a broken checkpoint."""
    maker = _find_maker(tx, path)
    if maker is None:
        return f"It was rebuilt in another folder: type `agentrl resume {run}`."
    if (
        maker["status"] in ("paused", "failed")
        and maker["kind"] == "train"
        and tx.execute(_select_needed_path(maker["id"], path)).first()
    ):
        return f"`agentrl resume {maker['name']}` rebuilds it, then type `agentrl resume {run}`."
    return f"Put the files back and type `agentrl resume {run}`."


@read_transaction
def load_rebuild(tx: Connection, work: IterationWork) -> Rebuild:
    """Return the inputs for rebuilding the claimed run's first broken checkpoint."""
    mine = select(schema.policies).where(schema.policies.c.run_id == work.run_id)
    row = tx.execute(mine.where(schema.policies.c.broken != "").order_by(schema.policies.c.version).limit(1)).one()
    broken = _policy_ref(work, row)
    before = tx.execute(mine.where(schema.policies.c.version == row.version - 1)).one_or_none()
    source = select(schema.iterations.c.id).where(
        schema.iterations.c.run_id == work.run_id, schema.iterations.c.number == row.version - 1
    )
    iteration = tx.execute(source).scalar_one_or_none()
    if before is None or iteration is None:
        return Rebuild(broken, broken, (), {})
    consumed = select(schema.consumptions.c.episode_id, schema.consumptions.c.advantage)
    recorded = tx.execute(consumed.where(schema.consumptions.c.iteration_id == iteration)).all()
    reward_set = tx.execute(select(schema.runs.c.reward_set).where(schema.runs.c.id == work.run_id)).scalar_one()
    groups = load_groups(tx, iteration, reward_set)
    advantages = {row.episode_id: row.advantage for row in recorded}
    return Rebuild(broken, _policy_ref(work, before), groups, advantages, wanted_groups(tx, iteration, work.config))


@read_transaction
def list_versions_before(tx: Connection, run_id: int, version: int) -> list[tuple[int, str, str]]:
    """Return the run's policies that are older than `version` and still have their files, as (version, path, sha256), newest
    first.
    """
    policies = schema.policies.c
    query = select(policies.version, policies.path, policies.sha256)
    query = query.where(policies.run_id == run_id, policies.version < version, policies.collected_at.is_(None))
    return [tuple(row) for row in tx.execute(query.order_by(policies.version.desc()))]


@transaction
def commit_rebuild(tx: Connection, work: IterationWork, broken: PolicyRef, path: str, sha256: str) -> None:
    """Replace the path and hash of the broken checkpoint by those of the rebuilt one, in all rows of `policies`. Release the
    iteration. Raise Fenced if another trainer holds the iteration.
    """
    handed_back = tx.execute(
        update(schema.iterations)
        .where(
            schema.iterations.c.id == work.id,
            schema.iterations.c.train_token == work.token,
            schema.iterations.c.status.in_(OPEN),
        )
        .values(lease_until=now_ms() - 1, worker="")
    )
    if _is_whole_again(tx, work, path):
        return  # this commit's answer was lost; another trainer may have claimed the iteration since
    if not handed_back.rowcount:
        raise Fenced(f"Version {broken.version} of {work.run} is being rebuilt by another trainer.")
    # Sent again at once: the messages that came meanwhile were refused, those of its evaluations too.
    users = select(schema.policies.c.run_id).where(schema.policies.c.path == broken.path)
    waiting = (schema.groups.c.run_id == work.run_id) | schema.groups.c.run_id.in_(users)
    tx.execute(update(schema.groups).where(waiting, schema.groups.c.status.in_(OPEN)).values(sent_ms=None))
    updated = tx.execute(
        update(schema.policies).where(schema.policies.c.path == broken.path).values(path=path, sha256=sha256, broken="")
    )
    if updated.rowcount:  # else another run that has the same checkpoint has made it again
        log(tx, work.run_id, "checkpoint_rebuilt", f"version {broken.version}", _describe_rebuild(broken, path, sha256))


def _is_whole_again(tx: Connection, work: IterationWork, path: str) -> bool:
    policies = schema.policies.c
    # Of all rows that name it: an update skipped since it was found broken has published it once more, without a mark.
    marks = select(func.max(policies.broken)).where(policies.run_id == work.run_id, policies.path == path)
    return bool(tx.execute(marks).scalar_one() == "")


@read_transaction
def is_checkpoint_named(tx: Connection, path: str) -> bool:
    """Return whether a row of `policies` has this checkpoint path."""
    return tx.execute(select(schema.policies.c.id).where(schema.policies.c.path == path).limit(1)).first() is not None


def _describe_rebuild(broken: PolicyRef, path: str, sha256: str) -> str:
    if path == broken.path:
        return "the folder is intact again"
    if sha256 == broken.sha256:
        return "from the version before it and the recorded episodes: bit for bit the same weights"
    return (
        "from the version before it and the recorded episodes: the weights differ in rounding from those that were published "
        f"(sha256 {broken.sha256[:12]}, now {sha256[:12]})"
    )


def _policy_ref(work: IterationWork, row: Any) -> PolicyRef:
    return PolicyRef(work.policy.base, work.policy.base_hash, row.path, row.sha256, row.version)

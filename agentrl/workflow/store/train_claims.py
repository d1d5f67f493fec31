"""Claims of iterations for training. If too few groups of an iteration have variance, more groups are planned instead.

The claim increments a token, and the commit checks that token (`train_commits`). So the commit of an outdated trainer is
rejected. The episodes are read after the claim's commit: to read many takes long, and the claim locks the iteration's row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection, func, select, update

from agentrl.workflow.runtime.shown_text import format_count
from agentrl.workflow.stats.group_variance import groups_to_plan, varies
from agentrl.workflow.store.connect import read_transaction, skip_flush, transaction
from agentrl.workflow.store.episode_loader import members_of
from agentrl.workflow.store.iterations import dynamic_sampling_of, insert_more_groups, wanted_groups
from agentrl.workflow.store.leases import memory_hint, note_takeover
from agentrl.workflow.store.planning import is_broken, log, newest_version, set_run_status
from agentrl.workflow.store.rollout_claims import MAX_LOSSES
from agentrl.workflow.store.run_format import supports_format
from agentrl.workflow.store.training_groups import load_groups
from agentrl.workflow.tables import schema
from agentrl.workflow.tables.columns import is_lease_free, now_ms
from agentrl.workflow.trajectory import OPEN, Group, PolicyRef, storable


@dataclass(frozen=True)
class IterationWork:
    """The data that a train job needs of one iteration.

    `policy` is the policy with which the update starts, including its optimizer state. `key` distinguishes the checkpoints of
    this run from those of other runs. `groups` is empty until `load_work` has read the groups. If `rebuilds` is True, the run's
    broken checkpoint must be rebuilt first, and `groups` stays empty. With dynamic sampling, only groups with variance are
    trained on (`choose_groups`), at most `max_groups` of them. Without dynamic sampling, all groups are trained on, and
    `max_groups` is 0. `iterations` is the run's number of iterations.
    """

    id: int
    token: int
    run_id: int
    run: str
    kind: str
    config: Mapping[str, Any]
    seed: int
    number: int
    policy: PolicyRef
    output_dir: str
    key: str
    groups: tuple[Group, ...]
    rebuilds: bool = False
    max_groups: int = 0
    iterations: int = 0

    @property
    def iteration(self) -> int:
        """The iteration's number, counted from 1. It is also the version of the policy that the update makes."""
        return self.number + 1


@dataclass(frozen=True, slots=True)
class MoreGroupsPlanned:
    """The result of a claim that failed because too few groups have different rewards. More groups were planned; the caller
    must send them to workers.
    """

    iteration: int
    varied: int
    groups: int
    more: int


@transaction
def claim_iteration(
    tx: Connection, iteration: int, worker: str, lease_seconds: float
) -> IterationWork | MoreGroupsPlanned | None:
    """Claim the iteration; `load_work` then loads its episodes. Return None if the iteration is not ready, has ended or is
    claimed, or if its run is not running or has a format that this agentrl does not support.

    An iteration is ready if all of its groups have ended and the policy with which its update starts is published. With dynamic
    sampling, more groups are planned if too few have variance, even before that policy is published.

    If fewer than half of the planned episodes are done, the run is paused with that reason, and None is returned.
    """
    row = _lock_ready_iteration(tx, iteration, worker, lease_seconds)
    if row is None:
        return None
    published = row["number"] <= row["newest"]
    if not row["broken"]:
        ended = _count_by_status(tx, iteration)
        done = ended.get("done", 0)
        if row["kind"] in ("train", "search") and 2 * done < row["episodes"] and row["too_few"] != "accepted":
            if published:
                _pause_run(tx, row, _too_few_reason(ended, row["episodes"]))
            return None
        if row["kind"] == "train" and dynamic_sampling_of(row["config"]) > 1 and row["too_few"] != "accepted":
            rewards = _load_group_rewards(tx, iteration)
            if rewards is None:
                return None
            more = _plan_more_groups(tx, row, rewards)
            if more is not None:
                return more
    return _take_lease(tx, row, worker, lease_seconds) if published else None


def _lock_ready_iteration(tx: Connection, iteration: int, worker: str, lease_seconds: float) -> Mapping[str, Any] | None:
    """Lock the iteration and return its row with columns of its run; None if the worker may not claim the iteration.

    `newest` is the newest published version of the run.
    """
    iterations, runs = schema.iterations, schema.runs
    open_groups = (
        select(func.count())
        .where(schema.groups.c.iteration_id == iteration, schema.groups.c.status.in_(OPEN))
        .scalar_subquery()
    )
    query = (
        select(iterations, runs.c.name, runs.c.kind, runs.c.config, runs.c.seed, runs.c.base, runs.c.base_hash)
        .add_columns(runs.c.output_dir, runs.c.manifest, runs.c.format, is_broken(runs.c.id).label("broken"))
        .add_columns(newest_version(runs.c.id).label("newest"), runs.c.iterations.label("planned"))
        .join(runs, runs.c.id == iterations.c.run_id)
        .where(iterations.c.id == iteration, iterations.c.status.in_(OPEN), runs.c.status == "running")
        .where((open_groups == 0) | is_broken(runs.c.id))
        .where(is_lease_free(iterations.c.lease_until, lease_seconds) | (iterations.c.worker == worker))
        .with_for_update(of=iterations)
    )
    row = tx.execute(query).mappings().one_or_none()
    return dict(row) if row and supports_format(row["name"], row["format"]) else None


def _pause_run(tx: Connection, row: Mapping[str, Any], reason: str) -> None:
    tx.execute(update(schema.iterations).where(schema.iterations.c.id == row["id"]).values(too_few="paused"))
    set_run_status(tx, row["run_id"], "paused", f"iteration {row['number'] + 1}: {reason}")


def _count_by_status(tx: Connection, iteration: int) -> dict[str, int]:
    column = schema.episodes.c.status
    query = select(column, func.count()).where(members_of(iteration)).group_by(column).order_by(column)
    return {row[0]: row[1] for row in tx.execute(query)}


def _too_few_reason(ended: Mapping[str, int], planned: int) -> str:
    """Return, for example, "none of the 4 episodes can train: 3 failed, 1 infra_error"."""
    done = ended.get("done", 0)
    others = ", ".join(f"{count} {status}" for status, count in ended.items() if status != "done")
    some = f"{f'only {done}' if done else 'none'} of the {format_count(planned, 'episode')}"
    return f"{some} can train" + (f": {others}" if others else "")


def _load_group_rewards(tx: Connection, iteration: int) -> list[list[float]] | None:
    """Return the rewards of the trainable episodes of each group; None if a group has not ended.

    The caller has locked the iteration. So the second of two concurrent claims sees the groups that the first claim planned.
    """
    groups, episodes = schema.groups.c, schema.episodes.c
    rows = tx.execute(select(groups.id, groups.status).where(groups.iteration_id == iteration)).all()
    if any(row.status in OPEN for row in rows):
        return None
    rewards: dict[int, list[float]] = {row.id: [] for row in rows}
    trainable = (episodes.status == "done", episodes.reward.is_not(None), ~episodes.tainted)
    for row in tx.execute(select(episodes.group_id, episodes.reward).where(episodes.iteration_id == iteration, *trainable)):
        rewards[row.group_id].append(row.reward)
    return list(rewards.values())


def _plan_more_groups(tx: Connection, row: Mapping[str, Any], rewards: Sequence[Sequence[float]]) -> MoreGroupsPlanned | None:
    varied, planned = sum(map(varies, rewards)), len(rewards)
    more = groups_to_plan(varied, planned - row["more_groups"], planned, dynamic_sampling_of(row["config"]))
    if not more:
        return None
    # Locked: what cancels or pauses the run meanwhile comes before this, or sees all of it.
    run = (
        tx.execute(select(schema.runs).where(schema.runs.c.id == row["run_id"]).with_for_update(key_share=True))
        .mappings()
        .one()
    )
    if run["status"] != "running":
        return None
    insert_more_groups(tx, run, row, planned, more)
    with_variance = f"{varied} of {format_count(planned, 'group')} {'has' if varied == 1 else 'have'} variance"
    detail = f"{with_variance}; {more} more {'is' if more == 1 else 'are'} sampled"
    log(tx, row["run_id"], "sampling_on", f"iteration {row['number'] + 1}", detail)
    return MoreGroupsPlanned(row["id"], varied, planned, more)


def _take_lease(tx: Connection, row: Mapping[str, Any], worker: str, lease_seconds: float) -> IterationWork | None:
    lost = row["worker"] not in ("", worker)
    if lost:
        seen = (row["lease_until"] or 0) - int(lease_seconds * 1000)
        note_takeover(tx, row["run_id"], row["worker"], f"iteration {row['number'] + 1}", worker, seen)
    losses = row["losses"] + lost
    if losses >= MAX_LOSSES:
        hint = memory_hint(tx, row["run_id"], row["worker"])
        set_run_status(tx, row["run_id"], "failed", f"iteration {row['number'] + 1}: its trainer was lost {losses} times{hint}")
        return None
    token = tx.execute(
        update(schema.iterations)
        .where(schema.iterations.c.id == row["id"])
        .values(
            train_token=schema.iterations.c.train_token + 1,
            worker=worker,
            losses=losses,
            lease_until=now_ms() + int(lease_seconds * 1000),
        )
        .returning(schema.iterations.c.train_token)
    ).scalar_one()
    return IterationWork(
        id=row["id"],
        token=token,
        run_id=row["run_id"],
        run=row["name"],
        kind=row["kind"],
        config=row["config"],
        seed=row["seed"],
        number=row["number"],
        policy=_load_newest_policy(tx, row["run_id"], row["base"], row["base_hash"]),
        output_dir=row["output_dir"],
        key=row["manifest"].get("id", "")[:8],
        groups=(),
        rebuilds=row["broken"],
        iterations=row["planned"],
        max_groups=wanted_groups(tx, row["id"], row["config"]),
    )


@read_transaction
def load_work(tx: Connection, work: IterationWork) -> IterationWork:
    """Return the work of a claim with the iteration's groups and their episodes."""
    if work.rebuilds:
        return work
    reward_set = tx.execute(select(schema.runs.c.reward_set).where(schema.runs.c.id == work.run_id)).scalar_one()
    return replace(work, groups=load_groups(tx, work.id, reward_set))


def _load_newest_policy(tx: Connection, run_id: int, base: str, base_hash: str) -> PolicyRef:
    latest = (
        select(schema.policies).where(schema.policies.c.run_id == run_id).order_by(schema.policies.c.version.desc()).limit(1)
    )
    row = tx.execute(latest).one()
    return PolicyRef(base, base_hash, row.path, row.sha256, row.version)


@transaction
def extend_lease(tx: Connection, iteration: int, token: int, lease_seconds: float) -> bool:
    """Renew the trainer's lease. Return False if the trainer no longer holds the iteration, or if the iteration has ended."""
    skip_flush(tx)
    extended = tx.execute(
        update(schema.iterations)
        .where(schema.iterations.c.id == iteration, schema.iterations.c.train_token == token, schema.iterations.c.worker != "")
        .where(schema.iterations.c.status.in_(OPEN))
        .values(lease_until=now_ms() + int(lease_seconds * 1000))
    )
    return bool(extended.rowcount)


@transaction
def hand_back_iteration(tx: Connection, iteration: int, token: int) -> None:
    """Release the trainer's claim early. No loss is counted."""
    tx.execute(
        update(schema.iterations)
        .where(
            schema.iterations.c.id == iteration, schema.iterations.c.train_token == token, schema.iterations.c.status.in_(OPEN)
        )
        .values(lease_until=now_ms() - 1, worker="")
    )


@transaction
def fail_update(tx: Connection, work: IterationWork, error: str, max_attempts: int) -> None:
    """Record a system failure of the update, and release the iteration. At `max_attempts` failures the run fails."""
    failed = tx.execute(
        update(schema.iterations)
        .where(
            schema.iterations.c.id == work.id,
            schema.iterations.c.train_token == work.token,
            schema.iterations.c.status.in_(OPEN),
        )
        .where(schema.iterations.c.worker != "")  # else this very failure is written already, and only the answer was lost
        .values(losses=schema.iterations.c.losses + 1, lease_until=now_ms() - 1, worker="")
        .returning(schema.iterations.c.losses)
    ).scalar_one_or_none()
    if failed is None:
        return
    log(tx, work.run_id, "update_failed", f"iteration {work.iteration}", storable(error))
    if failed >= max_attempts:
        set_run_status(tx, work.run_id, "failed", f"iteration {work.iteration}: {error}")

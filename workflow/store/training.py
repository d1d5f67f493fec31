"""Iterations are claimed for training, updates committed, policies published: all of it or nothing, and only once.

The token counted up at the claim and checked at the commit fences a second trainer out. Only the commit publishes: the
checkpoint's files are there before it, and mean nothing without it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, func, select, update

from workflow import db
from workflow.db import now_ms
from workflow.errors import Fenced, ModelError
from workflow.evaluate import Score
from workflow.store.connect import insert, reading, transaction
from workflow.store.groups import load_groups
from workflow.store.iterations import insert_iteration, staleness_of
from workflow.store.planning import is_broken, log, newest_version, still_read
from workflow.store.rollout import MAX_LOSSES, memory_hint
from workflow.store.rows import clean, members_of
from workflow.trajectory import OPEN, Group, PolicyRef


@dataclass(frozen=True)
class IterationWork:
    """All that a train job needs of one iteration.

    `policy` is what the update starts from, with its optimizer state; `key` tells this run's checkpoints from all others. With
    `rebuilds` the run's checkpoint is to be made again first, and there are no groups yet.
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


@dataclass(frozen=True)
class UpdateRecord:
    """What an update leaves behind.

    Args:
        metrics: one mapping per optimizer step; those of `db.UPDATE_METRICS`, `rows` and `tokens` are kept.
        advantages: episode id -> advantage, for the episodes that were consumed.
        dropped: slot -> why its group did not train.
        path, sha256: the new checkpoint; empty if the update was skipped.
        skipped: why no step was taken; empty if one was.
        bad: the skip came from a NaN or Inf, and counts towards the run's failure.
        seconds: of the update.
    """

    metrics: Sequence[Mapping[str, float]]
    advantages: Mapping[int, float]
    dropped: Mapping[int, str] = field(default_factory=dict)
    path: str = ""
    sha256: str = ""
    skipped: str = ""
    bad: bool = False
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Published:
    """The policy version that the commit published, and what may start with it: an iteration to roll out, one to train.

    Without staleness `trains` is None: what is trained next must be rolled out first.
    """

    version: int
    next_iteration: int | None
    trains: int | None = None


@transaction
def claim_iteration(tx: Connection, iteration: int, worker: str, lease_seconds: float) -> IterationWork | None:
    """Takes the iteration's lease and loads its episodes; None if it is not ready, over, held, or its run is not running.

    It is ready when all of its groups are terminal and the policy is published that its update starts from.

    With fewer than half of the planned episodes done the run is paused instead, and says why.
    """
    row = _claimable(tx, iteration, worker, lease_seconds)
    if row is None:
        return None
    done = tx.execute(select(func.count()).where(members_of(iteration), db.episodes.c.status == "done")).scalar_one()
    if row["kind"] == "train" and not row["broken"] and 2 * done < row["episodes"] and row["too_few"] != "accepted":
        tx.execute(update(db.iterations).where(db.iterations.c.id == iteration).values(too_few="paused"))
        reason = f"iteration {row['number']}: only {done} of {row['episodes']} episodes can train"
        _set_run(tx, row["run_id"], "paused", reason)
        return None
    losses = row["losses"] + (1 if row["worker"] not in ("", worker) else 0)
    if losses >= MAX_LOSSES:
        hint = memory_hint(tx, row["run_id"], row["worker"])
        _set_run(tx, row["run_id"], "failed", f"iteration {row['number']}: its trainer was lost {losses} times{hint}")
        return None
    token = tx.execute(
        update(db.iterations)
        .where(db.iterations.c.id == iteration)
        .values(
            train_token=db.iterations.c.train_token + 1,
            worker=worker,
            losses=losses,
            lease_until=now_ms() + int(lease_seconds * 1000),
        )
        .returning(db.iterations.c.train_token)
    ).scalar_one()
    return IterationWork(
        id=iteration,
        token=token,
        run_id=row["run_id"],
        run=row["name"],
        kind=row["kind"],
        config=row["config"],
        seed=row["seed"],
        number=row["number"],
        policy=_published(tx, row["run_id"], row["base"], row["base_hash"]),
        output_dir=row["output_dir"],
        key=row["manifest"].get("id", "")[:8],
        groups=() if row["broken"] else load_groups(tx, iteration, row["reward_set"]),
        rebuilds=row["broken"],
    )


def _claimable(tx: Connection, iteration: int, worker: str, lease_seconds: float) -> Mapping[str, Any] | None:
    iterations, runs = db.iterations, db.runs
    open_groups = (
        select(func.count()).where(db.groups.c.iteration_id == iteration, db.groups.c.status.in_(OPEN)).scalar_subquery()
    )
    query = (
        select(iterations, runs.c.name, runs.c.kind, runs.c.config, runs.c.seed, runs.c.base, runs.c.base_hash)
        .add_columns(runs.c.output_dir, runs.c.manifest, runs.c.reward_set, is_broken(runs.c.id).label("broken"))
        .join(runs, runs.c.id == iterations.c.run_id)
        .where(iterations.c.id == iteration, iterations.c.status.in_(OPEN), runs.c.status == "running")
        .where((open_groups == 0) | is_broken(runs.c.id), iterations.c.number <= newest_version(runs.c.id))
        .where(db.free(iterations.c.lease_until, lease_seconds) | (iterations.c.worker == worker))
        .with_for_update(of=iterations)
    )
    row = tx.execute(query).mappings().one_or_none()
    return dict(row) if row else None


def _published(tx: Connection, run_id: int, base: str, base_hash: str) -> PolicyRef:
    latest = select(db.policies).where(db.policies.c.run_id == run_id).order_by(db.policies.c.version.desc()).limit(1)
    row = tx.execute(latest).one()
    return PolicyRef(base, base_hash, row.path, row.sha256, row.version)


@transaction
def extend_lease(tx: Connection, iteration: int, token: int, lease_seconds: float) -> bool:
    """The trainer's heartbeat; False if another trainer holds the iteration, or it is over."""
    extended = tx.execute(
        update(db.iterations)
        .where(db.iterations.c.id == iteration, db.iterations.c.train_token == token, db.iterations.c.worker != "")
        .where(db.iterations.c.status.in_(OPEN))
        .values(lease_until=now_ms() + int(lease_seconds * 1000))
    )
    return bool(extended.rowcount)


@transaction
def hand_back_iteration(tx: Connection, iteration: int, token: int) -> None:
    """Ends the trainer's claim before its time, without counting a loss."""
    tx.execute(
        update(db.iterations)
        .where(db.iterations.c.id == iteration, db.iterations.c.train_token == token, db.iterations.c.status.in_(OPEN))
        .values(lease_until=now_ms() - 1, worker="")
    )


@transaction
def fail_update(tx: Connection, work: IterationWork, error: str, max_attempts: int) -> None:
    """Hands the iteration back after a failure of the system; the run fails with the last of `max_attempts`."""
    failed = tx.execute(
        update(db.iterations)
        .where(db.iterations.c.id == work.id, db.iterations.c.train_token == work.token, db.iterations.c.status.in_(OPEN))
        .where(db.iterations.c.worker != "")  # else this very failure is written already, and only the answer was lost
        .values(losses=db.iterations.c.losses + 1, lease_until=now_ms() - 1, worker="")
        .returning(db.iterations.c.losses)
    ).scalar_one_or_none()
    if failed is None:
        return
    log(tx, work.run_id, "update_failed", f"iteration {work.number}", clean(error))
    if failed >= max_attempts:
        _set_run(tx, work.run_id, "failed", f"iteration {work.number}: {error}")


@transaction
def commit_update(tx: Connection, work: IterationWork, record: UpdateRecord, max_bad_updates: int) -> Published:
    """One commit: iteration done, episodes consumed, policy published, the iteration that samples with it planned.

    Raises:
        Fenced: another trainer holds the iteration, or it is over; what was computed is discarded.
    """
    committed = _committed(tx, work)
    if committed is not None:
        return committed
    _close_iteration(tx, work, record)
    if record.metrics:
        columns = ("rows", "tokens", *db.UPDATE_METRICS)
        rows = [
            {"run_id": work.run_id, "iteration_id": work.id, "minibatch": i} | {name: step.get(name) for name in columns}
            for i, step in enumerate(record.metrics)
        ]
        tx.execute(db.updates.insert(), rows)
    if record.advantages:
        tx.execute(
            db.consumptions.insert(),
            [
                {"run_id": work.run_id, "iteration_id": work.id, "episode_id": episode, "advantage": advantage}
                for episode, advantage in record.advantages.items()
            ],
        )
    for slot, reason in record.dropped.items():
        for table in (db.groups, db.iteration_groups):
            tx.execute(update(table).where(table.c.iteration_id == work.id, table.c.slot == slot).values(dropped=reason))
    policy_id = _publish(tx, work, record)
    return _go_on(tx, work, record, policy_id, max_bad_updates)


def _committed(tx: Connection, work: IterationWork) -> Published | None:
    """What this very claim has published already: then the commit's answer was lost, not the commit."""
    mine = select(db.iterations.c.id).where(
        db.iterations.c.id == work.id, db.iterations.c.train_token == work.token, db.iterations.c.status == "done"
    )
    if tx.execute(mine).first() is None:
        return None
    return _published_by(tx, work)


def _published_by(tx: Connection, work: IterationWork) -> Published:
    """What the commit of that work published, as far as its run is running."""
    iterations, following = db.iterations.c, work.number + 1 + staleness_of(work.config)
    of_run = select(iterations.id).join(db.runs, db.runs.c.id == iterations.run_id)
    of_run = of_run.where(iterations.run_id == work.run_id, iterations.status.in_(OPEN), db.runs.c.status == "running")
    rolls_out = tx.execute(of_run.where(iterations.number == following)).scalar_one_or_none()
    open_groups = select(db.groups.c.iteration_id).where(db.groups.c.run_id == work.run_id, db.groups.c.status.in_(OPEN))
    ready = of_run.where(iterations.number == work.number + 1, iterations.id.not_in(open_groups))
    trains = tx.execute(ready).scalar_one_or_none()
    return Published(work.number + 1, rolls_out, None if trains == rolls_out else trains)


def _close_iteration(tx: Connection, work: IterationWork, record: UpdateRecord) -> None:
    closed = tx.execute(
        update(db.iterations)
        .where(db.iterations.c.id == work.id, db.iterations.c.train_token == work.token, db.iterations.c.status.in_(OPEN))
        .values(
            status="done",
            lease_until=None,
            skipped=record.skipped,
            dropped_groups=len(record.dropped),
            trainable=sum(episode.trainable for group in work.groups for episode in group.episodes),
            update_seconds=record.seconds,
            finished_at=datetime.now(UTC),
            **_sums(tx, work),
        )
    )
    if not closed.rowcount:
        raise Fenced(f"Iteration {work.number} of {work.run} is no longer held by train token {work.token}.")


def _sums(tx: Connection, work: IterationWork) -> dict[str, Any]:
    episodes = db.episodes.c
    summed = ("prompt_tokens", "sampled_tokens", "tool_calls", "tool_errors")
    row = tx.execute(
        select(
            # Stored episodes were rolled out before the iteration began.
            func.max(episodes.finished_at, type_=db.Utc()).filter(episodes.iteration_id == work.id).label("rolled_out_at"),
            *(func.coalesce(func.sum(episodes[name]), 0).label(name) for name in summed),
        ).where(members_of(work.id))
    )
    done = [e.reward for group in work.groups for e in group.episodes if e.status == "done" and e.reward is not None]
    return {**row.mappings().one(), "mean_reward": sum(done) / len(done) if done else None}


def _publish(tx: Connection, work: IterationWork, record: UpdateRecord) -> int:
    ref = work.policy
    trained = bool(record.path)
    policy_id: int = tx.execute(
        db.policies.insert()
        .values(
            run_id=work.run_id,
            version=work.number + 1,
            kind="trained" if trained else "alias",
            path=record.path if trained else ref.path,
            sha256=record.sha256 if trained else ref.sha256,
        )
        .returning(db.policies.c.id)
    ).scalar_one()
    return policy_id


def _go_on(tx: Connection, work: IterationWork, record: UpdateRecord, policy_id: int, max_bad: int) -> Published:
    run = tx.execute(select(db.runs).where(db.runs.c.id == work.run_id).with_for_update()).mappings().one()
    bad = run["bad_updates"] + 1 if record.bad else 0
    tx.execute(update(db.runs).where(db.runs.c.id == work.run_id).values(bad_updates=bad))
    tx.execute(  # marked while this update ran: unless something samples with it, the run has left it behind
        update(db.policies)
        .where(db.policies.c.run_id == work.run_id, db.policies.c.version <= work.number, db.policies.c.broken != "")
        .where(db.policies.c.path.not_in(still_read(work.run_id)))
        .values(broken="")
    )
    following = work.number + 1 + staleness_of(work.config)
    if following < run["iterations"]:
        insert_iteration(tx, work.run_id, following, policy_id)
    tx.execute(  # its train job may have come already, and was refused: it is sent again at once
        update(db.iterations)
        .where(db.iterations.c.run_id == work.run_id, db.iterations.c.number == work.number + 1)
        .values(train_sent_ms=None, train_sends=0)
    )
    if bad >= max_bad:
        _set_run(tx, work.run_id, "failed", f"{bad} updates in a row were skipped: {record.skipped}")
    elif work.number + 1 >= run["iterations"]:
        # Also a run that was failed meanwhile: nothing is left to resume.
        _set_run(tx, work.run_id, "done", "", (*OPEN, "paused", "failed"))
    return _published_by(tx, work)


@transaction
def finish_eval(tx: Connection, work: IterationWork, score: Score) -> None:
    """Ends an eval run with its score.

    Raises:
        Fenced: another worker holds the iteration.
    """
    _close_iteration(tx, work, UpdateRecord((), {}))
    tx.execute(
        insert(tx, db.evals)
        .values(
            run_id=work.run_id,
            policy=f"{work.policy.base}@{work.policy.path or 'base'}",
            dataset=work.config["dataset"]["name"],
            split=work.config["dataset"]["split"],
            episodes=score.episodes,
            errors=score.errors,
            # NULL where no episode was done: a NaN would compare as anything.
            **({"mean_reward": score.mean, "low": score.low, "high": score.high} if score.episodes else {}),
        )
        .on_conflict_do_nothing(index_elements=["run_id"])
    )
    _set_run(tx, work.run_id, "done", "")


@transaction
def finish_fork(tx: Connection, work: IterationWork) -> None:
    """Ends a fork run: its group is there to be looked at and trained on.

    Raises:
        Fenced: another worker holds the iteration.
    """
    _close_iteration(tx, work, UpdateRecord((), {}))
    _set_run(tx, work.run_id, "done", "")


@transaction
def confirm_base(tx: Connection, run: int, base_hash: str, chat_hashes: Mapping[str, str]) -> None:
    """Remembers at the first loading what the run's base is, and makes sure at each later one that it is the same.

    Args:
        chat_hashes: of the tokenizer and the chat template, kept in the manifest.

    Raises:
        ModelError: here the base, its tokenizer or its template is another.
    """
    row = tx.execute(select(db.runs).where(db.runs.c.id == run).with_for_update()).mappings().one()
    known = {name: row["manifest"].get(name, found) for name, found in chat_hashes.items()}
    if row["base_hash"] not in ("", base_hash) or known != dict(chat_hashes):
        raise ModelError(
            f"Run {row['name']!r} was made with base {row['base_hash'][:12]}, here {row['base']!r} is {base_hash[:12]}.",
            "Bring the same model here, or submit a new run.",
        )
    if row["base_hash"] == "" or not chat_hashes.keys() <= row["manifest"].keys():
        manifest = {**row["manifest"], **chat_hashes}
        tx.execute(update(db.runs).where(db.runs.c.id == run).values(base_hash=base_hash, manifest=manifest))


@reading
def optimizer_to_drop(tx: Connection, run: int, staleness: int = 0) -> str | None:
    """The checkpoint whose optimizer state no update can need any more.

    The newest keep it, those before it that are still sampled with, and the one that the oldest can be made again from.
    """
    trained = select(db.policies.c.path).where(db.policies.c.run_id == run, db.policies.c.kind == "trained")
    trained = trained.where(db.policies.c.version > 0)  # which a run that starts from another's policy has from there
    keep = 2 + staleness
    return tx.execute(trained.order_by(db.policies.c.version.desc()).offset(keep).limit(1)).scalar_one_or_none()


@transaction
def fail_run(tx: Connection, run: int, reason: str) -> None:
    """Ends the run as failed; `agentrl resume` takes it up again once the cause is mended."""
    _set_run(tx, run, "failed", reason)


def _set_run(tx: Connection, run_id: int, status: str, reason: str, leaving: Sequence[str] = (*OPEN, "paused")) -> None:
    over = datetime.now(UTC) if status in ("done", "failed") else None
    changed = tx.execute(
        update(db.runs)
        .where(db.runs.c.id == run_id, db.runs.c.status.in_(leaving))
        .values(status=status, reason=clean(reason), finished_at=over)
    )
    if changed.rowcount:
        log(tx, run_id, status, detail=reason)

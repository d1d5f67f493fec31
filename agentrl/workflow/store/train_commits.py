"""Commits that end an update, an evaluation or a run. Each commit happens completely or not at all, and only once.

The claim increments a token (`train_claims`), and the commit checks that token, so the commit of an outdated trainer is
rejected. Only the commit publishes a policy. The checkpoint's files are written before the commit, and no process uses them
until then.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

from sqlalchemy import Connection, func, select, update

from agentrl.workflow.errors import Fenced, ModelError
from agentrl.workflow.stats.evaluation import Score
from agentrl.workflow.store.connect import insert, read_transaction, transaction
from agentrl.workflow.store.episode_loader import members_of
from agentrl.workflow.store.evals import plan_eval, select_open_evals
from agentrl.workflow.store.iterations import insert_iteration, staleness_of
from agentrl.workflow.store.planning import resume_evals, select_sampled_paths, set_run_status
from agentrl.workflow.store.train_claims import IterationWork
from agentrl.workflow.tables import schema
from agentrl.workflow.tables.columns import Utc
from agentrl.workflow.trajectory import OPEN

NO_FACTS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class UpdateRecord:
    """The record of an update.

    Args:
        metrics: one mapping per optimizer step. Only `rows`, `tokens` and the names in `schema.UPDATE_METRICS` are stored.
        advantages: the advantage of each consumed episode, by episode id.
        dropped: the reason why a group was not trained on, by the group's slot.
        path, sha256: the path and hash of the new checkpoint; empty if the update was skipped.
        skipped: the reason why no optimizer step was taken; empty if a step was taken.
        bad: True if a NaN or Inf caused the skip. Repeated bad updates fail the run.
        seconds: the duration of the update, in seconds.
        costs: the values of the names in `schema.UPDATE_COSTS`.
    """

    metrics: Sequence[Mapping[str, float]]
    advantages: Mapping[int, float]
    dropped: Mapping[int, str] = field(default_factory=dict)
    path: str = ""
    sha256: str = ""
    skipped: str = ""
    bad: bool = False
    seconds: float = 0.0
    costs: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PublishedUpdate:
    """The policy version that the commit of an update published, and the work that can start next.

    `next_iteration` can be rolled out, and `trains` is an iteration that can be trained. Without staleness `trains` is None,
    because the next iteration must be rolled out first. `measured_by` has the ids of the iterations that evaluate the version.
    """

    version: int
    next_iteration: int | None
    trains: int | None = None
    measured_by: tuple[int, ...] = ()


@transaction
def commit_update(tx: Connection, work: IterationWork, record: UpdateRecord, max_bad_updates: int) -> PublishedUpdate:
    """Commit an update: end the iteration, consume its episodes, publish the policy, and plan the iteration that samples with
    that policy. Raise Fenced if another trainer holds the iteration, or the iteration has ended; the result of the update is
    then discarded.
    """
    committed = _find_own_commit(tx, work)
    if committed is not None:
        return committed
    close_iteration(tx, work, record)
    if record.metrics:
        columns = ("rows", "tokens", *schema.UPDATE_METRICS)
        rows = [
            {"run_id": work.run_id, "iteration_id": work.id, "minibatch": i} | {name: step.get(name) for name in columns}
            for i, step in enumerate(record.metrics)
        ]
        tx.execute(schema.updates.insert(), rows)
    if record.advantages:
        tx.execute(
            schema.consumptions.insert(),
            [
                {"run_id": work.run_id, "iteration_id": work.id, "episode_id": episode, "advantage": advantage}
                for episode, advantage in record.advantages.items()
            ],
        )
    for slot, reason in record.dropped.items():
        for table in (schema.groups, schema.iteration_groups):
            tx.execute(update(table).where(table.c.iteration_id == work.id, table.c.slot == slot).values(dropped=reason))
    policy_id = _publish(tx, work, record)
    return _plan_next_iteration(tx, work, record, policy_id, max_bad_updates)


def _find_own_commit(tx: Connection, work: IterationWork) -> PublishedUpdate | None:
    """Return the update that this claim has already committed, if the reply of that commit was lost; else None."""
    mine = select(schema.iterations.c.id).where(
        schema.iterations.c.id == work.id, schema.iterations.c.train_token == work.token, schema.iterations.c.status == "done"
    )
    if tx.execute(mine).first() is None:
        return None
    return _load_published(tx, work)


def _load_published(tx: Connection, work: IterationWork) -> PublishedUpdate:
    """Return the update that this claim committed. If the run is not running, the result names no work to start."""
    iterations, following = schema.iterations.c, work.number + 1 + staleness_of(work.config)
    of_run = select(iterations.id).join(schema.runs, schema.runs.c.id == iterations.run_id)
    of_run = of_run.where(iterations.run_id == work.run_id, iterations.status.in_(OPEN), schema.runs.c.status == "running")
    rolls_out = tx.execute(of_run.where(iterations.number == following)).scalar_one_or_none()
    open_groups = select(schema.groups.c.iteration_id).where(
        schema.groups.c.run_id == work.run_id, schema.groups.c.status.in_(OPEN)
    )
    ready = of_run.where(iterations.number == work.number + 1, iterations.id.not_in(open_groups))
    trains = tx.execute(ready).scalar_one_or_none()
    measured_by = tuple(select_open_evals(tx, work.run_id, work.number + 1))
    return PublishedUpdate(work.number + 1, rolls_out, None if trains == rolls_out else trains, measured_by)


def close_iteration(tx: Connection, work: IterationWork, record: UpdateRecord) -> None:
    """End the iteration, and store its sums. Raise Fenced if another worker holds the iteration, or the iteration has ended."""
    closed = tx.execute(
        update(schema.iterations)
        .where(
            schema.iterations.c.id == work.id,
            schema.iterations.c.train_token == work.token,
            schema.iterations.c.status.in_(OPEN),
        )
        .values(
            status="done",
            lease_until=None,
            skipped=record.skipped,
            dropped_groups=len(record.dropped),
            trainable=sum(episode.trainable for group in work.groups for episode in group.episodes),
            update_seconds=record.seconds,
            **{name: record.costs.get(name) for name in schema.UPDATE_COSTS},
            finished_at=datetime.now(UTC),
            **_iteration_sums(tx, work),
        )
    )
    if not closed.rowcount:
        raise Fenced(
            f"Another trainer has claimed iteration {work.iteration} of {work.run}: claim {work.token} is out of date."
        )


def _iteration_sums(tx: Connection, work: IterationWork) -> dict[str, Any]:
    episodes = schema.episodes.c
    summed = ("prompt_tokens", "sampled_tokens", "tool_calls", "tool_errors")
    row = tx.execute(
        select(
            # Stored episodes were rolled out before the iteration began.
            func.max(episodes.finished_at, type_=Utc()).filter(episodes.iteration_id == work.id).label("rolled_out_at"),
            *(func.coalesce(func.sum(episodes[name]), 0).label(name) for name in summed),
        ).where(members_of(work.id))
    )
    done = [e.reward for group in work.groups for e in group.episodes if e.status == "done" and e.reward is not None]
    return {**row.mappings().one(), "mean_reward": sum(done) / len(done) if done else None}


def _publish(tx: Connection, work: IterationWork, record: UpdateRecord) -> int:
    ref = work.policy
    trained = bool(record.path)
    policy_id: int = tx.execute(
        schema.policies.insert()
        .values(
            run_id=work.run_id,
            version=work.number + 1,
            kind="trained" if trained else "alias",
            path=record.path if trained else ref.path,
            sha256=record.sha256 if trained else ref.sha256,
        )
        .returning(schema.policies.c.id)
    ).scalar_one()
    return policy_id


def _plan_next_iteration(
    tx: Connection, work: IterationWork, record: UpdateRecord, policy_id: int, max_bad: int
) -> PublishedUpdate:
    run = tx.execute(select(schema.runs).where(schema.runs.c.id == work.run_id).with_for_update()).mappings().one()
    bad = run["bad_updates"] + 1 if record.bad else 0
    tx.execute(update(schema.runs).where(schema.runs.c.id == work.run_id).values(bad_updates=bad))
    tx.execute(  # marked while this update ran: unless something samples with it, the run has left it behind
        update(schema.policies)
        .where(
            schema.policies.c.run_id == work.run_id, schema.policies.c.version <= work.number, schema.policies.c.broken != ""
        )
        .where(schema.policies.c.path.not_in(select_sampled_paths(work.run_id)))
        .values(broken="")
    )
    following = work.number + 1 + staleness_of(work.config)
    if following < run["iterations"]:
        insert_iteration(tx, work.run_id, following, policy_id)
    tx.execute(  # its train job may have come already, and was refused: it is sent again at once
        update(schema.iterations)
        .where(schema.iterations.c.run_id == work.run_id, schema.iterations.c.number == work.number + 1)
        .values(train_sent_ms=None, train_sends=0)
    )
    plan_eval(tx, run, work.number + 1)
    if bad >= max_bad:
        set_run_status(tx, work.run_id, "failed", f"{bad} updates in a row were skipped: {record.skipped}")
    elif work.number + 1 >= run["iterations"]:
        # Also a run that was failed meanwhile: nothing is left to resume.
        set_run_status(tx, work.run_id, "done", "", (*OPEN, "paused", "failed"))
        if run["status"] != "running":  # paused with it, and a run that is done is resumed no more
            resume_evals(tx, work.run_id)
    return _load_published(tx, work)


@transaction
def finish_eval(tx: Connection, work: IterationWork, score: Score) -> None:
    """End an eval run, and store its score. Raise Fenced if another worker holds the iteration, or the iteration has ended."""
    close_iteration(tx, work, UpdateRecord((), {}))
    tx.execute(
        insert(tx, schema.evals)
        .values(
            run_id=work.run_id,
            policy=f"{work.policy.base}@{work.policy.path or 'base'}",
            dataset=work.config["dataset"]["name"],
            split=work.config["dataset"]["split"],
            episodes=score.episodes,
            errors=score.errors,
            tasks=score.tasks,
            accuracy=score.accuracy,
            pass_at={str(k): chance for k, chance in score.pass_at.items()},
            interval_by=score.interval_by,
            # NULL where no episode was done: a NaN would compare as anything.
            **({"mean_reward": score.mean, "low": score.low, "high": score.high} if score.episodes else {}),
        )
        .on_conflict_do_nothing(index_elements=["run_id"])
    )
    set_run_status(tx, work.run_id, "done", "")


@transaction
def finish_fork(tx: Connection, work: IterationWork) -> None:
    """End a fork run; its group can then be trained on. Raise Fenced if another worker holds the iteration, or the iteration
    has ended.
    """
    close_iteration(tx, work, UpdateRecord((), {}))
    set_run_status(tx, work.run_id, "done", "")


@transaction
def confirm_base(
    tx: Connection, run: int, base_hash: str, chat_hashes: Mapping[str, str], facts: Mapping[str, Any] = NO_FACTS
) -> None:
    """Check that this machine has the same base model as the run. At the first load, store the model's hashes instead. Raise
    ModelError if the base model, its tokenizer, its template or its code differs on this machine.

    Args:
        base_hash: the hash of the base model on this machine.
        chat_hashes: the hashes of the tokenizer, the chat template and the model's own code on this machine; stored in the
            manifest.
        facts: further facts about the base model; stored in the manifest.
    """
    row = tx.execute(select(schema.runs).where(schema.runs.c.id == run).with_for_update()).mappings().one()
    recorded = {name: row["manifest"].get(name, here) for name, here in chat_hashes.items()}
    other = {name: (recorded[name], here) for name, here in chat_hashes.items() if recorded[name] != here}
    if row["base_hash"] not in ("", base_hash):
        other = {"base": (row["base_hash"], base_hash)}
    for name, (expected, here) in other.items():
        raise ModelError(
            f"Run {row['name']!r} was submitted with {name} {expected[:12]}, but {row['base']!r} has {here[:12]} here.",
            "Copy the same model here, or submit a new run.",
        )
    if row["base_hash"] == "" or not chat_hashes.keys() <= row["manifest"].keys():
        manifest = {**facts, **row["manifest"], **chat_hashes}
        tx.execute(update(schema.runs).where(schema.runs.c.id == run).values(base_hash=base_hash, manifest=manifest))


@read_transaction
def find_optimizer_to_drop(tx: Connection, run: int, staleness: int = 0) -> str | None:
    """Return the path of the checkpoint whose optimizer state no later update can need; None if there is no such checkpoint.

    The optimizer state is kept for the newest version, and for the versions with which rollouts may still sample. It is also
    kept for one version before these, because the oldest of them is rebuilt from it.
    """
    trained = select(schema.policies.c.path).where(schema.policies.c.run_id == run, schema.policies.c.kind == "trained")
    trained = trained.where(schema.policies.c.version > 0)  # which a run that starts from another's policy has from there
    keep = 2 + staleness
    return tx.execute(trained.order_by(schema.policies.c.version.desc()).offset(keep).limit(1)).scalar_one_or_none()


@transaction
def fail_run(tx: Connection, run: int, reason: str) -> None:
    """Set the run's status to failed. After the cause is fixed, `agentrl resume` continues the run."""
    set_run_status(tx, run, "failed", reason)

"""Runs: their submission, and the planning, sending, pausing and cancelling of their iterations.

One transaction inserts all rows of an iteration (the iteration, its groups and their episodes). The same transaction publishes
the policy with which the iteration samples. At submission the first iteration is inserted; with max_staleness n, the first n +
1 iterations. A message may be lost or sent twice, but the planned rows are never lost.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

from sqlalchemy import ColumnElement, Connection, ScalarSelect, Select, exists, func, select, update

from agentrl.workflow.config import RunConfig
from agentrl.workflow.errors import CheckpointError, ConflictError, StateError
from agentrl.workflow.runtime.shown_text import format_count
from agentrl.workflow.store.agent_attempts import lose_agents
from agentrl.workflow.store.connect import insert, read_transaction, skip_flush, transaction
from agentrl.workflow.store.episode_loader import clean_tree, message_row, split_in_parts
from agentrl.workflow.store.forks import Fork, insert_fork
from agentrl.workflow.store.iterations import epochs_of, insert_iteration, iterations_per_epoch, staleness_of
from agentrl.workflow.store.run_format import RUN_FORMAT, check_format
from agentrl.workflow.store.run_names import find_run
from agentrl.workflow.store.stored_tokens import check_run_tokens, hold_tokens
from agentrl.workflow.tables import schema
from agentrl.workflow.tables.columns import now_ms
from agentrl.workflow.trajectory import OPEN, PolicyRef, Task, storable

RESUMABLE = ("paused", "failed", "running")
GROWING = ("serve", "search", "import")
"""The kinds of runs for which no episodes are planned at submission."""
IS_AT_WORK = (schema.runs.c.status == "running", schema.runs.c.kind != "serve")
"""The SQL conditions for running runs that workers execute. A `serve` run is excluded, because it has its own process."""
_SERVE_HINT = "Start another: agentrl serve --policy RUN"


@dataclass(frozen=True)
class Submission:
    """The submission of a run.

    Args:
        name: the unique name of the run. If a run with this name was submitted with the same config, that run is returned.
        kind: `train`; `eval` for one iteration without an update; `fork` for one group without an update; or a kind in GROWING,
            for one iteration to which groups are added later.
        config, manifest: the JSON values that are stored with the run.
        policy: the weights with which the run starts.
        tasks: the dataset rows, in the dataset's order.
        weights, code_hash: the weights of the rewards by name, and the hash of the rewards' source code.
        epochs, length: the length of the run, either in epochs or (`length`) in iterations.
        stem: the prefix of a generated name. If the name is taken, the run is called `stem-N`. Empty if a person chose the
            name.
        root: the parent folder of `output_dir`, which has the run's name; empty if a person chose `output_dir`.
        groups: the ids of stored groups to train on; empty for a run that samples new groups from the tasks.
        reward_set: the name of the reward set whose rewards are used for training.
        fork: the point at which the episodes of a fork run branch off; None for other runs.
        evaluation: the submission of the first evaluation of the run's policies. Its name is derived from this run's name.
        roles: the role of each task in a search, by the task's content hash. Tasks that are left out have the role `train`.
        difficulties: the difficulty of each task, by the task's content hash. In an epoch the lowest difficulty comes first. If
            empty, the seed decides the order.
    """

    name: str
    kind: str
    config: Mapping[str, Any]
    manifest: Mapping[str, Any]
    policy: PolicyRef
    tasks: Sequence[Task]
    dataset: str
    seed: int
    epochs: int | None
    tasks_per_iteration: int
    group_size: int
    weights: Mapping[str, float]
    code_hash: str
    output_dir: str = ""
    stem: str = ""
    root: str = ""
    groups: Sequence[int] = ()
    reward_set: str = "default"
    fork: Fork | None = None
    evaluation: "Submission | None" = None
    length: int | None = None
    roles: Mapping[str, str] = field(default_factory=dict)
    difficulties: Mapping[str, float] = field(default_factory=dict)

    def with_name(self, name: str) -> "Submission":
        """Return a copy with another name. The name also changes in the copy's config and in its output folder."""
        output = f"{self.root}/{name}" if self.root else self.output_dir
        return replace(self, name=name, config={**self.config, "name": name}, output_dir=output)

    @property
    def iterations(self) -> int:
        """The number of iterations.

        A fork and a run of a kind in GROWING have 1 iteration. Other runs have `length` iterations. If `length` is missing,
        they have epochs x ceil(n / tasks_per_iteration), where n is the number of stored groups, or of tasks if there are no
        stored groups.
        """
        return 1 if self._is_one else self.length or (self.epochs or 1) * self._per_epoch

    @property
    def passes(self) -> int:
        """The number of epochs. A last epoch that does not reach all tasks is included."""
        return 1 if self._is_one else epochs_of(self.iterations, self._per_epoch)

    @property
    def episodes(self) -> int:
        """The number of episodes to sample, without those that dynamic sampling adds. It is 0 for a run on stored groups."""
        if self.kind in GROWING:
            return 0
        whole, rest = divmod(self.iterations, self._per_epoch) if self.tasks else (0, 0)
        return (whole * len(self.tasks) + rest * self.tasks_per_iteration) * self.group_size

    @property
    def _is_one(self) -> bool:
        """True if the run has exactly one iteration, independent of the number of its tasks."""
        return self.fork is not None or self.kind in GROWING

    @property
    def _per_epoch(self) -> int:
        return iterations_per_epoch(len(self.groups) or len(self.tasks), self.tasks_per_iteration)


@dataclass(frozen=True, slots=True)
class SubmittedRun:
    """The id and name of a run, whether this call created it, the number of its iterations, and its status."""

    id: int
    name: str
    created: bool
    iterations: int = 0
    status: str = "running"


@transaction
def submit(tx: Connection, submission: Submission, failed: str = "") -> SubmittedRun:
    """Insert the run with its tasks, its starting policy and its first iterations. If the same run already exists, return that
    run.

    If a generated name is taken, the next free name is used. If the reply of an earlier commit of this submission was lost, the
    committed run is returned, even if it has another name. `failed` is the reason why the run cannot start. If `failed` is not
    empty, the run is stored as failed, and its evaluation as paused. Raise ConflictError if a run of that name exists, with
    another config or other starting weights. Raise CheckpointError if the run's starting weights have just been removed.
    """
    return insert_submission(tx, submission, failed)


def insert_submission(tx: Connection, submission: Submission, failed: str = "") -> SubmittedRun:
    """Insert the run in the transaction `tx`. See `submit`."""
    while (run_id := _insert_submission(tx, submission)) is None:
        if existing := _find_own(tx, submission):
            return existing
        if not submission.stem:
            return _find_same(tx, submission)
        submission = submission.with_name(_numbered_name(tx, submission.stem))
    if submission.evaluation:
        _insert_evaluation(tx, run_id, submission.name, submission.evaluation)
    if failed:
        row = find_run(tx, submission.name)
        _stop(tx, row, "failed", failed)
        for evaluation in _load_own_evals(tx, run_id, OPEN):
            _stop(tx, evaluation, "paused", failed)
    return SubmittedRun(run_id, submission.name, True, submission.iterations, "failed" if failed else "running")


def _insert_evaluation(tx: Connection, run_id: int, run: str, evaluation: Submission) -> None:
    version, eval_id = evaluation.policy.version, None
    while eval_id is None:  # unless somebody takes the name in between
        name = eval_name(tx, run, version)
        submission = replace(evaluation, name=name, config={**evaluation.config, "name": name})
        eval_id = _insert_submission(tx, submission, {"measures_id": run_id, "measures_version": version})


def _insert_submission(tx: Connection, submission: Submission, more: Mapping[str, Any] = MappingProxyType({})) -> int | None:
    """Insert the run and its rows; return the run's id, or None if the name is taken."""
    run_id = insert_run(tx, _row_of(submission) | dict(more))
    if run_id is None:
        return None
    _insert_tasks(tx, run_id, submission)
    ref = submission.policy
    _check_not_collected(tx, ref)
    policy_id = tx.execute(
        schema.policies.insert()
        .values(run_id=run_id, version=ref.version, kind="trained" if ref.path else "base", path=ref.path, sha256=ref.sha256)
        .returning(schema.policies.c.id)
    ).scalar_one()
    tx.execute(
        schema.reward_sets.insert().values(
            run_id=run_id, name="default", code_hash=submission.code_hash, weights=dict(submission.weights)
        )
    )
    if trackers := submission.config.get("report", {}).get("to"):
        samples = submission.config["report"]["samples"]
        tx.execute(
            schema.reports.insert(),
            [{"run_id": run_id, "tracker": tracker, "samples": samples} for tracker in dict.fromkeys(trackers)],
        )
    for some in split_in_parts(submission.groups):
        hold_tokens(tx, schema.episodes.c.group_id.in_(some))
    if submission.groups:
        tx.execute(schema.run_groups.insert(), [{"run_id": run_id, "group_id": group} for group in submission.groups])
    if submission.fork:
        hold_tokens(tx, schema.episodes.c.id == submission.fork.parent)
        insert_fork(tx, run_id, policy_id, submission.group_size, submission.fork)
    elif submission.kind in GROWING:
        tx.execute(schema.iterations.insert().values(run_id=run_id, number=0, epoch=0, policy_id=policy_id))
    else:
        for number in range(min(submission.iterations, 1 + staleness_of(submission.config))):
            insert_iteration(tx, run_id, number, policy_id)
    log(tx, run_id, "submitted", detail="" if submission.kind in GROWING else format_count(submission.iterations, "iteration"))
    return run_id


def _check_not_collected(tx: Connection, ref: PolicyRef) -> None:
    """Raise CheckpointError if the weights were removed after the caller looked them up."""
    gone = select(schema.policies.c.id).where(schema.policies.c.path == ref.path, schema.policies.c.collected_at.is_not(None))
    if ref.path and tx.execute(gone.limit(1)).first():
        raise CheckpointError(f"The weights in {ref.path!r} have just been removed.", "Choose another policy version.")


SUBMITTED_COLUMNS = ("name", "kind", "seed", "dataset", "iterations", "output_dir", "reward_set")


def _row_of(submission: Submission) -> dict[str, Any]:
    values = {name: getattr(submission, name) for name in SUBMITTED_COLUMNS}
    values |= {"status": "running", "epochs": submission.passes, "format": RUN_FORMAT}
    values |= {"config": dict(submission.config), "manifest": dict(submission.manifest)}
    return values | {"base": submission.policy.base, "base_hash": submission.policy.base_hash}


def insert_run(tx: Connection, values: Mapping[str, Any]) -> int | None:
    """Insert a row in `runs`; return its id, or None if the name is taken."""
    statement = insert(tx, schema.runs).values(created_at=datetime.now(UTC), **values)
    inserted = statement.on_conflict_do_nothing(index_elements=["name"]).returning(schema.runs.c.id)
    return tx.execute(inserted).scalar_one_or_none()


def _find_own(tx: Connection, submission: Submission) -> SubmittedRun | None:
    """Return the run that an earlier attempt of this submission committed before its reply was lost, or None."""
    runs = schema.runs.c
    mine = runs.manifest["id"].as_string() == submission.manifest.get("id", "")
    row = tx.execute(select(runs.id, runs.name, runs.iterations, runs.status).where(mine)).first()
    return row and SubmittedRun(row.id, row.name, True, row.iterations, row.status)


def _find_same(tx: Connection, submission: Submission) -> SubmittedRun:
    """Return the existing run with the submission's name; raise ConflictError if the run differs from the submission."""
    row = find_run(tx, submission.name)
    submitted = (
        _with_current_defaults(submission.config),
        submission.kind,
        submission.manifest.get("fork"),
        submission.policy.sha256,
    )
    stored = (_with_current_defaults(row["config"]), row["kind"], row["manifest"].get("fork"), _first_sha256(tx, row["id"]))
    if stored == submitted:
        return SubmittedRun(row["id"], row["name"], False, row["iterations"], row["status"])
    if (_without_length(stored[0]), *stored[1:]) == (_without_length(submitted[0]), *submitted[1:]):
        length = format_count(row["iterations"], "iteration")
        raise ConflictError(
            f"A run called {row['name']!r} exists with the same config, but another length: {length}.",
            f"Extend it with `agentrl resume {row['name']} --epochs N` or --iterations N, or choose another --name.",
        )
    raise ConflictError(
        f"A run called {submission.name!r} exists with another config.",
        f"Choose another --name, or look at it with `agentrl config show {submission.name}`.",
    )


def _with_current_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with default values for the keys that were added to agentrl after the config was stored."""
    try:
        return RunConfig.model_validate(config).model_dump(mode="json")
    except ValueError:  # of another release, which alone knows what it means
        return dict(config)


def _without_length(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in ("epochs", "iterations")}


def _first_sha256(tx: Connection, run_id: int) -> str:
    """Return the hash of the weights with which the run started; empty for an untrained base model."""
    first = (
        select(schema.policies.c.sha256).where(schema.policies.c.run_id == run_id).order_by(schema.policies.c.version).limit(1)
    )
    return str(tx.execute(first).scalar_one())


def _insert_tasks(tx: Connection, run_id: int, submission: Submission) -> None:
    tasks, roles, hard = submission.tasks, submission.roles, submission.difficulties
    if not tasks:
        return
    rows = [
        {
            "content_hash": task.content_hash,
            "key": storable(task.key),
            "messages": [message_row(message) for message in task.messages],
            "reference": storable(task.reference),
            "metadata": clean_tree(dict(task.metadata)),
        }
        for task in tasks
    ]
    tx.execute(insert(tx, schema.tasks).on_conflict_do_nothing(index_elements=["content_hash"]), rows)
    hashes = [task.content_hash for task in tasks]
    ids: dict[str, int] = {}
    for some in split_in_parts(hashes):
        stored = tx.execute(select(schema.tasks.c.content_hash, schema.tasks.c.id).where(schema.tasks.c.content_hash.in_(some)))
        ids |= {row.content_hash: row.id for row in stored}
    tx.execute(
        schema.run_tasks.insert(),
        [
            {
                "run_id": run_id,
                "task_id": ids[content_hash],
                "role": roles.get(content_hash, "train"),
                "difficulty": hard.get(content_hash),
            }
            for content_hash in hashes
        ],
    )


def log(tx: Connection, run_id: int | None, kind: str, subject: str = "", detail: str = "") -> None:
    """Insert an event of the run."""
    tx.execute(schema.events.insert().values(run_id=run_id, kind=kind, subject=subject, detail=storable(detail)))


@read_transaction
def db_clock_ms(tx: Connection) -> int:
    """Return the database's time in ms since 1970.

    Call this before sending a message, and pass the result to `mark_groups_sent` or `mark_train_sent` as the time of sending.
    """
    return int(tx.execute(select(now_ms())).scalar_one())


@transaction
def mark_groups_sent(tx: Connection, groups: Sequence[int], sent_ms: int | None = None) -> None:
    """Add one to the number of messages of each group, and store the time of sending.

    A group that another transaction has locked is not marked: usually, a worker claims it at that moment. If that worker is
    lost, the control loop sends the message again at once.

    Args:
        sent_ms: the database's time (`db_clock_ms`) before the message was sent; None for the current time. With a later time,
            the control loop would wait for a message that a lost worker has already received.
    """
    skip_flush(tx)
    marked = update(schema.groups).where(schema.groups.c.id.in_(select_unlocked(schema.groups.c.id, groups)))
    tx.execute(marked.values(sent_ms=now_ms() if sent_ms is None else sent_ms, sends=schema.groups.c.sends + 1))


def select_unlocked(key: ColumnElement[Any], values: Sequence[int]) -> Select[tuple[int]]:
    """Return the SQL that locks those rows with these keys that no other transaction has locked, without waiting for a lock."""
    return select(key).where(key.in_(values)).with_for_update(skip_locked=True, key_share=True)


@transaction
def mark_train_sent(tx: Connection, iteration: int, sent_ms: int | None = None) -> None:
    """Add one to the number of messages of the iteration's train job, and store the time of sending. See `mark_groups_sent`.

    This waits if another transaction has locked the iteration, because `train_sends` says whether there is a train job.
    """
    skip_flush(tx)
    tx.execute(
        update(schema.iterations)
        .where(schema.iterations.c.id == iteration)
        .values(train_sent_ms=now_ms() if sent_ms is None else sent_ms, train_sends=schema.iterations.c.train_sends + 1)
    )


@transaction
def mark_first_train_sent(tx: Connection, iteration: int) -> bool:
    """Note that the iteration's train job is sent now. Return False, and note nothing, if that was noted before, if a group of
    the iteration is open, or if another transaction has locked the iteration: then the control loop sends what is missing.
    """
    skip_flush(tx)
    is_open = exists().where(schema.groups.c.iteration_id == iteration, schema.groups.c.status.in_(OPEN))
    marked = tx.execute(
        update(schema.iterations)
        .where(schema.iterations.c.id.in_(select_unlocked(schema.iterations.c.id, [iteration])))
        .where(schema.iterations.c.train_sent_ms.is_(None), ~is_open)
        .values(train_sent_ms=now_ms(), train_sends=1)
    )
    return marked.rowcount == 1


@transaction
def forget_train_sent(tx: Connection, iteration: int) -> None:
    """Undo `mark_first_train_sent`, because the message was not sent."""
    sent = schema.iterations.c
    tx.execute(
        update(schema.iterations).where(sent.id == iteration, sent.train_sends == 1).values(train_sent_ms=None, train_sends=0)
    )


@transaction
def start_iteration(tx: Connection, iteration: int) -> list[int]:
    """Mark a planned iteration as running; return the ids of its open groups, in slot order."""
    started = tx.execute(
        update(schema.iterations)
        .where(schema.iterations.c.id == iteration, schema.iterations.c.status == "planned")
        .values(status="running", started_at=datetime.now(UTC))
        .returning(schema.iterations.c.run_id)
    ).scalar_one_or_none()
    if started is not None:
        tx.execute(
            update(schema.runs)
            .where(schema.runs.c.id == started, schema.runs.c.started_at.is_(None))
            .values(started_at=datetime.now(UTC))
        )
    mine = select(schema.groups.c.id).where(schema.groups.c.iteration_id == iteration, schema.groups.c.status.in_(OPEN))
    return list(tx.execute(mine.order_by(schema.groups.c.slot)).scalars())


@read_transaction
def find_free_name(tx: Connection, stem: str) -> str:
    """Return `stem-N` with the smallest N for which no run has that name."""
    return _numbered_name(tx, stem)


def eval_name(tx: Connection, run: str, version: int) -> str:
    """Return the name of the evaluation of that version of the run. If the name is taken, a number is appended."""
    name = f"{run[:48]}-eval-{version}"
    row = tx.execute(select(schema.runs.c.id).where(schema.runs.c.name == name)).first()
    return _numbered_name(tx, name) if row else name


def _numbered_name(tx: Connection, stem: str) -> str:
    names = set(
        tx.execute(select(schema.runs.c.name).where(schema.runs.c.name.startswith(f"{stem}-", autoescape=True))).scalars()
    )
    number = 1
    while f"{stem}-{number}" in names:
        number += 1
    return f"{stem}-{number}"


def check_resumable(row: Mapping[str, Any]) -> None:
    """Raise StateError if the run cannot be resumed: it is done or cancelled, has another format, is of the kind `serve`, or
    its tokens were removed.
    """
    check_run_tokens(row["name"], row["tokens_removed_at"])
    if row["kind"] == "serve":
        raise StateError(f"Run {row['name']!r} was served by a process, and only that process could continue it.", _SERVE_HINT)
    if row["status"] not in RESUMABLE:
        raise StateError(
            f"Run {row['name']!r} is {row['status']}: there is nothing left to do.", f"agentrl watch {row['name']}"
        )
    check_format(row["name"], row["format"], "resume")


@transaction
def resume(tx: Connection, run: str) -> Mapping[str, Any]:
    """Resume a paused or failed run and its paused evaluations. Work without a live lease is sent again at once.

    If the run was paused because too few episodes of an iteration were done, the iteration then trains on those that are done.
    Raise StateError if the run cannot be resumed. See `check_resumable`.
    """
    row = find_run(tx, run)
    check_resumable(row)
    resume_row(tx, row)
    return row


def resume_row(tx: Connection, row: Mapping[str, Any]) -> None:
    """Resume the run of this row in the transaction `tx`. See `resume`; the caller has checked that the run can be resumed."""
    _resume(tx, row)
    resume_evals(tx, row["id"])


def resume_evals(tx: Connection, run_id: int) -> None:
    for evaluation in _load_own_evals(tx, run_id, ("paused",)):
        _resume(tx, evaluation)


def _resume(tx: Connection, row: Mapping[str, Any]) -> None:
    if row["status"] != "running":
        tx.execute(
            update(schema.runs)
            .where(schema.runs.c.id == row["id"])
            .values(status="running", reason="", bad_updates=0, finished_at=None)
        )
        log(tx, row["id"], "resumed")
    # A message sent before the pause may be gone: what is not held is sent again at once, and its losses are forgiven.
    fresh = {"losses": 0, "worker": ""}
    for table, sent in (
        (schema.groups, {"sent_ms": None, "sends": 0}),
        (schema.iterations, {"train_sent_ms": None, "train_sends": 0}),
    ):
        mine = (table.c.run_id == row["id"], table.c.status.in_(OPEN), _is_unheld(table))
        tx.execute(update(table).where(*mine).values({**sent, **fresh}))
    tx.execute(
        update(schema.iterations)
        .where(schema.iterations.c.run_id == row["id"], schema.iterations.c.too_few == "paused")
        .values(too_few="accepted")
    )
    open_ones = select(func.count()).where(schema.iterations.c.run_id == row["id"], schema.iterations.c.status.in_(OPEN))
    if not tx.execute(open_ones).scalar_one():
        tx.execute(
            update(schema.runs).where(schema.runs.c.id == row["id"]).values(status="done", finished_at=datetime.now(UTC))
        )


def _load_own_evals(tx: Connection, run_id: int, statuses: Sequence[str]) -> Sequence[Mapping[str, Any]]:
    mine = select(schema.runs).where(schema.runs.c.measures_id == run_id, schema.runs.c.status.in_(statuses))
    return [dict(row) for row in tx.execute(mine.order_by(schema.runs.c.id)).mappings()]


def newest_version(run_id: Any) -> ScalarSelect[int]:
    """Return the SQL for the run's newest version k, from which the update of iteration k (from 0) starts."""
    return select(func.max(schema.policies.c.version)).where(schema.policies.c.run_id == run_id).scalar_subquery()


def select_sampled_policies(run_id: Any) -> Select[tuple[int]]:
    """Select the ids of the policies with which the run's open groups sample."""
    iterations, groups = schema.iterations.c, schema.groups.c
    waiting = select(iterations.policy_id).join(schema.groups, groups.iteration_id == iterations.id)
    return waiting.where(groups.run_id == run_id, groups.status.in_(OPEN))


def select_sampled_paths(run_id: Any) -> Select[tuple[str]]:
    """Select the checkpoint paths of the policies with which the run's open groups sample.

    Several versions may have the same path, because the version of a skipped update has the path of the previous version.
    """
    return select(schema.policies.c.path).where(schema.policies.c.id.in_(select_sampled_policies(run_id)))


def is_broken(run_id: Any) -> ColumnElement[bool]:
    """Return the SQL condition that a checkpoint of the run is marked as broken and has not been rebuilt yet."""
    return exists().where(schema.policies.c.run_id == run_id, schema.policies.c.broken != "")


def _is_unheld(table: Any) -> Any:
    return func.coalesce(table.c.lease_until, 0) < now_ms()


@transaction
def stop(tx: Connection, run: str, status: str, reason: str = "") -> Mapping[str, Any]:
    """Pause, cancel or fail a run. Workers finish or drop their current work, and no more messages are sent. Idempotent.

    If the run is paused or cancelled, its own evaluations are paused or cancelled too. Raise StateError if the run has already
    ended, or it is a `serve` run, which cannot be paused.
    """
    row = find_run(tx, run)
    if row["status"] == status:
        return row
    if row["kind"] == "serve" and status == "paused":
        raise StateError(f"Run {row['name']!r} is served by a process and cannot pause.", "End it with Ctrl-C in its terminal.")
    if row["status"] in ("done", "cancelled") or (row["status"] == "failed" and status == "paused"):
        raise StateError(f"Run {row['name']!r} is {row['status']} already.", f"agentrl watch {row['name']}")
    _stop(tx, row, status, reason)
    if status != "failed":
        for evaluation in _load_own_evals(tx, row["id"], OPEN if status == "paused" else (*OPEN, "paused")):
            _stop(tx, evaluation, status, reason)
    return {**row, "status": status}


def _stop(tx: Connection, row: Mapping[str, Any], status: str, reason: str) -> None:
    over = datetime.now(UTC) if status in ("cancelled", "failed") else None
    tx.execute(update(schema.runs).where(schema.runs.c.id == row["id"]).values(status=status, reason=reason, finished_at=over))
    if status == "cancelled":
        served: dict[str, Any] = {}
        if row["kind"] == "serve":  # nobody comes back to its episodes: they end here, also where their process is gone
            lose_agents(tx, row["id"], reason)
            served = {"finished_at": over}
        for table in (schema.episodes, schema.groups, schema.iterations):
            still = update(table).where(table.c.run_id == row["id"], table.c.status.in_(OPEN))
            tx.execute(still.values(status="cancelled", **served))
    log(tx, row["id"], status, detail=reason)


@read_transaction
def open_iterations(tx: Connection, run_id: int) -> list[int]:
    """Return the ids of the run's open iterations, in order."""
    query = select(schema.iterations.c.id).where(schema.iterations.c.run_id == run_id, schema.iterations.c.status.in_(OPEN))
    return list(tx.execute(query.order_by(schema.iterations.c.number)).scalars())


def set_run_status(tx: Connection, run_id: int, status: str, reason: str, leaving: Sequence[str] = (*OPEN, "paused")) -> None:
    """Set the run's status and reason, if its current status is in `leaving`."""
    over = datetime.now(UTC) if status in ("done", "failed") else None
    changed = tx.execute(
        update(schema.runs)
        .where(schema.runs.c.id == run_id, schema.runs.c.status.in_(leaving))
        .values(status=status, reason=storable(reason), finished_at=over)
    )
    if changed.rowcount:
        log(tx, run_id, status, detail=reason)

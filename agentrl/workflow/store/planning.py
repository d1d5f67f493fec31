"""Runs are submitted, their iterations planned, sent, paused and cancelled.

All rows of an iteration (itself, its groups, their episodes) are inserted in one transaction: that of the policy which it
samples with. The first is inserted at submission (with max_staleness n the first n + 1), each other one in the commit that
publishes its policy. Publishing a message can fail or repeat; work cannot be forgotten.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

from sqlalchemy import ColumnElement, Connection, ScalarSelect, Select, exists, func, select, update

from agentrl.workflow.config import RunConfig
from agentrl.workflow.errors import CheckpointError, ConflictError, StateError
from agentrl.workflow.store.agent_attempts import lose_agents
from agentrl.workflow.store.connect import insert, read_transaction, transaction
from agentrl.workflow.store.episode_loader import clean_tree, message_row, split_in_parts
from agentrl.workflow.store.forks import Fork, insert_fork
from agentrl.workflow.store.iterations import epochs_of, insert_iteration, iterations_per_epoch, staleness_of
from agentrl.workflow.store.run_format import RUN_FORMAT, check_format
from agentrl.workflow.store.run_names import find_run
from agentrl.workflow.tables import schema
from agentrl.workflow.tables.columns import now_ms
from agentrl.workflow.trajectory import OPEN, PolicyRef, Task, storable

RESUMABLE = ("paused", "failed", "running")
GROWING = ("serve", "search", "import")
"""Kinds of runs that plan no episodes when they are submitted."""
IS_AT_WORK = (schema.runs.c.status == "running", schema.runs.c.kind != "serve")
"""A run for which workers work; of the kind `serve` a process of its own does all."""
_SERVE_HINT = "Start another: agentrl serve --policy RUN"


@dataclass(frozen=True)
class Submission:
    """The submission of a run.

    Args:
        name: unique; the run with this name is returned if it was submitted with the same config.
        stem: of a name that nobody chose: where it is taken, the run is called `stem-N`. Empty: a person chose it.
        root: the folder in which `output_dir` is called as the run is; empty where a person chose that.
        kind: `train`, `eval` for one iteration without an update, `fork` for one group without an update, or one of GROWING
            for one iteration to which groups are added.
        config, manifest: stored with the run.
        policy: the weights it starts from.
        tasks: the dataset's rows, in the dataset's order.
        weights, code_hash: reward name -> weight, and the hash of the rewards' source.
        groups: stored groups to train on; empty for a run that makes its own from the tasks.
        reward_set: whose rewards train.
        epochs, length: how long the run is, in passes over the tasks or (`length`) in iterations.
        fork: of a fork run, where it leaves its parent.
        difficulties: content hash of a task -> its place in an epoch, the lowest first; empty: the seed orders them.
        roles: content hash of a task -> what a run that searches has it for; of any other `train`.
        evaluation: of a run that measures its policies, the run that measures the first; its name follows from this one's.
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
        """Return the same under another name, which its config and its own folder have too."""
        output = f"{self.root}/{name}" if self.root else self.output_dir
        return replace(self, name=name, config={**self.config, "name": name}, output_dir=output)

    @property
    def iterations(self) -> int:
        """`length`, or epochs x ceil(tasks / tasks_per_iteration), of stored groups where it trains on those; 1 for a fork."""
        return 1 if self._is_one else self.length or (self.epochs or 1) * self._per_epoch

    @property
    def passes(self) -> int:
        """Passes over the tasks; the last may end before all of them had their turn."""
        return 1 if self._is_one else epochs_of(self.iterations, self._per_epoch)

    @property
    def episodes(self) -> int:
        """Episodes that it plans, unless it samples on; 0 where it trains on stored ones, or searches."""
        if self.kind in GROWING:
            return 0
        whole, rest = divmod(self.iterations, self._per_epoch) if self.tasks else (0, 0)
        return (whole * len(self.tasks) + rest * self.tasks_per_iteration) * self.group_size

    @property
    def _is_one(self) -> bool:
        """Whether it has one iteration, whatever its tasks."""
        return self.fork is not None or self.kind in GROWING

    @property
    def _per_epoch(self) -> int:
        return iterations_per_epoch(len(self.groups) or len(self.tasks), self.tasks_per_iteration)


@dataclass(frozen=True, slots=True)
class SubmittedRun:
    """The run's id and name, whether this call made it, and how long and in which state it is."""

    id: int
    name: str
    created: bool
    iterations: int = 0
    status: str = "running"


@transaction
def submit(tx: Connection, submission: Submission, failed: str = "") -> SubmittedRun:
    """Write the run with its tasks, its starting policy and the iterations that sample with it, or find the same one.

    A name that nobody chose and that is taken gives way to the next free one; what this very submission wrote, and did not
    hear of, is found whatever it is called.

    Args:
        failed: why it cannot begin; it is written as a run that failed, with its evaluation paused.

    Raises:
        ConflictError: a run of that name exists and was submitted with another config, or from other weights.
        CheckpointError: its weights have just been collected.
    """
    return insert_submission(tx, submission, failed)


def insert_submission(tx: Connection, submission: Submission, failed: str = "") -> SubmittedRun:
    """As `submit`, within a transaction."""
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
        for each in _load_own_evals(tx, run_id, OPEN):
            _stop(tx, each, "paused", failed)
    return SubmittedRun(run_id, submission.name, True, submission.iterations, "failed" if failed else "running")


def _insert_evaluation(tx: Connection, run_id: int, run: str, evaluation: Submission) -> None:
    version, made = evaluation.policy.version, None
    while made is None:  # unless somebody takes the name in between
        name = eval_name(tx, run, version)
        named = replace(evaluation, name=name, config={**evaluation.config, "name": name})
        made = _insert_submission(tx, named, {"measures_id": run_id, "measures_version": version})


def _insert_submission(tx: Connection, submission: Submission, more: Mapping[str, Any] = MappingProxyType({})) -> int | None:
    """The run's id; None where its name is taken. `more` goes into its row."""
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
            [{"run_id": run_id, "tracker": each, "samples": samples} for each in dict.fromkeys(trackers)],
        )
    if submission.groups:
        tx.execute(schema.run_groups.insert(), [{"run_id": run_id, "group_id": group} for group in submission.groups])
    if submission.fork:
        insert_fork(tx, run_id, policy_id, submission.group_size, submission.fork)
    elif submission.kind in GROWING:
        tx.execute(schema.iterations.insert().values(run_id=run_id, number=0, epoch=0, policy_id=policy_id))
    else:
        for number in range(min(submission.iterations, 1 + staleness_of(submission.config))):
            insert_iteration(tx, run_id, number, policy_id)
    log(tx, run_id, "submitted", detail="" if submission.kind in GROWING else f"{submission.iterations} iterations")
    return run_id


def _check_not_collected(tx: Connection, ref: PolicyRef) -> None:
    """Refuses weights that were collected since they were looked up."""
    gone = select(schema.policies.c.id).where(schema.policies.c.path == ref.path, schema.policies.c.collected_at.is_not(None))
    if ref.path and tx.execute(gone.limit(1)).first():
        raise CheckpointError(f"The weights in {ref.path!r} have just been removed.", "Choose another policy version.")


SUBMITTED_COLUMNS = ("name", "kind", "seed", "dataset", "iterations", "output_dir", "reward_set")


def _row_of(submission: Submission) -> dict[str, Any]:
    asked = {name: getattr(submission, name) for name in SUBMITTED_COLUMNS}
    asked |= {"status": "running", "epochs": submission.passes, "format": RUN_FORMAT}
    asked |= {"config": dict(submission.config), "manifest": dict(submission.manifest)}
    return asked | {"base": submission.policy.base, "base_hash": submission.policy.base_hash}


def insert_run(tx: Connection, values: Mapping[str, Any]) -> int | None:
    """Return a run's row; its id, or None where its name is taken."""
    statement = insert(tx, schema.runs).values(created_at=datetime.now(UTC), **values)
    made = statement.on_conflict_do_nothing(index_elements=["name"]).returning(schema.runs.c.id)
    return tx.execute(made).scalar_one_or_none()


def _find_own(tx: Connection, submission: Submission) -> SubmittedRun | None:
    """The run that this submission made already, where the answer of that commit was lost."""
    runs = schema.runs.c
    mine = runs.manifest["id"].as_string() == submission.manifest.get("id", "")
    row = tx.execute(select(runs.id, runs.name, runs.iterations, runs.status).where(mine)).first()
    return row and SubmittedRun(row.id, row.name, True, row.iterations, row.status)


def _find_same(tx: Connection, submission: Submission) -> SubmittedRun:
    """The run of this name, which must be the same."""
    row = find_run(tx, submission.name)
    asked = (
        _with_current_defaults(submission.config),
        submission.kind,
        submission.manifest.get("fork"),
        submission.policy.sha256,
    )
    found = (_with_current_defaults(row["config"]), row["kind"], row["manifest"].get("fork"), _first_sha256(tx, row["id"]))
    if found == asked:
        return SubmittedRun(row["id"], row["name"], False, row["iterations"], row["status"])
    if (_without_length(found[0]), *found[1:]) == (_without_length(asked[0]), *asked[1:]):
        raise ConflictError(
            f"A run called {row['name']!r} exists with another length: {row['iterations']} iterations.",
            f"Extend it with `agentrl resume {row['name']} --epochs N` or --iterations N, or choose another --name.",
        )
    raise ConflictError(
        f"A run called {submission.name!r} exists with another config.",
        f"Choose another --name, or look at it with `agentrl config show --run {submission.name}`.",
    )


def _with_current_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config with the defaults of the keys that are younger than it."""
    try:
        return RunConfig.model_validate(config).model_dump(mode="json")
    except ValueError:  # of another release, which alone knows what it means
        return dict(config)


def _without_length(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in ("epochs", "iterations")}


def _first_sha256(tx: Connection, run_id: int) -> str:
    """The hash of the weights that the run started from; empty for a base as it is."""
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
        found = tx.execute(select(schema.tasks.c.content_hash, schema.tasks.c.id).where(schema.tasks.c.content_hash.in_(some)))
        ids |= {row.content_hash: row.id for row in found}
    tx.execute(
        schema.run_tasks.insert(),
        [
            {"run_id": run_id, "task_id": ids[each], "role": roles.get(each, "train"), "difficulty": hard.get(each)}
            for each in hashes
        ],
    )


def log(tx: Connection, run_id: int | None, kind: str, subject: str = "", detail: str = "") -> None:
    """Add to the run's event log."""
    tx.execute(schema.events.insert().values(run_id=run_id, kind=kind, subject=subject, detail=storable(detail)))


@read_transaction
def db_clock_ms(tx: Connection) -> int:
    """Return the database's clock, in ms: read it before a message is sent, and mark it as sent then."""
    return int(tx.execute(select(now_ms())).scalar_one())


@transaction
def mark_groups_sent(tx: Connection, groups: Sequence[int], sent_ms: int | None = None) -> None:
    """Remember how often each group's message was sent, and when last.

    Args:
        sent_ms: the `db_clock_ms` before; unset: now. A worker may have taken the message, and be lost, before it is marked;
            marked as sent later than that, it would be waited for as if it lay in a queue.
    """
    marks = {"sent_ms": now_ms() if sent_ms is None else sent_ms, "sends": schema.groups.c.sends + 1}
    tx.execute(update(schema.groups).where(schema.groups.c.id.in_(groups)).values(marks))


@transaction
def mark_train_sent(tx: Connection, iteration: int, sent_ms: int | None = None) -> None:
    """Remember how often the iteration's train job was sent, and when last: see `mark_groups_sent`."""
    tx.execute(
        update(schema.iterations)
        .where(schema.iterations.c.id == iteration)
        .values(train_sent_ms=now_ms() if sent_ms is None else sent_ms, train_sends=schema.iterations.c.train_sends + 1)
    )


@transaction
def start_iteration(tx: Connection, iteration: int) -> list[int]:
    """Mark the iteration running; return its groups that are not terminal, in slot order."""
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
    """Return `stem-N` with the first N that no run has."""
    return _numbered_name(tx, stem)


def eval_name(tx: Connection, run: str, version: int) -> str:
    """Return what the run's evaluation of that version is called; with a number behind it where another run is called so."""
    name = f"{run[:48]}-eval-{version}"
    taken = tx.execute(select(schema.runs.c.id).where(schema.runs.c.name == name)).first()
    return _numbered_name(tx, name) if taken else name


def _numbered_name(tx: Connection, stem: str) -> str:
    taken = set(
        tx.execute(select(schema.runs.c.name).where(schema.runs.c.name.startswith(f"{stem}-", autoescape=True))).scalars()
    )
    number = 1
    while f"{stem}-{number}" in taken:
        number += 1
    return f"{stem}-{number}"


def check_resumable(row: Mapping[str, Any]) -> None:
    """Raise StateError where the run, by its row, is done, cancelled, of another format, or what a process served."""
    if row["kind"] == "serve":
        raise StateError(f"Run {row['name']!r} was served by a process, and only that process could continue it.", _SERVE_HINT)
    if row["status"] not in RESUMABLE:
        raise StateError(
            f"Run {row['name']!r} is {row['status']}: there is nothing left to do.", f"agentrl watch {row['name']}"
        )
    check_format(row["name"], row["format"], "resume")


@transaction
def resume(tx: Connection, run: str) -> Mapping[str, Any]:
    """Resume a paused or failed run and its paused evaluations; work without a lease is sent at once.

    An iteration that paused the run because too few of its episodes ended well then trains with those there are.

    Raises:
        StateError: the run is done or cancelled.
    """
    row = find_run(tx, run)
    check_resumable(row)
    resume_row(tx, row)
    return row


def resume_row(tx: Connection, row: Mapping[str, Any]) -> None:
    """As `resume`, of a run by its row, which may be resumed."""
    _resume(tx, row)
    resume_evals(tx, row["id"])


def resume_evals(tx: Connection, run_id: int) -> None:
    """Set the run's paused evaluations running again."""
    for each in _load_own_evals(tx, run_id, ("paused",)):
        _resume(tx, each)


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
    """The rows of the run's evaluations of its own policies that have such a status."""
    mine = select(schema.runs).where(schema.runs.c.measures_id == run_id, schema.runs.c.status.in_(statuses))
    return [dict(row) for row in tx.execute(mine.order_by(schema.runs.c.id)).mappings()]


def newest_version(run_id: Any) -> ScalarSelect[int]:
    """Return the version that the run published last: its update number that starts from there."""
    return select(func.max(schema.policies.c.version)).where(schema.policies.c.run_id == run_id).scalar_subquery()


def select_sampled_policies(run_id: Any) -> Select[tuple[int]]:
    """Return the ids of the policies that unfinished groups of the run sample with."""
    iterations, groups = schema.iterations.c, schema.groups.c
    waiting = select(iterations.policy_id).join(schema.groups, groups.iteration_id == iterations.id)
    return waiting.where(groups.run_id == run_id, groups.status.in_(OPEN))


def select_sampled_paths(run_id: Any) -> Select[tuple[str]]:
    """Return their checkpoints, each of which several versions may name: a skipped update's is that of the version before
    it.
    """
    return select(schema.policies.c.path).where(schema.policies.c.id.in_(select_sampled_policies(run_id)))


def is_broken(run_id: Any) -> ColumnElement[bool]:
    """Return whether one of the run's checkpoints was found broken and waits to be made again."""
    return exists().where(schema.policies.c.run_id == run_id, schema.policies.c.broken != "")


def _is_unheld(table: Any) -> Any:
    return func.coalesce(table.c.lease_until, 0) < now_ms()


@transaction
def stop(tx: Connection, run: str, status: str, reason: str = "") -> Mapping[str, Any]:
    """Pause, cancels or fail a run: its workers finish or drop what they hold, nothing new is sent. Idempotent.

    The evaluations that it makes of itself are paused and cancelled with it.

    Raises:
        StateError: the run is already over.
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
        for each in _load_own_evals(tx, row["id"], OPEN if status == "paused" else (*OPEN, "paused")):
            _stop(tx, each, status, reason)
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
    """Return the run's iterations that are not over, in their order."""
    query = select(schema.iterations.c.id).where(schema.iterations.c.run_id == run_id, schema.iterations.c.status.in_(OPEN))
    return list(tx.execute(query.order_by(schema.iterations.c.number)).scalars())


def set_run_status(tx: Connection, run_id: int, status: str, reason: str, leaving: Sequence[str] = (*OPEN, "paused")) -> None:
    """Set the run's status and its reason, if its present status is one of `leaving`."""
    over = datetime.now(UTC) if status in ("done", "failed") else None
    changed = tx.execute(
        update(schema.runs)
        .where(schema.runs.c.id == run_id, schema.runs.c.status.in_(leaving))
        .values(status=status, reason=storable(reason), finished_at=over)
    )
    if changed.rowcount:
        log(tx, run_id, status, detail=reason)

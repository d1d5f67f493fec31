"""What the control loop and people want to know: snapshots, lists, one episode whole. Lists read no blob and no long text."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, func, select, text, update

from workflow import db
from workflow.columns import SET_BACK, free, now_ms
from workflow.errors import CheckpointError, NotFoundError
from workflow.snapshot import Claim, GroupState, IterationState, RunState, Snapshot
from workflow.store.connect import Database, insert, reading, transaction
from workflow.store.evals import Version, best_of
from workflow.store.iterations import staleness_of
from workflow.store.planning import is_broken, newest_version, run_row
from workflow.store.rows import MAX_ID, load_episodes, task_value
from workflow.store.waiting import awaits_maker
from workflow.trajectory import OPEN, Episode

Row = Mapping[str, Any]


@reading
def snapshot(tx: Connection, lease_seconds: float) -> Snapshot:
    """The unfinished work of all running runs but those that wait until another has made their checkpoint again."""
    now = int(tx.execute(select(now_ms())).scalar_one())
    running = tx.execute(
        select(db.runs.c.id, db.runs.c.name, is_broken(db.runs.c.id))
        .where(db.runs.c.status == "running", ~awaits_maker())
        .order_by(db.runs.c.id)
    )
    return Snapshot(
        tuple(
            RunState(run_id, name, _open_iterations(tx, run_id, now, lease_seconds), _group_seconds(tx, run_id), broken)
            for run_id, name, broken in running
        ),
        lease_seconds,
    )


def _open_iterations(tx: Connection, run_id: int, now: int, lease: float) -> tuple[IterationState, ...]:
    iterations, groups = db.iterations, db.groups
    mine = select(iterations, newest_version(run_id).label("newest")).where(iterations.c.run_id == run_id)
    rows = tx.execute(mine.where(iterations.c.status.in_(OPEN)).order_by(iterations.c.number)).all()
    states = []
    for row in rows:
        members = tx.execute(
            select(groups.c.id, groups.c.worker, groups.c.lease_until, groups.c.sent_ms, groups.c.sends)
            .where(groups.c.iteration_id == row.id, groups.c.status.in_(OPEN))
            .order_by(groups.c.slot)
        )
        states.append(
            IterationState(
                id=row.id,
                number=row.number,
                groups=tuple(GroupState(m.id, _claim(now, lease, m.lease_until, m.sent_ms, m.sends)) for m in members),
                train=_claim(now, lease, row.lease_until, row.train_sent_ms, row.train_sends),
                published=row.number <= row.newest,
            )
        )
    return tuple(states)


def _claim(now: int, lease: float, lease_until: int | None, sent_ms: int | None, sends: int) -> Claim:
    held = lease_until is not None and now <= lease_until <= now + SET_BACK * lease * 1000
    expired_ago = None if lease_until is None or lease_until >= now else (now - lease_until) / 1000
    return Claim(held, expired_ago, None if sent_ms is None else (now - sent_ms) / 1000, sends)


def _group_seconds(tx: Connection, run_id: int) -> float:
    groups = db.groups.c
    recent = tx.execute(
        select(groups.started_at, groups.finished_at)
        .where(groups.run_id == run_id, groups.status == "done", groups.finished_at.is_not(None))
        .order_by(groups.id.desc())
        .limit(32)
    ).all()
    seconds = sorted((row.finished_at - row.started_at).total_seconds() for row in recent)
    return seconds[len(seconds) // 2] if seconds else 0.0


def unfinished_runs(database: Database) -> int:
    """How many runs are running: an embedded stack stops some time after this is 0.

    Raises:
        ServiceError: the database is away; said at once, since who asks has workers to look after.
    """
    with database.read() as tx:
        return int(tx.execute(select(func.count()).where(db.runs.c.status == "running")).scalar_one())


@reading
def run_to_serve(tx: Connection, run: str) -> Row:
    """The run's row, with what its workers must know beside it: the `weights` of its rewards, whether its groups are `stored`.

    Raises:
        NotFoundError: there is none.
    """
    row = run_row(tx, run)
    sets, groups = db.reward_sets.c, db.run_groups.c
    weights = tx.execute(select(sets.weights).where(sets.run_id == row["id"], sets.name == "default")).scalar_one()
    stored = tx.execute(select(groups.group_id).where(groups.run_id == row["id"]).limit(1)).first() is not None
    return {**row, "weights": weights, "stored": stored}


@reading
def running_beside(tx: Connection, run: str) -> list[str]:
    """The names of the runs that are running, but for that one and its own evaluations."""
    mine = select(db.runs.c.id).where(db.runs.c.name == run)
    others = select(db.runs.c.name).where(db.runs.c.status == "running", db.runs.c.name != run)
    others = others.where(func.coalesce(db.runs.c.measures_id, 0).not_in(mine))
    return list(tx.execute(others.order_by(db.runs.c.id)).scalars())


def some_run_overlaps(database: Database) -> bool:
    """Whether a run is running whose rollouts go on during updates.

    Raises:
        ServiceError: the database is away; said at once.
    """
    with database.read() as tx:
        configs = tx.execute(select(db.runs.c.config).where(db.runs.c.status == "running")).scalars()
        return any(staleness_of(config) for config in configs)


@transaction
def take_service_lease(tx: Connection, name: str, holder: str, seconds: float) -> bool:
    """Takes or renews the lease of a service that must run once; False while another holds it."""
    leases = db.service_leases
    until = now_ms() + int(seconds * 1000)
    made = tx.execute(
        insert(tx, leases)
        .values(name=name, holder=holder, lease_until=until)
        .on_conflict_do_nothing(index_elements=["name"])
        .returning(leases.c.name)
    ).scalar_one_or_none()
    if made:
        return True
    renewed = tx.execute(
        update(leases)
        .where(leases.c.name == name, (leases.c.holder == holder) | free(leases.c.lease_until, seconds))
        .values(holder=holder, lease_until=until)
    )
    return bool(renewed.rowcount)


@reading
def service_holder(tx: Connection, name: str) -> str | None:
    """Who holds the service's lease now; None where nobody does."""
    leases = db.service_leases
    return tx.execute(
        select(leases.c.holder).where(leases.c.name == name, leases.c.lease_until >= now_ms())
    ).scalar_one_or_none()


# lists for people


@reading
def list_runs(tx: Connection, limit: int = 50) -> list[Row]:
    """The newest runs, from `v_runs`; without the evaluations that runs make of themselves (`list_evals`)."""
    return newest_runs(tx, limit)


def newest_runs(tx: Connection, limit: int) -> list[Row]:
    """As list_runs, inside a transaction."""
    return _rows(tx, "SELECT * FROM v_runs WHERE measures IS NULL ORDER BY id DESC LIMIT :limit", limit=limit)


@reading
def describe_run(tx: Connection, run: str) -> Row:
    """One run, from `v_runs`.

    Raises:
        NotFoundError: there is none.
    """
    return run_by_id(tx, run_row(tx, run)["id"])


def run_by_id(tx: Connection, run_id: int) -> Row:
    """The run of that number, which there is, from `v_runs`."""
    return _rows(tx, "SELECT * FROM v_runs WHERE id = :id", id=run_id)[0]


@reading
def list_iterations(tx: Connection, run: str, after: int = 0) -> list[Row]:
    """The run's iterations after number `after`, counted from 1, from `v_iterations`."""
    query = "SELECT * FROM v_iterations WHERE run = :run AND iteration > :after ORDER BY iteration"
    return _rows(tx, query, run=run_row(tx, run)["name"], after=after)


@reading
def list_evals(tx: Connection, run: str) -> list[Row]:
    """The evaluations that the run makes of its own policies, by version, from `v_evals`."""
    mine = "SELECT id FROM runs WHERE measures_id = :id"
    return _rows(tx, f"SELECT * FROM v_evals WHERE id IN ({mine}) ORDER BY policy_version", id=run_row(tx, run)["id"])


@reading
def progress(tx: Connection, run: str) -> Row:
    """Counts of the episodes, tokens and tool calls of the run's open iterations; empty if none is open.

    From `iteration` up to `through`: one, unless the rollouts of some go on during the updates of others.
    """
    run_id = run_row(tx, run)["id"]
    query = """
        SELECT min(i.number) + 1 AS iteration, max(i.number) + 1 AS through, count(*) AS episodes,
               count(*) FILTER (WHERE e.status NOT IN ('planned', 'running')) AS finished,
               count(*) FILTER (WHERE e.status = 'running') AS running,
               count(*) FILTER (WHERE e.status = 'done') AS done,
               CAST(coalesce(sum(e.sampled_tokens), 0) AS BIGINT) AS sampled_tokens,
               CAST(coalesce(sum(e.tool_calls), 0) AS BIGINT) AS tool_calls
        FROM iterations i JOIN episodes e ON e.iteration_id = i.id
        WHERE i.run_id = :id AND i.status IN ('planned', 'running')"""
    (counts,) = _rows(tx, query, id=run_id)
    return counts if counts["episodes"] else {}


@reading
def sampled_on(tx: Connection, run: str) -> str:
    """Why the newest open iteration is sampled on, and with how many groups; empty where dynamic sampling has added none."""
    query = """
        SELECT detail FROM events WHERE run_id = :id AND kind = 'sampling_on' AND subject IN (
          SELECT 'iteration ' || (i.number + 1) FROM iterations i JOIN groups g ON g.iteration_id = i.id
          WHERE i.run_id = :id AND i.status IN ('planned', 'running') AND i.more_groups > 0
          AND g.status IN ('planned', 'running'))
        ORDER BY id DESC LIMIT 1"""
    rows = _rows(tx, query, id=run_row(tx, run)["id"])
    return str(rows[0]["detail"]) if rows else ""


@reading
def most_frequent_failure(tx: Connection, run: str) -> Row:
    """How many of the run's episodes ended as failed or infra_error (`failed`), and the `error` of most of them with its
    `status` and count (`episodes`); empty where none did."""
    query = """
        SELECT status, error, count(*) AS episodes, CAST(sum(count(*)) OVER () AS BIGINT) AS failed FROM episodes
        WHERE run_id = :id AND status IN ('failed', 'infra_error')
        GROUP BY status, error ORDER BY count(*) DESC, min(id) LIMIT 1"""
    rows = _rows(tx, query, id=run_row(tx, run)["id"])
    return rows[0] if rows else {}


EPISODE_FILTERS = {
    "iteration": "iteration_id = (SELECT id FROM iterations WHERE run_id = :run_id AND number = :iteration - 1)",
    "status": "status = :status",
    "stop_reason": "stop_reason = :stop_reason",
    "task": "task_id IN (SELECT id FROM tasks WHERE key = :task)",
    "min_reward": "reward >= :min_reward",
    "max_reward": "reward <= :max_reward",
    "tool_errors": "tool_errors >= :tool_errors",
}
"""Filter of `list_episodes` -> its condition on the episodes of run `:run_id`."""


@reading
def list_episodes(tx: Connection, run: str, filters: Mapping[str, Any], limit: int = 50, offset: int = 0) -> list[Row]:
    """The run's episodes that meet all filters (keys of EPISODE_FILTERS), in order of their ids, from `v_episodes`."""
    conditions = " AND ".join(["run_id = :run_id", *(EPISODE_FILTERS[name] for name in filters)])
    # The page first, from one table: the view would join all the rows that are passed over.
    page = f"SELECT id FROM episodes WHERE {conditions} ORDER BY id LIMIT :limit OFFSET :offset"
    query = f"SELECT v.* FROM ({page}) page JOIN v_episodes v ON v.id = page.id ORDER BY page.id"
    return _rows(tx, query, run_id=run_row(tx, run)["id"], limit=limit, offset=offset, **filters)


@reading
def list_events(tx: Connection, run: str) -> list[Row]:
    """What happened to the run, oldest first."""
    query = select(db.events).where(db.events.c.run_id == run_row(tx, run)["id"]).order_by(db.events.c.id)
    return [dict(row) for row in tx.execute(query).mappings()]


@reading
def evaluation(tx: Connection, run: str) -> Row:
    """The result of an eval run.

    Raises:
        NotFoundError: the run is no evaluation, or not done.
    """
    query = select(db.evals).where(db.evals.c.run_id == run_row(tx, run)["id"])
    row = tx.execute(query).mappings().one_or_none()
    if row is None:
        raise NotFoundError(f"Run {run!r} has no evaluation result.", f"agentrl watch {run}")
    return dict(row)


@dataclass(frozen=True)
class EpisodeRecord:
    """One episode whole: its row of `v_episodes`, its value with every step, its step, call and reward rows.

    `grades` are the calls that judged it: the env made them when it was over, and the model saw nothing of them.
    """

    row: Row
    episode: Episode
    steps: Sequence[Row]
    calls: Sequence[Row]
    grades: Sequence[Row]
    rewards: Sequence[Row]


@reading
def find_episode(tx: Connection, episode: int) -> EpisodeRecord:
    """The episode with all its steps.

    Raises:
        NotFoundError: there is none.
    """
    return episode_record(tx, episode)


_CALLS_OF = "SELECT * FROM v_tool_calls WHERE episode_id = :id AND kind = '{kind}' ORDER BY step, call"


def episode_record(tx: Connection, episode: int) -> EpisodeRecord:
    """As find_episode, inside a transaction."""
    rows = _rows(tx, "SELECT * FROM v_episodes WHERE id = :id", id=episode) if abs(episode) <= MAX_ID else []
    if not rows:
        raise NotFoundError(f"There is no episode {episode}.", "List them with `agentrl episodes RUN`.")
    task_id = tx.execute(select(db.episodes.c.task_id).where(db.episodes.c.id == episode)).scalar_one()
    task = task_value(tx.execute(select(db.tasks).where(db.tasks.c.id == task_id)).mappings().one())
    (value,) = load_episodes(tx, db.episodes.c.id == episode, {task_id: task})
    return EpisodeRecord(
        row=rows[0],
        episode=value,
        steps=_with_inherited(tx, "SELECT * FROM v_steps WHERE episode_id = :id ORDER BY step", rows[0]),
        calls=_with_inherited(tx, _CALLS_OF.format(kind="call"), rows[0]),
        grades=_with_inherited(tx, _CALLS_OF.format(kind="grade"), rows[0]),
        rewards=_rows(tx, "SELECT * FROM v_rewards WHERE episode_id = :id ORDER BY id", id=episode),
    )


def _with_inherited(tx: Connection, query: str, episode: Row) -> list[Row]:
    """The query's rows of the episode, after those of the steps that it has from its parent."""
    own = _rows(tx, query, id=episode["id"])
    if episode["parent_id"] is None:
        return own
    (parent,) = _rows(tx, "SELECT * FROM v_episodes WHERE id = :id", id=episode["parent_id"])
    return [*(row for row in _with_inherited(tx, query, parent) if row["step"] < episode["inherited_steps"]), *own]


@reading
def find_policy(tx: Connection, run: str, version: Version) -> Row:
    """The run's policy of that version, with the run's base and its hash.

    Raises:
        NotFoundError: there is none.
        CheckpointError: its weights were collected.
    """
    row = run_row(tx, run)
    version = best_of(tx, row) if version == "best" else version
    query = select(db.policies).where(db.policies.c.run_id == row["id"])
    # A version that no database takes is one that no policy has.
    query = query.where(db.policies.c.version == min(version, MAX_ID)) if version is not None else query
    found = tx.execute(query.order_by(db.policies.c.version.desc()).limit(1)).mappings().one_or_none()
    if found is None:
        raise NotFoundError(f"Run {row['name']!r} has no policy version {version}.", f"agentrl watch {row['name']}")
    if found["collected_at"] is not None:
        raise collected(row["name"], found)
    return {**found, "base": row["base"], "base_hash": row["base_hash"], "config": row["config"]}


def collected(run: str, policy: Mapping[Any, Any]) -> CheckpointError:
    """What to say to whoever wants the weights of a policy (its row) that `agentrl gc` took."""
    return CheckpointError(
        f"Policy version {policy['version']} of {run!r} was collected on {policy['collected_at']:%Y-%m-%d}.",
        f"Its episodes are still there; {run}@N takes another version, {run} the newest.",
    )


def _rows(tx: Connection, query: str, **parameters: Any) -> list[Row]:
    rows = tx.execute(text(query), parameters).mappings()
    return [{name: _typed(name, value) for name, value in row.items()} for row in rows]


def _typed(name: str, value: Any) -> Any:
    """SQLite's views forget what is a moment, a truth value or JSON."""
    if name == "pass_at" and isinstance(value, str):
        return json.loads(value)
    if name.endswith("_at") and isinstance(value, str):
        return datetime.fromisoformat(value).replace(tzinfo=UTC)
    if name == "arguments" and isinstance(value, str):
        return json.loads(value)
    return bool(value) if name == "tainted" else value

"""Evaluations of a run's policies: planned in the commit that publishes a version, found again, the best one named.

Each is a run of its own that samples with that one version and updates nothing, so that it is claimed, sent, resumed and
replayed like any run, and keeps no update waiting. That of version 0 is written at submission; the later ones are its copies,
with the same tasks and the same draws: two versions differ by their weights alone.
"""

from collections.abc import Mapping
from typing import Any, Literal
from uuid import uuid4

from sqlalchemy import JSON, Connection, func, insert, literal, select, text

from workflow import db
from workflow.columns import Utc
from workflow.errors import NotFoundError, StateError
from workflow.evaluate import is_right
from workflow.store.connect import reading
from workflow.store.epochs import Epoch
from workflow.store.iterations import insert_iteration
from workflow.store.planning import eval_name, insert_run, log, run_row
from workflow.trajectory import OPEN, PolicyRef

Row = Mapping[str, Any]

Version = int | Literal["best"] | Epoch | None
"""Of a run's policy; None is the newest."""


def plan_eval(tx: Connection, run: Mapping[Any, Any], version: int) -> None:
    """Plans the evaluation of a version that the run (its row) has just published, where it is that version's turn.

    Every `eval.every` versions, and after the last. A paused run's evaluation waits with it, until the run goes on or is done.
    Where none tells any more what to measure on, as in a database that was downgraded meanwhile, the run's events say so, and
    it goes on unmeasured.
    """
    every = run["config"].get("eval", {}).get("every")
    if not every or (version % every and version < run["iterations"]):
        return
    first = select(db.runs).where(db.runs.c.measures_id == run["id"]).order_by(db.runs.c.measures_version).limit(1)
    model = tx.execute(first).mappings().one_or_none()
    if model is None:
        told = f"no earlier evaluation tells its tasks: agentrl eval --policy {run['name']}@{version}"
        log(tx, run["id"], "not_measured", f"version {version}", told)
        return
    kept = ("kind", "seed", "dataset", "epochs", "iterations", "output_dir", "reward_set", "measures_id")
    values = {key: model[key] for key in kept} | {"base": run["base"], "base_hash": run["base_hash"]}
    values |= {"measures_version": version, "manifest": model["manifest"] | {"id": uuid4().hex}}
    values["status"] = "paused" if run["status"] == "paused" else "running"
    made = None
    while made is None:  # unless somebody takes the name in between
        name = eval_name(tx, run["name"], version)
        made = insert_run(tx, {**values, "name": name, "config": model["config"] | {"name": name}})
    _copy(tx, model["id"], made, ("task_id",), db.run_tasks)
    _copy(tx, model["id"], made, ("name", "code_hash", "weights"), db.reward_sets)
    insert_iteration(tx, made, 0, _insert_policy(tx, run["id"], version, made))


def _copy(tx: Connection, model: int, made: int, names: tuple[str, ...], table: Any) -> None:
    """What rows of the table say of the run `model` is said of the run `made` too."""
    rows = select(literal(made), *(table.c[name] for name in names)).where(table.c.run_id == model)
    tx.execute(insert(table).from_select(["run_id", *names], rows))


def _insert_policy(tx: Connection, run: int, version: int, made: int) -> int:
    published = db.policies.c
    row = tx.execute(
        select(published.path, published.sha256).where(published.run_id == run, published.version == version)
    ).one()
    values = {"run_id": made, "version": version, "path": row.path, "sha256": row.sha256}
    statement = db.policies.insert().values(**values, kind="trained" if row.path else "base").returning(published.id)
    return int(tx.execute(statement).scalar_one())


def open_evals(tx: Connection, run: int, version: int | None = None) -> list[int]:
    """The iterations to send of the run's evaluations (of that version only) that are running."""
    iterations, runs = db.iterations.c, db.runs.c
    mine = select(iterations.id).join(db.runs, runs.id == iterations.run_id).where(runs.measures_id == run)
    mine = mine.where(iterations.status.in_(OPEN), runs.status == "running").order_by(iterations.id)
    return list(tx.execute(mine.where(runs.measures_version == version) if version is not None else mine).scalars())


@reading
def waiting_evals(tx: Connection, run: int) -> list[int]:
    """See `open_evals`."""
    return open_evals(tx, run)


@reading
def right_episodes(tx: Connection, iteration: int) -> set[int] | None:
    """Ids of the evaluation's episodes that are right, by the rewards they had when they ended; None where nothing tells."""
    runs, sets, rewards = db.runs.c, db.reward_sets.c, db.rewards.c
    scored_by = select(sets.id, sets.weights, runs.manifest).join(db.runs, runs.id == sets.run_id)
    scored_by = scored_by.join(db.iterations, db.iterations.c.run_id == runs.id)
    reward_set = tx.execute(scored_by.where(db.iterations.c.id == iteration, sets.name == "default")).one()
    rows = tx.execute(
        select(rewards.episode_id, rewards.part, func.sum(rewards.value).label("value"))
        .join(db.episodes, db.episodes.c.id == rewards.episode_id)
        .where(rewards.reward_set_id == reward_set.id, db.episodes.c.iteration_id == iteration)
        .group_by(rewards.episode_id, rewards.part)
    )
    parts: dict[int, dict[str, float]] = {}
    for row in rows:
        parts.setdefault(row.episode_id, {})[row.part] = row.value
    told_by = reward_set.manifest.get("right_by", {})
    weights, correct = told_by.get("weights", reward_set.weights), told_by.get("correct", ())
    found = {}
    for episode, its in parts.items():
        given = its.keys() - reward_set.weights.keys() if told_by.get("gives") else ()
        found[episode] = is_right(its, weights, correct, given)
    told = {episode for episode, right in found.items() if right is not None}
    return {episode for episode in told if found[episode]} if told else None


# for people


@reading
def policy_at(tx: Connection, path: str) -> str:
    """`RUN@VERSION` of the policy that was first published with that checkpoint; empty where none was."""
    policies = db.policies.c
    named = select(db.runs.c.name, policies.version).join(db.policies, policies.run_id == db.runs.c.id)
    row = tx.execute(named.where(policies.path == path).order_by(policies.id).limit(1)).one_or_none()
    return f"{row.name}@{row.version}" if row else ""


def best_version(tx: Connection, run_id: int) -> int | None:
    """The version with the highest mean on the held-out split, of those alike the first; None where none was measured yet."""
    found: int | None = tx.execute(text("SELECT best_version FROM v_runs WHERE id = :id"), {"id": run_id}).scalar_one()
    return found


def best_of(tx: Connection, run: Mapping[str, Any]) -> int:
    """As best_version, of a run's row.

    Raises:
        NotFoundError: none was measured yet.
    """
    found = best_version(tx, run["id"])
    if found is None:
        measured = run["config"].get("eval", {}).get("every")
        hint = f"agentrl watch {run['name']}" if measured else "Runs submitted with --eval-every N know theirs."
        raise NotFoundError(f"No policy version of {run['name']!r} was measured yet, so that none is its best.", hint)
    return found


@reading
def find_evals(tx: Connection, run: str) -> list[Row]:
    """The evaluation of that name or number; empty where the run is none.

    Raises:
        NotFoundError: there is no such run.
        StateError: it is an evaluation that is not done.
    """
    row = run_row(tx, run)
    found = _done(tx, "r.id = :id", id=row["id"])
    if row["kind"] == "eval" and not found:
        raise StateError(
            f"The evaluation {row['name']!r} has no result: it is {row['status']}.", f"agentrl watch {row['name']}"
        )
    return found


@reading
def evals_of_policy(tx: Connection, policy: PolicyRef) -> list[Row]:
    """Every evaluation of exactly these weights, newest first, whoever asked for it."""
    base = "r.base_hash = :base_hash" if policy.base_hash else "r.base = :base"
    named = {"base_hash": policy.base_hash} if policy.base_hash else {"base": policy.base}
    return _done(tx, f"{base} AND p.sha256 = :sha256", sha256=policy.sha256, **named)


def _done(tx: Connection, condition: str, **parameters: Any) -> list[Row]:
    query = f"""
        SELECT r.id, r.name AS run, v.dataset, v.split, v.tasks, v.episodes, v.errors, v.mean_reward, v.policy, s.code_hash,
               s.weights, r.config, r.manifest, m.name AS measures, v.created_at,
               (SELECT min(i.id) FROM iterations i WHERE i.run_id = r.id) AS iteration
        FROM evals v
        JOIN runs r ON r.id = v.run_id
        LEFT JOIN runs m ON m.id = r.measures_id
        JOIN policies p ON p.run_id = r.id
        JOIN reward_sets s ON s.run_id = r.id AND s.name = 'default'
        WHERE {condition} ORDER BY r.id DESC"""
    typed = text(query).columns(config=JSON, manifest=JSON, weights=JSON, created_at=Utc)
    return [dict(row) for row in tx.execute(typed, parameters).mappings()]


@reading
def measured_tasks(tx: Connection, run: int) -> frozenset[int]:
    """Ids of the tasks of an evaluation."""
    return frozenset(tx.execute(select(db.run_tasks.c.task_id).where(db.run_tasks.c.run_id == run)).scalars())


@reading
def task_means(tx: Connection, run: int) -> dict[int, float | None]:
    """Of each task of an evaluation the mean reward of its done episodes; None where it has none. By the task's id."""
    episodes = db.episodes.c
    counts = (episodes.status == "done") & ~episodes.tainted
    mean = func.avg(episodes.reward).filter(counts).label("mean")
    query = select(db.run_tasks.c.task_id, mean).select_from(db.run_tasks)
    query = query.outerjoin(
        db.episodes, (episodes.run_id == db.run_tasks.c.run_id) & (episodes.task_id == db.run_tasks.c.task_id)
    )
    rows = tx.execute(query.where(db.run_tasks.c.run_id == run).group_by(db.run_tasks.c.task_id))
    return {row.task_id: row.mean for row in rows}


@reading
def done_episodes(tx: Connection, run: int) -> dict[int, list[int]]:
    """Of each task of an evaluation the ids of its done episodes, where it has some. By the task's id."""
    episodes = db.episodes.c
    query = select(episodes.task_id, episodes.id).where(episodes.run_id == run, episodes.status == "done", ~episodes.tainted)
    found: dict[int, list[int]] = {}
    for row in tx.execute(query.order_by(episodes.id)):
        found.setdefault(row.task_id, []).append(row.id)
    return found


@reading
def measured_datasets(tx: Connection) -> list[str]:
    """Every dataset that something was measured on."""
    return list(tx.execute(text("SELECT DISTINCT dataset FROM evals ORDER BY 1")).scalars())

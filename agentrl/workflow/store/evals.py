"""Evaluations of a run's policies. The transaction that publishes a policy version also plans its evaluation.

Each evaluation is a separate run, which samples with one version and updates nothing. So it is claimed, sent, resumed and
replayed like any run, and no update waits for it. The evaluation of version 0 is written at submission. Each later evaluation
is a copy of that one, with the same tasks and the same random draws. So two results of a run differ only because the weights
differ.
"""

from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from sqlalchemy import Connection, insert, literal, select

from agentrl.workflow.store.connect import read_transaction
from agentrl.workflow.store.iterations import insert_iteration
from agentrl.workflow.store.planning import eval_name, insert_run, log
from agentrl.workflow.tables import schema
from agentrl.workflow.trajectory import OPEN

Row = Mapping[str, Any]


def plan_eval(tx: Connection, run: Mapping[Any, Any], version: int) -> None:
    """Plan the evaluation of the version that the run has just published, if an evaluation of that version is due.

    An evaluation is due every `eval.every` versions, and at the end of the run. The evaluation of a paused run is paused too,
    until the run is resumed. If the run's first evaluation is missing (for example after a downgrade of the database),
    an event says so, and the run continues without this evaluation.
    """
    every = run["config"].get("eval", {}).get("every")
    if not every or (version % every and version < run["iterations"]):
        return
    first = select(schema.runs).where(schema.runs.c.measures_id == run["id"]).order_by(schema.runs.c.measures_version).limit(1)
    model = tx.execute(first).mappings().one_or_none()
    if model is None:
        hint = f"no earlier evaluation has its tasks: agentrl eval --policy {run['name']}@{version}"
        log(tx, run["id"], "not_measured", f"version {version}", hint)
        return
    copied_columns = ("kind", "seed", "dataset", "epochs", "iterations", "output_dir", "reward_set", "measures_id", "format")
    values = {key: model[key] for key in copied_columns} | {"base": run["base"], "base_hash": run["base_hash"]}
    values |= {"measures_version": version, "manifest": model["manifest"] | {"id": uuid4().hex}}
    values["status"] = "paused" if run["status"] == "paused" else "running"
    run_id = None
    while run_id is None:  # again if another command takes the name in between
        name = eval_name(tx, run["name"], version)
        run_id = insert_run(tx, {**values, "name": name, "config": model["config"] | {"name": name}})
    _copy_rows(tx, model["id"], run_id, ("task_id",), schema.run_tasks)
    _copy_rows(tx, model["id"], run_id, ("name", "code_hash", "weights"), schema.reward_sets)
    insert_iteration(tx, run_id, 0, _insert_policy(tx, run["id"], version, run_id))


def _copy_rows(tx: Connection, model: int, run_id: int, names: tuple[str, ...], table: Any) -> None:
    """Copy the columns `names` of the table's rows from the run `model` to the run `run_id`."""
    rows = select(literal(run_id), *(table.c[name] for name in names)).where(table.c.run_id == model)
    tx.execute(insert(table).from_select(["run_id", *names], rows))


def _insert_policy(tx: Connection, run: int, version: int, run_id: int) -> int:
    published = schema.policies.c
    row = tx.execute(
        select(published.path, published.sha256).where(published.run_id == run, published.version == version)
    ).one()
    values = {"run_id": run_id, "version": version, "path": row.path, "sha256": row.sha256}
    statement = schema.policies.insert().values(**values, kind="trained" if row.path else "base").returning(published.id)
    return int(tx.execute(statement).scalar_one())


def select_open_evals(tx: Connection, run: int, version: int | None = None) -> list[int]:
    """Return the ids of open iterations of the run's running evaluations, all or those of `version`."""
    iterations, runs = schema.iterations.c, schema.runs.c
    mine = select(iterations.id).join(schema.runs, runs.id == iterations.run_id).where(runs.measures_id == run)
    mine = mine.where(iterations.status.in_(OPEN), runs.status == "running").order_by(iterations.id)
    return list(tx.execute(mine.where(runs.measures_version == version) if version is not None else mine).scalars())


@read_transaction
def list_open_evals(tx: Connection, run: int) -> list[int]:
    """See `select_open_evals`."""
    return select_open_evals(tx, run)

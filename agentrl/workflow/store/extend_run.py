"""Extension of a run: more iterations are planned, as if the run had been submitted with the larger number.

An iteration's number alone decides its tasks, its random draws and its sampling version. So an extended run equals, bit for
bit, a run that was submitted with the final length. A run whose learning rate decays until the end is an exception, and cannot
be extended.
"""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, func, select, update

from agentrl.workflow.config import MAX_INT
from agentrl.workflow.errors import ConfigError, StateError
from agentrl.workflow.runtime.shown_text import format_count
from agentrl.workflow.store.connect import transaction
from agentrl.workflow.store.iterations import epoch_length, epochs_of, insert_iteration, staleness_of
from agentrl.workflow.store.planning import RESUMABLE, log, newest_version, resume_row
from agentrl.workflow.store.run_format import check_format
from agentrl.workflow.store.run_names import find_run, require_weights
from agentrl.workflow.store.stored_tokens import check_run_tokens
from agentrl.workflow.tables import schema

EXTENDABLE = (*RESUMABLE, "done")


@transaction
def extend(tx: Connection, run: str, key: str, epochs: int | None = None, iterations: int | None = None) -> Mapping[str, Any]:
    """Add epochs or iterations to a run, and resume it as `planning.resume` does. Raise StateError if the run's state does not
    allow an extension. Raise ConfigError if the run's config does not allow this extension. Raise CheckpointError if the
    weights that the next iteration samples with were removed.

    Args:
        key: the key of this request. If a request with the same key is repeated (for example because the commit's reply was
            lost), it has no further effect.
        epochs: the number of epochs to add.
        iterations: the number of iterations to add.

    Returns:
        The run's row from before the change.
    """
    # Locked: two that extend it at once, or an update that publishes meanwhile, come one after the other.
    tx.execute(select(schema.runs.c.id).where(schema.runs.c.id == find_run(tx, run)["id"]).with_for_update()).one()
    row = find_run(tx, run)
    events = schema.events.c
    earlier_event = select(events.id).where(events.run_id == row["id"], events.kind == "extended", events.subject == key)
    if tx.execute(earlier_event).first():
        return row
    stored = select(schema.run_groups.c.group_id).where(schema.run_groups.c.run_id == row["id"]).limit(1)
    check_extendable(row, tx.execute(stored).first() is not None)
    of_an_epoch = epoch_length(tx, row)
    total = row["iterations"] + (iterations or 0) + (epochs or 0) * of_an_epoch
    if total > MAX_INT:
        raise ConfigError(f"{row['name']!r} would have {total} iterations; the maximum is {MAX_INT}.", "Add fewer.")
    going = {"status": "running", "reason": "", "bad_updates": 0, "finished_at": None} if row["status"] == "done" else {}
    length = {"iterations": total, "epochs": epochs_of(total, of_an_epoch)}
    config = _with_length(row["config"], total, of_an_epoch)
    tx.execute(update(schema.runs).where(schema.runs.c.id == row["id"]).values(**length, config=config, **going))
    log(tx, row["id"], "extended", key, f"{row['iterations']} -> {format_count(total, 'iteration')}")
    _plan_published_iterations(tx, row, total)
    resume_row(tx, {**row, **going})
    return row


def check_extendable(row: Mapping[str, Any], stored: bool) -> None:
    """Check that a run can be extended. `row` is the run's row. `stored` is True if the run trains on stored groups. Raise
    StateError if the run's state does not allow an extension. Raise ConfigError if the run's config does not allow an
    extension.
    """
    name, decay = row["name"], row["config"]["update"].get("decay", "none")
    if row["kind"] != "train":
        raise StateError(f"{name!r} is of kind {row['kind']} and does not train.", "Use a training run: agentrl runs")
    check_format(row["name"], row["format"], "resume")
    check_run_tokens(row["name"], row["tokens_removed_at"])
    if stored:
        raise StateError(
            f"{name!r} trains on stored episodes, each of them once, so it cannot be extended.",
            "Train on stored episodes in a new run: agentrl submit --from-episodes RUN",
        )
    if row["status"] not in EXTENDABLE:
        raise StateError(f"Run {name!r} is {row['status']} and cannot be extended.", _fresh_run_hint(row))
    if decay != "none":
        raise ConfigError(
            f"The learning rate of {name!r} falls to 0 at its end (update.decay={decay}), so the run cannot be extended.",
            _fresh_run_hint(row),
        )


def _fresh_run_hint(row: Mapping[str, Any]) -> str:
    return f"Continue with its policy in a new run: agentrl submit --dataset {row['dataset']} --model {row['name']}"


def _with_length(config: Mapping[str, Any], total: int, of_an_epoch: int) -> dict[str, Any]:
    whole, rest = divmod(total, of_an_epoch)
    in_epochs = config.get("iterations") is None and not rest
    return {**config, "epochs": whole if in_epochs else None, "iterations": None if in_epochs else total}


def _plan_published_iterations(tx: Connection, row: Mapping[str, Any], total: int) -> None:
    planned = tx.execute(
        select(func.max(schema.iterations.c.number)).where(schema.iterations.c.run_id == row["id"])
    ).scalar_one()
    newest, ahead = tx.execute(select(newest_version(row["id"]))).scalar_one(), staleness_of(row["config"])
    policies = schema.policies.c
    for number in range(planned + 1, min(total, newest + ahead + 1)):
        of_run = select(schema.policies).where(policies.run_id == row["id"], policies.version == max(0, number - ahead))
        policy = tx.execute(of_run).one()
        require_weights(row["name"], policy.version, policy.collected_at, f"iteration {number + 1}")
        insert_iteration(tx, row["id"], number, policy.id)

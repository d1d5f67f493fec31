"""Inputs of a past update, as its trainer found them, for `agentrl whatif`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, select

from agentrl.workflow.errors import CheckpointError, NotFoundError, StateError
from agentrl.workflow.store.connect import read_transaction
from agentrl.workflow.store.iterations import wanted_groups
from agentrl.workflow.store.run_names import find_run
from agentrl.workflow.store.training_groups import load_groups
from agentrl.workflow.tables import schema
from agentrl.workflow.trajectory import Group, PolicyRef


@dataclass(frozen=True)
class UpdateInputs:
    """The inputs of an iteration's update.

    Args:
        run: the run's row.
        policy: the policy that the update started from.
        number: the iteration's number from 0; `iteration` is the one from 1.
        groups, wanted: as of `claims.IterationWork`.
        advantages: by episode, as the update recorded them.
    """

    run: Mapping[str, Any]
    number: int
    policy: PolicyRef
    groups: tuple[Group, ...]
    wanted: int
    advantages: Mapping[int, float]

    @property
    def iteration(self) -> int:
        """The iteration's number from 1, which is also the policy version that its update made."""
        return self.number + 1

    @property
    def is_borrowed(self) -> bool:
        """Whether the update started from another run's checkpoint, hence without its optimizer and critic."""
        return not self.policy.path.endswith(self.run["manifest"].get("id", "")[:8])


@read_transaction
def load_update_inputs(tx: Connection, run: str, iteration: int | None) -> UpdateInputs:
    """Return the run's iteration of that number, from 1; None is the last whose update took a step, or, where none did, the
    last.

    Raises:
        NotFoundError: no such run or iteration.
        StateError: it is not trained yet, or the run trains nothing.
        CheckpointError: the weights that its update started from were collected.
    """
    row = find_run(tx, run)
    found = _find_iteration(tx, row, iteration)
    policies, consumptions = schema.policies.c, schema.consumptions.c
    of_run = select(schema.policies).where(policies.run_id == row["id"], policies.version == found.number)
    start = tx.execute(of_run).one()
    if start.collected_at is not None:
        raise CheckpointError(
            f"Policy version {start.version}, which the update of iteration {found.number + 1} of {row['name']!r} started "
            f"from, was collected on {start.collected_at:%Y-%m-%d}.",
            f"For the last one: agentrl whatif {row['name']}, without --iteration.",
        )
    recorded = select(consumptions.episode_id, consumptions.advantage).where(consumptions.iteration_id == found.id)
    return UpdateInputs(
        run=row,
        number=found.number,
        policy=PolicyRef(row["base"], row["base_hash"], start.path, start.sha256, start.version),
        groups=load_groups(tx, found.id, row["reward_set"]),
        wanted=wanted_groups(tx, found.id, row["config"]),
        advantages={each.episode_id: each.advantage for each in tx.execute(recorded)},
    )


def _find_iteration(tx: Connection, run: Mapping[str, Any], wanted: int | None) -> Any:
    name, iterations = run["name"], schema.iterations.c
    if run["kind"] != "train":
        raise StateError(f"{name!r} does not train: it is of kind {run['kind']}.", "Name a training run: agentrl runs")
    if wanted is not None and not 1 <= wanted <= run["iterations"]:
        raise NotFoundError(f"{name!r} has {run['iterations']} iterations, counted from 1; there is no iteration {wanted}.")
    query = select(schema.iterations).where(iterations.run_id == run["id"], iterations.status == "done")
    query = query if wanted is None else query.where(iterations.number == wanted - 1)
    found = tx.execute(query.order_by(iterations.number.desc())).all()
    if not found:
        which = "No iteration" if wanted is None else f"Iteration {wanted}"
        raise StateError(f"{which} of {name!r} is {'' if wanted is None else 'not '}trained yet.", f"agentrl watch {name}")
    return next((each for each in found if not each.skipped), found[0])

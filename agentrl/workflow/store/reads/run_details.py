"""Details of a run besides its row: config, manifest, notes, and counts of its rows."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.workflow.store.driver_reader import select_rows, sql_read_transaction
from agentrl.workflow.store.reads.eval_results import MEASURED
from agentrl.workflow.store.reads.run_rows import run_name

PARTS_FROM = 1000
"""The newest rewards, whose parts are a run's."""


@dataclass(frozen=True, slots=True)
class StoredConfig:
    """A run's config.

    Args:
        values: by section.
        origins: where each value that was chosen came from, by its dotted key; None: that was not written down.
    """

    values: Mapping[str, Any]
    origins: Mapping[str, str] | None


@sql_read_transaction
def find_config(tx: Any, run_id: int) -> StoredConfig:
    """Return the config of the run of that number, as it is stored.

    Raises:
        NotFoundError: there is no such run.
    """
    run_name(tx, run_id)
    (row,) = select_rows(tx, "SELECT config, manifest FROM runs WHERE id = :id", id=run_id)
    return StoredConfig(row["config"], row["manifest"].get("origins"))


def load_manifest(tx: Any, run_id: int) -> dict[str, Any]:
    """Return what a person asks of a run's making, inside a transaction: versions, hashes, the code of its rewards, its
    folder.
    """
    query = "SELECT manifest, base, base_hash, output_dir, seed, format, reward_set FROM runs WHERE id = :id"
    (run,) = select_rows(tx, query, id=run_id)
    query = "SELECT name, code_hash, weights FROM reward_sets WHERE run_id = :id ORDER BY id"
    rewards = select_rows(tx, query, id=run_id)
    query = "SELECT version, kind, path, sha256, collected_at, broken FROM policies WHERE run_id = :id ORDER BY version"
    first = select_rows(tx, f"{query} LIMIT 1", id=run_id)
    newest = select_rows(tx, f"{query} DESC LIMIT 1", id=run_id)
    told = {name: run[name] for name in ("base", "base_hash", "output_dir", "seed", "format", "reward_set")}
    policies = {"first": first[0] if first else None, "newest": newest[0] if newest else None}
    manifest = {name: value for name, value in run["manifest"].items() if name != "origins"}  # they stand beside the config
    return {**manifest, **told, "reward_sets": [dict(row) for row in rewards], "policies": policies}


def find_what_it_has(tx: Any, run_id: int, name: str) -> dict[str, bool]:
    """Return what kinds of rows the run has, inside a transaction."""
    asked = {
        "annotations": "SELECT 1 AS one FROM annotations WHERE run = :name LIMIT 1",
        "prompts": "SELECT 1 AS one FROM resources WHERE run_id = :id LIMIT 1",
        "critic_calls": "SELECT 1 AS one FROM critic_calls WHERE run_id = :id LIMIT 1",
        "agents": "SELECT 1 AS one FROM agent_attempts WHERE run = :name LIMIT 1",
        "evals": f"SELECT 1 AS one FROM ({MEASURED}) measured LIMIT 1",
    }
    values = {"id": run_id, "name": name}
    return {what: bool(select_rows(tx, query, **_used(query, values))) for what, query in asked.items()}


def _used(query: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if f":{key}" in query}


def list_reward_parts(tx: Any, run_id: int, name: str) -> list[str]:
    """Return the names of the parts of the run's rewards, inside a transaction: those with a weight, and those given of
    late.
    """
    sets = select_rows(tx, "SELECT weights FROM reward_sets WHERE run_id = :id", id=run_id)
    query = f"SELECT DISTINCT part FROM (SELECT part FROM rewards WHERE run = :name ORDER BY id DESC LIMIT {PARTS_FROM}) newest"
    given = [row["part"] for row in select_rows(tx, query, name=name)]
    return sorted({*given, *(part for each in sets for part in each["weights"])})

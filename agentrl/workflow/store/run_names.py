"""Names of runs and policies: a run is found by name or number, and its policies by `RUN`, `RUN@3`, `RUN@best` or
`RUN@epoch3`.
"""

from collections.abc import Mapping
from datetime import datetime
from difflib import get_close_matches
from typing import Any, Literal

from agentrl.workflow.errors import CheckpointError, ConfigError, NotFoundError
from agentrl.workflow.store.driver_reader import Queryable, Row, select_rows, sql_read_transaction
from agentrl.workflow.store.epoch_ends import Epoch, version_after
from agentrl.workflow.store.row_codecs import MAX_ID
from agentrl.workflow.trajectory import PolicyRef

Version = int | Literal["best"] | Epoch | None
"""A reference to a version of a run's policy. None is the newest version."""
MAX_NAME_CHARS = 64


@sql_read_transaction
def find_run(tx: Any, run: str, columns: str = "*") -> Row:
    """Return the given columns of the run's row. `run` is the run's name or number. Raise NotFoundError if there is no such
    run.
    """
    rows = select_rows(tx, f"SELECT {columns} FROM runs WHERE name = :name", name=run)
    if not rows and run.isascii() and run.isdigit() and len(run) < 19:
        rows = select_rows(tx, f"SELECT {columns} FROM runs WHERE id = :id", id=int(run))
    if not rows:
        raise NotFoundError(f"There is no run {run!r}.", f"{_similar_name_hint(tx, run)}List them with `agentrl runs`.")
    return rows[0]


@sql_read_transaction
def is_run(tx: Any, name: str) -> bool:
    """Return whether there is a run of that name."""
    return bool(select_rows(tx, "SELECT id FROM runs WHERE name = :name", name=name))


def _similar_name_hint(tx: Any, run: str) -> str:
    names = (
        [row["name"] for row in select_rows(tx, "SELECT name FROM runs ORDER BY id DESC LIMIT 200")]
        if len(run) <= MAX_NAME_CHARS
        else []
    )
    close = get_close_matches(run, names, n=1)
    return f"Did you mean {close[0]!r}? " if close else ""


def parse_version(word: str) -> Version:
    """Parse the text of a version, such as `3`, `v3`, `best` or `epoch3`. Raise ConfigError if the text is not a version."""
    if word == "best":
        return "best"
    digits = word.removeprefix("epoch").removeprefix("v")
    if not (digits.isascii() and digits.isdecimal() and len(digits) < 20) or word.startswith("epochv"):
        raise ConfigError(f"{word!r} is not a policy version.", "Pass RUN@3, RUN@best or RUN@epoch3.")
    return Epoch(int(digits)) if word.startswith("epoch") else int(digits)


def find_stored_policy(db: Queryable, run: str, version: Version) -> PolicyRef:
    """Return a policy that the run published: the version with that number, the best version by the evaluations, or (None) the
    newest. Raise NotFoundError if there is no such run or version. Raise CheckpointError if `agentrl gc` or `--save-every` has
    removed the version's weights.
    """
    row = find_policy(db, run, version)
    return PolicyRef(row["base"], row["base_hash"], row["path"], row["sha256"], row["version"])


@sql_read_transaction
def find_policy(tx: Any, run: str, version: Version) -> Row:
    """Return the row of the run's policy with that version, together with the run's `base`, `base_hash` and `config`. Raise
    NotFoundError if there is no such run or version. Raise CheckpointError if `agentrl gc` or `--save-every` has removed the
    version's weights.
    """
    row = find_run(tx, run)
    version = _require_best_version(tx, row) if version == "best" else version
    version = version_after(tx, row, version.number) if isinstance(version, Epoch) else version
    query, args = "SELECT id, version, kind, path, sha256, collected_at FROM policies WHERE run_id = :run", {"run": row["id"]}
    if version is not None:
        query, args = f"{query} AND version = :version", args | {"version": min(version, MAX_ID)}  # more no database takes
    rows = select_rows(tx, f"{query} ORDER BY version DESC LIMIT 1", **args)
    if not rows:
        newest = select_rows(tx, "SELECT max(version) AS version FROM policies WHERE run_id = :run", run=row["id"])[0][
            "version"
        ]
        message = f"Run {row['name']!r} has no policy version {version}; {newest} is the newest."
        raise NotFoundError(message, f"agentrl watch {row['name']}")
    policy = rows[0]
    require_weights(row["name"], policy["version"], policy["collected_at"])
    return {**policy, "base": row["base"], "base_hash": row["base_hash"], "config": row["config"]}


def require_weights(run: str, version: int, collected_at: datetime | None, purpose: str = "") -> None:
    """Raise CheckpointError if the weights of a run's policy version were removed.

    Args:
        run: the run's name.
        version: the policy version.
        collected_at: the time of the removal; None if the weights exist.
        purpose: the operation that needs the weights, for the error message; empty if the user named the version.
    """
    if collected_at is not None:
        raise CheckpointError(
            f"The weights of {run}@{version} were removed on {collected_at:%Y-%m-%d}{purpose and f'; {purpose} needs them'}.",
            f"The episodes are still stored. Use {run}@N for another version, {run} for the newest.",
        )


@sql_read_transaction
def find_policy_at(tx: Any, path: str) -> str:
    """Return `RUN@VERSION` of the policy whose checkpoint has this path; empty if there is none. If several policies have it,
    return the oldest.
    """
    query = "SELECT r.name, p.version FROM policies p JOIN runs r ON r.id = p.run_id WHERE p.path = :path ORDER BY p.id LIMIT 1"
    rows = select_rows(tx, query, path=path)
    return f"{rows[0]['name']}@{rows[0]['version']}" if rows else ""


def find_best_version(tx: Any, run_id: int) -> int | None:
    """Return the version with the highest mean reward on the held-out split; None if no version has been evaluated.

    If several versions have the same mean reward, return the first of them.
    """
    version: int | None = select_rows(tx, "SELECT best_version FROM v_runs WHERE id = :id", id=run_id)[0]["best_version"]
    return version


def _require_best_version(tx: Any, run: Mapping[str, Any]) -> int:
    version = find_best_version(tx, run["id"])
    if version is None:
        measured = run["config"].get("eval", {}).get("every")
        newest = f"Runs with --eval-every N (in Python: val_dataset) have a best version. The newest is {run['name']}."
        hint = f"agentrl watch {run['name']}" if measured else newest
        raise NotFoundError(f"No policy version of {run['name']!r} was evaluated yet, so there is no best version.", hint)
    return version

"""What a person's words mean: the database if there is one yet, and which policy a name is."""

from typing import Any

from workflow.config import RunConfig


def existing_database() -> Any:
    """The database, or None where it would have to be made: a request is checked before anything is written."""
    from workers.process import database
    from workflow.settings import settings
    from workflow.store.query import sqlite_file

    file = sqlite_file(settings())
    return None if file is not None and not file.exists() else database()


def find_policy(policy: str) -> tuple[RunConfig, Any]:
    """`RUN[@VERSION]`: the run's config and that policy. Else a model: the default config with it, and None."""
    from workers.submit import stored_policy, version_number
    from workflow.config import build
    from workflow.errors import NotFoundError
    from workflow.store import planning

    name, _, word = policy.partition("@")
    version = version_number(word) if word else None
    db = existing_database()
    if db is not None:
        try:
            run = planning.find_run(db, name)
        except NotFoundError:
            if version is not None:
                raise
        else:
            ref = stored_policy(db, name, version)
            return RunConfig.model_validate(run["config"]), ref
    if version is not None:
        raise NotFoundError(f"There is no run {name!r}.", "List them with `agentrl runs`.")
    return build({"model.path": policy}), None

"""What a person's words mean: the database if there is one yet, and which policy a name is."""

from typing import Any

from workflow.config import RunConfig
from workflow.errors import ConfigError


def existing_database() -> Any:
    """The database, or None where it would have to be made: a request is checked before anything is written."""
    from workers.process import database
    from workflow.settings import settings
    from workflow.store.query import sqlite_file

    file = sqlite_file(settings())
    return None if file is not None and not file.exists() else database()


def find_policy(policy: str) -> tuple[RunConfig, Any]:
    """`RUN[@VERSION]`: the run's config and that policy. Else a model: the default config with it, and None."""
    from workers.submit import stored_policy
    from workflow.config import build
    from workflow.errors import NotFoundError
    from workflow.store import planning

    name, _, version = policy.partition("@")
    if version and not (version.removeprefix("v").isdecimal() and version.isascii() and len(version) < 20):
        raise ConfigError(f"{version!r} is no policy version.", "Write RUN@3.")
    db = existing_database()
    if db is not None:
        try:
            run = planning.find_run(db, name)
        except NotFoundError:
            if version:
                raise
        else:
            ref = stored_policy(db, name, int(version.removeprefix("v")) if version else None)
            return RunConfig.model_validate(run["config"]), ref
    if version:
        raise NotFoundError(f"There is no run {name!r}.", "List them with `agentrl runs`.")
    return build({"model.path": policy}), None

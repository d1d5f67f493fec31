"""The location of a Trainer's runs: a data folder and its files, a database, or a temporary folder of this process."""

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.api.store import FILE, Store, open_store
from agentrl.workflow.errors import ConfigError, ServiceError
from agentrl.workflow.settings import Settings, is_url, settings

MEMORY = ":memory:"
COMMAND = (sys.executable, "-P", "-m", "agentrl.cli")
"""The command line, as a process of its own: what it starts and opens is not this process's."""


class InMemoryStore:
    """A store that is deleted with this process. It uses the models of the data folder."""

    def __init__(self) -> None:
        """Make its folder, which is removed when this process ends, after the workers in it were stopped."""
        self.folder = Path(tempfile.mkdtemp(prefix="agentrl-"))
        atexit.register(self.close)
        models = settings().models_dir
        models.mkdir(parents=True, exist_ok=True)
        (self.folder / "models").symlink_to(models)

    def __fspath__(self) -> str:
        """Return its folder, for `agentrl.open`."""
        return str(self.folder)

    def close(self) -> None:
        """Stop its workers and remove it; repeatable."""
        if self.folder.exists():
            atexit.unregister(self.close)
            if (self.folder / "stack").exists():
                subprocess.run(
                    [*COMMAND, "down"], env=StoreLocation.of(self.folder).environment(), capture_output=True, check=False
                )
            shutil.rmtree(self.folder, ignore_errors=True)

    def __repr__(self) -> str:
        return f"<store in {str(self.folder)!r}, gone with this process>"


@dataclass(frozen=True)
class StoreLocation:
    """The location of runs, as settings for commands.

    Args:
        variables: environment variables, empty where one of this process is to be left out.
    """

    variables: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, store: "str | Path | Store | InMemoryStore | None") -> "StoreLocation":
        """Return the location for a folder, a SQLite file, a URL or a store; None: the default of the commands.

        Raises:
            ConfigError: it is none of these.
        """
        match store:
            case None:
                return cls()
            case InMemoryStore():
                return cls.of(store.folder)
            case Store():
                return cls({"AGENTRL_DATABASE_URL": store.url})
            case str() | Path() if str(store).strip():
                return cls(_variables_of(str(store)))
        raise ConfigError(
            f"A store must be a folder, a file, a URL or a Store, not {store!r:.80}.", 'For example: store="sqlite:///runs.db"'
        )

    @property
    def settings(self) -> Settings:
        """The settings of a process that uses this location."""
        names = {f"AGENTRL_{name.upper()}": name for name in Settings.model_fields}
        given = {names[variable]: value for variable, value in self.variables.items() if variable in names}
        return Settings.model_validate(settings().model_dump() | given)

    def environment(self, **more: str) -> dict[str, str]:
        """Return the environment of a process that uses this location."""
        left_out = {name for name, value in self.variables.items() if not value}
        return {name: value for name, value in {**os.environ, **self.variables, **more}.items() if name not in left_out}

    def open(self) -> Store:
        """Open the store for reading.

        Raises:
            NotFoundError: nothing is stored there yet.
        """
        return open_store(self.settings.database) if self.variables else open_store()


def _variables_of(store: str) -> dict[str, str]:
    if store == MEMORY:
        raise ConfigError(
            "InMemoryStore must be passed as an object, which several trainers may share.",
            "Pass store=agentrl.InMemoryStore().",
        )
    path = Path(store.removeprefix("sqlite:///") if store.startswith("sqlite:///") else store).expanduser()
    if is_url(store) and not store.startswith("sqlite:///"):
        return {"AGENTRL_DATABASE_URL": store}
    if is_url(store) or path.suffix in (".db", ".sqlite", ".sqlite3"):
        return {"AGENTRL_DATABASE_URL": f"sqlite:///{path.absolute()}"}
    if path.is_file():
        raise ConfigError(f"{store!r} is not a name of a database file.", f"Pass {FILE}, or a folder.")
    return {"AGENTRL_HOME": str(path.absolute()), "AGENTRL_DATABASE_URL": ""}


def write_once(file: Path, text: str) -> None:
    """Write a file of the data folder atomically, if it does not exist.

    Raises:
        ServiceError: it cannot be written.
    """
    if file.exists():
        return
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(file)
    except OSError as error:
        said = f"Cannot write to the folder {str(file.parent)!r}: {error.strerror or error}."
        raise ServiceError(said, "Pass another store, or set AGENTRL_HOME to a folder of yours.") from error

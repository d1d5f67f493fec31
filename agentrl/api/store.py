"""Stores: `agentrl.open()` opens a store for reading, and `StoreLocation` says where the store of a Trainer is."""

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike, fspath
from pathlib import Path
from typing import Any
from urllib.parse import quote

from agentrl.api import episode, html
from agentrl.api.episode import Episodes, StoredEpisode
from agentrl.api.lists import Rows, Table
from agentrl.api.run import Run, filter_of
from agentrl.workflow.errors import ConfigError, NotFoundError, ServiceError
from agentrl.workflow.settings import Settings, is_url, settings
from agentrl.workflow.store.driver_reader import Reader
from agentrl.workflow.store.reads import run_rows, user_sql
from agentrl.workflow.store.reads.episode_rows import EpisodeFilter
from agentrl.workflow.store.reads.run_rows import RunFilter
from agentrl.workflow.tables.views import RunRow

FILE = "agentrl.db"
"""The name of the database in a data folder."""
MEMORY = ":memory:"
SQLITE = "sqlite:///"
COMMAND = (sys.executable, "-P", "-m", "agentrl.cli")
"""The command that starts agentrl's command line in a child process."""


class Store:
    """Read-only access to the runs and episodes of a store."""

    def __init__(self, where: Settings) -> None:
        """Set the database that the store reads. No connection is opened yet.

        Args:
            where: the settings, which contain the database's URL.
        """
        self._settings = where
        self._db = Reader(where.database, self._open_whole)

    @property
    def url(self) -> str:
        """The URL of the store's database."""
        return self._settings.database

    def runs(self, **chosen: Any) -> Rows[RunRow, Run]:
        """Return the runs that match the filter, newest first.

        Args:
            chosen: fields of the filter: `status`, `kind`, `dataset`, `model`, and `text`, which matches a part of the name.

        Raises:
            ConfigError: the filter has no such field or, raised when the list is read, the field has no such value.
        """
        run_filter = filter_of(RunFilter, chosen)
        return Rows(RunRow, lambda paging: run_rows.list_runs(self._db, run_filter, paging), lambda row: Run(self._db, row))

    def run(self, name: "str | int | None" = None) -> Run:
        """Return a run by its name or number. Without `name`, return the newest run; an evaluation only if there is no other.

        Raises:
            NotFoundError: the run does not exist, or the store has no run yet.
        """
        run_name = run_rows.find_newest_run(self._db) if name is None else str(name)
        if run_name is None:
            raise NotFoundError("There is no run yet.", "Submit one: agentrl submit --dataset gsm8k")
        return Run(self._db, run_rows.describe_run(self._db, run_name))

    def episodes(self, run: "str | int | None" = None, **chosen: Any) -> Episodes:
        """Return the episodes of a run that match the filter. Without `run`, they are those of the newest run. See
        `Run.episodes`.
        """
        return Episodes(self._db, filter_of(EpisodeFilter, {"run": self.run(run).name, **chosen}))

    def episode(self, number: int) -> StoredEpisode:
        """Load an episode by its id.

        Raises:
            NotFoundError: no episode has this id.
        """
        return episode.find(self._db, number)

    def sql(self, query: str, limit: int = 10_000, seconds: float = 5.0) -> Table:
        """Return the result of one SELECT over the views and tables. `agentrl sql --schema` describes the views.

        Args:
            query: the SELECT.
            limit: the most rows to return.
            seconds: the time limit, in seconds.

        Raises:
            AccessDenied: the query is not a SELECT, or takes longer than `seconds`.
            ConfigError: the query is not valid SQL for this database.
        """
        columns, rows = user_sql.run_query(self._settings, query, limit, seconds)
        return Table(tuple(columns), tuple(tuple(row) for row in rows))

    def close(self) -> None:
        """Close the connections to the database. A later query opens them again."""
        self._db.close()

    def __enter__(self) -> "Store":
        """Return the store; the end of the `with` block closes it."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the store."""
        self.close()

    def _open_whole(self) -> Any:
        from agentrl.workflow.store.migrate import open_database

        return open_database(self._settings.database)

    def __repr__(self) -> str:
        return f"<store {_shown(self._settings.database)}>"

    def _repr_html_(self) -> str:
        return f"<p><b>{html.text(repr(self))}</b></p>{self.runs()._repr_html_()}"


def open_store(place: "str | PathLike[str] | None" = None) -> Store:
    """Open a store for reading.

    Args:
        place: a data folder, a SQLite file, the URL of a database (`sqlite:///runs.db`, `postgresql://...`), or an
            `InMemoryStore`. None: the store that the commands use on this machine.

    Raises:
        NotFoundError: no store exists there.
        ConfigError: `place` is not a folder, a file or a URL.
    """
    if not isinstance(place, str | PathLike | None):
        raise ConfigError(f"A store must be a folder, a file or a URL, not {place!r:.60}.")
    where = settings() if place is None else _settings_of(fspath(place))
    file = user_sql.sqlite_file(where)
    if file is not None and not (file.is_file() and file.stat().st_size):
        raise NotFoundError(f"There is no store {str(file)!r}.", "Create one: agentrl submit --dataset gsm8k")
    return Store(where)


class InMemoryStore:
    """A store in a temporary folder, which is deleted when this process ends. The store uses the models of the data folder."""

    def __init__(self) -> None:
        """Create the folder. When this process ends, the workers of the store are stopped and the folder is removed."""
        self.folder = Path(tempfile.mkdtemp(prefix="agentrl-"))
        atexit.register(self.close)
        models = settings().models_dir
        models.mkdir(parents=True, exist_ok=True)
        (self.folder / "models").symlink_to(models)

    def __fspath__(self) -> str:
        """Return the folder, for `agentrl.open`."""
        return str(self.folder)

    def close(self) -> None:
        """Stop the store's workers and remove its folder. Further calls do nothing."""
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
    """The location of a store, as environment variables for commands.

    Args:
        variables: the environment variables. An empty value removes the variable from the command's environment.
    """

    variables: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, store: "str | Path | Store | InMemoryStore | None") -> "StoreLocation":
        """Return the location of a folder, a SQLite file, a URL or a store. None means the store that the commands use.

        Raises:
            ConfigError: the value has another type or form.
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
        overrides = {names[variable]: value for variable, value in self.variables.items() if variable in names}
        return Settings.model_validate(settings().model_dump() | overrides)

    def environment(self, **more: str) -> dict[str, str]:
        """Return the environment of a process that uses this location."""
        left_out = {name for name, value in self.variables.items() if not value}
        return {name: value for name, value in {**os.environ, **self.variables, **more}.items() if name not in left_out}

    def open(self) -> Store:
        """Open the store for reading.

        Raises:
            NotFoundError: no store exists at this location.
        """
        return open_store(self.settings.database) if self.variables else open_store()


def _variables_of(store: str) -> dict[str, str]:
    if store == MEMORY:
        raise ConfigError(
            "InMemoryStore must be passed as an object, which several trainers may share.",
            "Pass store=agentrl.InMemoryStore().",
        )
    path = Path(store).expanduser()
    if is_url(store) or path.suffix in (".db", ".sqlite", ".sqlite3"):
        return {"AGENTRL_DATABASE_URL": _database_url(store)}
    if path.is_file():
        raise ConfigError(f"{store!r} is not a name of a database file.", f"Pass {FILE}, or a folder.")
    return {"AGENTRL_HOME": str(path.absolute()), "AGENTRL_DATABASE_URL": ""}


def _settings_of(place: str) -> Settings:
    if not place:
        raise ConfigError("A store must be a folder, a file or a URL, not an empty text.")
    here, url = settings(), _database_url(place)
    return here if here.database in (place, url) else here.model_copy(update={"database_url": url, "database_reader_url": ""})


def _database_url(place: str) -> str:
    """Return the database URL for a URL, a file or a folder. A relative path is made absolute."""
    if place.startswith(SQLITE):
        return f"{SQLITE}{Path(place.removeprefix(SQLITE)).expanduser().absolute()}"
    if is_url(place):
        return place
    path = Path(place).expanduser()
    return f"{SQLITE}{quote(str((path / FILE if path.is_dir() else path).absolute()))}"


def _shown(url: str) -> str:
    head, at, tail = url.rpartition("@")
    scheme, marks, login = head.partition("://")
    return f"{scheme}{marks}{login.partition(':')[0]}{at}{tail}" if at else url


def write_once(file: Path, text: str) -> None:
    """Write a file of the data folder atomically, unless the file exists.

    Raises:
        ServiceError: the file cannot be written.
    """
    if file.exists():
        return
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(file)
    except OSError as error:
        message = f"Cannot write to the folder {str(file.parent)!r}: {error.strerror or error}."
        raise ServiceError(message, "Pass another store, or set AGENTRL_HOME to a folder of yours.") from error

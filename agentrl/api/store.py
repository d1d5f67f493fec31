"""Read access to a store: `agentrl.open()`."""

from os import PathLike, fspath
from pathlib import Path
from typing import Any

from agentrl.api import episode, html
from agentrl.api.episode import Episodes, StoredEpisode
from agentrl.api.lists import Rows, Table
from agentrl.api.run import Run, filter_of
from agentrl.workflow.errors import ConfigError, NotFoundError
from agentrl.workflow.settings import Settings, is_url, settings
from agentrl.workflow.store.driver_reader import Reader
from agentrl.workflow.store.reads import run_rows, user_sql
from agentrl.workflow.store.reads.episode_rows import EpisodeFilter
from agentrl.workflow.store.reads.run_rows import RunFilter
from agentrl.workflow.tables.views import RunRow

FILE = "agentrl.db"
"""What a data folder's database is called."""


class Store:
    """Read-only access to the runs and episodes of a store."""

    def __init__(self, where: Settings) -> None:
        """Take the settings that name its database."""
        self._settings = where
        self._db = Reader(where.database, self._open_whole)

    @property
    def url(self) -> str:
        """The URL of the store's database."""
        return self._settings.database

    def runs(self, **chosen: Any) -> Rows[RunRow, Run]:
        """Return the matching runs, newest first (`status`, `kind`, `dataset`, `model`, `text` in the name).

        Raises:
            ConfigError: there is no such filter.
        """
        asked = filter_of(RunFilter, chosen)
        return Rows(RunRow, lambda paging: run_rows.list_runs(self._db, asked, paging), lambda row: Run(self._db, row))

    def run(self, name: "str | int | None" = None) -> Run:
        """Return a run by name or number; without one, the newest.

        Raises:
            NotFoundError: there is none.
        """
        found = run_rows.find_newest_run(self._db) if name is None else str(name)
        if found is None:
            raise NotFoundError("There is no run yet.", "Submit one: agentrl submit --dataset gsm8k")
        return Run(self._db, run_rows.describe_run(self._db, found))

    def episodes(self, run: "str | int | None" = None, **chosen: Any) -> Episodes:
        """Return the episodes of a run, by default the newest, that match the filter (see `Run.episodes`)."""
        return Episodes(self._db, filter_of(EpisodeFilter, {"run": self.run(run).name, **chosen}))

    def episode(self, number: int) -> StoredEpisode:
        """Return an episode by its number.

        Raises:
            NotFoundError: there is none.
        """
        return episode.find(self._db, number)

    def sql(self, query: str, limit: int = 10_000, seconds: float = 5.0) -> Table:
        """Return the result of one SELECT over the views (`agentrl sql --schema` describes them) and tables.

        Raises:
            AccessDenied: it is anything else, or takes longer than `seconds`.
            ConfigError: the database does not understand it.
        """
        columns, rows = user_sql.run_query(self._settings, query, limit, seconds)
        return Table(tuple(columns), tuple(tuple(row) for row in rows))

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
        place: a data folder, a SQLite file, or the URL of a database (`sqlite:///runs.db`, `postgresql://...`), or an
            `InMemoryStore`; None: the one that the commands use here.

    Raises:
        NotFoundError: there is none.
        ConfigError: it is no place.
    """
    if not isinstance(place, str | PathLike | None):
        raise ConfigError(f"A store must be a folder, a file or a URL, not {place!r:.60}.")
    where = settings() if place is None else _settings_of(str(fspath(place)))
    file = user_sql.sqlite_file(where)
    if file is not None and not (file.is_file() and file.stat().st_size):
        raise NotFoundError(f"There is no store {str(file)!r}.", "Create one: agentrl submit --dataset gsm8k")
    return Store(where)


def _settings_of(place: str) -> Settings:
    if not place:
        raise ConfigError("A store must be a folder, a file or a URL, not an empty text.")
    url = place if is_url(place) else f"sqlite:///{_file_of(Path(place).expanduser())}"
    here = settings()
    if url == here.database:
        return here
    return here.model_copy(update={"database_url": url, "database_reader_url": ""})


def _file_of(path: Path) -> str:
    from urllib.parse import quote

    return quote(str((path / FILE if path.is_dir() else path).absolute()))


def _shown(url: str) -> str:
    """The URL without a password."""
    head, at, tail = url.rpartition("@")
    scheme, marks, login = head.partition("://")
    return f"{scheme}{marks}{login.partition(':')[0]}{at}{tail}" if at else url

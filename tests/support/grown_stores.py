"""Stores of synthetic runs: each is filled once for a file of tests, and copied for each test."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, make_url

from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.migrate import open_database
from bench.performance import synthetic
from tests.conftest import copy_store, created

Shape = tuple[tuple[str, int], ...]


def grown_store(shape: Mapping[str, int]) -> Any:
    """Return a fixture: a database of each kind with runs of that shape (see `bench.performance.synthetic`)."""

    @pytest.fixture(params=["sqlite", "postgres"])
    def grown(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
        template = request.getfixturevalue(f"grown_{request.param}")(tuple(shape.items()))
        if request.param == "sqlite":
            copy_store(tmp_path, template)
            with closing(open_database(f"sqlite:///{tmp_path / 'agentrl.db'}")) as database:
                yield database
        else:
            with created(request.getfixturevalue("postgres_server"), template) as url, closing(open_database(url)) as database:
                yield database

    return grown


@pytest.fixture(scope="module")
def grown_sqlite(tmp_path_factory: pytest.TempPathFactory, migrated_file: Path) -> Callable[[Shape], Path]:
    """The file to copy for a shape."""

    @cache
    def fill(shape: Shape) -> Path:
        folder = tmp_path_factory.mktemp("grown")
        copy_store(folder, migrated_file)
        _fill(f"sqlite:///{folder / 'agentrl.db'}", shape)
        return folder / "agentrl.db"

    return fill


@pytest.fixture(scope="module")
def grown_postgres(postgres_server: Engine, migrated_name: str) -> Iterator[Callable[[Shape], str]]:
    """The name of the database to copy for a shape."""
    with ExitStack() as stack:

        @cache
        def fill(shape: Shape) -> str:
            url = stack.enter_context(created(postgres_server, migrated_name))
            _fill(url, shape)
            return str(make_url(url).database)

        yield fill


def _fill(url: str, shape: Shape) -> None:
    with closing(open_database(url)) as database, database.engine.begin() as tx:
        synthetic.fill(tx, dict(shape))

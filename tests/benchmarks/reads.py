"""What people and the control loop read of a grown database: every list, the snapshot, one episode whole, every view."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from sqlalchemy import text

from tests.benchmarks.synthetic import Run
from workflow.store import observe
from workflow.store.connect import Database
from workflow.views import VIEWS

Read = Callable[[Database], object]
FILTERS: tuple[dict[str, object], ...] = (
    {},
    {"iteration": 1},
    {"status": "failed"},
    {"status": "done"},
    {"stop_reason": "max_tokens"},
    {"task": "train/3"},
    {"min_reward": 1.0},
    {"max_reward": 0.0},
    {"tool_errors": 1},
    {"tool_errors": 2},
    {"status": "done", "stop_reason": "max_tokens", "min_reward": 1.0, "tool_errors": 1},
    {"iteration": 1, "task": "train/3", "max_reward": 0.5},
)
"""Every filter of `list_episodes` alone, some that nothing meets, some together."""

README = Path(__file__).parents[2] / "README.md"

WITHOUT_IDS = ("v_ledger", "v_tool_sessions")
"""An episode stands in the first once for each run that trained on it; a session is its episode's."""

OF_RUN = {"v_evals": "measures"}
"""View -> the column that names the run, where it is not `run`: that of an evaluation is the evaluation."""


def reads(runs: list[Run], episodes: int) -> dict[str, Read]:
    """Name -> what is read, for the oldest, the largest and the running run."""
    found: dict[str, Read] = {
        "list_runs": observe.list_runs,
        "snapshot": lambda database: observe.snapshot(database, 30.0),
        "find_episode first": lambda database: observe.find_episode(database, 1),
        "find_episode last": lambda database: observe.find_episode(database, episodes),
    }
    for run in runs:
        found |= _of_run(run.name, run.iterations * 128)
    return found


def _of_run(run: str, episodes: int) -> dict[str, Read]:
    found: dict[str, Read] = {
        f"{run}: describe_run": lambda database: observe.describe_run(database, run),
        f"{run}: progress": lambda database: observe.progress(database, run),
        f"{run}: list_iterations": lambda database: observe.list_iterations(database, run),
        f"{run}: list_iterations, new": lambda database: observe.list_iterations(database, run, 30),
        f"{run}: most_frequent_failure": lambda database: observe.most_frequent_failure(database, run),
        f"{run}: list_episodes, last page": lambda database: observe.list_episodes(database, run, {}, 51, episodes - 51),
    }
    for filters in FILTERS:
        shown = " ".join(f"{name}={value}" for name, value in filters.items())
        found[f"{run}: list_episodes {shown}"] = _page(run, filters)
    for view in VIEWS:
        chosen = f"SELECT * FROM {view} WHERE {OF_RUN.get(view, 'run')} = '{run}'"
        found[f"{run}: {view}"] = _query(f"{chosen} LIMIT 50")
        if view not in WITHOUT_IDS:
            found[f"{run}: {view}, newest"] = _query(f"{chosen} ORDER BY id DESC LIMIT 50")
    return found


def questions(run: str) -> dict[str, Read]:
    """The README's five queries, over all of a run."""
    shown = README.read_text().split("<!-- queries -->")[1].split("<!-- /queries -->")[0]
    queries = re.findall(r"```sql\n(.*?)```", shown, re.DOTALL)
    return {f"README {n}": _query(query.replace("quickstart", run)) for n, query in enumerate(queries, 1)}


def _page(run: str, filters: Mapping[str, object]) -> Read:
    return lambda database: observe.list_episodes(database, run, filters, 51)


def _query(query: str) -> Read:
    def read(database: Database) -> object:
        with database.read() as tx:
            return tx.execute(text(query)).all()

    return read

"""Builds the responses about runs: the list, one run, and its config.

The origin of a config value is the option, variable or file that set it. Other values that differ from the default have the
origin `settled`, or `given` in runs that recorded no origins.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from agentrl.workers.page.shown.shown_texts import LISTED_CHARS, SHOWN_CHARS, cut_rows, cut_value
from agentrl.workflow.config import NAME_PATTERN, RunConfig
from agentrl.workflow.store.driver_reader import DriverTransaction
from agentrl.workflow.store.reads import run_details, run_rows
from agentrl.workflow.store.reads.eval_results import count_evals
from agentrl.workflow.store.reads.label_rows import notes_of
from agentrl.workflow.store.reads.lineage import find_children, find_sources
from agentrl.workflow.store.reads.open_work import list_open_work
from agentrl.workflow.store.reads.run_details import StoredConfig, load_summaries
from agentrl.workflow.store.reads.run_differences import flat_config
from agentrl.workflow.store.reads.run_seconds import load_run_seconds
from agentrl.workflow.tables.views import RunRow

CHILDREN_SHOWN = 100
OPEN_WORK_SHOWN = 200
"""The most entries in the list of a run's claims and waiting messages."""


def list_shown_runs(tx: DriverTransaction, rows: Sequence[RunRow]) -> list[dict[str, Any]]:
    """Return the rows of runs, each extended by the run's summary."""
    summaries = load_summaries(tx, rows)
    return [{**row, **summaries[row.id].shown()} for row in rows]


def typed_run(number: int, name: str) -> str:
    """Return the text that names the run on a command line. It is the run's name. If the name may need quotes in a shell (it
    does not match NAME_PATTERN), it is the run's number.
    """
    return name if re.fullmatch(NAME_PATTERN, name) else str(number)


def load_run(tx: DriverTransaction, run: int) -> dict[str, Any]:
    """Return the response of `/api/runs/{run}` about this run. Raise NotFoundError if the run does not exist."""
    name = run_rows.run_name(tx, run)
    (shown_run,) = list_shown_runs(tx, [run_rows.run_by_id(tx, run)])
    children = find_children(tx, run, CHILDREN_SHOWN + 1)
    work = (asdict(claim) for claim in list_open_work(tx) if claim.run == name) if shown_run["status"] == "running" else ()
    return {
        "run": shown_run,
        "typed": typed_run(run, name),
        "config": list_config(run_details.find_config(tx, run)),
        "manifest": run_details.load_manifest(tx, run),
        "progress": run_rows.count_progress(tx, name),
        "waits_for": shown_run["waits_for"],
        "seconds": load_run_seconds(tx, name, episodes=False),
        "sampled_on": run_rows.why_sampling_on(tx, name),
        "tags": shown_run["tags"],
        "notes": cut_rows(notes_of(tx, run), SHOWN_CHARS),
        "sources": [asdict(source) for source in find_sources(tx, run)],
        "children": [asdict(child) for child in children[:CHILDREN_SHOWN]],
        "children_cut": len(children) > CHILDREN_SHOWN,
        "has": run_details.find_what_it_has(tx, run, name),
        "reward_parts": run_details.list_reward_parts(tx, run, name),
        "open_work": [*work][:OPEN_WORK_SHOWN],
        "evaluations": count_evals(tx, run),
    }


def list_config(config: StoredConfig) -> list[dict[str, Any]]:
    """Return a row with key, value and origin for each config value. `cut` has the full length of a shortened one."""
    values, origin = flat_config(config.values), _origins(config)
    return [{"key": key, **_shown(value), "origin": origin(key, value)} for key, value in values.items()]


def _shown(value: Any) -> dict[str, Any]:
    shortened, cut = cut_value(value)
    return {"value": shortened, "cut": cut}


def _origins(config: StoredConfig) -> Callable[[str, Any], str]:
    """Return a function that returns the origin of a value. Its arguments are the value's key and the value."""
    defaults, stored = RunConfig().flat(), config.origins

    def origin(key: str, value: Any) -> str:
        if stored and isinstance(stored.get(key), str):
            return stored[key][:LISTED_CHARS]
        if key in defaults and defaults[key] == value:
            return "default"
        return "given" if stored is None else "settled"

    return origin

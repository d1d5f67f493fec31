"""Runs as the page shows them: in a list, and one with all that is shown of it first."""

import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from agentrl.workers.page.shown.config_rows import list_config
from agentrl.workers.page.shown.cutting import SHOWN_CHARS, cut_rows
from agentrl.workflow.config import NAME_PATTERN
from agentrl.workflow.store.driver_reader import DriverTransaction
from agentrl.workflow.store.reads import run_details, run_rows
from agentrl.workflow.store.reads.eval_results import count_evals
from agentrl.workflow.store.reads.label_rows import notes_of
from agentrl.workflow.store.reads.lineage import find_children, find_sources
from agentrl.workflow.store.reads.open_work import list_open_work
from agentrl.workflow.store.reads.run_details import load_summaries
from agentrl.workflow.tables.views import RunRow

CHILDREN_SHOWN = 100
"""The most runs that come from one."""
OPEN_WORK_SHOWN = 200
"""The most claims and waiting messages of a run."""


def list_shown_runs(tx: DriverTransaction, rows: Sequence[RunRow]) -> list[dict[str, Any]]:
    """Return the rows of runs, each with its summary."""
    summaries = load_summaries(tx, rows)
    return [{**row, **summaries[row.id].shown()} for row in rows]


def typed_run(number: int, name: str) -> str:
    """Return the run as a person types it: by its name, since a command takes a number for a name first; by its number, if in a
    strange store no shell should read that name."""
    return name if re.fullmatch(NAME_PATTERN, name) else str(number)


def load_run(tx: DriverTransaction, run: int) -> dict[str, Any]:
    """Return the run of that number, as `/api/runs/{run}` answers it.

    Raises:
        NotFoundError: there is no such run.
    """
    name = run_rows.run_name(tx, run)
    (shown,) = list_shown_runs(tx, [run_rows.run_by_id(tx, run)])
    children = find_children(tx, run, CHILDREN_SHOWN + 1)
    work = (asdict(each) for each in list_open_work(tx) if each.run == name) if shown["status"] == "running" else ()
    return {
        "run": shown,
        "typed": typed_run(run, name),
        "config": list_config(run_details.find_config(tx, run)),
        "manifest": run_details.load_manifest(tx, run),
        "progress": run_rows.count_progress(tx, name),
        "waits_for": shown["waits_for"],
        "sampled_on": run_rows.why_sampling_on(tx, name),
        "tags": shown["tags"],
        "notes": cut_rows(notes_of(tx, run), SHOWN_CHARS),
        "sources": [asdict(each) for each in find_sources(tx, run)],
        "children": [asdict(each) for each in children[:CHILDREN_SHOWN]],
        "children_cut": len(children) > CHILDREN_SHOWN,
        "has": run_details.find_what_it_has(tx, run, name),
        "reward_parts": run_details.list_reward_parts(tx, run, name),
        "open_work": [*work][:OPEN_WORK_SHOWN],
        "evaluations": count_evals(tx, run),
    }

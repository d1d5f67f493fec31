"""Trackio: a run in Trackio's local database (`TRACKIO_DIR`), which `trackio show` serves and `trackio sync` uploads."""

import os
from collections.abc import Mapping
from typing import Any

from agentrl.workflow.errors import ConfigError
from agentrl.workflow.trackers import EVALUATION, ITERATION, PROJECT, SAMPLES, TrackedRun, TrackedStep, Tracker

REMOTE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")


class _Session:
    """A session in Trackio."""

    def __init__(self, run: TrackedRun, handle: str) -> None:
        import trackio as package

        if remote := [name for name in REMOTE if os.environ.get(name)]:
            raise ConfigError(f"{remote[0]} is set, and agentrl writes trackio's local database only.", "Use `trackio sync`.")
        self._package = package
        self.handle = handle or run.name
        self._known = _read_last_numbers(self.handle)
        config = {**run.config, "page": run.page, "tags": ", ".join(run.tags)}
        self._run = package.init(PROJECT, self.handle, config=config, resume="allow", embed=False, auto_log_cpu=False)
        self.url = f"trackio show --project {PROJECT}"

    def last_numbers(self) -> Mapping[str, int]:
        return self._known

    def log(self, step: TrackedStep) -> None:
        text: dict[str, Any] = {SAMPLES: self._package.Markdown(step.text)} if step.text else {}
        self._run.log({**step.numbers, **text}, step=step.number)

    def finish(self, status: str) -> None:
        self._run.finish()


def _read_last_numbers(name: str) -> dict[str, int]:
    from trackio.sqlite_storage import SQLiteStorage

    if not SQLiteStorage.get_project_db_path(PROJECT).exists():
        return {}
    rows = SQLiteStorage.get_logs(PROJECT, name)
    return {
        series: max(int(row[series]) for row in rows if series in row)
        for series in (ITERATION, EVALUATION)
        if any(series in row for row in rows)
    }


trackio = Tracker("trackio", _Session)

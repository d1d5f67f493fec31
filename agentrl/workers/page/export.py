"""A run as one file: what the page would ask about it is asked here, in process, and recorded until the file is full."""

import asyncio
import json
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2

from agentrl.workers.page.one_file import embed, embed_json, write_page
from agentrl.workers.page.read_only import Busy, ReadOnlyStore
from agentrl.workers.page.service import application
from agentrl.workflow.errors import ConfigError, ConflictError, NotFoundError, ServiceError
from agentrl.workflow.store.reads import run_rows, task_rows

TOKENS = 4096
"""As many tokens as the page asks for at once."""
TRIES, AGAIN_SECONDS = 10, 0.5
"""How often a busy store is asked, and how long after."""
MISSES = 20
"""So many that do not fit one after another are tried before the file counts as full."""
ITERATIONS_SHARE, TASKS_SHARE = 0.4, 0.5
"""The part of the room that iterations may fill, and these and tasks: the rest is for groups and episodes."""
SILENCE_SECONDS = 5.0
"""How long nothing is said of the progress."""
ABOUT_BYTES = 2000
"""Room for what is said of the file itself."""


class _NotTaken(Exception):
    """An answer that is not there, or does not fit."""


@dataclass
class _Recording:
    """The answers so far. `limit`: the most bytes of all of them for now; `progress` is told their number now and then."""

    client: httpx2.AsyncClient
    limit: int
    progress: Callable[[str], None]
    told: float = field(default_factory=time.monotonic)
    size: int = 0
    answers: dict[str, bytes] = field(default_factory=dict)

    async def ask(self, path: str) -> Any:
        """The answer to a path, which is recorded.

        Raises:
            _NotTaken: there is none, or it does not fit.
        """
        body = await self._body(path)
        if path not in self.answers:
            made = embed_json(body)
            cost = len(made) + len(embed(path)) + 2
            if self.size + cost > self.limit:
                raise _NotTaken(path)
            self.answers[path] = made
            self.size += cost
            if time.monotonic() - self.told >= SILENCE_SECONDS:
                self.told = time.monotonic()
                self.progress(f"{len(self.answers):,} answers of the page, {self.size / 1e6:.1f} MB so far")
        return json.loads(body)

    async def whole(self, work: Callable[[], Awaitable[None]]) -> bool:
        """Whether all of it could be taken; otherwise nothing of it is."""
        before = len(self.answers), self.size
        try:
            await work()
        except _NotTaken:
            for path in [*self.answers][before[0] :]:
                del self.answers[path]
            self.size = before[1]
            return False
        return True

    async def many(self, works: Iterable[Callable[[], Awaitable[None]]]) -> None:
        """Takes those that fit, until too many one after another do not."""
        missed = 0
        for work in works:
            missed = 0 if await self.whole(work) else missed + 1
            if missed >= MISSES:
                return

    async def _body(self, path: str) -> bytes:
        for tried in range(TRIES):
            answered = await self.client.get(f"/{path}")
            if answered.status_code != 503:
                break
            await asyncio.sleep(AGAIN_SECONDS * (tried + 1 < TRIES))
        if answered.status_code == 503:
            raise Busy("The store cannot be read now.", "Try again.")
        if answered.status_code != 200:
            raise _NotTaken(path)
        return bytes(answered.content)


def write_export(
    store: ReadOnlyStore,
    run: str,
    out: Path,
    episodes: Sequence[int],
    limit_bytes: int,
    force: bool = False,
    progress: Callable[[str], None] = lambda line: None,
) -> str:
    """Write the run of that name or number into one file, and return a sentence on what it left out; empty: nothing.

    Args:
        episodes: those that must be in it.
        limit_bytes: the most bytes of the file.
        force: write over a file that is there.
        progress: called with a line every few seconds.

    Raises:
        NotFoundError: there is no such run or episode.
        ConflictError: the file exists.
        ConfigError: it cannot be written there, or the limit is too small, or an episode is another run's.
        ServiceError: the store cannot be read.
    """
    out = _check_place(out, force)
    row = run_rows.describe_run(store, run)
    title = f"agentrl: {row.run}"
    empty = len(write_page(title, {"run": row.id}, {})) + ABOUT_BYTES
    made = asyncio.run(_record(store, row.id, list(dict.fromkeys(episodes)), limit_bytes - empty, empty, progress))
    left_out = _left_out(row.id, made, task_rows.count_tasks(store, row.id), limit_bytes)
    about = {"run": row.id, "made_at": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), "left_out": left_out}
    _write(out, write_page(title, about, made.answers), force)
    return left_out


def _check_place(out: Path, force: bool) -> Path:
    """Where the file is to be, links followed.

    Raises:
        ConflictError: there is one.
        ConfigError: there can be none.
    """
    elsewhere = ConfigError(f"Cannot write to {str(out)!r}.", "Pass a file in an existing folder: --out run.html")
    try:
        place = out.resolve()
        is_file, possible = place.is_file(), place.parent.is_dir()
    except (OSError, RuntimeError, ValueError) as error:  # too long a name, links in a circle, a NUL
        raise elsewhere from error
    if not possible or (not is_file and os.path.lexists(place)):  # a folder, a device, a pipe
        raise elsewhere
    if is_file and not force:
        raise _exists_error(out)
    return place


def _exists_error(out: Path) -> ConflictError:
    return ConflictError(f"The file {str(out)!r} exists.", "Pass another --out, or overwrite it with --force.")


async def _record(
    store: ReadOnlyStore, run: int, episodes: Sequence[int], room: int, around: int, progress: Callable[[str], None]
) -> _Recording:
    transport = httpx2.ASGITransport(application(store))
    headers = {"Accept-Encoding": "identity"}
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers, timeout=None) as client:
        made = _Recording(client, room, progress)
        tasks = await _take_run(made, run, around)
        await _take_chosen(made, run, episodes, (room + around) / 1e6)
        tasks += await _take_more_tasks(made, run)
        free = room - made.size
        made.limit = room - int(free * (1 - ITERATIONS_SHARE))
        await made.many(_work(made, f"api/runs/{run}/iterations/{number}") for number in _iterations(made, run))
        made.limit = room - int(free * (1 - TASKS_SHARE))
        await made.many(_work(made, f"api/runs/{run}/tasks/{task}") for task in tasks)
        made.limit = room
        await made.many(_groups(made, run))
    return made


def _work(made: _Recording, *paths: str) -> Callable[[], Awaitable[None]]:
    async def work() -> None:
        for path in paths:
            await made.ask(path)

    return work


async def _take_run(made: _Recording, run: int, around: int) -> list[int]:
    """What the run's page shows before anything is chosen; returns the tasks that it lists.

    Raises:
        ConfigError: even that does not fit.
    """
    room, made.limit = made.limit, 1 << 62
    here = f"api/runs/{run}"
    try:
        told = await made.ask(here)
        curves = await made.ask(f"{here}/curves")
        while curves["more"]:
            curves = await made.ask(f"{here}/curves?after={curves['rows'][-1][0]}")
        for path in ("events?size=500&sort=-id", "lanes", "episodes?size=50"):
            await made.ask(f"{here}/{path}")
        tasks = await made.ask(f"{here}/tasks?size=25")
        for path in ("annotations?size=100", "prompts", "critic-calls?size=20"):
            await made.ask(f"{here}/{path}")
        await made.ask(f"api/evals?measures={run}&size=200")
        await made.ask("api/views")
        page = await made.ask(f"{here}/ledger")
        while page["next"]:
            page = await made.ask(f"{here}/ledger?after={page['next']}")
        _put(made, "api/runs?size=50", {"rows": [told["run"]], "next": ""})  # the others are nobody's business
        _put(made, "api/store", await _store(made))
    except _NotTaken as error:
        raise ServiceError(f"The store did not answer {str(error)!r}.", "Open the run instead: agentrl ui") from error
    if made.size > room:
        least = (made.size + around) / 1e6 + 0.1
        raise ConfigError(f"The run's curves and lists alone need {least:.1f} MB.", f"Raise the limit: --limit-mb {least:.1f}")
    made.limit = room
    return [row["task_id"] for row in tasks["rows"]]


async def _take_more_tasks(made: _Recording, run: int) -> list[int]:
    """The further pages of the list of tasks, as many as fit; returns the tasks that they list."""
    found: list[int] = []
    page = json.loads(made.answers[f"api/runs/{run}/tasks?size=25"])
    try:
        while page["next"]:
            page = await made.ask(f"api/runs/{run}/tasks?cursor={quote(page['next'], safe='')}&size=25")
            found += [row["task_id"] for row in page["rows"]]
    except _NotTaken:
        pass
    return found


async def _store(made: _Recording) -> dict[str, Any]:
    """What is told of the store, without the folder that it is in."""
    told: dict[str, Any] = await made.ask("api/store")
    made.size -= len(made.answers.pop("api/store"))
    return {**told, "place": str(told["place"]).partition("?")[0].rpartition("/")[2], "newest_run": None, "actions": False}


def _put(made: _Recording, path: str, value: Any) -> None:
    made.answers[path] = embed(value)
    made.size += len(made.answers[path]) + len(path) + 6


async def _take_chosen(made: _Recording, run: int, named: Sequence[int], limit_mb: float) -> None:
    """The named episodes; the best, the worst and the last where they fit.

    Raises:
        NotFoundError, ConfigError: a named one is not there, or another run's, or does not fit.
    """
    for episode in named:
        answered = await made.client.get(f"/api/episodes/{episode}")
        if answered.status_code in (404, 422):
            raise NotFoundError(f"There is no episode {episode}.", f"List the run's: agentrl episodes {run}")
        of = answered.json().get("episode", {})
        if of.get("run_id", run) != run:
            raise ConfigError(f"Episode {episode} is of run {of['run_id']}.", f"List the run's: agentrl episodes {run}")
        if not await made.whole(_episode(made, run, episode, beside=True)):
            raise ConfigError(f"Episode {episode} does not fit into {limit_mb:.0f} MB.", "Raise --limit-mb.")
    for order in ("sort=-reward&status=done", "sort=reward&status=done", "sort=-id"):
        answered = await made.client.get(f"/api/runs/{run}/episodes?size=1&{order}")
        rows = answered.json()["rows"] if answered.status_code == 200 else ()
        for row in rows:
            await made.whole(_episode(made, run, row["id"], beside=True))


def _episode(made: _Recording, run: int, episode: int, beside: bool = False) -> Callable[[], Awaitable[None]]:
    """All of an episode: its turns, its tokens; `beside`: its group, its iteration, its task."""

    async def work() -> None:
        here = f"api/episodes/{episode}"
        told = page = await made.ask(here)
        while page["next_turn"] is not None:
            page = await made.ask(f"{here}?turn={page['next_turn']}")
        start, total = 0, 1
        while start < total:
            tokens = await made.ask(f"{here}/tokens?size={TOKENS}&start={start}")
            start, total = start + len(tokens["ids"]), tokens["total"] if tokens["ids"] else 0
        if beside:
            row = told["episode"]
            await made.ask(f"api/groups/{row['group_id']}")
            await made.ask(f"api/runs/{run}/iterations/{row['iteration']}")
            await made.ask(f"api/runs/{run}/tasks/{told['task']['id']}")

    return work


def _groups(made: _Recording, run: int) -> "Iterable[Callable[[], Awaitable[None]]]":
    """Groups and their episodes, those of the newest iterations first."""
    for number in _iterations(made, run):
        document = made.answers.get(f"api/runs/{run}/iterations/{number}")
        for group in json.loads(document)["groups"] if document else ():
            yield _work(made, f"api/groups/{group['id']}")
            for episode in group["episodes"]:
                yield _episode(made, run, episode["id"])


def _iterations(made: _Recording, run: int) -> list[int]:
    """Their numbers, the newest first."""
    return [row["iteration"] for row in reversed(_curves(made, run))]


def _curves(made: _Recording, run: int) -> list[dict[str, Any]]:
    pages = (json.loads(made.answers[path]) for path in made.answers if path.startswith(f"api/runs/{run}/curves"))
    return [dict(zip(page["columns"], row, strict=True)) for page in pages for row in page["rows"]]


def _left_out(run: int, made: _Recording, tasks: int, limit_bytes: int) -> str:
    """A sentence on what the run has and the file has not."""
    curves = _curves(made, run)
    taken = {
        "iterations": sum(path.startswith(f"api/runs/{run}/iterations/") for path in made.answers),
        "groups": sum(path.startswith("api/groups/") for path in made.answers),
        "episodes": sum(path.startswith("api/episodes/") and path.count("/") == 2 and "?" not in path for path in made.answers),
        "tasks": sum(path.startswith(f"api/runs/{run}/tasks/") for path in made.answers),
    }
    there = {
        "iterations": len(curves),
        "groups": sum(row["groups"] or 0 for row in curves),
        "episodes": sum(row["episodes"] or 0 for row in curves),
        "tasks": tasks,
    }
    missing = [f"{there[what] - taken[what]:,} of {there[what]:,} {what}" for what in there if there[what] > taken[what]]
    return f"Left out to stay below {limit_bytes / 1e6:.0f} MB: {', '.join(missing)}." if missing else ""


def _write(out: Path, document: bytes, force: bool) -> None:
    """Writes the file at once and whole.

    Raises:
        ConflictError: it exists by now.
        ConfigError: it cannot be written.
    """
    try:
        handle, name = tempfile.mkstemp(prefix=f".{out.name[:100]}.", dir=out.absolute().parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(document)
            os.chmod(name, 0o666 & ~_umask())
            if force:
                os.replace(name, out)
            else:
                _link(name, out)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(name)
    except FileExistsError as error:
        raise _exists_error(out) from error
    except OSError as error:
        raise ConfigError(
            f"The file {str(out)!r} cannot be written: {error.strerror or error}.", "Pass another --out."
        ) from error


def _link(name: str, out: Path) -> None:
    """Gives the file its name unless that is taken, also where a file system knows no second names."""
    try:
        os.link(name, out)
    except FileExistsError:
        raise
    except OSError:
        os.close(os.open(out, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        os.replace(name, out)


def _umask() -> int:
    now = os.umask(0o077)
    os.umask(now)
    return now

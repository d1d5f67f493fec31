"""Exports a run as one HTML file. The export sends the requests that the page would send to a service in this process, and
records the responses until the file has its maximum size.
"""

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
"""The number of tokens in one request. It must be the number that the page uses; otherwise the page would not find the recorded
responses.
"""
TRIES, AGAIN_SECONDS = 10, 0.5
"""How often a request to a busy store is sent, at most, and the pause between two tries, in seconds."""
EPISODES = "episodes?size=50"
"""The request of the page for the first episodes of a run. In the file, the answer lists all episodes of the file."""
MISSES = 20
"""If this many parts, one directly after the other, do not fit into the file, the file is regarded as full."""
ITERATIONS_SHARE, TASKS_SHARE = 0.4, 0.5
"""Two shares of the free space. Iterations are recorded until the first share is used, then tasks until the second share is
used. The rest is for groups and episodes.
"""
SILENCE_SECONDS = 5.0
"""The shortest time between two progress messages, in seconds."""
ABOUT_BYTES = 2000
"""The space reserved for the description of the file itself, in bytes."""


class _NotTaken(Exception):
    """The exception for a response that does not exist, or that does not fit into the file."""


@dataclass
class _Recording:
    """The responses that are recorded so far.

    Attributes:
        limit: the most bytes that all responses may have at present.
        progress: called every few seconds with a sentence about the progress.
        size: the number of bytes of the recorded responses.
        answers: the recorded responses by path.
        listed: the rows of the list of episodes, by the episode's id.
    """

    client: httpx2.AsyncClient
    limit: int
    progress: Callable[[str], None]
    reported: float = field(default_factory=time.monotonic)
    size: int = 0
    answers: dict[str, bytes] = field(default_factory=dict)
    listed: dict[int, Any] = field(default_factory=dict)
    _group_rows: tuple[int, dict[int, Any]] = (0, {})

    async def ask(self, path: str) -> Any:
        """Request a path, record the response and return its JSON."""
        body = await self._body(path)
        if path not in self.answers:
            embedded = embed_json(body)
            cost = len(embedded) + len(embed(path)) + 2
            if self.size + cost > self.limit:
                raise _NotTaken(path)
            self.answers[path] = embedded
            self.size += cost
            if time.monotonic() - self.reported >= SILENCE_SECONDS:
                self.reported = time.monotonic()
                self.progress(f"{len(self.answers):,} answers of the page, {self.size / 1e6:.1f} MB so far")
        return json.loads(body)

    async def list_episode(self, run: int, group: int, episode: int) -> None:
        """Add the episode to the list of the run's episodes, if the run sampled it."""
        if self._group_rows[0] != group:
            rows = json.loads(await self._body(f"api/runs/{run}/episodes?group={group}&size=1000"))["rows"]
            self._group_rows = group, {row["id"]: row for row in rows}
        row = self._group_rows[1].get(episode)
        if row is None or episode in self.listed:
            return
        cost = len(embed(row)) + 2
        if self.size + cost > self.limit:
            raise _NotTaken(f"the row of episode {episode}")
        self.listed[episode] = row
        self.size += cost

    async def whole(self, work: Callable[[], Awaitable[None]]) -> bool:
        """Run `work`, which records several responses. If one of them does not fit or does not exist, remove those that `work`
        has recorded, and return False.
        """
        before = len(self.answers), len(self.listed), self.size
        try:
            await work()
        except _NotTaken:
            for path in [*self.answers][before[0] :]:
                del self.answers[path]
            for episode in [*self.listed][before[1] :]:
                del self.listed[episode]
            self.size = before[2]
            return False
        return True

    async def many(self, works: Iterable[Callable[[], Awaitable[None]]]) -> None:
        """Call `whole` with each function in `works`. Stop when the responses of several functions in a row (`MISSES`) did not
        fit into the file.
        """
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
            raise Busy("The store is busy and cannot be read now.", "Try again later.")
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
    """Write a run into one HTML file. Return a sentence about what was left out; empty if the file is complete.

    Args:
        episodes: the ids of episodes that must be included.
        limit_bytes: the largest size of the file, in bytes.
        progress: called every few seconds with a sentence about the progress.

    Raises:
        NotFoundError: the run or an episode does not exist.
        ConflictError: the file exists, and `force` is False.
        ConfigError: the file cannot be written, the limit is too small, or an episode belongs to another run.
        ServiceError: the store cannot be read.
    """
    out = _check_place(out, force)
    row = run_rows.describe_run(store, run)
    title = f"agentrl: {row.run}"
    empty = len(write_page(title, {"run": row.id}, {})) + ABOUT_BYTES
    recording = asyncio.run(_record(store, row.id, list(dict.fromkeys(episodes)), limit_bytes - empty, empty, progress))
    left_out = _left_out(row.id, recording, task_rows.count_tasks(store, row.id), limit_bytes)
    about = {"run": row.id, "made_at": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), "left_out": left_out}
    _write(out, write_page(title, about, recording.answers), force)
    return left_out


def _check_place(out: Path, force: bool) -> Path:
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
        recording = _Recording(client, room, progress)
        tasks = await _take_run(recording, run, around)
        await _take_chosen(recording, run, episodes, (room + around) / 1e6)
        await recording.many(_search(recording, run))
        tasks += await _take_more_tasks(recording, run)
        free = room - recording.size
        recording.limit = room - int(free * (1 - ITERATIONS_SHARE))
        await recording.many(_work(recording, f"api/runs/{run}/iterations/{number}") for number in _iterations(recording, run))
        recording.limit = room - int(free * (1 - TASKS_SHARE))
        await recording.many(_work(recording, f"api/runs/{run}/tasks/{task}") for task in tasks)
        recording.limit = room
        await recording.many(_groups(recording, run))
    _put_list(recording, run)
    return recording


def _work(recording: _Recording, *paths: str) -> Callable[[], Awaitable[None]]:
    async def work() -> None:
        for path in paths:
            await recording.ask(path)

    return work


async def _take_run(recording: _Recording, run: int, around: int) -> list[int]:
    """Record the responses that the run's page needs first."""
    room, recording.limit = recording.limit, 1 << 62
    here = f"api/runs/{run}"
    try:
        shown_run = await recording.ask(here)
        curves = await recording.ask(f"{here}/curves")
        while curves["more"]:
            curves = await recording.ask(f"{here}/curves?after={curves['rows'][-1][0]}")
        for path in ("events?size=500&sort=-id", "lanes", "examples", "verdict"):
            await recording.ask(f"{here}/{path}")
        episodes = await recording.ask(f"{here}/{EPISODES}")
        recording.listed = {row["id"]: row for row in episodes["rows"]}
        tasks = await recording.ask(f"{here}/tasks?size=25")
        searched = ("search",) if shown_run["run"]["kind"] == "search" else ()
        for path in ("annotations?size=100", "prompts", "critic-calls?size=20", *searched):
            await recording.ask(f"{here}/{path}")
        await recording.ask(f"api/evals?measures={run}&size=200")
        await recording.ask("api/views")
        page = await recording.ask(f"{here}/ledger")
        while page["next"]:
            page = await recording.ask(f"{here}/ledger?after={page['next']}")
        _put(recording, "api/runs?size=50", {"rows": [shown_run["run"]], "next": ""})  # the others are nobody's business
        _put(recording, "api/store", await _store(recording))
    except _NotTaken as error:
        raise ServiceError(
            f"The export failed at this request to the store: {str(error)!r}.", "Open the run instead: agentrl ui"
        ) from error
    if recording.size > room:
        least = (recording.size + around) / 1e6 + 0.1
        raise ConfigError(f"The run's curves and lists alone need {least:.1f} MB.", f"Raise the limit: --limit-mb {least:.1f}")
    recording.limit = room
    return [row["task_id"] for row in tasks["rows"]]


async def _take_more_tasks(recording: _Recording, run: int) -> list[int]:
    """Record the further pages of the list of tasks until one does not fit. Return the ids of the tasks on these pages."""
    task_ids: list[int] = []
    page = json.loads(recording.answers[f"api/runs/{run}/tasks?size=25"])
    try:
        while page["next"]:
            page = await recording.ask(f"api/runs/{run}/tasks?cursor={quote(page['next'], safe='')}&size=25")
            task_ids += [row["task_id"] for row in page["rows"]]
    except _NotTaken:
        pass
    return task_ids


async def _store(recording: _Recording) -> dict[str, Any]:
    """Return the description of the store. Its location is reduced to the last part, so the file does not show the folder."""
    description: dict[str, Any] = await recording.ask("api/store")
    recording.size -= len(recording.answers.pop("api/store"))
    return {
        **description,
        "place": str(description["place"]).partition("?")[0].rpartition("/")[2],
        "newest_run": None,
        "actions": False,
    }


def _put(recording: _Recording, path: str, value: Any) -> None:
    recording.answers[path] = embed(value)
    recording.size += len(recording.answers[path]) + len(path) + 6


def _put_list(recording: _Recording, run: int) -> None:
    """Put the episodes that the file contains into the list of episodes, which so far has only the run's first episodes."""
    path = f"api/runs/{run}/{EPISODES}"
    page = json.loads(recording.answers[path])
    rows = [recording.listed[episode] for episode in sorted(recording.listed)]
    is_complete = len(rows) >= sum(row["episodes"] or 0 for row in _curves(recording, run))
    _put(recording, path, {**page, "rows": rows, "next": "" if is_complete else page["next"]})


async def _take_chosen(recording: _Recording, run: int, chosen: Sequence[int], limit_mb: float) -> None:
    for episode in chosen:
        answered = await recording.client.get(f"/api/episodes/{episode}")
        if answered.status_code in (404, 422):
            raise NotFoundError(f"There is no episode {episode}.", f"List the episodes of run {run}: agentrl episodes {run}")
        of = answered.json().get("episode", {})
        if of.get("run_id", run) != run:
            raise ConfigError(
                f"Episode {episode} belongs to run {of['run_id']}, not to run {run}.",
                f"List the episodes of run {run}: agentrl episodes {run}",
            )
        if not await recording.whole(_episode(recording, run, episode, beside=True)):
            raise ConfigError(f"Episode {episode} does not fit into {limit_mb:.0f} MB.", "Raise --limit-mb.")
    for order in ("sort=-reward&status=done", "sort=reward&status=done", "sort=-id"):
        answered = await recording.client.get(f"/api/runs/{run}/episodes?size=1&{order}")
        rows = answered.json()["rows"] if answered.status_code == 200 else ()
        for row in rows:
            await recording.whole(_episode(recording, run, row["id"], beside=True))


def _episode(recording: _Recording, run: int, episode: int, beside: bool = False) -> Callable[[], Awaitable[None]]:
    """Return a function that records an episode with all of its turns, and with its tokens if they are stored."""

    async def work() -> None:
        here = f"api/episodes/{episode}"
        first_page = page = await recording.ask(here)
        while page["next_turn"] is not None:
            page = await recording.ask(f"{here}?turn={page['next_turn']}")
        start, total = 0, int(first_page["tokens_removed"] is None)
        while start < total:
            tokens = await recording.ask(f"{here}/tokens?size={TOKENS}&start={start}")
            start, total = start + len(tokens["ids"]), tokens["total"] if tokens["ids"] else 0
        row = first_page["episode"]
        await recording.list_episode(run, row["group_id"], episode)
        if beside:
            await recording.ask(f"api/groups/{row['group_id']}")
            await recording.ask(f"api/runs/{run}/iterations/{row['iteration']}")
            await recording.ask(f"api/runs/{run}/tasks/{first_page['task']['id']}")

    return work


def _search(recording: _Recording, run: int) -> "Iterable[Callable[[], Awaitable[None]]]":
    """Yield functions that each record a candidate of a search with its list of episodes, those on the best path first."""
    tree = json.loads(recording.answers.get(f"api/runs/{run}/search", b'{"candidates": []}'))
    for row in sorted(tree["candidates"], key=lambda row: (not row["is_best"], not row["on_path"])):
        episodes = () if row["group"] is None else (f"api/runs/{run}/episodes?size=50&texts_of={row['group']}",)
        yield _work(recording, f"api/runs/{run}/search/{row['number']}", *episodes)


def _groups(recording: _Recording, run: int) -> "Iterable[Callable[[], Awaitable[None]]]":
    """Yield functions that each record a group or one of its episodes. Those of the newest iterations come first."""
    for number in _iterations(recording, run):
        document = recording.answers.get(f"api/runs/{run}/iterations/{number}")
        for group in json.loads(document)["groups"] if document else ():
            yield _work(recording, f"api/groups/{group['id']}")
            for episode in group["episodes"]:
                yield _episode(recording, run, episode["id"])


def _iterations(recording: _Recording, run: int) -> list[int]:
    return [row["iteration"] for row in reversed(_curves(recording, run))]


def _curves(recording: _Recording, run: int) -> list[dict[str, Any]]:
    pages = (json.loads(recording.answers[path]) for path in recording.answers if path.startswith(f"api/runs/{run}/curves"))
    return [dict(zip(page["columns"], row, strict=True)) for page in pages for row in page["rows"]]


def _left_out(run: int, recording: _Recording, tasks: int, limit_bytes: int) -> str:
    """Return a sentence about the parts of the run that the file does not contain; empty if the file is complete."""
    curves = _curves(recording, run)
    recorded = {
        "iterations": sum(path.startswith(f"api/runs/{run}/iterations/") for path in recording.answers),
        "groups": sum(path.startswith("api/groups/") for path in recording.answers),
        "episodes": sum(
            path.startswith("api/episodes/") and path.count("/") == 2 and "?" not in path for path in recording.answers
        ),
        "tasks": sum(path.startswith(f"api/runs/{run}/tasks/") for path in recording.answers),
    }
    there = {
        "iterations": len(curves),
        "groups": sum(row["groups"] or 0 for row in curves),
        "episodes": sum(row["episodes"] or 0 for row in curves),
        "tasks": tasks,
    }
    missing = [f"{there[what] - recorded[what]:,} of {there[what]:,} {what}" for what in there if there[what] > recorded[what]]
    return f"Left out to stay below {limit_bytes / 1e6:.0f} MB: {', '.join(missing)}." if missing else ""


def _write(out: Path, document: bytes, force: bool) -> None:
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
    """Rename the temporary file to `out`, also without hard links. Raise FileExistsError if `out` exists."""
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

"""The actions of a page that was started with `--actions`. Each action runs a command of agentrl in a separate process. Only
one action of each kind runs at a time.

The page sends numbers and texts, never a command. This module builds the command line from them: the same command that the page
shows for copying.
"""

import asyncio
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, Field

from agentrl.workers.page.answers import answer
from agentrl.workers.page.read_only import ReadOnlyStore
from agentrl.workers.page.routes import Store
from agentrl.workers.page.shown.whole_episode import load_episode_answer
from agentrl.workflow.errors import AccessDenied, ConfigError, StateError
from agentrl.workflow.runtime import shown_text
from agentrl.workflow.store.reads.run_rows import run_name
from agentrl.workflow.trajectory import storable

router = APIRouter(prefix="/api/actions", tags=["actions"])

Kind = Literal["verify", "fork", "rescore", "whatif", "tag", "untag", "note"]
COMMAND = (sys.executable, "-m", "agentrl.cli")
SECONDS: Mapping[str, float] = {"verify": 900, "fork": 300, "rescore": 900, "whatif": 900, "tag": 60, "untag": 60, "note": 60}
"""The time limit of a command of each kind, in seconds."""
MAX_OUTPUT = 50_000
"""The most characters of a command's output that are returned. A longer output is cut at its beginning."""
LOOK_SECONDS = 0.05

Word = Annotated[str, Field(max_length=20_000)]


class Action(BaseModel):
    """The parameters of an action. The kinds `tag`, `untag` and `note` use `run` and `text`, the text of the tag or note. The
    other kinds use `episode`. `step` is the first step that `fork` samples again; None for the last step.
    """

    run: Annotated[int, Field(ge=1, lt=2**63)] | None = None
    episode: Annotated[int, Field(ge=1, lt=2**63)] | None = None
    text: Word = ""
    step: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    n: Annotated[int, Field(ge=1, le=64)] | None = None
    reward: list[Word] = []
    algorithm: Word = ""
    iteration: Annotated[int, Field(ge=1, lt=2**31)] | None = None


class Done(BaseModel):
    """The result of a command. `output` is the end of the text that the command printed. `timed_out` is true if the command was
    killed after its time limit.
    """

    command: str
    exit_code: int
    output: str
    seconds: float
    timed_out: bool


@router.post("/{kind}", response_model=Done)
async def act(kind: Kind, action: Action, store: Store, request: Request) -> Response:
    """Run a command of agentrl, and return its output."""
    if not request.app.state.actions:
        raise AccessDenied("This page is read-only.", "Restart it with actions: agentrl ui --actions")
    args = await run_in_threadpool(make_words, store, kind, action)
    state = request.app.state
    if not hasattr(state, "acting"):
        state.acting = set()
    if kind in state.acting:
        raise StateError(f"Another action {kind!r} is still running.", "Wait until it has ended.")
    state.acting.add(kind)
    try:
        return answer(await _run(args, _environment(store), SECONDS[kind], state.is_ending))
    finally:
        state.acting.discard(kind)


def make_words(store: ReadOnlyStore, kind: str, action: Action) -> list[str]:
    """Return the arguments of the action's command, without `agentrl` itself. Raise ConfigError if a parameter is missing, or
    the command is impossible for this episode. Raise NotFoundError if the run or the episode does not exist.
    """
    if kind in ("tag", "untag", "note"):
        if action.run is None or not action.text.strip():
            raise ConfigError(f"The action {kind!r} needs a run and a text.", "Send `run` and `text`.")
        number, content = action.run, storable(action.text)
        run = store.ask(lambda tx: run_name(tx, number))  # a command takes a number for a name first
        return ["tag", f"--remove={content}", "--", run] if kind == "untag" else [kind, "--", run, content]
    command_args = _shown_command(store, kind, action)
    if kind == "fork":
        return [*_changed(command_args, "--step", action.step), *(["-n", str(action.n)] if action.n else ())]
    if kind == "whatif":
        return _changed(
            _changed(command_args, "--algorithm", storable(action.algorithm) or None), "--iteration", action.iteration
        )
    if kind == "rescore":
        if not action.reward:
            raise ConfigError(
                "This action needs a reward.", f"Type it: agentrl rescore {shlex.quote(command_args[1])} --reward NAME"
            )
        return [*command_args[:2], *(f"--reward={storable(reward)}" for reward in action.reward[:20])]
    return command_args


def _shown_command(store: ReadOnlyStore, kind: str, action: Action) -> list[str]:
    """Return the arguments of the command that the page shows for the episode, without `agentrl` itself."""
    episode = action.episode
    if episode is None:
        raise ConfigError(f"The action {kind!r} needs an episode.", "Send `episode`, the number of the episode.")
    commands = store.ask(lambda tx: load_episode_answer(tx, episode, 0, 1))["commands"]
    line = commands.get(kind)
    if line is None:
        raise ConfigError(f"Cannot {kind} episode {episode}.", f"Show the episode: agentrl replay {episode}")
    return shlex.split(line)[1:]


def _changed(args: Sequence[str], option: str, value: object) -> list[str]:
    """Return the arguments with `value` as the new value of the option. If `value` is None, return the arguments unchanged."""
    if value is None:
        return [*args]
    at = args.index(option) + 1
    return [*args[:at], str(value), *args[at + 1 :]]


def _environment(store: ReadOnlyStore) -> dict[str, str]:
    here = {"AGENTRL_HOME": str(store.settings.root), "AGENTRL_DATABASE_URL": store.settings.database}
    return {**os.environ, **here, "NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "120", "PYTHONIOENCODING": "utf-8"}


async def _run(args: Sequence[str], environment: Mapping[str, str], seconds: float, is_ending: Any) -> dict[str, Any]:
    began = time.monotonic()
    with tempfile.TemporaryFile() as printed:  # no pipe, which a service that the command starts would keep open
        child = await asyncio.create_subprocess_exec(
            *(*COMMAND, *args),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=printed,
            stderr=printed,
            env=dict(environment),
            start_new_session=True,
        )
        late = False
        try:
            while child.returncode is None and not late:
                with suppress(TimeoutError):
                    await asyncio.wait_for(child.wait(), LOOK_SECONDS)
                late = time.monotonic() - began > seconds or is_ending()
        finally:
            late = child.returncode is None
            if late:
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
            code = await child.wait()
        output = _read_end(printed)
    result = {"command": shlex.join(["agentrl", *args]), "exit_code": code, "output": output}
    return {**result, "seconds": time.monotonic() - began, "timed_out": late}


def _read_end(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 4 * MAX_OUTPUT))
    text = shown_text.clean(file.read().decode("utf-8", "replace"))
    return text if len(text) <= MAX_OUTPUT and size <= 4 * MAX_OUTPUT else f"...{text[-MAX_OUTPUT:]}"

"""The last checkpoint of an offline training (`sft`, `dpo`), from which a killed training continues.

The checkpoint is in the folder `.NAME.training`, next to the model `NAME`, and is removed when the model is written. The random
draws of an optimizer step depend only on the step's number. So the checkpoint stores only the weights, the optimizer's state
and the number of steps.
"""

import fcntl
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from agentrl.workflow import checkpoints
from agentrl.workflow.errors import BrokenCheckpoint, CheckpointError, ConflictError, DatasetError
from agentrl.workflow.training.optimizer import LossScale, optimizer_state, set_optimizer_state
from agentrl.workflow.training.ranks import ALONE, Ranks

AGAIN_HINT = "type the same command again"
INTERRUPTED_HINT = "To continue that training, type its command again. To start a new one, pass --force."
MIN_SECONDS_APART = 60.0
"""The least time between two checkpoints, in seconds, if no number of steps is set."""
MAX_TIME_SHARE = 20
"""The limit of the time for checkpoints: 1/20 of the training's time, if no number of steps is set."""
LAST = "last"
MAX_STATE = 1 << 16
"""The largest progress file that is read, in bytes."""


@contextmanager
def catch_interrupt(react: Callable[[], None] = lambda: None) -> Iterator[Callable[[], bool]]:
    """Catch the first Ctrl-C, so the current step can be completed; a second Ctrl-C ends the process at once.

    The context yields a function that returns True after the first Ctrl-C. Outside of the main thread it always returns False.
    `react` is called at the first Ctrl-C.
    """
    pressed = False
    if threading.current_thread() is not threading.main_thread():  # only that one hears of it
        yield lambda: False
        return

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        signal.signal(signal.SIGINT, before)
        react()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


class Resumable:
    """The progress of one offline training, and its last checkpoint.

    Args:
        folder: the folder of the last checkpoint; it need not exist.
        key: the hash of recipe, model and data. A checkpoint with a different key belongs to another training.
        every: the number of optimizer steps from one checkpoint to the next. None: the time decides, by `MIN_SECONDS_APART` and
            `MAX_TIME_SHARE`.
        clock: the time at which chat templates rendered the training's examples; None if nothing was rendered.
    """

    def __init__(self, folder: Path, key: str, every: int | None, clock: datetime | None = None) -> None:
        self._folder = folder
        self._key = key
        self._every = every
        self._clock = clock
        self._wait = MIN_SECONDS_APART
        self._written = time.monotonic()

    def load(self, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, loss_scale: LossScale) -> int:
        """Restore weights, optimizer and loss scale from the last checkpoint.

        Return the number of steps done; 0 without a checkpoint. Raise CheckpointError if the checkpoint cannot be read, or has
        other parameters.
        """
        if not self._folder.exists():
            return 0
        try:
            weights = load_file(self._folder / checkpoints.WEIGHTS)
            state = load_file(self._folder / checkpoints.OPTIMIZER)
        except (OSError, SafetensorError) as error:
            raise _unusable(self._folder) from error
        if {name: p.shape for name, p in parameters.items()} != {name: tensor.shape for name, tensor in weights.items()}:
            raise _unusable(self._folder)
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(weights[name])
        set_optimizer_state(optimizer, parameters, state)
        scale = _read_state(self._folder).get("loss_scale")
        if loss_scale.is_used and scale is not None:
            try:
                loss_scale.state = scale
            except (TypeError, ValueError) as error:
                raise _unusable(self._folder) from error
        return read_progress(self._folder)[1]

    def save_if_due(
        self,
        done: int,
        steps: int,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        loss_scale: LossScale,
        now: bool = False,
    ) -> None:
        """Write a checkpoint after step `done` if one is due, or if `now` is True. Write none after the last step. Raise
        CheckpointError if writing failed; the previous checkpoint is unchanged.
        """
        if done == steps or not (now or self._is_due(done)):
            return

        def writer(folder: Path) -> None:
            tensors = {name: p.detach().to("cpu", copy=True).contiguous() for name, p in parameters.items()}
            save_file(tensors, folder / checkpoints.WEIGHTS)
            save_file(optimizer_state(optimizer, parameters), folder / checkpoints.OPTIMIZER)
            progress = {"key": self._key, "done": done, "steps": steps}
            progress |= {"loss_scale": loss_scale.state} if loss_scale.is_used else {}
            progress |= {"clock": self._clock.isoformat()} if self._clock else {}
            (folder / checkpoints.STATE).write_text(json.dumps(progress))

        began = time.monotonic()
        checkpoints.write(str(self._folder), writer, AGAIN_HINT)
        self._written = time.monotonic()
        self._wait = max(MIN_SECONDS_APART, MAX_TIME_SHARE * (self._written - began))

    def drop(self) -> None:
        """Remove the checkpoint of a training that cannot continue."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _is_due(self, done: int) -> bool:
        return time.monotonic() - self._written > self._wait if self._every is None else done % self._every == 0


@contextmanager
def open_resumable(
    target: Path, key: str, every: int | None, overwrite: bool, clock: datetime | None = None, ranks: Ranks = ALONE
) -> Iterator[Resumable]:
    """Lock the training of the model `target`, and yield its progress.

    Remove its checkpoint if the context ends without an exception. Raise ConflictError if another process makes that model, or
    another training of that model was interrupted. Raise CheckpointError if the checkpoint is broken, or the folder cannot be
    written. Raise DatasetError if the ranks have different keys.

    Args:
        key: see `Resumable`.
        every: see `Resumable`.
        overwrite: whether to remove the checkpoint if it is broken or belongs to another training. If False, this raises an
            exception.
        clock: see `Resumable`; `rendering_clock` returns it.
        ranks: the ranks that train together. Rank 0 locks, checks and removes; the others only read what it leaves.
    """
    place = _place(target)
    if ranks.rank:
        _compare_keys(ranks, key)
        yield Resumable(place / LAST, key, every, clock)
        return
    with _lock_folder(place, target):
        last = place / LAST
        resumable = Resumable(last, key, every, clock)
        with ranks.using_files():
            checkpoints.repair_folder(last)
            try:
                _check(last, key, target)
            except (CheckpointError, ConflictError):
                if not overwrite:
                    raise
                resumable.drop()
        _compare_keys(ranks, key)
        yield resumable
        shutil.rmtree(place, ignore_errors=True)


def remove_empty_folder(target: Path) -> None:
    """Remove the folder of the training of the model `target` if it is empty and no process uses it. Rank 0 leaves it if it is
    killed before its first checkpoint.
    """
    if (place := _place(target)).is_dir():
        with suppress(CheckpointError, ConflictError), _lock_folder(place, target):
            pass


def _compare_keys(ranks: Ranks, key: str) -> None:
    """Raise DatasetError if the ranks have different keys. Their models and recipes are equal, so their examples differ."""
    hint = "The dataset must yield the same rows in each process: without unseeded random numbers, or the order of a set."
    ranks.agree(key, "examples", DatasetError, hint)


def rendering_clock(target: Path, overwrite: bool = False, ranks: Ranks = ALONE) -> datetime:
    """Return the time that chat templates use to render a training's examples, in UTC. It is the same on all ranks.

    It is the time of the interrupted training of the model `target`, or now if none was interrupted or `overwrite` is True. A
    chat template may print the date. With the stored time, a training that continues after midnight has the same examples and
    the same key.
    """
    clock = datetime.now(UTC)
    if not overwrite:
        with suppress(OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            clock = datetime.fromisoformat(_read_state(_place(target) / LAST)["clock"]).astimezone(UTC)
    return datetime.fromisoformat(ranks.gather(clock.isoformat())[0])


def _place(target: Path) -> Path:
    return target.with_name(f".{target.name}.training")


def read_progress(folder: Path) -> tuple[str, int, int]:
    """Return a checkpoint's key, steps done, and all steps. Raise CheckpointError if it cannot be read."""
    try:
        state = _read_state(folder)
        key, done, steps = state["key"], state["done"], state["steps"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _unusable(folder) from error
    if type(key) is not str or type(done) is not int or type(steps) is not int or not 0 < done < steps:
        raise _unusable(folder)
    return key, done, steps


def _read_state(folder: Path) -> Any:
    with (folder / checkpoints.STATE).open("rb") as file:
        return json.loads(file.read(MAX_STATE))


def _check(last: Path, key: str, target: Path) -> None:
    """Raise an exception if the checkpoint exists and is broken or has a different key."""
    if not last.exists():
        return
    try:
        checkpoints.verify(last)
    except BrokenCheckpoint as error:
        raise _unusable(last) from error
    recorded_key, done, steps = read_progress(last)
    if recorded_key != key:
        message = f"A training of {str(target)!r} with another recipe, model or data was interrupted at step {done} of {steps}."
        raise ConflictError(message, INTERRUPTED_HINT)


def _unusable(folder: Path) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint {str(folder)!r} of an interrupted training was changed.", "Pass --force to start again."
    )


@contextmanager
def _lock_folder(place: Path, target: Path) -> Iterator[None]:
    """Make the folder and lock it for this process. When the context ends, remove the folder if it is empty."""
    try:
        place.mkdir(parents=True, exist_ok=True)
        lock = os.open(place, os.O_RDONLY)
    except OSError as error:
        raise checkpoints.write_error(place, error, AGAIN_HINT) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # other than that somebody has it: a file system without locks keeps nobody out
        if isinstance(error, BlockingIOError):
            os.close(lock)
            message = f"Another process is making the model {str(target)!r}."
            raise ConflictError(message, "Wait until that process has ended, or pass another --name.") from error
    try:
        yield
    finally:
        with suppress(OSError):
            place.rmdir()
        os.close(lock)

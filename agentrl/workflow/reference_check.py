"""The check whether rewards can score the tasks of a dataset. If a task's reference is the answer, it must earn the full
reward.

Only rewards that compare answers with references are checked. Such a reward has `reference_form`, which turns a reference into
an answer. `reference_form` is a field of a `Judge`, or an attribute of any other reward function.
"""

import hashlib
import os
import random
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from agentrl.workflow.errors import DatasetError, InfraError, SandboxUnavailable, ServiceError
from agentrl.workflow.plugins import find
from agentrl.workflow.rewards import code_hash, numbers, part_sum
from agentrl.workflow.settings import settings
from agentrl.workflow.trajectory import Episode, Message, Step, Task

SAMPLE_SIZE = 32
"""The number of tasks that are checked when a run is submitted."""
MAX_SHOWN = 5
HINT = "Correct the rows, or use another reward. To list all such rows: agentrl data check FILE --reward NAME"


def comparing_rewards(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the rewards that compare an answer with the task's reference."""
    return tuple(name for name in names if getattr(find("rewards", name), "reference_form", ""))


def check_sample(tasks: Sequence[Task], names: Sequence[str], seed: int) -> None:
    """Check the references of a random sample of the tasks.

    A sample that has passed is checked again only if its tasks or the code of the rewards change. `names` are the names of the
    rewards. `seed` is the seed that selects the sample. Raise DatasetError if some tasks cannot be scored; the message has
    their keys. Raise SandboxUnavailable or InfraError if a reward could not run its code.
    """
    if not names:
        return
    sample = random.Random(seed).sample(list(tasks), min(SAMPLE_SIZE, len(tasks)))
    parts = [code_hash(dict.fromkeys(names, 1.0)), *(task.content_hash for task in sample)]
    passed = settings().root / "checked" / hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    if passed.exists():
        return
    if problems := reference_problems(sample, names):
        more = f"; and {len(problems) - MAX_SHOWN} more" if len(problems) > MAX_SHOWN else ""
        text = "; ".join(problems[:MAX_SHOWN])
        raise DatasetError(
            f"{len(problems)} of {len(sample)} checked tasks cannot be scored: {text}{more}.",
            HINT,
        )
    if settings().root.is_dir():
        with suppress(OSError):  # a folder that may only be read: the next submit checks again
            passed.parent.mkdir(exist_ok=True)
            passed.touch()


def reference_problems(tasks: Sequence[Task], names: Sequence[str]) -> list[str]:
    """Score each task's reference as if it were the answer. Return `key: why` for each task that does not get the full value of
    a reward. Raise SandboxUnavailable or InfraError if a reward could not run its code.
    """
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        reasons = pool.map(lambda task: next(filter(None, (_problem(task, name) for name in names)), ""), tasks)
        return [f"{task.key}: {why}" for task, why in zip(tasks, reasons, strict=True) if why]


def _problem(task: Task, name: str) -> str:
    """Return why neither the task's reference nor one of its aliases earns the full reward; empty if at least one does."""
    aliases = task.metadata.get("aliases")
    others = aliases if isinstance(aliases, list) else ()
    problem = _problem_of_answer(task, name, task.reference)
    return problem if problem and all(_problem_of_answer(task, name, other) for other in others) else ""


def _problem_of_answer(task: Task, name: str, text: str) -> str:
    reward = find("rewards", name)
    answer = Step(0, (), (), (), (), "stop", Message("assistant", reward.reference_form.format(text)), 0)
    try:
        value = part_sum(numbers(reward(Episode(task, steps=(answer,), status="done", stop_reason="answered"))))
    except (InfraError, SandboxUnavailable, ServiceError):
        raise
    except Exception as error:  # noqa: BLE001 - whatever it raises here would fail the task's episodes
        return f"{name}: {error}"
    return "" if value >= 1.0 else f"{name}: its own reference earns {value:g}"

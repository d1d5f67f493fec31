"""A curriculum: it selects and orders tasks by their difficulty, which is known from the stored episodes of all runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agentrl.workflow.config import DatasetConfig, solved_range
from agentrl.workflow.errors import DatasetError
from agentrl.workflow.runtime.shown_text import format_count
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.reads.task_rows import load_solved
from agentrl.workflow.trajectory import Task


@dataclass(frozen=True, slots=True)
class ChosenTasks:
    """The tasks that a run uses.

    Args:
        difficulties: the share of failed episodes of each task, by content hash; empty unless the run orders tasks by
            difficulty.
        remarks: sentences for the user that say how many tasks were left out, and why.
    """

    tasks: tuple[Task, ...]
    difficulties: Mapping[str, float] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()


def choose_by_difficulty(db: Database | None, config: DatasetConfig, tasks: Sequence[Task]) -> ChosenTasks:
    """Select the tasks whose share of solved episodes is within `config.keep_solved`. Tasks without stored episodes are
    selected too.

    If `config.order` needs it, the result contains the difficulty of each task. Raise DatasetError if no task has a stored
    episode, or no task is left.
    """
    if config.keep_solved is None and config.order == "shuffled":
        return ChosenTasks(tuple(tasks))
    counts = load_solved(db) if db is not None else {}
    shares = {task.content_hash: counts[task.content_hash].share for task in tasks if task.content_hash in counts}
    if not shares:
        some = f"None of the {format_count(len(tasks), 'task')} of {config.name!r}"
        message = f"{some} has a stored episode, which is needed to know how hard it is."
        raise DatasetError(message, f"Sample them: agentrl data check {config.name} --model MODEL --samples 8")
    difficulties = {key: 1 - share for key, share in shares.items()} if config.order == "easy_first" else {}
    if config.keep_solved is None:
        return ChosenTasks(tuple(tasks), difficulties)
    low, high = solved_range(config.keep_solved)
    chosen_tasks = tuple(task for task in tasks if low <= shares.get(task.content_hash, low) <= high)
    if not chosen_tasks:
        raise DatasetError(
            f"No task of {config.name!r} was solved in {config.keep_solved} of its episodes.",
            "Widen the range of --keep-solved.",
        )
    rarely, often = (sum(share < low for share in shares.values()), sum(share > high for share in shares.values()))
    count, unknown = format_count(len(tasks), "task"), len(tasks) - len(shares)
    remark = (
        f"keep_solved {config.keep_solved}: it keeps {len(chosen_tasks)} of {count}, {unknown} of them without a stored "
        f"episode; left out: {rarely} solved more rarely, {often} more often."
    )
    return ChosenTasks(chosen_tasks, difficulties, (remark,))

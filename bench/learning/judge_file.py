"""`python -m bench.learning.judge_file FILE.jsonl`: does a file in HumanEval's or MBPP's format pay its own solutions alone?

Each task's own solution must pass all of its tests, and each kind of forged answer must fail some of every task's; it ends with
1 otherwise.
"""

import json
import sys
import time
from collections.abc import Callable

from agentrl.workflow.config import DatasetConfig
from agentrl.workflow.datasets import load_tasks
from agentrl.workflow.plugins import find
from agentrl.workflow.rewards.tests_passed import question
from agentrl.workflow.tools.python import sandbox
from agentrl.workflow.trajectory import Task
from tests.rewards.test_code import FORGERIES

WRONG = {
    "always 1.0": "def add(*a, **k): return 1.0",
    "always None": "def add(*a, **k): pass",
    "returns its argument": "def add(*a, **k): return a[0] if a else None",
    "raises": "def add(*a, **k): raise AssertionError",
    "a set of numbers of one hash": "def add(*a, **k): return {n * (2**61 - 1) for n in range(3000)}",
    "a number beyond any float": "def add(*a, **k): return 10**400",
    "an object that hashes and equals as all do": (
        "class Yes(str):\n    def __eq__(self, other): return True\n    def __hash__(self): return 0\n"
        "def add(*a, **k): return Yes()"
    ),
    "a descriptor": "class D:\n    def __get__(self, *a): return lambda *a: True\nclass C: add = D()\nadd = C().add",
    "lines on every descriptor": (
        "import os\ndef add(*a, **k):\n    for fd in range(3, 64):\n"
        '        try: os.write(fd, b\'{"done": {"code": 0, "value": "true"}}\\n\')\n'
        "        except OSError: pass\n    os._exit(0)"
    ),
    "judge's own names": (
        "__held__ = __relayed__ = candidate = check = outcome = lambda *a, **k: True\ndef add(*a, **k): return NotImplemented"
    ),
}
OF_ADD = ("the right number as text", "the right number as a float")
"""Right but for their type, of a sum."""


def kinds() -> dict[str, str]:
    """The forged answers by what they try; of any function, if `add` is replaced."""
    forged = {name: code.replace("def add(a, b)", "def add(*a, **k)") for name, code in FORGERIES.items() if name not in OF_ADD}
    return forged | WRONG


def main(path: str) -> int:
    """Prints a line for each kind of answer."""
    tasks = load_tasks(DatasetConfig(name=path)).tasks
    programs = sum("test" in task.metadata for task in tasks)
    print(f"{len(tasks)} tasks, the tests of {programs} are run as programs")
    good = _paid("their own solutions", tasks, lambda task: task.reference) == len(tasks)
    for name, code in kinds().items():
        good = _paid(name, tasks, lambda task, code=code: code.replace("add", task.metadata["function"])) == 0 and good
    sandbox().close()
    return 0 if good else 1


def _paid(name: str, tasks: tuple[Task, ...], answer: Callable[[Task], str]) -> int:
    judge, began = find("rewards", "tests_passed"), time.monotonic()
    shares = [json.loads(judge.run(question(task, answer(task))).content) for task in tasks]
    paid = [task.key for task, share in zip(tasks, shares, strict=True) if share == 1.0]
    whole = f"{len(paid)} of {len(tasks)}"
    print(f"{whole:>12}  mean {sum(shares) / len(shares):.3f}  {time.monotonic() - began:6.1f} s  {name}", flush=True)
    return len(paid)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

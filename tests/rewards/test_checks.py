"""Tests that are a program: every form that HumanEval's and MBPP's have is judged, by the answer's function alone."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl.workers.requests.submit import prepare
from agentrl.workflow.config import DatasetConfig, build
from agentrl.workflow.datasets import load_tasks
from agentrl.workflow.errors import DatasetError, RewardError
from agentrl.workflow.judging import code_judge
from agentrl.workflow.plugins import find
from agentrl.workflow.sandbox import program_tests
from agentrl.workflow.trajectory import Message, Task
from bench.learning import judge_file
from bench.learning.judge_file import kinds
from tests.data.test_datasets import write
from tests.rewards.test_code import HUMAN_EVAL, MBPP, answered, earned, human
from tests.rewards.test_code import box as box

FORMS = {
    "what operators between constants come to": human(
        "area",
        'def area(a, b):\n    """Of a rectangle."""\n',
        "    return a * b\n",
        "    assert candidate(3 * 19, 2) == 2 * 57\n    assert abs(candidate(1.0, 2.0 / 3.0) - 2.0/3.0) < 1e-6\n"
        "    assert candidate(0**0, 5) == 5\n    assert candidate('a' + 'b', 2) == 'abab'\n    assert True, 'a note'",
    ),
    "a loop with random numbers": human(
        "plus",
        'def plus(x, y):\n    """Sum."""\n',
        "    return x + y\n",
        "    import random\n\n    assert candidate(2, 3) == 5\n    for i in range(50):\n"
        "        x, y = random.randint(0, 1000), random.randint(0, 1000)\n        assert candidate(x, y) == x + y",
    ),
    "a loop over a range": human(
        "say",
        'def say(x, base):\n    """In that base."""\n',
        "    return str(x) if x < base else say(x // base, base) + str(x % base)\n",
        '    assert candidate(8, 3) == "22"\n    for x in range(2, 8):\n        assert candidate(x, x + 1) == str(x)',
    ),
    "a helper of the prompt, both ways": human(
        "turned_back",
        'def turned(text):\n    """By one."""\n    return text[1:] + text[:1]\n\n\n'
        'def turned_back(text):\n    """The other way."""\n',
        "    return text[-1:] + text[:-1]\n",
        "    from random import randint, choice\n    import copy\n    import string\n\n    letters = string.ascii_lowercase\n"
        "    for _ in range(20):\n        str = ''.join(choice(letters) for i in range(randint(1, 9)))\n"
        "        there = turned(str)\n        assert candidate(copy.deepcopy(there)) == str",
    ),
    "a check of what came out by a helper": human(
        "root",
        'import math\n\n\ndef value(a, x):\n    """x * x - a"""\n    return x * x - a\n\n\n'
        'def root(a):\n    """Where value is 0."""\n',
        "    return math.sqrt(a)\n",
        "    import math\n    import random\n    rng = random.Random(42)\n"
        "    for _ in range(20):\n        a = rng.randint(1, 99)\n"
        "        solution = candidate(a)\n        assert math.fabs(value(a, solution)) < 1e-4",
    ),
    "what the reference itself gives": human(
        "ordered",
        'def ordered(items):\n    """Sorted."""\n',
        "    return sorted(items)\n",
        "    assert tuple(candidate([3, 1, 2])) == tuple(ordered([3, 1, 2]))\n"
        "    assert tuple(candidate([2, 1])) == tuple([1, 2])",
    ),
    "variables": human(
        "squares_of_odd",
        'def squares_of_odd(numbers):\n    """Sum of squares."""\n',
        "    return sum(n * n for n in numbers if n % 2 and n > 0)\n",
        "    print\n    lst = list(range(-9, 10, 2))\n    odd = sum([i**2 for i in lst if i % 2 != 0 and i > 0])\n"
        "    assert candidate(lst) == odd, 'prints'\n    assert True, 'prints'",
    ),
    "any, in, chains, ranges and what is not": human(
        "half",
        'def half(number):\n    """Half."""\n',
        "    return number / 2\n",
        "    assert candidate(4) in (2, 3)\n    assert 1 < candidate(4) < 3\n    assert candidate(1) != 1\n"
        "    assert all(candidate(n) * 2 == n for n in range(5))\n    assert any(candidate(n) == 3 for n in range(9))\n"
        "    assert isinstance(candidate(1), float)\n    assert round(candidate(3), 1) == 1.5\n"
        "    assert candidate(number=8) == 4.0",
    ),
    "a call of what another call gave": human(
        "swap",
        'def swap(pair):\n    """The other way round."""\n',
        "    return pair[::-1]\n",
        "    assert candidate(candidate((1, 2))) == (1, 2)\n    assert candidate((1, 2)) == (2, 1)",
    ),
    "tests by the function's own name": human(
        "twice",
        'def twice(n):\n    """2n"""\n',
        "    return 2 * n\n",
        "    for n in range(3):\n        assert twice(n) == n + n",
    ),
    "arguments that are functions or objects, with what they need": human(
        "mapped",
        'def mapped(change, items, more=0):\n    """Each item, changed."""\n',
        "    return [change(item) + more for item in items]\n",
        "    import math\n\n    class Times:\n        def __init__(self, n):\n            self.n = n\n\n"
        "        def __call__(self, x):\n            return self.n * x\n\n"
        "    three = 3\n"
        "    assert candidate(lambda x: x + 1, [1, 2]) == [2, 3]\n    assert candidate(Times(5), [1, 2], more=1) == [6, 11]\n"
        "    for i in range(2):\n        assert candidate(change=lambda x: x + i * three, items=[1]) == [1 + 3 * i]\n"
        "    assert candidate(math.sqrt, [4.0]) == [2.0]",
    ),
    "mbpp's, with a helper of theirs": {
        "task_id": 7, "text": "Write a function to find what is common.", "code": "def common(a, b):\n  return set(a) & set(b)",
        "test_list": ["assert set(common((1, 2), (2, 3))) == set((2,))", "assert set(common((1,), (3,))) == set(())",
                      "assert sorted(common((1, 2), (2, 1))) == [1, 2]"],
    },
    "mbpp's, with what must be imported": {
        "task_id": 8, "text": "Round up.", "code": "def up(x):\n  return math.ceil(x)", "test_setup_code": "import math",
        "test_list": ["assert up(1.5) == 2", "assert up(2.5) == math.ceil(2.5)"],
    },
}  # fmt: skip
OF_THE_RELAY = (
    *("protocol lines printed", "sys.exit in a call", "os._exit in a call", "json patched", "builtins patched"),
    *("an object that equals everything", "a number that equals everything", "a fork"),
)
"""Forgeries that attack the relay between answer and tests; the others meet the same sandbox where tests are cases."""
WRONG = {name: kinds()[name] for name in OF_THE_RELAY} | judge_file.WRONG


def loaded(folder: Path, *rows: dict[str, Any]) -> list[Task]:
    """The tasks of a file with these rows."""
    return list(load_tasks(DatasetConfig(name=str(write(folder / "own.jsonl", *rows)))).tasks)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.slow
def test_program_tests_passes_reference_and_fails_wrong_answer(box: None, tmp_path: Path, form: str) -> None:
    (task,) = loaded(tmp_path, FORMS[form])
    assert earned(task.reference, task) == 1.0
    function = task.metadata["function"]
    for wrong in ("always 1.0", "always None", "raises", "os._exit in a call", "an object that equals everything"):
        assert earned(WRONG[wrong].replace("add(", f"{function}("), task) < 1.0, wrong


@pytest.mark.slow
@pytest.mark.parametrize("forgery", WRONG)
def test_program_tests_result_cannot_be_forged_by_answer(box: None, tmp_path: Path, forgery: str) -> None:
    (task,) = loaded(tmp_path, FORMS["a loop with random numbers"])
    assert "test" in task.metadata
    assert earned(WRONG[forgery].replace("add", "plus"), task) == 0.0


def test_program_tests_pays_share_of_passed_tests(box: None, tmp_path: Path) -> None:
    (task,) = loaded(tmp_path, FORMS["a loop with random numbers"])
    assert earned("def plus(x, y): return 5", task) == 0.5, "the first; not one of the loop's, which are one"
    assert earned("def plus(x, y): return x + y if x < 900 else 0", task) == 0.5
    assert earned("def plus(x, y):\n    if x > 900: raise ValueError\n    return x + y", task) == 0.5


def test_program_tests_counts_code_above_its_last_statement(box: None, tmp_path: Path) -> None:
    test = (
        "    assert candidate(1) == 2\n    for n in range(5):\n        got = candidate(n)\n        assert got == n + 1\n"
        "    assert candidate(2) == 3"
    )
    (task,) = loaded(tmp_path, human("next_to", 'def next_to(n):\n    """n + 1"""\n', "    return n + 1\n", test))
    assert earned(task.reference, task) == 1.0
    assert earned("def next_to(n):\n    if n == 3: raise ValueError\n    return n + 1", task) == pytest.approx(1 / 3)


def test_program_tests_ignores_asserts_that_always_hold(box: None, tmp_path: Path) -> None:
    loop = "    for n in range(2):\n        assert candidate(n) == n\n"
    caught = "    try:\n        candidate(5)\n    except Exception:\n        pass\n    assert True\n"
    test = f"{loop}    assert 1 + 1 == 2\n    assert same(1) == 1\n{caught}    x = candidate\n    assert x is not None"
    (task,) = loaded(tmp_path, human("same", 'def same(n):\n    """n"""\n', "    return n\n", test))
    assert earned(task.reference, task) == 1.0
    assert earned("import os\nos._exit(0)", task) == earned("def same(n): return 7", task) == 0.0
    assert earned("def same(n): return 1", task) == 0.5, "two that speak of it"


def test_program_tests_makes_dependent_calls_in_limited_rounds(box: None, tmp_path: Path) -> None:
    def nested(depth: int) -> Task:
        test = f"    assert {'candidate(' * depth}0{')' * depth} in ({depth}, {2 * depth})"
        (task,) = loaded(tmp_path, human("up", 'def up(n):\n    """n + 1"""\n', "    return n + 1\n", test))
        return task

    for depth in (3, code_judge.MAX_ROUNDS + 1):
        assert earned(nested(depth).reference, nested(depth)) == 1.0, "what the reference gives too is asked at once"
        assert earned("def up(n): return n + 3", nested(depth)) == 0.0
    assert earned("def up(n): return n + 2", nested(3)) == 1.0, "another way is followed"
    assert earned("def up(n): return n + 2", nested(code_judge.MAX_ROUNDS + 1)) == 0.0, "but not for ever"


@pytest.fixture
def module_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """`program_tests.outcome`, called in this process, replaces the module `tests`, the package of these tests, by its own."""
    monkeypatch.setitem(sys.modules, program_tests.MODULE, sys.modules[program_tests.MODULE])


@pytest.mark.usefixtures("module_put_back")
def test_program_tests_shows_answer_only_arguments() -> None:
    test = (
        "secret = [2]\ndef helper(x):\n    assert x != 77\n    return x\ndef check(candidate):\n    expected, one = [4242], 1\n"
        "    double = lambda x: 2 * x + one\n    assert candidate(double, [1]) == [3]\n"
        "    got = candidate(lambda x: x, secret)\n    assert got == secret and expected"
    )
    reference = "def mapped(change, items):\n    return [change(item) for item in items]"
    asked = program_tests.outcome(reference, test, "mapped", [], final=False)["asked"]
    assert [json.loads(text)["args"] for text in asked] == ["[[1], 1]", "[[2]]"]
    assert not [text for text in asked if "4242" in text or "77" in text or "assert" in text]
    hidden = test.replace("lambda x: x,", "helper,")
    assert "call itself: function" in program_tests.outcome(reference, hidden, "mapped", [], final=False)["unjudged"]


OTHER_ARGUMENTS = {
    "a list that holds what is expected": "all = [(lambda x: x + 1, 3)]\n    assert candidate(all[0][0], [2]) == [all[0][1]]",
    "an object that changes": "times = Times(2)\n    times.n = 3\n    assert candidate(times, [1]) == [3]",
    "a name with two meanings": "f = lambda x: x\n    if True: f = lambda x: 2 * x\n    assert candidate(f, [1]) == [2]",
    "a default that is older": "n = 1\n    f = lambda x, k=n: x + k\n    n = 5\n    assert candidate(f, [1]) == [2]",
    "an iterator beside it": "assert candidate(lambda x: x + 1, iter([1])) == [2]",
    "a call by another": "assert max([Times(1), Times(2)], key=lambda t: candidate(t, [1])[0]).n == 2",
    "an assignment in it": "assert candidate((f := lambda x: x), [1]) == [1]",
}


@pytest.mark.usefixtures("module_put_back")
@pytest.mark.parametrize("name", OTHER_ARGUMENTS)
def test_outcome_refuses_argument_its_source_does_not_repeat(name: str) -> None:
    head = "class Times:\n    def __init__(self, n): self.n = n\n    def __call__(self, x): return self.n * x\n"
    reference = "def mapped(change, items):\n    return [change(item) for item in items]"
    test = f"{head}def check(candidate):\n    {OTHER_ARGUMENTS[name]}"
    assert "they pass " in program_tests.outcome(reference, test, "mapped", [], final=False)["unjudged"]


def test_program_tests_with_too_many_calls_is_refused(box: None, tmp_path: Path) -> None:
    for test in (
        f"    for n in range({program_tests.MAX_CALLS + 1}):\n        assert candidate(n) == n",
        "    while True: candidate(1)",
    ):
        (task,) = loaded(
            tmp_path, human("same", 'def same(n):\n    """n"""\n', "    return n\n", f"{test}\n    assert candidate(0) == 0")
        )
        with pytest.raises(RewardError, match="the tests cannot be judged"):
            earned(task.reference, task)


REFUSED = {
    "no plain data": (
        "    import re\n    for pattern in [re.compile('a')]:\n        assert candidate(pattern) == 1",
        "they pass arguments that are not plain data and are not written in the call itself: Pattern",
    ),
    "a wrong reference": (
        "    for n in range(2):\n        assert candidate(n) == n + 1",
        "its own reference earns 0",
    ),
    "an exception that is caught": (
        "    try:\n        candidate('x' * 3)\n        assert candidate(1) == 5\n"
        "    except KeyError:\n        assert candidate(2) == 2",
        "its own reference earns",
    ),
    "nothing": ("    for n in range(2):\n        assert candidate is not None", "hold whatever the function gives"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_submit_names_tasks_whose_tests_cannot_be_judged(box: None, tmp_path: Path, name: str) -> None:
    test, why = REFUSED[name]
    rows = [FORMS["variables"], human("same", 'def same(n):\n    """n"""\n', "    return n\n", test)]
    file = write(tmp_path / "own.jsonl", *rows)
    with pytest.raises(DatasetError, match="1 of 2 checked tasks cannot be scored: own/same: tests_passed: ") as told:
        prepare(None, build({"dataset.name": str(file), "model.path": str(tmp_path)}))
    assert why in told.value.message
    assert "squares_of_odd" not in told.value.message


def test_program_tests_with_undefined_name_is_refused_at_load(tmp_path: Path) -> None:
    row = human("same", 'def same(n):\n    """n"""\n', "    return n\n", "    assert candidate(x) == helper(x)")
    none = human("other", 'def other(n):\n    """n"""\n', "    return n\n", "    assert True")
    with pytest.raises(DatasetError, match="2 malformed rows") as told:
        loaded(tmp_path, row, none)
    assert "line 1: own/same: its tests need 'x', which nothing defines" in told.value.message
    assert "line 2: own/other: it has no test such as `assert f(...) == value`" in told.value.message


def test_task_rows_have_unique_names(tmp_path: Path) -> None:
    official = {**HUMAN_EVAL[0], "task_id": "HumanEval/0"}
    bare = {name: value for name, value in MBPP[1].items() if name != "task_id"}
    assert [task.key for task in loaded(tmp_path, official, MBPP[0], bare)] == ["HumanEval/0", "own/1", "own/line-3"]
    with pytest.raises(DatasetError, match="line 2: HumanEval/0: the 'task_id' of line 1"):
        loaded(tmp_path, official, {**bare, "task_id": "HumanEval/0"})
    assert [task.key for task in loaded(tmp_path, official, official)] == ["HumanEval/0"], "the same row again"
    for wrong in ("", "a\nb", "x" * 201, 1.5, [1], True, 10**30):
        with pytest.raises(DatasetError, match="'task_id' must be a whole number, or printable text"):
            loaded(tmp_path, {**official, "task_id": wrong})


def test_program_tests_lines_end_by_line_feed_only(tmp_path: Path) -> None:
    (task,) = loaded(tmp_path, {**MBPP[0], "text": "one\u2028two\x85three"})
    assert "one\u2028two\x85three" in task.messages[0].content


def test_stored_task_of_older_run_is_judged_the_same(box: None) -> None:
    """What is stored of a task, and asked of its judge, keeps its form."""
    cases = [
        '[{"$tuple": [1, 2]}, 3, "equal", 0.0]',
        '[{"$tuple": [5, 5]}, 10, "exact", 0.0]',
        '[{"$tuple": [1, 1]}, 2.05, "near", 0.1]',
    ]
    task = Task(
        "code/add",
        (Message("user", "?"),),
        "",
        {"function": "add", "setup": "", "hidden": cases, "visible": [], "unread_tests": 2},
    )
    assert earned("def add(a, b): return a + b", task) == 1.0
    passed = find("rewards", "tests_passed")
    code = "def add(a, b): return 3"
    question = {"setup": "", "function": "add", "hidden": cases, "answer": code}
    assert passed.asks(answered(task, code)) == question
    assert passed.run(question).content == str(1 / 3)

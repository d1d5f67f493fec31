"""Programming tasks: what is read of a file, what an answer earns, and that no answer can say of itself that it is right."""

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from agentrl.workers.jobs.tool_call import run_tool
from agentrl.workers.requests.submit import prepare
from agentrl.workflow.config import DatasetConfig, build
from agentrl.workflow.datasets import load_tasks
from agentrl.workflow.datasets.code import code_metadata
from agentrl.workflow.datasets.code_tiny import MISTAKE_RATE, SPLITS, code_tiny
from agentrl.workflow.envs import Env
from agentrl.workflow.envs.code import code as env
from agentrl.workflow.errors import DatasetError, InfraError, RewardError, SandboxUnavailable
from agentrl.workflow.judging.assertions import all_cases, read_asserts
from agentrl.workflow.plugins import find
from agentrl.workflow.reference_check import reference_problems
from agentrl.workflow.rewards import progress, score, tests_passed
from agentrl.workflow.rewards.progress import MAX_TRIED
from agentrl.workflow.rewards.tests_passed import read_code
from agentrl.workflow.sandbox import CodeResult
from agentrl.workflow.sandbox.function_tests import Case
from agentrl.workflow.settings import settings
from agentrl.workflow.store.tool_calls import CallWork
from agentrl.workflow.tools.python import sandbox
from agentrl.workflow.trajectory import Episode, Message, Task, ToolCall
from tests.data.test_datasets import episode_of, reward_of, write
from tests.support.sandbox_fixtures import machine


@pytest.fixture(scope="module")
def box() -> Iterator[None]:
    """The process's sandbox, closed at the end."""
    machine()
    yield
    if sandbox.made:
        sandbox().close()
        sandbox.forget()


# --- code_tiny ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", SPLITS)
def test_code_tiny_split_is_repeatable(split: str) -> None:
    tasks = list(islice(code_tiny.load(split), 200))
    assert len(tasks) == min(200, SPLITS[split])
    assert tasks[:20] == list(islice(code_tiny.load(split), 20))
    assert len({task.key for task in tasks}) == len(tasks)


def test_code_tiny_question_is_in_one_split() -> None:
    words = {split: [task.metadata["words"] for task in islice(code_tiny.load(split), 1000)] for split in SPLITS}
    counted = [*words["test"], *words["train"]]
    assert len(set(counted)) == len(counted) == SPLITS["test"] + SPLITS["train"]
    assert not set(counted) & set(words["warmup"])
    with pytest.raises(DatasetError, match="no split 'dev'"):
        code_tiny.load("dev")


def test_code_tiny_cases_equal_reference() -> None:
    for task in islice(code_tiny.load("test"), 60):
        body = task.reference.removeprefix("def f(x, y): return ")
        for case in [Case.of(text) for text in (*task.metadata["visible"], *task.metadata["hidden"])]:
            x, y = case.args
            assert case.passes(eval(body, {"x": x, "y": y}))  # noqa: S307 - our own expression of x, y and numbers


def test_code_tiny_reference_earns_one_and_wrong_operator_less(box: None) -> None:
    for task in islice(code_tiny.load("train"), 8):
        said = (*task.messages, Message("assistant", task.reference))
        assert reward_of(code_tiny, episode_of(task, said)) == 1.0
    task = next(task for task in code_tiny.load("train") if task.metadata["words"].count("plus") == 1)
    assert reward_of(code_tiny, answered(task, task.reference.replace(" + ", " - "))) < 1.0


def test_code_tiny_teacher_is_right_half_the_time(box: None) -> None:
    tasks = list(islice(code_tiny.load("warmup"), 400))
    assert code_tiny.demonstrations is not None
    said = list(code_tiny.demonstrations(tasks, 0))
    right = sum(conversation[-1].content == task.reference for task, conversation in zip(tasks, said, strict=True))
    assert (1 - MISTAKE_RATE) ** 2 - 0.1 < right / len(tasks) < 1 - MISTAKE_RATE + 0.1
    tool = env.toolset()["python"]
    for _, calling, told, _ in said[:5]:
        (call,) = calling.tool_calls
        assert run_tool(tool, CallWork(1, "code", call.name, call.arguments, "none")).content == told.content


# --- the reward ---------------------------------------------------------------------------------------------------------------

judged_only = Env(rewards={"tests_passed": 1.0})
ADD = Task("add", (Message("user", "?"),), "", code_metadata("add", [Case((1, 2), 3), Case((5, 5), 10), Case((0, 7), 7)]))


def answered(task: Task, code: str) -> Episode:
    """An episode that answers with this code."""
    return episode_of(task, (*task.messages, Message("assistant", code)))


def earned(code: str, task: Task = ADD) -> float:
    """The share of the hidden tests that it passes."""
    return score(answered(task, code), {"tests_passed": 1.0})["tests_passed"]


def test_tests_passed_pays_share_of_tests(box: None) -> None:
    assert earned("def add(a, b): return a + b") == 1.0
    assert earned("It is this:\n```python\ndef add(a, b):\n    return a + b\n```\nDone.") == 1.0
    assert earned("def add(a, b): return 10") == pytest.approx(1 / 3)
    assert earned("def add(a, b):\n    if a == 1: raise ValueError\n    return a + b") == pytest.approx(2 / 3)
    assert earned("def sub(a, b): return a + b") == 0.0
    assert earned("add = ") == earned("") == earned("\ud800") == 0.0


@pytest.mark.slow
def test_tests_passed_fails_only_slow_or_deadly_test(box: None) -> None:
    assert earned("def add(a, b):\n    while a == 5: pass\n    return a + b") == pytest.approx(2 / 3)
    assert earned("import os\ndef add(a, b):\n    if a == 5: os.abort()\n    return a + b") == pytest.approx(2 / 3)


@pytest.mark.slow
def test_tests_passed_stops_trying_endless_function(box: None) -> None:
    twice = Task("slow", (Message("user", "?"),), "", code_metadata("f", [Case((n,), n) for n in range(20)]))
    assert earned("def f(n):\n    while n > 10: pass\n    return n", twice) == pytest.approx(11 / 20)


YES = "class Yes:\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n    __hash__ = None\n"
FORGERIES = {
    "marker printed": "print('ALL TESTS PASSED')\nprint('3/3 passed')\ndef add(a, b):\n    print('PASSED')",
    "protocol lines printed": (
        "import json, os\ndef add(a, b):\n"
        "    for fd in range(3, 64):\n"
        '        try: os.write(fd, b\'{"done": {"code": 0, "value": "null"}}\\n\')\n'
        "        except OSError: pass"
    ),
    "answers looked for in caller frames": (
        "import sys\ndef add(a, b):\n    frame = sys._getframe()\n    found = []\n    while frame:\n"
        "        for name, value in list(frame.f_locals.items()):\n"
        "            if name in ('value', 'expected', 'case', 'want', 'wanted', 'answer') and type(value) is int:\n"
        "                found.append(value)\n"
        "        frame = frame.f_back\n    return found[0] if found else None"
    ),
    "answers looked for in memory": (
        "import gc\ndef add(a, b):\n    for thing in gc.get_objects():\n"
        "        if type(thing) is dict and 'hidden' in thing: return 3\n"
    ),
    "sys.exit": "import sys\nsys.exit(0)",
    "sys.exit in a call": "import sys\ndef add(a, b): sys.exit(0)",
    "os._exit": "import os\nos._exit(0)",
    "os._exit in a call": "import os\ndef add(a, b): os._exit(0)",
    "json patched": (
        "import json\njson.dumps = lambda *a, **k: '3'\njson.loads = lambda *a, **k: {'call': 'add', 'args': '[]', 'cpu': 9}\n"
        "def add(*a): return None"
    ),
    "builtins patched": (
        "import builtins\nbuiltins.all = builtins.any = lambda *a: True\nbuiltins.type = lambda *a: int\n"
        "builtins.AssertionError = Exception\ndef add(a, b): return None"
    ),
    "assert patched by a hook": "import sys\nsys.excepthook = lambda *a: None\ndef add(a, b): assert False",
    "test file rewritten": (
        "import os\nfor folder, _, files in os.walk('/tmp'):\n    for file in files:\n"
        "        open(os.path.join(folder, file), 'w').write('print(\"passed\")')\n"
        "for name in ('test.py', 'conftest.py', 'check.py'): open('/tmp/' + name, 'w').write('')\n"
        "def add(a, b): return None"
    ),
    "an object that equals everything": YES + "def add(a, b): return Yes()",
    "a number that equals everything": YES.replace("class Yes", "class Yes(int)") + "def add(a, b): return Yes(4)",
    "a list of such": YES + "def add(a, b): return [Yes()]",
    "NaN": "def add(a, b): return float('nan')",
    "the right number as a float": "def add(a, b): return float(a + b)",
    "truth for one": "def add(a, b): return True",
    "the right number as text": "def add(a, b): return str(a + b)",
    "no function but a value": "add = 3",
    "atexit": "import atexit\natexit.register(print, 'passed')\ndef add(a, b): return None",
    "a fork": "import os\ndef add(a, b):\n    os.fork() or os._exit(0)\n    return None",
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_tests_passed_pays_nothing_for_forgery(box: None, forgery: str) -> None:
    assert earned(FORGERIES[forgery]) == 0.0


IMPORTS = "from collections import *\nfrom decimal import Decimal\nfrom enum import IntEnum\nfrom fractions import Fraction\n"
LYING = "__eq__ = lambda self, other: True\n    __ne__ = lambda self, other: False\n    __hash__ = lambda self: 0"
NOT_PLAIN = {
    "Counter": ("f('aab') == {'a': 2, 'b': 1}", "return Counter(x)", "Counter", "'b'"),
    "defaultdict": ("f(0) == {'a': 2, 'b': 2}", "d = defaultdict(lambda: 2)\n    d['a'], d['b']\n    return d", "dict", ""),
    "OrderedDict": ("f('ab') == {'a': 0, 'b': 0}", "return OrderedDict.fromkeys(x, 0)", "OrderedDict", ""),
    "namedtuple": ("f(3) == (3, 4)", "return namedtuple('P', 'a b')(x, x + 1)", "namedtuple('P', 'a b')", "1, 2"),
    "Fraction": ("f(3) == 1.5", "return Fraction(x, 2)", "Fraction", "1, 2"),
    "Decimal": ("f(3) == 1.5", "return Decimal(x) / 2", "Decimal", "1"),
    "IntEnum": ("f(3) == 3", "return IntEnum('E', {'A': 3})(x)", "int", "4"),
    "str": ("f('a') == 'aa'", "return type('S', (str,), {})(x * 2)", "str", "'b'"),
    "float": ("abs(f(2) - 1.4142) < 0.001", "return type('S', (float,), {})(x ** 0.5)", "float", "4"),
    "keys": ("f({'a': 1}) == {'a'}", "return x.keys()", "set", "'b'"),
    "items": ("f({'a': 1}) == {('a', 1)}", "return x.items()", "frozenset", "'b'"),
    "order of keys": ("list(f({'b': 1, 'a': 2})) == ['b', 'a']", "return x.keys()", "list", "'ab'"),
    "values": ("list(f({'b': 1, 'a': 2})) == [1, 2]", "return x.values()", "list", "'ab'"),
    "generator": ("list(f(3)) == [0, 1, 2]", "return (number for number in range(x))", "list", "[3]"),
    "map": ("sorted(f(['b', 'a'])) == ['a', 'b']", "return map(str, x)", "list", "'bc'"),
    "range": ("f(3) == range(3)", "return range(x)", "list", "[3]"),
    "deque": ("f(3) == deque([0, 1, 2])", "return deque(range(x))", "deque", "[3]"),
    "bytearray": ("f('a') == b'a'", "return bytearray(x.encode())", "bytearray", "b'b'"),
    "complex": ("f(2) == 2j", "return x * 1j", "complex", "2"),
    "type": ("f(2) is int", "return type(x)", "type", "'int', (int,), {}"),
}  # fmt: skip
"""Name -> (assertion, right body of `f(x)`, type whose lying subclass is wrong, arguments of that subclass)."""


def mbpp_task(folder: Path, code: str, test: str) -> Task:
    row = {"task_id": 1, "text": "?", "code": code, "test_list": [test]}
    (task,) = load_tasks(DatasetConfig(name=str(write(folder / "own.jsonl", row)))).tasks
    return task


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_tests_passed_pays_values_of_any_type_but_no_forged_one(box: None, tmp_path: Path, name: str) -> None:
    test, body, base, args = NOT_PLAIN[name]
    right = f"{IMPORTS}def f(x):\n    {body}"
    forged = f"{IMPORTS}class Yes({base}):\n    {LYING}\ndef f(x): return Yes({args})"
    task = mbpp_task(tmp_path, right, f"assert {test}")
    assert reference_problems([task], ["tests_passed"]) == []
    assert [score(answered(task, code), {"tests_passed": 1.0})["tests_passed"] for code in (right, forged)] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("test", "truth"), [("assert f('ab')", 1.0), ("assert f('ba') is not None", 1.0), ("assert f('b')", 0.0)]
)
def test_tests_passed_evaluates_truth_of_object_inside(box: None, tmp_path: Path, test: str, truth: float) -> None:
    code = "import re\ndef f(x): return re.search('a', x)"
    task = mbpp_task(tmp_path, code, test)
    assert score(answered(task, code), {"tests_passed": 1.0})["tests_passed"] == truth


def test_tests_passed_system_failure_is_no_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = sandbox() if sandbox.made else None
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("AGENTRL_SANDBOX", "bwrap")
    settings.cache_clear()
    sandbox.forget()
    judge = find("rewards", "tests_passed")
    code = "def add(a, b): return b + a  # never judged before"
    try:
        with pytest.raises(SandboxUnavailable, match="bubblewrap is not installed"):
            earned(code)
        with pytest.raises(InfraError, match="bubblewrap is not installed"):
            run_tool(judge, CallWork(1, "code", "tests_passed", judge.asks(answered(ADD, code)), "none", kind="grade"))
        with pytest.raises(SandboxUnavailable, match="apt-get install bubblewrap"):
            prepare(None, build({"dataset.name": "code_tiny", "env": f"{__name__}:judged_only", "model.path": str(tmp_path)}))
    finally:
        settings.cache_clear()
        if made is not None:
            made.close()


def test_tests_passed_judges_same_answer_to_other_task_anew(box: None) -> None:
    other = Task("multiply", (Message("user", "?"),), "", code_metadata("add", [Case((2, 2), 4), Case((1, 2), 2)]))
    assert earned("def add(a, b): return a + b") == 1.0
    assert earned("def add(a, b): return a + b", other) == 0.5


def test_tests_passed_judges_equal_siblings_once(box: None) -> None:
    judge = find("rewards", "tests_passed")
    question = judge.asks(answered(ADD, "def add(a, b): return b + a  # by all of them"))
    with ThreadPoolExecutor(8) as siblings:
        verdicts = list(siblings.map(judge.run, [question] * 8))
    assert {verdict.content for verdict in verdicts} == {"1.0"}
    assert len({verdict.cpu_seconds for verdict in verdicts}) == 1, "what one of them took is what was seen"


def test_tests_passed_needs_a_test_and_a_finished_turn() -> None:
    with pytest.raises(RewardError, match="has no hidden test"):
        earned("x", Task("t", (Message("user", "?"),), "", code_metadata("f", [])))
    cut = Episode(ADD, status="done", stop_reason="max_tokens")
    assert score(cut, {"tests_passed": 1.0}) == {"tests_passed": 0.0}


def trying(*codes: str) -> Episode:
    """An episode that runs these programs, a turn each, and answers with the last."""
    turns = (Message("assistant", "", tool_calls=(ToolCall("python", {"code": code}),)) for code in codes)
    said = [message for turn in turns for message in (turn, Message("tool", "?", name="python"))]
    return episode_of(SHOWN, (*SHOWN.messages, *said, Message("assistant", codes[-1])))


SHOWN = replace(ADD, metadata=code_metadata("add", [Case((5, 5), 10)], visible=[Case((1, 2), 3), Case((2, 2), 4)]))


def test_progress_pays_step_for_rise_of_visible_tests(box: None) -> None:
    judge = find("rewards", "progress")
    half, whole = "def add(a, b): return 3", "def add(a, b): return a + b\nprint(add(1, 2))"
    tried = trying("print(1)", half, "add(", whole, half)
    assert judge.run(judge.asks(tried)).content == "[[0.0], [0.5], [0.0], [1.0], [0.5], []]"
    assert score(tried, {"progress": 1.0}) == {"progress": (0.0, 0.5, 0.0, 0.5, 0.0, 0.0)}
    assert score(trying("print(1)", half), {"progress": 1.0}) == {"progress": (0.0, 0.5, 0.0)}
    assert score(trying("raise ValueError", "import os; os._exit(0)"), {"progress": 1.0}) == {"progress": (0.0, 0.0, 0.0)}
    assert score(answered(SHOWN, whole), {"progress": 1.0}) == {"progress": (0.0,)}
    assert score(replace(tried, task=ADD), {"progress": 1.0}) == {"progress": (0.0,) * 6}


def test_progress_judges_only_first_programs() -> None:
    tried = trying(*(f"print({number})" for number in range(MAX_TRIED + 2)))
    assert [len(step) for step in find("rewards", "progress").asks(tried)["tried"]] == [1] * MAX_TRIED + [0, 0, 0]


def test_progress_programs_share_cpu_budget(box: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "WHOLE_CPU_SECONDS", 0.5)
    judge = find("rewards", "progress")
    slow = "import time\nwhile time.process_time() < 0.6: pass\ndef add(a, b): return a + b"
    told = judge.run(judge.asks(trying(slow, "def add(a, b): return a + b")))
    assert told.content == "[[0.0], [0.0], []]"
    assert told.cpu_seconds is not None
    assert told.cpu_seconds >= 0.5


SLEEPY = "import time\ndef add(a, b):\n    time.sleep(0.4)\n    return a + b  # sleepy"


def test_tests_passed_fails_rest_once_answer_slept_too_long(box: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tests_passed, "WHOLE_IDLE_SECONDS", 0.5)
    task = replace(ADD, metadata=code_metadata("add", [Case((n, 1), n + 1, "equal") for n in range(10)]))
    assert 0 < earned(SLEEPY, task) < 0.5
    judge = find("rewards", "progress")
    sleeps = "import time\ntime.sleep(0.8)\ndef add(a, b): return a + b"
    told = judge.run(judge.asks(trying(sleeps, "def add(a, b): return a + b")))
    assert told.content == "[[0.0], [0.0], []]"


def test_tests_passed_waiting_for_core_is_not_sleep() -> None:
    budget = tests_passed.Budget(10.0)
    budget.pay(CodeResult("ok", "", 0, 1.0, 90.0, "bwrap", waited_seconds=80.0))
    assert not budget.spent
    budget.pay(CodeResult("ok", "", 0, 1.0, 90.0, "bwrap", waited_seconds=10.0))
    assert budget.spent


def test_read_code_takes_last_block() -> None:
    assert read_code("```python\na = 1\n```\nbetter:\n```\na = 2\n```") == "a = 2"
    assert read_code(" a = 3\n") == "a = 3"


# --- cases --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "found", "passes"),
    [
        (1, 1, True), (1, 1.0, False), (1, True, False), (0.0, -0.0, False), ([1], (1,), False), ({1, 2}, {2, 1}, True),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True), ({1: "a"}, {True: "a"}, False), (math.nan, math.nan, True),
        (None, False, False), ("1", 1, False), (2**70, 2**70, True), ([[1, (2,)]], [[1, (2,)]], True), (b"a", "a", False),
    ],
)  # fmt: skip
def test_case_rule_exact_distinguishes_types(value: Any, found: Any, passes: bool) -> None:
    assert Case.of(Case((), value).text).passes(found) is passes


@pytest.mark.parametrize(
    ("test", "case"),
    [
        ("assert f(1, 'a') == [2, (3,)]", Case((1, "a"), [2, (3,)], "equal")),
        ("assert 5 == f(-1)", Case((-1,), 5, "equal")),
        ("assert f(1) is None, 'why'", Case((1,), None, "equal")),
        ("assert f(1) is True", Case((1,), True, "exact")),
        ("assert f(3 * 19, 'a' + 'b', 0**0) == [3 + 5, (2**10, -7 // 2)]", Case((57, "ab", 1), [8, (1024, -4)], "equal")),
        ("assert abs(f([1.0, 2.0]) - 2.0/3.0) < 10**-6", Case(([1.0, 2.0],), 2.0 / 3.0, "near", 1e-6)),
        ("assert f({'a' * 2: {1 + 1}}) == (not True)", Case(({"aa": {2}},), False, "equal")),
        ("assert f([])", Case(([],), True, "true")),
        ("assert not f({})", Case(({},), False, "false")),
        ("assert abs(f(2) - 1.5) < 1e-3", Case((2,), 1.5, "near", 1e-3)),
        ("def check(candidate):\n    assert candidate({'a': 1}) == {2}", Case(({"a": 1},), {2}, "equal")),
    ],
)
def test_read_asserts_reads_without_running(test: str, case: Case) -> None:
    assert read_asserts(test, ("f", "candidate")) == ([case], 0)


@pytest.mark.parametrize(
    "test",
    ["assert f(x) == 1", "assert f(1) == g(2)", "assert f(1) > 2", "assert f(a=1) == 2", "assert g(1) == 2", "assert True",
     "assert f(1) == 1 == 1", "assert f(1, *[2]) == 1", "assert f(open('/etc/passwd')) == 1",
     "assert f(9**9**9) == 1", "assert f('a' * 10**9) == 1", "assert f('%1000000000d' % 3) == 1", "assert f(1 << 10**9) == 1",
     "assert f([0] * 10**9) == 1", "assert f(1 / 0) == 1", "assert f(2.0**5000) == 1", "assert f(1) is 256",
     "assert f([[0] * 999] * 999) == 1", "assert f(('a' * 9999,) * 999) == 1", "assert f(" + "-" * 500 + "x) == 1"],
)  # fmt: skip
def test_read_asserts_counts_other_forms(test: str) -> None:
    assert read_asserts(test, ("f",)) == ([], 1)


def test_read_asserts_limits_size_made_by_operators() -> None:
    small = "assert f([0] * 999) == 1\n"
    assert len(read_asserts(small * 20, ("f",))[0]) == 20
    assert len(read_asserts(small * 2000, ("f",))[0]) < 100
    assert all_cases(small * 2000, ("f",)) is None


@pytest.mark.parametrize("keys", ["{%s}", "{%s: 0}"])
def test_exact_json_limits_keys_of_equal_hash(keys: str) -> None:
    separator = ", " if ":" not in keys else ": 0, "
    same = separator.join(str(number * (2**61 - 1)) for number in range(5000))
    other = separator.join(map(str, range(5000)))
    assert read_asserts(f"assert f({keys % same}) == 1", ("f",)) == ([], 1)
    assert len(read_asserts(f"assert f({keys % other}) == 1", ("f",))[0]) == 1


def test_case_rules_equal_python() -> None:
    assert Case((), 240, "equal").passes(240.0)
    assert not Case((), (1, 2), "equal").passes([1, 2])
    assert Case((), 1.0, "near", 0.1).passes(1.05)
    assert not Case((), 1.0, "near", 0.1).passes(1.2)
    assert not Case((), 1.0, "near", 0.1).passes(math.nan)
    assert not Case((), 1.0, "near", 0.1).passes("1.0")
    assert Case((), True, "true").passes([0])
    assert Case((), False, "false").passes([])


# --- files --------------------------------------------------------------------------------------------------------------------


def human(name: str, head: str, body: str, test: str, **more: str) -> dict[str, str]:
    """A row in HumanEval's format."""
    check = f"\n\nMETADATA = {{}}\n\n\ndef check(candidate):\n{test}\n"
    return {"task_id": f"own/{name}", "prompt": head, "entry_point": name, "canonical_solution": body, "test": check, **more}


HUMAN_EVAL = [
    human(
        "double_all",
        'from typing import List\n\n\ndef double_all(numbers: List[int]) -> List[int]:\n    """Twice each number.\n'
        '    >>> double_all([1])\n    [2]\n    """\n',
        "    return [2 * number for number in numbers]\n",
        "    assert candidate([1, 2]) == [2, 4]\n    assert candidate([]) == []",
    ),
    human(
        "half",
        'def half(number: float) -> float:\n    """Half of a number."""\n',
        "    return number / 2\n",
        "    assert candidate(4) == 2\n    assert abs(candidate(0.3) - 0.15) < 1e-6\n    assert candidate(sum([1])) == 0.5",
    ),
    human(
        "is_odd_length",
        'def helper(text: str) -> int:\n    return len(text)\n\n\ndef is_odd_length(text: str) -> bool:\n    """Odd?"""\n',
        "    return helper(text) % 2 == 1\n",
        "    assert candidate('abc')\n    assert not candidate('ab')\n    assert True",
    ),
]
MBPP = [
    {"task_id": 1, "text": "Write a function to add two numbers.", "code": "def plus(a, b):\r\n  return a + b",
     "test_list": ["assert plus(1, 2) == 3", "assert plus(0, 0) == 0", "assert plus(-1, 1) == 0"], "test_setup_code": "",
     "challenge_test_list": ["assert plus(2, 2) == 4"]},
    {"task_id": 2, "prompt": "Write a function to find the volume.", "code": "def volume(a):\n  return (a * a * a) / 1",
     "test_list": ["assert volume(2) == 8"], "test_imports": []},
    {"task_id": 3, "text": "Round up.", "code": "def up(x):\n  return math.ceil(x)",
     "test_list": ["assert up(1.5) == 2", "assert up(2) == 2"], "test_setup_code": "import math", "challenge_test_list": []},
]  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "keys", "hidden", "visible"),
    [
        (HUMAN_EVAL, ["own/double_all", "own/half", "own/is_odd_length"], [2, 0, 2], [1, 0, 0]),
        (MBPP, ["own/1", "own/2", "own/3"], [3, 1, 1], [1, 1, 1]),
    ],
)
def test_code_file_becomes_tasks_whose_solutions_earn_one(
    box: None, tmp_path: Path, rows: list[dict[str, Any]], keys: list[str], hidden: list[int], visible: list[int]
) -> None:
    loaded = load_tasks(DatasetConfig(name=str(write(tmp_path / "own.jsonl", *rows))))
    assert (loaded.env, loaded.skipped) == ("code", ())
    assert [task.key for task in loaded.tasks] == keys
    assert [len(task.metadata["hidden"]) for task in loaded.tasks] == hidden
    assert [len(task.metadata["visible"]) for task in loaded.tasks] == visible
    assert ["test" in task.metadata for task in loaded.tasks] == [count == 0 for count in hidden], "then it is run"
    assert [earned(task.reference, task) for task in loaded.tasks] == [1.0] * 3
    assert all(json.loads(json.dumps(task.metadata)) == task.metadata for task in loaded.tasks)


def test_code_task_shows_first_test_only(tmp_path: Path) -> None:
    task = load_tasks(DatasetConfig(name=str(write(tmp_path / "own.jsonl", *MBPP)))).tasks[0]
    (message,) = task.messages
    assert "assert plus(1, 2) == 3" in message.content
    assert "plus(0, 0)" not in message.content
    (message,) = load_tasks(DatasetConfig(name=str(write(tmp_path / "own.jsonl", *HUMAN_EVAL)))).tasks[0].messages
    assert ">>> double_all([1])" in message.content
    assert "candidate" not in message.content


def test_code_task_adds_what_stands_above_function(box: None, tmp_path: Path) -> None:
    tasks = load_tasks(DatasetConfig(name=str(write(tmp_path / "own.jsonl", *HUMAN_EVAL)))).tasks
    assert earned("def double_all(numbers: List[int]): return [n + n for n in numbers]", tasks[0]) == 1.0
    assert earned("def is_odd_length(text): return bool(helper(text) & 1)", tasks[2]) == 1.0


def test_code_file_names_malformed_rows_and_skips_on_request(tmp_path: Path) -> None:
    bad: list[Any] = [
        MBPP[0], b"{", {**MBPP[0], "test_list": []}, {**MBPP[0], "test_list": [1]}, {**MBPP[0], "code": "def ("},
        {**MBPP[0], "code": "x = 1"}, {**MBPP[0], "test_list": ["assert plus(x) == 1"], "challenge_test_list": []},
        {**HUMAN_EVAL[0], "test": "pass"}, {**HUMAN_EVAL[0], "prompt": 3}, [1], {**MBPP[0], "test_list": None},
    ]  # fmt: skip
    path = write(tmp_path / "bad.jsonl", *bad)
    with pytest.raises(DatasetError, match="10 malformed rows") as told:
        load_tasks(DatasetConfig(name=str(path)))
    assert all(f"line {number}: " in told.value.message for number in range(2, 12))
    loaded = load_tasks(DatasetConfig(name=str(path), skip_bad_rows=True))
    assert ([task.key for task in loaded.tasks], len(loaded.skipped)) == (["bad/1"], 10)
    with pytest.raises(DatasetError, match="only the split"):
        load_tasks(DatasetConfig(name=str(path), split="test"))
    with pytest.raises(DatasetError, match="code is a format"):
        find("datasets", "code").load("train")


# --- the env ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["code", "code_tiny"])
def test_code_envs_offer_python_and_reward_tests(name: str) -> None:
    found = find("envs", name)
    assert list(found.toolset()) == ["python"]
    assert found.rewards["tests_passed"] == 1.0
    assert found.reset(ADD)[-1] == ADD.messages[-1]

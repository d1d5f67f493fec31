"""code: programming tasks from a file of JSON lines, in HumanEval's or MBPP's format. `--dataset FILE.jsonl`

HumanEval (Chen et al. 2021, arXiv:2107.03374): `task_id, prompt, entry_point, canonical_solution, test`. MBPP (Austin et al.
2021, arXiv:2108.07732): `task_id`, `text` or `prompt`, `code`, `test_list`, and `test_setup_code`, `challenge_test_list`.

A test is an `assert` over one call with written-out arguments: `assert f(1, 2) == 3`, `assert not f("x")`,
`assert abs(f(2) - 1.41) < 1e-2`. It is read here, never run: its arguments go into the sandbox, and what comes out is
compared outside. Asserts of another form are left out (`metadata["unread_tests"]` counts them); a row without any that can be
read is malformed.

The model sees HumanEval's prompt as it is, with the examples in its docstring, and of MBPP's tests the first; the others are
hidden.
"""

import ast
import doctest
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from workflow.datasets import Dataset
from workflow.datasets.jsonl import SKIP_HINT, malformed
from workflow.errors import DatasetError
from workflow.sandbox.cases import Case
from workflow.trajectory import Message, Task

ENV = "code"


def code_metadata(
    function: str, cases: Sequence[Case], setup: str = "", unread: int = 0, visible: Sequence[Case] = ()
) -> dict[str, Any]:
    """What the rewards read of a task: the function's name, what must run before the answer, the hidden tests and those that
    the question shows."""
    tests = {"hidden": [case.text for case in cases], "visible": [case.text for case in visible]}
    return {"function": function, "setup": setup, **tests, "unread_tests": unread}


# files


def is_code(path: Path) -> bool:
    """Whether the file's first row is HumanEval's or MBPP's; False where it cannot be read."""
    try:
        with path.open(encoding="utf-8-sig") as lines:
            row = json.loads(next((line for line in lines if line.strip()), "null"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(row, dict) and ({"entry_point", "test"} <= row.keys() or "test_list" in row)


def read_tasks(path: Path, split: str = "train", skip_bad_rows: bool = False) -> tuple[list[Task], list[str]]:
    """The file's tasks, and what was wrong with the lines that were left out (`line N: why`).

    Raises:
        DatasetError: another split than `train`; the file cannot be read; a line is malformed and `skip_bad_rows` is off.
    """
    if split != "train":
        raise DatasetError(f"{str(path)!r} is one split, 'train', and {split!r} was asked.", "Name the other split's file.")
    tasks, problems = [], []
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"Cannot read the dataset {str(path)!r}: {error}.", "Check the path.") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                tasks.append(_task(f"{path.stem}/{number}", _row(line)))
            except (ValueError, RecursionError) as error:
                problems.append(f"line {number}: {error}")
    if problems and not skip_bad_rows:
        raise malformed(str(path), problems, SKIP_HINT)
    return tasks, problems


def _row(line: str) -> dict[str, Any]:
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError("must be an object")
    return row


def _task(key: str, row: Mapping[str, Any]) -> Task:
    return _mbpp(key, row) if "test_list" in row else _human_eval(key, row)


def _human_eval(key: str, row: Mapping[str, Any]) -> Task:
    prompt, function = _text(row, "prompt"), _text(row, "entry_point")
    cases, unread = read_asserts(_text(row, "test"), ("candidate", function))
    if not cases:
        raise ValueError("no test that can be read: assert f(...) == value")
    reference = prompt + _text(row, "canonical_solution")
    question = f"Complete this function, and answer with all of it:\n```python\n{prompt.strip()}\n```"
    # What stands before the function, its imports and helpers, need not be repeated in an answer.
    metadata = code_metadata(function, cases, _before(prompt, function), unread, _examples(prompt, function))
    return Task(key, (Message("user", question),), reference, metadata)


def _mbpp(key: str, row: Mapping[str, Any]) -> Task:
    question = _text(row, "text" if "text" in row else "prompt")
    reference, tests = _text(row, "code"), row["test_list"]
    more = row.get("challenge_test_list", [])
    if not (
        isinstance(tests, list) and isinstance(more, list) and tests and all(isinstance(test, str) for test in tests + more)
    ):
        raise ValueError("'test_list' must be a list of texts, and not empty")
    function = _tested(tests[0], reference)
    setup = str(row.get("test_setup_code") or "\n".join(row.get("test_imports", ())))
    hidden = [*tests[1:], *more] or tests
    cases, unread = read_asserts("\n".join(hidden), (function,))
    if not cases:
        raise ValueError("no hidden test that can be read: assert f(...) == value")
    message = Message("user", f"{question.strip()}\nYour code should pass this test:\n```python\n{tests[0].strip()}\n```")
    shown, _ = read_asserts(tests[0], (function,))
    return Task(key, (message,), reference, code_metadata(function, cases, setup, unread, shown))


def _text(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise ValueError(f"{name!r} must be text, and not empty")
    return value


def _before(prompt: str, function: str) -> str:
    """What a HumanEval prompt holds above its function."""
    return prompt[: max(0, prompt.rfind(f"def {function}("))].strip()


def _examples(prompt: str, function: str) -> list[Case]:
    """The tests that the docstring of a prompt shows: `>>> f(1)` and what it gives."""
    found: list[Case] = []
    with suppress(ValueError):  # no examples but something alike
        defined = (node for node in ast.walk(_parsed(prompt)) if isinstance(node, ast.FunctionDef) and node.name == function)
        shown = next((ast.get_docstring(node) for node in defined), None)
        for example in doctest.DocTestParser().get_examples(shown or ""):
            with suppress(ValueError):
                found += read_asserts(f"assert {example.source.strip()} == {example.want.strip()}", (function,))[0]
    return found


def _tested(test: str, reference: str) -> str:
    """The function that a test calls, among those that the reference defines."""
    defined = {node.name for node in ast.walk(_parsed(reference)) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(_parsed(test)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in defined:
            return node.func.id
    raise ValueError("the first test calls no function that 'code' defines")


# asserts


def read_asserts(source: str, names: Sequence[str]) -> tuple[list[Case], int]:
    """The tests of these functions, and how many asserts say it in another form.

    Raises:
        ValueError: it is no Python.
    """
    asserts = [node for node in ast.walk(_parsed(source)) if isinstance(node, ast.Assert)]
    cases = [case for node in asserts if (case := _case(node.test, names)) is not None]
    return cases, len(asserts) - len(cases)


def _parsed(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, MemoryError) as error:
        raise ValueError(f"no Python: {error}") from error


def _case(test: ast.expr, names: Sequence[str]) -> Case | None:
    """None for what is none of the forms."""
    try:
        return _read_case(test, names)
    except (ValueError, TypeError):  # an argument that is not written out
        return None


def _read_case(test: ast.expr, names: Sequence[str]) -> Case:
    match test:
        case ast.Compare(ast.Call(ast.Name("abs"), [ast.BinOp(call, ast.Sub(), value)]), [ast.Lt() | ast.LtE()], [within]):
            return _storable(Case(_args(call, names), _number(value), "near", _number(within)))
        case ast.Compare(call, [ast.Eq() | ast.Is()], [value]) if _calls(call, names):
            return _storable(Case(_args(call, names), ast.literal_eval(value), "equal"))
        case ast.Compare(value, [ast.Eq()], [call]):
            return _storable(Case(_args(call, names), ast.literal_eval(value), "equal"))
        case ast.UnaryOp(ast.Not(), call):
            return _storable(Case(_args(call, names), False, "false"))
    return _storable(Case(_args(test, names), True, "true"))


def _calls(node: ast.expr, names: Sequence[str]) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names


def _args(node: ast.expr, names: Sequence[str]) -> tuple[Any, ...]:
    if not isinstance(node, ast.Call) or not _calls(node, names) or node.keywords:
        raise ValueError("no call of the function with positional arguments")
    return tuple(ast.literal_eval(argument) for argument in node.args)


def _number(node: ast.expr) -> float:
    value = ast.literal_eval(node)
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError("no number")
    return float(value)


def _storable(case: Case) -> Case:
    """The case, if its data are plain."""
    assert case.text
    return case


def _refuse(split: str) -> Iterator[Task]:
    raise DatasetError(
        "code is a format, no dataset: the file is missing.",
        "Name a file in HumanEval's or MBPP's format: --dataset FILE.jsonl",
    )


code = Dataset(load=_refuse, env=ENV)

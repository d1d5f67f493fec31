"""code: programming tasks from a file or the hub, in the format of HumanEval or MBPP. `--dataset FILE.jsonl`

HumanEval (Chen et al. 2021, arXiv:2107.03374): `task_id, prompt, entry_point, canonical_solution, test`. MBPP (Austin et al.
2021, arXiv:2108.07732): `task_id`, `text` or `prompt`, `code`, `test_list`, and `test_setup_code`, `challenge_test_list`.

Tests over constants (`assert f(1, 2) == 3 * 19`) are parsed here and never run. If one test of a row is more complex, all tests
of the row run as a program, in a process without model-written code (`sandbox.program_tests`). A row whose tests cannot all be
judged is refused.

A task's key is its row's `task_id`. A text such as `HumanEval/0` is kept. In a file mbpp.jsonl, the number 11 becomes
`mbpp/11`, and line 11 without a `task_id` becomes `mbpp/line-11`. The model sees HumanEval's prompt, or MBPP's first test. The
other tests are hidden.
"""

import ast
import doctest
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from agentrl.workflow.config import DatasetConfig
from agentrl.workflow.dataset_rows.formats import SourceRow
from agentrl.workflow.datasets import Dataset
from agentrl.workflow.datasets.jsonl import add_problem
from agentrl.workflow.errors import DatasetError
from agentrl.workflow.judging.assertions import all_cases, check_names, parse_source, read_asserts
from agentrl.workflow.judging.constants import Constants
from agentrl.workflow.sandbox.function_tests import Case
from agentrl.workflow.trajectory import Message, Task

ENV = "code"
MAX_KEY = 200
MAX_ID = 10**18
UNSTORABLE = re.compile(r"[\x00\ud800-\udfff]")


def code_metadata(
    function: str, cases: Sequence[Case], setup: str = "", visible: Sequence[Case] = (), test: str = ""
) -> dict[str, Any]:
    """Return the metadata that the rewards read.

    The metadata has the function's name, the code to run before the answer, the hidden tests, and the tests in the question.
    `test` is the hidden tests as a program, if they cannot be expressed as cases.
    """
    tests = {"hidden": [case.text for case in cases], "visible": [case.text for case in visible]}
    return {"function": function, "setup": setup, **tests, **({"test": test} if test else {})}


# files


def is_code(row: Mapping[str, Any] | None) -> bool:
    """Return True if the first row of a dataset has the format of HumanEval or MBPP."""
    return row is not None and ({"entry_point", "test"} <= row.keys() or "test_list" in row)


def read_tasks(rows: Iterable[SourceRow], config: DatasetConfig, problems: list[str]) -> Iterator[Task]:
    """Yield the tasks of the rows; add `PLACE: why` to `problems` for each malformed row.

    Raises:
        DatasetError: see `jsonl.add_problem`.
    """
    seen: dict[str, tuple[str, dict[str, Any]]] = {}
    for source in rows:
        key = ""
        try:
            values = source.columns()
            key = _key(values, source.label, source.number)
            first, other = seen.setdefault(key, (source.place, values))
            if other != values:  # the same row again is passed over, as in every dataset
                raise ValueError(f"the 'task_id' of {first}")
            task = _task(key, values)
        except (ValueError, RecursionError) as error:
            add_problem(problems, f"{source.place}: {f'{key}: ' * bool(key)}{error}", config)
            continue
        yield task


def _key(row: Mapping[str, Any], stem: str, line: int) -> str:
    """Return the key of the row's task. A plain number or word gets the file's name as a prefix."""
    task_id = row.get("task_id")
    if task_id is None:
        return f"{stem}/line-{line}"
    if type(task_id) is int and abs(task_id) < MAX_ID:
        return f"{stem}/{task_id}"
    if not isinstance(task_id, str) or not task_id.isprintable() or not 0 < len(task_id) <= MAX_KEY:
        raise ValueError(f"'task_id' must be a whole number, or printable text of at most {MAX_KEY} characters")
    return task_id if "/" in task_id else f"{stem}/{task_id}"


def _task(key: str, row: Mapping[str, Any]) -> Task:
    return _mbpp(key, row) if "test_list" in row else _human_eval(key, row)


def _human_eval(key: str, row: Mapping[str, Any]) -> Task:
    prompt, function = _text(row, "prompt"), _text(row, "entry_point")
    reference = prompt + _text(row, "canonical_solution")
    tests = _tests(_text(row, "test"), ("candidate", function), reference)
    question = f"Complete this function, and answer with all of it:\n```python\n{prompt.strip()}\n```"
    # The code before the function, imports and helpers, need not be repeated in an answer.
    metadata = code_metadata(function, setup=_code_before(prompt, function), visible=_examples(prompt, function), **tests)
    return Task(key, (Message("user", question),), reference, metadata)


def _mbpp(key: str, row: Mapping[str, Any]) -> Task:
    question = _text(row, "text" if "text" in row else "prompt")
    reference, tests = _text(row, "code"), row["test_list"]
    more = row.get("challenge_test_list", [])
    if not (
        isinstance(tests, list) and isinstance(more, list) and tests and all(isinstance(test, str) for test in tests + more)
    ):
        raise ValueError("'test_list' must be a list of texts, and not empty")
    function = _tested_function(tests[0], reference)
    setup = str(row.get("test_setup_code") or "\n".join(row.get("test_imports", ())))
    hidden = [*tests[1:], *more] or tests
    test_metadata = _tests("\n".join(hidden), (function,), f"{setup}\n{reference}")
    message = Message("user", f"{question.strip()}\nYour code should pass this test:\n```python\n{tests[0].strip()}\n```")
    examples, _ = read_asserts(tests[0], (function,))
    return Task(key, (message,), reference, code_metadata(function, setup=setup, visible=examples, **test_metadata))


def _tests(source: str, names: Sequence[str], program: str) -> dict[str, Any]:
    cases = all_cases(source, names)
    if cases:
        return {"cases": cases}
    check_names(source, program)
    return {"cases": [], "test": source}


def _text(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str) or not value.strip() or UNSTORABLE.search(value):
        raise ValueError(f"{name!r} must be text without NUL and half surrogate pairs, and not empty")
    return value


def _code_before(prompt: str, function: str) -> str:
    return prompt[: max(0, prompt.rfind(f"def {function}("))].strip()


def _examples(prompt: str, function: str) -> list[Case]:
    """Return the tests in the docstring of a prompt: `>>> f(1)` and its value."""
    cases: list[Case] = []
    constants = Constants()
    with suppress(ValueError):  # text that only looks like examples
        defined = (
            node for node in ast.walk(parse_source(prompt)) if isinstance(node, ast.FunctionDef) and node.name == function
        )
        docstring = next((ast.get_docstring(node) for node in defined), None)
        for example in doctest.DocTestParser().get_examples(docstring or ""):
            with suppress(ValueError):
                test = f"assert {example.source.strip()} == {example.want.strip()}"
                cases += read_asserts(test, (function,), constants)[0]
    return cases


def _tested_function(test: str, reference: str) -> str:
    defined = {node.name for node in ast.walk(parse_source(reference)) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(parse_source(test)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in defined:
            return node.func.id
    raise ValueError("the first test calls no function that 'code' defines")


def _refuse(split: str) -> Iterator[Task]:
    raise DatasetError(
        "code is a format, not a dataset: --dataset needs a file.",
        "Pass a file in HumanEval's or MBPP's format: --dataset FILE.jsonl",
    )


code = Dataset(load=_refuse, env=ENV)

"""Tests of a function as data, and the check whether a return value passes such a test.

Return values of a model's function are decoded and compared in a separate session, which runs only this file and can be killed
(`judging.code_judge`). The reason is that building a set of a few thousand maliciously chosen numbers takes minutes. This file
runs inside and imports only the standard library and `exact_json`.
"""

import json
from dataclasses import dataclass
from typing import Any, Literal

from agentrl.workflow.sandbox import exact_json

TOLERANCE_SLACK = 1e-12
Rule = Literal["exact", "equal", "near", "true", "false"]


@dataclass(frozen=True)
class Case:
    """One test of a function.

    Args:
        args: the function's arguments, as plain data.
        value: the return value that is expected, as plain data.
        rule: how a return value is compared. `exact`: same value and same types. `equal`: equal by Python's ==. `near`: differs
            by at most `tolerance`. `true`, `false`: has this truth value.
        tolerance: the largest difference that `near` accepts.
    """

    args: tuple[Any, ...]
    value: Any
    rule: Rule = "exact"
    tolerance: float = 0.0

    def passes(self, result: Any) -> bool:
        """Return whether the plain value `result` passes. A value that cannot be compared does not pass."""
        try:
            return self._passes(result)
        except (ArithmeticError, ValueError, TypeError, RecursionError):
            return False

    def _passes(self, result: Any) -> bool:
        if self.rule == "exact":
            return _canonical(result) == _canonical(self.value)
        if self.rule == "near":
            return not isinstance(result, bool) and abs(result - self.value) <= self.tolerance + TOLERANCE_SLACK
        if self.rule == "equal":
            return bool(result == self.value)
        return bool(result) is (self.rule == "true")

    @property
    def text(self) -> str:
        """The test as text, for a task's metadata."""
        return exact_json.encode([self.args, self.value, self.rule, self.tolerance])

    @classmethod
    def of(cls, text: str) -> "Case":
        """Build a test from its text. Raise ValueError if the text is not that of a test."""
        args, value, rule, tolerance = exact_json.decode(text)
        return cls(tuple(args), value, rule, tolerance)


def args_of(text: str) -> str:
    """Return the arguments in a `Case.text`, still encoded by `exact_json`. Raise ValueError if the text has another form."""
    args, _, _, _ = json.loads(text)
    return json.dumps(args)


def verdicts(pairs: list[list[str]]) -> list[bool]:
    """Return for each pair whether the value passes the test. A pair is the text of a test and the text of a value."""
    return [_verdict(Case.of(case), value) for case, value in pairs]


def _verdict(case: Case, value: str) -> bool:
    try:
        result = exact_json.decode(value)
        return case.passes(result)
    except (ValueError, MemoryError):
        return False


def _canonical(value: Any) -> str:
    """Return a text that is equal for equal plain data. The order of a dict is ignored; 1, 1.0 and True are different."""
    return json.dumps(json.loads(exact_json.encode(value)), sort_keys=True)

"""A test of a function as data, and the check whether a value passes it.

Return values of a model's function are decoded and compared here, in a session that runs only this file and can be killed
(`judging.code_judge`): building a set of a few thousand chosen numbers takes minutes. This file runs inside, and imports only
the standard library and `exact_json`.
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
        value: the value that it must return, as plain data.
        rule: `exact`: the same value of the same types; `equal`: equal by Python's ==; `near`: a difference of at most
            `tolerance`; `true`, `false`: only the truth value counts.
        tolerance: the largest difference that `near` accepts.
    """

    args: tuple[Any, ...]
    value: Any
    rule: Rule = "exact"
    tolerance: float = 0.0

    def passes(self, result: Any) -> bool:
        """Return whether `result`, a value of plain data, passes. A value that cannot be compared, such as a number beyond any
        float, fails.
        """
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
        """The case as text, for a task's metadata."""
        return exact_json.encode([self.args, self.value, self.rule, self.tolerance])

    @classmethod
    def of(cls, text: str) -> "Case":
        """Parse the text of a case.

        Raises:
            ValueError: the text is not a case.
        """
        args, value, rule, tolerance = exact_json.decode(text)
        return cls(tuple(args), value, rule, tolerance)


def args_of(text: str) -> str:
    """Return the arguments in a case's text, as `exact_json` text, without decoding them.

    Raises:
        ValueError: the text is not a case.
    """
    args, _, _, _ = json.loads(text)
    return json.dumps(args)


def verdicts(pairs: list[list[str]]) -> list[bool]:
    """Return for each pair of a case and a value, both as text, whether the value passes."""
    return [_verdict(Case.of(case), value) for case, value in pairs]


def _verdict(case: Case, value: str) -> bool:
    try:
        result = exact_json.decode(value)
        return case.passes(result)
    except (ValueError, MemoryError):
        return False


def _canonical(value: Any) -> str:
    """Return equal text for equal plain data. The order of a dict does not count; 1, 1.0 and True differ."""
    return json.dumps(json.loads(exact_json.encode(value)), sort_keys=True)

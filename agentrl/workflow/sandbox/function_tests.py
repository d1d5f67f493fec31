"""A test of a function as data, and the check whether a value passes it.

Values that a model's function returned are decoded and compared here, in a session that runs nothing but this file and may be
killed (`judging.code_judge`): a set of a few thousand chosen numbers takes minutes to build. This file runs inside, and imports
only the standard library and `exact_json`.
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
        args: the function's arguments; plain data.
        value: the value that it must return; plain data.
        rule: `exact`: the same value of the same types; `equal`: equal by Python's ==; `near`: at most `tolerance` away;
            `true`, `false`: the truth value of what it returns.
        tolerance: the largest difference that `near` accepts.
    """

    args: tuple[Any, ...]
    value: Any
    rule: Rule = "exact"
    tolerance: float = 0.0

    def passes(self, result: Any) -> bool:
        """Return whether this value, plain data, is right. A value that cannot be compared (a number beyond any float) is
        wrong.
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
        """Return the case that a text holds.

        Raises:
            ValueError: the text holds no case.
        """
        args, value, rule, tolerance = exact_json.decode(text)
        return cls(tuple(args), value, rule, tolerance)


def args_of(text: str) -> str:
    """Return the arguments in a case's text, as `exact_json` text; nothing is decoded.

    Raises:
        ValueError: the text holds no case.
    """
    args, _, _, _ = json.loads(text)
    return json.dumps(args)


def verdicts(pairs: list[list[str]]) -> list[bool]:
    """Return whether the value passes, for each pair of a case and a value, both as text."""
    return [_verdict(Case.of(case), value) for case, value in pairs]


def _verdict(case: Case, value: str) -> bool:
    try:
        result = exact_json.decode(value)
        return case.passes(result)
    except (ValueError, MemoryError):
        return False


def _canonical(value: Any) -> str:
    """The same text for the same plain data: the order of a dict does not count, and 1, 1.0 and True differ."""
    return json.dumps(json.loads(exact_json.encode(value)), sort_keys=True)

"""A test of a function as data, and whether a value passes it.

What a model's function returned is decoded and compared here, in a session that runs nothing but this file and may be killed
(`judging.code_judge`): a set of a few thousand chosen numbers takes minutes to build. This file runs inside, and imports only
the standard library and plain data.
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
        args: what it is called with; plain data.
        value: what it must return; plain data.
        rule: `exact`: the same value of the same types; `equal`: what Python's == says of plain data; `near`: at most
            `tolerance` away; `true`, `false`: as a condition.
        tolerance: of `near`.
    """

    args: tuple[Any, ...]
    value: Any
    rule: Rule = "exact"
    tolerance: float = 0.0

    def passes(self, found: Any) -> bool:
        """Whether this value, plain data, is right. What cannot be compared (a number beyond any float) is wrong."""
        try:
            return self._passes(found)
        except (OverflowError, ValueError, TypeError, RecursionError):
            return False

    def _passes(self, found: Any) -> bool:
        if self.rule == "exact":
            return _canonical(found) == _canonical(self.value)
        if self.rule == "near":
            return type(found) in (int, float) and abs(found - self.value) <= self.tolerance + TOLERANCE_SLACK
        if self.rule == "equal":
            return bool(found == self.value)
        return bool(found) is (self.rule == "true")

    @property
    def text(self) -> str:
        """The case as a task's metadata hold it."""
        return exact_json.encode([self.args, self.value, self.rule, self.tolerance])

    @classmethod
    def of(cls, text: str) -> "Case":
        """The case of such a text.

        Raises:
            ValueError: it is none.
        """
        args, value, rule, tolerance = exact_json.decode(text)
        return cls(tuple(args), value, rule, tolerance)


def args_of(text: str) -> str:
    """The arguments in a case's text, as plain data's text too; nothing is decoded.

    Raises:
        ValueError: it is no case.
    """
    args, _, _, _ = json.loads(text)
    return json.dumps(args)


def verdicts(pairs: list[list[str]]) -> list[bool]:
    """Whether the value passes, for each pair of a case's text and a value's."""
    return [_verdict(Case.of(case), value) for case, value in pairs]


def _verdict(case: Case, value: str) -> bool:
    try:
        found = exact_json.decode(value)
        return case.passes(found)
    except (ValueError, MemoryError):
        return False


def _canonical(value: Any) -> str:
    """Text that is the same for the same plain data: a dict has no order, 1, 1.0 and True are three things."""
    return json.dumps(json.loads(exact_json.encode(value)), sort_keys=True)

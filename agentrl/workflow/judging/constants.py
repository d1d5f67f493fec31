"""Evaluates constant expressions in a source, with a limit on the size of their values.

A short text may have a value that exceeds any memory, such as `[[[0]*99999]*99999]*99999`. So the size of an operator's result,
with all its items, is computed before the result, and the limit applies to the sum over one source. The number of keys with
equal hashes in a set is limited too.
"""

import ast
import operator
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

MAX_BITS = 4096
"""The maximum number of bits of a number that an operator takes or returns."""
MAX_MADE = 100_000
"""The maximum number of digits, characters and items that the operators of a source take and return in total."""
MAX_ALIKE = 1000
"""The maximum number of keys of a set or dict with the same hash. Building a set takes time quadratic in this number."""

OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
SIGNS: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Not: operator.not_}


class Constants:
    """An evaluator of the constant expressions in a source, with a limit on their total size."""

    def __init__(self) -> None:
        self._room = MAX_MADE

    def value(self, node: ast.expr) -> Any:
        """Return the value of a constant expression. Raise ValueError or TypeError if the expression has no value, or the value
        is too large.
        """
        try:
            match node:
                case ast.BinOp(left, sign, right) if type(sign) in OPERATORS:
                    return self._apply(type(sign), self.value(left), self.value(right))
                case ast.UnaryOp(sign, operand) if type(sign) in SIGNS:
                    return SIGNS[type(sign)](self.value(operand))
                case ast.List(items):
                    return [self.value(item) for item in items]
                case ast.Tuple(items):
                    return tuple(self.value(item) for item in items)
                case ast.Set(items):
                    return set(_distinct([self.value(item) for item in items]))
                case ast.Dict(keys, values) if None not in keys:
                    distinct_keys = _distinct([self.value(key) for key in keys if key is not None])
                    return dict(zip(distinct_keys, map(self.value, values), strict=True))
            return ast.literal_eval(node)
        except ArithmeticError as error:
            raise ValueError(f"no value: {error}") from error

    def is_one(self, node: ast.expr) -> bool:
        """Return True if the expression is constant."""
        try:
            self.value(node)
        except (ValueError, TypeError, RecursionError):
            return False
        return True

    def _apply(self, sign: type[ast.operator], left: Any, right: Any) -> Any:
        """Check the size of the result of an operation, then compute and return the result."""
        if not (_is_short(left) and _is_short(right)):
            raise ValueError("a number that is too large")
        if sign in (ast.Pow, ast.Mod) and not (isinstance(left, int | float) and isinstance(right, int | float)):
            raise ValueError("no number")
        if sign is ast.Pow and _bits(left) * abs(right) > MAX_BITS:
            raise ValueError("a power that is too large")
        times = next((abs(side) for side in (left, right) if isinstance(side, int)), 1) if sign is ast.Mult else 1
        self._spend(_size(left) + _size(right))
        if isinstance(left, str | bytes | list | tuple) or isinstance(right, str | bytes | list | tuple):
            self._spend(times * max(_size(left), _size(right)))
        value = OPERATORS[sign](left, right)
        if not _is_short(value):
            raise ValueError("a number that is too large")
        return value

    def _spend(self, size: int) -> None:
        self._room -= size
        if self._room < 0:
            raise ValueError("too large")


def _distinct(keys: Sequence[Hashable]) -> Sequence[Hashable]:
    """Return the keys. Raise an exception if too many of them have the same hash."""
    if max(Counter(map(hash, keys)).values(), default=0) > MAX_ALIKE:
        raise ValueError("too many keys of the same hash")
    return keys


def _size(value: Any) -> int:
    """Return the number of digits, characters and items in a value; an item that occurs twice counts twice."""
    match value:
        case str() | bytes():
            return 1 + len(value)
        case int():
            return 1 + value.bit_length() // 3
        case list() | tuple() | set():
            return 1 + sum(map(_size, value))
        case dict():
            return 1 + sum(_size(key) + _size(item) for key, item in value.items())
    return 1


def _is_short(value: Any) -> bool:
    return not isinstance(value, int) or value.bit_length() <= MAX_BITS


def _bits(value: float) -> int:
    return value.bit_length() if isinstance(value, int) else 1

"""calculator: exact arithmetic for the model, with integers and fractions, without floats and `eval`.

The calculator accepts numbers (with commas between thousands), `+ - * / // % **`, signs and parentheses. Limits apply to the
length of the text, to the depth of nesting, and to the size of every intermediate result. They are checked before a value is
computed.
"""

import ast
import operator
import re
from collections.abc import Callable
from decimal import Context, Decimal
from fractions import Fraction

from agentrl.workflow.errors import ToolFailure
from agentrl.workflow.tools import Tool

MAX_CHARACTERS = 500
MAX_DEPTH = 300  # a sum of n terms nests n deep
MAX_BITS = 1024  # the most bits of a numerator or denominator
MAX_DIGITS = 300
ROUNDING_CONTEXT = Context(prec=10)

FOREIGN = re.compile(r"[^0-9.+\-*/%()\s]")
THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
LEADING_ZEROS = re.compile(r"(?<![0-9.])0+(?=[0-9])")

Operation = Callable[[Fraction, Fraction], Fraction]


def calculate(expression: str) -> str:
    """Return the value of an arithmetic expression, as text.

    Integers and terminating decimals are exact. Other values are rounded to 10 significant digits.

    Raises:
        ToolFailure: the text is not arithmetic, divides by zero, is too long, is nested too deep, or has a value that is too
            large.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ToolFailure(f"the expression has {len(expression)} characters; at most {MAX_CHARACTERS} are read")
    text = LEADING_ZEROS.sub("", THOUSANDS.sub("", " ".join(expression.split())))
    foreign = FOREIGN.search(text)
    if foreign:
        raise ToolFailure(f"{foreign.group()!r} is not arithmetic: write numbers, + - * / // % ** and parentheses")
    return _print(_value(_parse(text), text, MAX_DEPTH))


def _parse(text: str) -> ast.expr:
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ToolFailure(f"{text!r:.80} is not a complete arithmetic expression") from error


def _value(node: ast.expr, text: str, depth: int) -> Fraction:
    if depth == 0:
        raise ToolFailure(f"the expression nests more than {MAX_DEPTH} levels deep")
    match node:
        case ast.Constant(value=int() | float()):
            # The text itself, because the parser has already rounded a decimal to a float.
            return _check_bits(Fraction(text[node.col_offset : node.end_col_offset]))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, text, depth - 1)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand, text, depth - 1)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
            return _apply(OPERATIONS[type(op)], _value(left, text, depth - 1), _value(right, text, depth - 1))
    raise ToolFailure(f"{text!r:.80} is not arithmetic")


def _apply(operation: Operation, left: Fraction, right: Fraction) -> Fraction:
    try:
        return _check_bits(operation(left, right))
    except ZeroDivisionError as error:
        raise ToolFailure("division by zero") from error


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ToolFailure("only whole exponents are computed")
    # Bits grow by the exponent, so the size of the result is known before it is computed.
    bits = (max(abs(base.numerator), base.denominator) - 1).bit_length()
    if bits * abs(exponent.numerator) > MAX_BITS:
        raise ToolFailure(f"a number with more than about {MAX_DIGITS} digits is too large")
    return Fraction(base**exponent.numerator)


def _floor_division(left: Fraction, right: Fraction) -> Fraction:
    return Fraction(left // right)


OPERATIONS: dict[type[ast.operator], Operation] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: _floor_division,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}


def _check_bits(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ToolFailure(f"a number with more than about {MAX_DIGITS} digits is too large")
    return value


def _print(value: Fraction) -> str:
    places = _decimal_places(value.denominator)
    if places is None:
        return f"{ROUNDING_CONTEXT.divide(Decimal(value.numerator), Decimal(value.denominator)):f}"
    digits = str(abs(value.numerator) * 10**places // value.denominator).rjust(places + 1, "0")
    sign = "-" if value < 0 else ""
    return sign + (f"{digits[:-places]}.{digits[-places:]}" if places else digits)


def _decimal_places(denominator: int) -> int | None:
    places = 0
    for prime in (2, 5):
        power = 0
        while denominator % prime == 0:
            denominator //= prime
            power += 1
        places = max(places, power)
    return places if denominator == 1 else None


@Tool
def calculator(expression: str) -> str:
    """Computes an arithmetic expression exactly, for example (48 + 24) / 2."""
    return calculate(expression)

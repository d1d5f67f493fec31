"""Tests as they are written: the asserts of a source are read here, and never run.

An assert over one call with arguments that constants say (`assert f(1, 2) == 3 * 19`, `assert not f("x")`,
`assert abs(f(2) - 1.41) < 1e-2`) is a `Case`: data alone. A source that says more than that (a loop, a helper, what another
call gave) is a program, and is run as one (`workflow.sandbox.checks`); here it is only looked over.
"""

import ast
import builtins
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from workflow.sandbox.cases import Case

MOST_BITS = 4096
MOST_ITEMS = 100_000
"""What operators between constants may come to."""

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


def parsed(source: str) -> ast.Module:
    """The tree of a source.

    Raises:
        ValueError: it is no Python.
    """
    try:
        return ast.parse(source)
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"no Python: {error}") from error


def read_asserts(source: str, names: Sequence[str]) -> tuple[list[Case], int]:
    """The tests of these functions, and how many asserts say it in another form.

    Raises:
        ValueError: it is no Python.
    """
    asserts = [node for node in ast.walk(parsed(source)) if isinstance(node, ast.Assert)]
    cases = [case for node in asserts if (case := _case(node.test, names)) is not None]
    return cases, len(asserts) - len(cases)


def all_cases(source: str, names: Sequence[str]) -> list[Case] | None:
    """All tests of a source whose asserts stand alone, each of them a case; None where it must be run to know.

    `assert True` tests nothing, and is none.

    Raises:
        ValueError: it is no Python.
    """
    tree = parsed(source)
    if not all(_is_alone(statement, top=True) for statement in tree.body):
        return None
    asserts = [node for node in ast.walk(tree) if isinstance(node, ast.Assert) and not _says_nothing(node)]
    cases = [case for node in asserts if (case := _case(node.test, names)) is not None]
    return cases if len(cases) == len(asserts) else None


def check_names(source: str, program: str) -> None:
    """Looks whether all names that a source uses are there when it runs after `program`.

    Raises:
        ValueError: nothing defines one, or it holds no assert; it is no Python.
    """
    tree, before = parsed(source), parsed(program)
    if not any(isinstance(node, ast.Assert) and not _says_nothing(node) for node in ast.walk(tree)):
        raise ValueError("no test: assert f(...) == value")
    known = {*dir(builtins), "__name__", *_bound(tree), *_bound(before)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id not in known and "*" not in known:
            raise ValueError(f"its tests need {node.id!r}, which nothing defines")


def folded(node: ast.expr) -> Any:
    """The value of an expression of constants and operators between them.

    Raises:
        ValueError, TypeError: it holds something else, has no value, or is too large.
    """
    try:
        match node:
            case ast.BinOp(left, sign, right) if type(sign) in OPERATORS:
                return _applied(type(sign), folded(left), folded(right))
            case ast.UnaryOp(sign, operand) if type(sign) in SIGNS:
                return SIGNS[type(sign)](folded(operand))
            case ast.List(items):
                return [folded(item) for item in items]
            case ast.Tuple(items):
                return tuple(folded(item) for item in items)
            case ast.Set(items):
                return {folded(item) for item in items}
            case ast.Dict(keys, values) if None not in keys:
                return {folded(key): folded(value) for key, value in zip(keys, values, strict=True) if key is not None}
        return ast.literal_eval(node)
    except ArithmeticError as error:
        raise ValueError(f"no value: {error}") from error


def _applied(sign: type[ast.operator], left: Any, right: Any) -> Any:
    """The value; its size is known before it is computed."""
    if sign is ast.Pow and not (_is_small(left) and _is_small(right) and _bits(left) * abs(right) <= MOST_BITS):
        raise ValueError("a power that is too large")
    if sign is ast.Mod and not (isinstance(left, int | float) and isinstance(right, int | float)):
        raise ValueError("no number")
    repeats = sign is ast.Mult and (_is_sized(left) or _is_sized(right))
    if repeats and max(_size(left), 1) * max(_size(right), 1) > MOST_ITEMS:
        raise ValueError("too long")
    value = OPERATORS[sign](left, right)
    if (isinstance(value, int) and value.bit_length() > MOST_BITS) or (_is_sized(value) and len(value) > MOST_ITEMS):
        raise ValueError("too large")
    return value


def _is_small(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and value.bit_length() <= MOST_BITS)


def _bits(value: float) -> int:
    return value.bit_length() if isinstance(value, int) else 1


def _is_sized(value: Any) -> bool:
    return isinstance(value, str | bytes | list | tuple)


def _size(value: Any) -> int:
    """How many times, or how many items."""
    return len(value) if _is_sized(value) else abs(int(value))


def _is_alone(statement: ast.stmt, top: bool) -> bool:
    """Whether nothing but its place makes the asserts in it true: no loop, no variable, no helper."""
    match statement:
        case ast.Assert() | ast.Import() | ast.ImportFrom() | ast.Pass() | ast.Expr(ast.Constant() | ast.Name()):
            return True
        case ast.FunctionDef(body=body) if top:
            return all(_is_alone(inner, top=False) for inner in body)
        case ast.Assign([ast.Name()], value) if top:
            return _is_constant(value)
    return False


def _is_constant(node: ast.expr) -> bool:
    try:
        folded(node)
    except (ValueError, TypeError, RecursionError):
        return False
    return True


def _says_nothing(node: ast.Assert) -> bool:
    return isinstance(node.test, ast.Constant) and bool(node.test.value)


def _bound(tree: ast.AST) -> Iterator[str]:
    """The names that something in it binds, wherever; `*` where that cannot be told."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(name, ast.Store() | ast.Del()) | ast.arg(name) | ast.ExceptHandler(name=str(name)):
                yield name
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
                yield name
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
                yield name
            case ast.alias(name, asname):
                yield asname or name.partition(".")[0]


def _case(test: ast.expr, names: Sequence[str]) -> Case | None:
    """None for what is none of the forms."""
    try:
        return _read_case(test, names)
    except (ValueError, TypeError, RecursionError):  # an argument that no constants say
        return None


def _read_case(test: ast.expr, names: Sequence[str]) -> Case:
    match test:
        case ast.Compare(ast.Call(ast.Name("abs"), [ast.BinOp(call, ast.Sub(), value)]), [ast.Lt() | ast.LtE()], [within]):
            return _storable(Case(_args(call, names), _number(value), "near", _number(within)))
        case ast.Compare(call, [ast.Is()], [ast.Constant(bool(value))]):
            return _storable(Case(_args(call, names), value, "exact"))
        case ast.Compare(call, [ast.Eq()], [value]) | ast.Compare(call, [ast.Is()], [ast.Constant(None) as value]) if _calls(
            call, names
        ):
            return _storable(Case(_args(call, names), folded(value), "equal"))
        case ast.Compare(value, [ast.Eq()], [call]):
            return _storable(Case(_args(call, names), folded(value), "equal"))
        case ast.UnaryOp(ast.Not(), call):
            return _storable(Case(_args(call, names), False, "false"))
    return _storable(Case(_args(test, names), True, "true"))


def _calls(node: ast.expr, names: Sequence[str]) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names


def _args(node: ast.expr, names: Sequence[str]) -> tuple[Any, ...]:
    if not isinstance(node, ast.Call) or not _calls(node, names) or node.keywords:
        raise ValueError("no call of the function with positional arguments")
    return tuple(folded(argument) for argument in node.args)


def _number(node: ast.expr) -> float:
    value = folded(node)
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError("no number")
    return float(value)


def _storable(case: Case) -> Case:
    """The case, if its data are plain."""
    assert case.text
    return case

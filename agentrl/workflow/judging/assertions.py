"""Parses the asserts in a test's source, without running them."""

import ast
import builtins
import math
from collections.abc import Sequence
from typing import Any

from agentrl.workflow.judging.constants import Constants
from agentrl.workflow.sandbox.function_tests import Case
from agentrl.workflow.sandbox.program_tests import bound_names


def parse_source(source: str) -> ast.Module:
    """Parse a source. Raise ValueError if the source is not Python."""
    try:
        return ast.parse(source)
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"not Python: {error}") from error


def read_asserts(source: str, names: Sequence[str], constants: Constants | None = None) -> tuple[list[Case], int]:
    """Return (the cases that test these functions, the number of asserts that are not cases). `names` are the names of the
    functions. `constants` evaluates the constants in the asserts. If several sources share one `Constants`, its size limit
    applies to all of them together. Raise ValueError if the source is not Python.
    """
    asserts = [node for node in ast.walk(parse_source(source)) if isinstance(node, ast.Assert)]
    constants = constants or Constants()
    cases = [case for node in asserts if (case := _case(node.test, names, constants)) is not None]
    return cases, len(asserts) - len(cases)


def all_cases(source: str, names: Sequence[str]) -> list[Case] | None:
    """Return the cases of a source if each assert is a case and depends on nothing else; None if the source must run as a
    program.

    `assert True` tests nothing, and is ignored. Raise ValueError if the source is not Python.
    """
    tree, constants = parse_source(source), Constants()
    if not all(_is_alone(statement, constants, top=True) for statement in tree.body):
        return None
    asserts = [node for node in ast.walk(tree) if isinstance(node, ast.Assert) and not _says_nothing(node)]
    cases = [case for node in asserts if (case := _case(node.test, names, constants)) is not None]
    return cases if len(cases) == len(asserts) else None


def check_names(source: str, program: str) -> None:
    """Check that every name in a source is defined when the source runs after `program`. Raise ValueError if a name is
    undefined, the source has no assert, or the source is not Python.
    """
    tree, before = parse_source(source), parse_source(program)
    if not any(isinstance(node, ast.Assert) and not _says_nothing(node) for node in ast.walk(tree)):
        raise ValueError("it has no test such as `assert f(...) == value`")
    defined_names = {*dir(builtins), "__name__", *bound_names(tree), *bound_names(before)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id not in defined_names and "*" not in defined_names:
            raise ValueError(f"its tests need {node.id!r}, which nothing defines")


def _is_alone(statement: ast.stmt, constants: Constants, top: bool) -> bool:
    """Return True if the asserts in the statement depend on no loop, variable or helper around them."""
    match statement:
        case ast.Assert() | ast.Import() | ast.ImportFrom() | ast.Pass() | ast.Expr(ast.Constant() | ast.Name()):
            return True
        case ast.FunctionDef(body=body) if top:
            return all(_is_alone(inner, constants, top=False) for inner in body)
        case ast.Assign([ast.Name()], value) if top:
            return constants.is_one(value)
    return False


def _says_nothing(node: ast.Assert) -> bool:
    return isinstance(node.test, ast.Constant) and bool(node.test.value)


def _case(test: ast.expr, names: Sequence[str], constants: Constants) -> Case | None:
    """Return the case for the expression of an assert; None if the expression has another form."""
    try:
        return _read_case(test, names, constants)
    except (ValueError, TypeError, RecursionError):  # an argument that is not constant
        return None


def _read_case(test: ast.expr, names: Sequence[str], constants: Constants) -> Case:
    match test:
        case ast.Compare(ast.Call(ast.Name("abs"), [ast.BinOp(call, ast.Sub(), value)]), [ast.Lt() | ast.LtE()], [within]):
            return _check_storable(
                Case(_args(call, names, constants), _number(value, constants), "near", _number(within, constants))
            )
        case ast.Compare(call, [ast.Is()], [ast.Constant(bool(value))]):
            return _check_storable(Case(_args(call, names, constants), value, "exact"))
        case ast.Compare(call, [ast.Eq()], [value]) | ast.Compare(call, [ast.Is()], [ast.Constant(None) as value]) if _calls(
            call, names
        ):
            return _check_storable(Case(_args(call, names, constants), constants.value(value), "equal"))
        case ast.Compare(value, [ast.Eq()], [call]):
            return _check_storable(Case(_args(call, names, constants), constants.value(value), "equal"))
        case ast.UnaryOp(ast.Not(), call):
            return _check_storable(Case(_args(call, names, constants), False, "false"))
    return _check_storable(Case(_args(test, names, constants), True, "true"))


def _calls(node: ast.expr, names: Sequence[str]) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names


def _args(node: ast.expr, names: Sequence[str], constants: Constants) -> tuple[Any, ...]:
    if not isinstance(node, ast.Call) or not _calls(node, names) or node.keywords:
        raise ValueError("no call of the function with positional arguments")
    return tuple(constants.value(argument) for argument in node.args)


def _number(node: ast.expr, constants: Constants) -> float:
    value = constants.value(node)
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError("no number")
    return float(value)


def _check_storable(case: Case) -> Case:
    """Return the case. Raise an exception if its values are not plain data."""
    assert case.text
    return case

"""Tests written as a program. They run here, in a session without model-written code; the model's function runs elsewhere.

A call of the function is *relayed*: the caller (`judging.code_judge`) gets its arguments, calls the function in the session of
the model's answer, and runs the tests again with the value. Until a value is known, the reference's value is used, so that all
calls are found in one round; more rounds are needed only where arguments depend on earlier values. Each run is the same as the
last one up to the values that are new.

Each assert is one test: it is passed if it held every time it was reached. An assert that does not hold, or raises, does not
stop the others. Where a statement outside of the asserts raises, the tests from there on fail. An assert that holds even if
every call of the function fails tests nothing, and does not count.

This file runs inside, and imports only the standard library and `exact_json`. The programs it runs come from the dataset; from
the model it gets plain data alone.
"""

import ast
import inspect
import random
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

from agentrl.workflow.sandbox import exact_json

FILE, MODULE = "<tests>", "tests"
CHECK = "check"
RELAYED, HELD = "__relayed__", "__held__"
MOST_CALLS = 1000

KnownCalls = Sequence[tuple[str, str | None]]
"""Calls in order: the arguments as text, and the value as text, None where the call failed."""


class CallFailed(Exception):
    """A call of the function returned no value."""


class CannotJudge(BaseException):
    """These tests cannot be judged in this way."""


def outcome(reference: str, test: str, function: str, told: KnownCalls, final: bool) -> dict[str, Any]:
    """Runs the tests.

    Args:
        reference: the program that the tests run after; it defines the correct function.
        told: the calls whose values are known.
        final: treat calls whose value is not known as failed.

    Returns:
        passed: a verdict per test, valid where all calls were known; asked: the arguments, as text, of the calls that were
        not, from the `known`-th on. Or unjudged: the reason why these tests cannot be judged.
    """
    try:
        tests = Tests(reference, test, function)
        void = tests.run(lambda right: Relay(right, (), final=True))
        relays: list[Relay] = []

        def relay(right: Callable[..., Any]) -> Relay:
            relays.append(Relay(right, told, final))
            return relays[-1]

        held = tests.run(relay)
    except CannotJudge as error:
        return {"unjudged": str(error)}
    counted = [number for number in range(tests.count) if number not in void]
    if not counted:
        return {"unjudged": "its asserts hold whatever the function gives"}
    return {"passed": [number in held for number in counted], "asked": relays[0].asked, "known": relays[0].known}


class Relay:
    """A stand-in for the model's function."""

    def __init__(self, right: Callable[..., Any], told: KnownCalls, final: bool) -> None:
        self._right, self._told, self._final = right, told, final
        self.known = 0
        self.asked: list[str] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The call's value: the model's where it is known, else the reference's."""
        text = self._text(args, kwargs)
        if not self.asked and self.known < len(self._told) and self._told[self.known][0] == text:
            value = self._told[self.known][1]
            self.known += 1
            if value is None:
                raise CallFailed
            return exact_json.decode(value)
        if self._final:
            raise CallFailed
        if len(self.asked) >= MOST_CALLS:
            raise CannotJudge(f"they call the function more than {MOST_CALLS} times")
        self.asked.append(text)
        return self._plain_copy(self._right(*exact_json.decode(text)))

    def _text(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        if kwargs:
            bound = inspect.signature(self._right).bind(*args, **kwargs)
            bound.apply_defaults()
            args, kwargs = bound.args, bound.kwargs
        if kwargs:
            raise CannotJudge("they pass an argument that has no place, only a name")
        try:
            text = exact_json.encode(list(args))
        except (TypeError, ValueError) as error:
            raise CannotJudge(f"they pass what is no plain data: {error}") from error
        if exact_json.holds_opaque(text):
            if self.known:  # the model's function gave it: this call fails, and not the tests
                raise CallFailed
            raise CannotJudge(f"they pass what is no plain data: {', '.join(type(value).__name__ for value in args)}")
        return text

    @staticmethod
    def _plain_copy(value: Any) -> Any:
        try:
            return exact_json.decode(exact_json.encode(value))
        except (TypeError, ValueError) as error:
            raise CannotJudge(f"the reference gives what is no plain data: {error}") from error


class Tests:
    """The tests of a function, instrumented."""

    def __init__(self, reference: str, test: str, function: str) -> None:
        self._reference, self._function = reference, function
        self._tree = ast.parse(test)
        checks = [
            node for node in self._tree.body if isinstance(node, ast.FunctionDef) and node.name == CHECK and node.args.args
        ]
        self._check = checks[-1] if checks else None
        self._stands_for = self._check.args.args[0].arg if self._check else None
        self._is_used = any(isinstance(node, ast.Name) and node.id == self._stands_for for node in ast.walk(self._tree))
        noted = _AssertNoter(function, self._stands_for)
        self._code = compile(ast.fix_missing_locations(noted.visit(self._tree)), FILE, "exec")
        self._lines = noted.lines
        self._held: dict[int, bool] = {}

    @property
    def count(self) -> int:
        """The number of asserts."""
        return len(self._lines)

    def run(self, relay: Callable[[Callable[..., Any]], Relay]) -> set[int]:
        """Runs the tests with `relay(reference's function)` in the function's place; the numbers of the asserts that held."""
        random.seed(0)
        self._held = {}
        names = self._make_namespace()
        names[RELAYED] = relay(names[self._function])
        names[HELD] = self._note
        if not self._is_used:
            names[self._function] = names[RELAYED]
        kept = set(range(self.count))
        try:
            exec(self._code, names)
            if self._check is not None:
                names[CHECK](names[RELAYED])
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the tests' own
            kept = self._asserts_before(error.__traceback__)
        return {number for number, held in self._held.items() if held} & kept

    def _make_namespace(self) -> dict[str, Any]:
        module = sys.modules[MODULE] = types.ModuleType(MODULE)
        try:
            exec(compile(self._reference, "<reference>", "exec"), module.__dict__)
        except (Exception, SystemExit) as error:
            raise CannotJudge(f"the reference raises {type(error).__name__}: {error}") from error
        if not callable(module.__dict__.get(self._function)):
            raise CannotJudge(f"the reference defines no {self._function!r}")
        return module.__dict__

    def _note(self, number: int, value: Any) -> None:
        self._held[number] = self._held.get(number, True) and bool(value)

    def _asserts_before(self, trace: types.TracebackType | None) -> set[int]:
        """The asserts before the statement in which the tests, or their `check`, raised."""
        while trace is not None and trace.tb_frame.f_code.co_filename != FILE:
            trace = trace.tb_next
        if trace is None:
            return set()
        inside = self._check is not None and trace.tb_frame.f_code.co_name == CHECK
        body = self._check.body if inside and self._check else self._tree.body
        ended = next((node for node in body if (node.end_lineno or 0) >= trace.tb_lineno), body[-1])
        return {number for number, line in enumerate(self._lines) if body[0].lineno <= line < ended.lineno}


class _AssertNoter(ast.NodeTransformer):
    """Replaces each assert by a note of whether it holds.

    `check` gets the model's function as a parameter. In an assert that uses this parameter, the function's own name means the
    reference; in any other assert it means the model's function.
    """

    def __init__(self, function: str, stands_for: str | None) -> None:
        self._function, self._stands_for = function, stands_for
        self.lines: list[int] = []

    def visit_Assert(self, node: ast.Assert) -> ast.Try:
        """`try: held(number, test) except Exception: held(number, False)`."""
        number = len(self.lines)
        self.lines.append(node.lineno)
        names = [inner for inner in ast.walk(node.test) if isinstance(inner, ast.Name)]
        if self._stands_for not in {name.id for name in names}:
            for name in names:
                name.id = RELAYED if name.id == self._function else name.id
        failed = ast.ExceptHandler(ast.Name("Exception", ast.Load()), None, [self._note(number, ast.Constant(False))])
        return ast.copy_location(ast.Try([self._note(number, node.test)], [failed], [], []), node)

    @staticmethod
    def _note(number: int, test: ast.expr) -> ast.Expr:
        return ast.Expr(ast.Call(ast.Name(HELD, ast.Load()), [ast.Constant(number), test], []))

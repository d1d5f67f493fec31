"""Tests of a function that are a program. They run in a session that contains no model-written code; the model's function runs
in another session.

A call of the function is *relayed*. The caller (`judging.code_judge`) gets the call's arguments, calls the function in the
session of the model's answer, and runs the tests again with the returned value. While a value is unknown, the value of the
reference is used instead. So one round finds all calls, and further rounds are needed only if arguments depend on earlier
values. Each run equals the previous run up to the first new value.

An argument that is not plain data, such as `lambda x: x + n` or `Point(1)`, is relayed as its source code, with the definitions
that it needs (`_Sources`). Of the tests' program, the session of the answer gets only imports, functions, classes and named
lambdas. It never gets a statement that binds a value, because that value could be an expected value. The rebuilt argument must
give the same result in the reference as the original argument; otherwise the tests cannot be judged.

Each assert is one test. It passes if it held every time that it was reached. An assert that fails or raises does not stop the
others. If a statement outside of the asserts raises, all tests from there on fail. An assert that holds even if every call of
the function fails tests nothing, so it is ignored.

This file runs inside and imports only the standard library and `exact_json`. The programs that it runs come from the dataset.
From the model it gets only plain data.
"""

import ast
import builtins
import copy
import inspect
import json
import random
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from typing import Any, cast

from agentrl.workflow.sandbox import exact_json

FILE, MODULE = "<tests>", "tests"
CHECK = "check"
CALLER = "__call_with_source__"
"""The name of the function in a `source` that calls the tested function. It takes the plain arguments of the call."""

WITH_SOURCE = '{"source": '
"""The start of the text of a call if some of its arguments are not plain data."""

RELAYED, HELD = "__relayed__", "__held__"
MAX_CALLS = 1000

KnownCalls = Sequence[tuple[str, str | None]]
"""The type of the known calls, in order. Each call has its arguments as text, and its value as text or None if the call failed.

The arguments are the `exact_json` text of a list. If some of them are not plain data, they are a JSON object `{"source": ...,
"args": ...}` instead. `source` defines the function `CALLER`, and `args` is the `exact_json` text of the arguments of `CALLER`.
"""


class CallFailed(Exception):
    """The error if a test calls the model's function, and the call failed or has no value."""


class CannotJudge(BaseException):
    """The error for tests that cannot be judged by relaying calls. The message is the reason."""


def outcome(reference: str, test: str, function: str, known_calls: KnownCalls, final: bool) -> dict[str, Any]:
    """Run the tests of a function.

    Args:
        reference: a program that defines the correct function. It runs before the tests.
        test: the program with the tests.
        function: the name of the tested function.
        known_calls: the calls whose values are known, in order.
        final: True to treat calls whose value is not known as failed.

    Returns:
        If the tests cannot be judged, a dict with the single key `unjudged`: the reason. Else a dict with these keys:

        passed: a verdict for each test. It is valid only if the values of all calls were known.
        asked: the arguments, as text, of the calls whose value was not known.
        known: the number of calls before the first call whose value was not known.
    """
    try:
        tests = Tests(reference, test, function)
        void = tests.run(lambda right: FunctionRelay(right, (), True, tests.sources))
        relays: list[FunctionRelay] = []

        def relay(right: Callable[..., Any]) -> FunctionRelay:
            relays.append(FunctionRelay(right, known_calls, final, tests.sources))
            return relays[-1]

        held = tests.run(relay)
    except CannotJudge as error:
        return {"unjudged": str(error)}
    counted = [number for number in range(tests.count) if number not in void]
    if not counted:
        return {"unjudged": "its asserts hold whatever the function gives"}
    return {"passed": [number in held for number in counted], "asked": relays[0].new_calls, "known": relays[0].replayed}


class FunctionRelay:
    """A function that the tests call instead of the model's function."""

    def __init__(self, right: Callable[..., Any], known_calls: KnownCalls, final: bool, sources: "_Sources") -> None:
        self._right, self._known_calls, self._final, self._sources = right, known_calls, final, sources
        self.replayed = 0
        self.new_calls: list[str] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the call's value: from the model's function if it is known, else from the reference."""
        text = self._text(args, kwargs, sys._getframe(1))
        if not self.new_calls and self.replayed < len(self._known_calls) and self._known_calls[self.replayed][0] == text:
            value = self._known_calls[self.replayed][1]
            self.replayed += 1
            if value is None:
                raise CallFailed
            return exact_json.decode(value)
        if self._final:
            raise CallFailed
        if len(self.new_calls) >= MAX_CALLS:
            raise CannotJudge(f"they call the function more than {MAX_CALLS} times")
        self.new_calls.append(text)
        if text.startswith(WITH_SOURCE):
            return self._value_with_source(text, args, kwargs)
        return self._plain_copy(self._right(*exact_json.decode(text)))

    def _value_with_source(self, text: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the value from the reference for arguments that are relayed as source code. Raise CannotJudge if the source
        code cannot be run, or the reference returns another value for the arguments that it builds.
        """
        call: dict[str, str] = json.loads(text)
        names: dict[str, Any] = {self._sources.function: self._right}
        try:
            exec(compile(call["source"], "<source>", "exec"), names)
            value = exact_json.encode(names[CALLER](*exact_json.decode(call["args"])))
            same = value == exact_json.encode(self._right(*copy.deepcopy(args), **copy.deepcopy(kwargs)))
        except (Exception, SystemExit) as error:
            raise CannotJudge(f"they pass an argument whose source code fails: {type(error).__name__}: {error}") from error
        if not same:
            raise CannotJudge("they pass an argument whose source code builds another argument")
        return exact_json.decode(value)

    def _text(self, args: tuple[Any, ...], kwargs: dict[str, Any], caller: types.FrameType) -> str:
        positional = args
        if kwargs:
            bound = inspect.signature(self._right).bind(*args, **kwargs)
            bound.apply_defaults()
            if bound.kwargs:
                raise CannotJudge("they pass a keyword-only argument")
            positional = bound.args
        text = _plain_text(list(positional))
        if text is not None:
            return text
        if any(isinstance(value, Iterator) for value in positional):  # encoding has used it up
            raise CannotJudge("they pass an iterator together with an argument that is not plain data")
        if call := self._sources.call(caller, args, kwargs):
            return json.dumps(call)
        if self.replayed:  # the model's function gave the argument: this call fails, and not the tests
            raise CallFailed
        kinds = ", ".join(type(value).__name__ for value in positional)
        raise CannotJudge(f"they pass arguments that are not plain data and are not written in the call itself: {kinds}")

    @staticmethod
    def _plain_copy(value: Any) -> Any:
        try:
            return exact_json.decode(exact_json.encode(value))
        except (TypeError, ValueError) as error:
            raise CannotJudge(f"the reference returns a value that is not plain data: {error}") from error


class _Sources:
    """A builder of source code that makes the arguments of a call again, in another process.

    Args:
        test: the program with the tests. It is parsed when a call first needs it.
        function: the name of the tested function.
        stands_for: the name of the parameter by which `check` gets the function; None without `check`.
    """

    def __init__(self, test: str, function: str, stands_for: str | None) -> None:
        self.function = function
        self._test, self._functions = test, {function, stands_for}

    @cached_property
    def _tree(self) -> ast.Module:
        return ast.parse(self._test)

    @cached_property
    def _calls(self) -> dict[tuple[int | None, ...], ast.Call]:
        return {_place(node): node for node in ast.walk(self._tree) if isinstance(node, ast.Call)}

    @cached_property
    def _definitions(self) -> dict[str, ast.stmt]:
        body, bound = self._tree.body, Counter(bound_names(self._tree))
        bodies = [body, *(node.body for node in body if isinstance(node, ast.FunctionDef) and node.name == CHECK)]
        return {name: node for statements in bodies for node in statements for name in _defined_names(node) if bound[name] == 1}

    def call(self, caller: types.FrameType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, str] | None:
        """Return the `source` and `args` of the call that `caller` makes; None if they cannot be sent to the other sandbox."""
        node = self._calls.get(_place_of_call(caller))
        if node is None or not isinstance(node.func, ast.Name) or node.func.id not in self._functions:
            return None
        if len(node.args) != len(args) or [keyword.arg for keyword in node.keywords] != list(kwargs):
            return None
        plain: list[Any] = []
        nodes: list[ast.AST] = []

        def argument(written: ast.expr, value: Any) -> str:
            if _plain_text([value]) is None:
                nodes.append(written)
                return ast.unparse(written)
            plain.append(value)
            return f"__plain__[{len(plain) - 1}]"

        arguments = [argument(written, value) for written, value in zip(node.args, args, strict=True)]
        arguments += [f"{keyword.arg}={argument(keyword.value, kwargs[str(keyword.arg)])}" for keyword in node.keywords]
        needed = self._needed(nodes, {**caller.f_globals, **caller.f_locals})
        if needed is None:
            return None
        definitions, values = needed
        lines = [f"def {CALLER}(*__plain__):"]
        lines += [f"    {name} = __plain__[{len(plain) + number}]" for number, name in enumerate(values)]
        caller_tree = ast.parse("\n".join([*lines, f"    return {self.function}({', '.join(arguments)})"]))
        body = cast(ast.FunctionDef, caller_tree.body[0]).body
        body[-1:-1] = definitions
        return {"source": ast.unparse(caller_tree), "args": exact_json.encode([*plain, *values.values()])}

    def _needed(self, nodes: list[ast.AST], variables: dict[str, Any]) -> tuple[list[ast.stmt], dict[str, Any]] | None:
        """Return the definitions and plain values that the names in `nodes` mean; None if a name means something else."""
        definitions: set[ast.stmt] = set()
        values: dict[str, Any] = {}
        waiting, seen = list(nodes), set[str]()
        while waiting:
            node = waiting.pop()
            if any(isinstance(inner, ast.Assert | ast.NamedExpr) for inner in ast.walk(node)):
                return None
            used = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)} - set(bound_names(node))
            if used & self._functions:
                return None
            for name in sorted(used - seen):
                seen.add(name)
                if name in self._definitions:
                    definitions.add(self._definitions[name])
                    waiting.append(self._definitions[name])
                elif name in variables and _plain_text([variables[name]]) is not None:
                    values[name] = variables[name]
                elif name in variables or not hasattr(builtins, name):
                    return None
        return sorted(definitions, key=lambda statement: statement.lineno), values


def _plain_text(value: list[Any]) -> str | None:
    try:
        text = exact_json.encode(value)
    except Exception:  # noqa: BLE001 - of an object of the tests
        return None
    return None if exact_json.holds_opaque(text) else text


def _place(node: ast.expr) -> tuple[int | None, ...]:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def _place_of_call(caller: types.FrameType) -> tuple[int | None, ...]:
    """Return the position of the call that `caller` makes in the tests; () if it is not in the tests."""
    if caller.f_code.co_filename != FILE:
        return ()
    return next(islice(caller.f_code.co_positions(), caller.f_lasti // 2, None))  # two bytes an instruction


def _defined_names(statement: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement defines, if it is an import, a function, a class or a named lambda."""
    match statement:
        case ast.FunctionDef(name) | ast.ClassDef(name) | ast.Assign([ast.Name(name)], ast.Lambda()):
            yield name
        case ast.Import() | ast.ImportFrom():
            yield from bound_names(statement)


def bound_names(tree: ast.AST) -> Iterator[str]:
    """Yield the names that the code binds, once per place; `*` for an import of all names."""
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


class Tests:
    """The tests of a function, instrumented to record each assert."""

    def __init__(self, reference: str, test: str, function: str) -> None:
        self._reference, self._function = reference, function
        self._tree = ast.parse(test)
        checks = [
            node for node in self._tree.body if isinstance(node, ast.FunctionDef) and node.name == CHECK and node.args.args
        ]
        self._check = checks[-1] if checks else None
        self._stands_for = self._check.args.args[0].arg if self._check else None
        self.sources = _Sources(test, function, self._stands_for)
        self._is_used = any(isinstance(node, ast.Name) and node.id == self._stands_for for node in ast.walk(self._tree))
        noted = _AssertNoter(function, self._stands_for)
        self._code = compile(ast.fix_missing_locations(noted.visit(self._tree)), FILE, "exec")
        self._lines = noted.lines
        self._held: dict[int, bool] = {}

    @property
    def count(self) -> int:
        """The number of asserts."""
        return len(self._lines)

    def run(self, relay: Callable[[Callable[..., Any]], FunctionRelay]) -> set[int]:
        """Run the tests; return the numbers of the asserts that held.

        Args:
            relay: makes the function that replaces the model's function, from the reference's function.
        """
        random.seed(0)
        self._held = {}
        names = self._make_namespace()
        names[RELAYED] = relay(names[self._function])
        names[HELD] = self._note
        if not self._is_used:
            names[self._function] = names[RELAYED]
        asserts = set(range(self.count))
        try:
            exec(self._code, names)
            if self._check is not None:
                names[CHECK](names[RELAYED])
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the tests' own
            asserts = self._asserts_before(error.__traceback__)
        return {number for number, held in self._held.items() if held} & asserts

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
        """Return the numbers of the asserts before the statement, in the tests or their `check`, that raised."""
        while trace is not None and trace.tb_frame.f_code.co_filename != FILE:
            trace = trace.tb_next
        if trace is None:
            return set()
        inside = self._check is not None and trace.tb_frame.f_code.co_name == CHECK
        body = self._check.body if inside and self._check else self._tree.body
        ended = next((node for node in body if (node.end_lineno or 0) >= trace.tb_lineno), body[-1])
        return {number for number, line in enumerate(self._lines) if body[0].lineno <= line < ended.lineno}


class _AssertNoter(ast.NodeTransformer):
    """A transformer that replaces each assert by code that records whether the assert holds.

    `check` gets the model's function as a parameter. In an assert that uses this parameter, the function's name refers to the
    reference. In any other assert it refers to the model's function.
    """

    def __init__(self, function: str, stands_for: str | None) -> None:
        self._function, self._stands_for = function, stands_for
        self.lines: list[int] = []

    def visit_Assert(self, node: ast.Assert) -> ast.Try:
        """Replace an assert by `try: held(number, test) except Exception: held(number, False)`."""
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

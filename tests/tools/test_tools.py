"""Tools: the calculator is exact, bounded and never runs what it is given; a Tool checks its arguments."""

from datetime import date
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.workflow.errors import ToolFailure
from agentrl.workflow.plugins import find, names
from agentrl.workflow.tools import Tool, run_within
from agentrl.workflow.tools.calculator import calculate

WHOLE = st.integers(-(10**9), 10**9)
OPERATORS = st.sampled_from(["+", "-", "*", "/", "//", "%"])


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("48/2", "24"),
        ("(48 + 24) / 2", "36"),
        ("0.1+0.2", "0.3"),
        ("1,234,567*2", "2469134"),
        ("1,080.50 + 0", "1080.5"),
        ("7//2", "3"),
        ("-7//2", "-4"),
        ("-7%3", "2"),
        ("2**10", "1024"),
        ("2**-3", "0.125"),
        ("-2**2", "-4"),
        ("(-2)**2", "4"),
        ("2**3**2", "512"),
        ("--5", "5"),
        ("+.5", "0.5"),
        ("05+007", "12"),
        ("2/3", "0.6666666667"),
        ("-1/3", "-0.3333333333"),
        ("1000000/3", "333333.3333"),
        ("1/3*3", "1"),
        ("1/1024", "0.0009765625"),
        ("1\n+ 2", "3"),
        ("12345678901234567890*10", "123456789012345678900"),
        ("1**999999999", "1"),
        ("-0", "0"),
        ("+".join(["1"] * 250), "250"),
    ],
)
def test_calculator_is_exact(expression: str, result: str) -> None:
    assert find("tools", "calculator").call({"expression": expression}) == result


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("9**9**9", "too large"),
        ("2**99999999999", "too large"),
        ("(2**1000)*(2**1000)", "too large"),
        ("(1/3)**99999", "too large"),
        ("9" * 400, "too large"),
        ("1<<99", "'<' is not arithmetic"),
        ("1/0", "division by zero"),
        ("1//0", "division by zero"),
        ("1%0", "division by zero"),
        ("0**-1", "division by zero"),
        ("2**0.5", "whole exponents"),
        ("1+" * 251 + "1", "at most 500"),
        ("(" * 400, "not a complete"),
        ("-" * 450 + "1", "nests"),
        ("", "not a complete"),
        ("1 2", "not a complete"),
        ("20%", "not a complete"),
        ("$5", "'\\$' is not arithmetic"),
        ("2(3)", "not arithmetic"),
        ("()", "not arithmetic"),
        ("...", "not arithmetic"),
        ("1e5", "'e' is not arithmetic"),
        ("1_000", "'_' is not arithmetic"),
        ("1,00", "',' is not arithmetic"),
        ("__import__('os').system('true')", "not arithmetic"),
        ("\u0663+1", "not arithmetic"),
        ("1\x00", "not arithmetic"),
    ],
)
def test_calculator_explains_what_it_cannot_do(expression: str, why: str) -> None:
    with pytest.raises(ToolFailure, match=why):
        calculate(expression)


@given(st.text(alphabet="0123456789.,+-*/%() \n", max_size=600))
def test_calculator_gives_value_or_reason_for_any_text(text: str) -> None:
    try:
        said = calculate(text)
    except ToolFailure as failure:
        said = ""
        reason = str(failure)
    assert Decimal(said).is_finite() if said else 0 < len(reason) < 200


@given(WHOLE, OPERATORS, WHOLE)
def test_calculator_integer_results_equal_python(left: int, operator: str, right: int) -> None:
    operation = {"+": "add", "-": "sub", "*": "mul", "/": "truediv", "//": "floordiv", "%": "mod"}[operator]
    try:
        exact = Fraction(getattr(Fraction, f"__{operation}__")(Fraction(left), Fraction(right)))
    except ZeroDivisionError:
        with pytest.raises(ToolFailure, match="division by zero"):
            calculate(f"({left}) {operator} ({right})")
        return
    printed = Fraction(calculate(f"({left}) {operator} ({right})"))
    assert abs(printed - exact) * 10**9 <= abs(exact)


@given(st.integers(-(10**60), 10**60), st.integers(0, 60))
def test_calculator_keeps_decimals_of_any_length(digits: int, places: int) -> None:
    number = Decimal(digits).scaleb(-places) if digits.bit_length() < 90 else Decimal(digits)
    assert Fraction(calculate(f"{number:f}")) == Fraction(number)


def test_calculator_schema_is_its_signature() -> None:
    schema = find("tools", "calculator").schema["function"]
    assert schema["name"] == "calculator"
    assert schema["parameters"]["required"] == ["expression"]
    assert schema["parameters"]["properties"] == {"expression": {"type": "string"}}


@pytest.mark.parametrize("arguments", [{}, {"expression": 5}, {"expression": "1", "digits": 3}, {"expr": "1"}])
def test_tool_arguments_that_do_not_fit_are_models_mistake(arguments: dict[str, object]) -> None:
    with pytest.raises(ToolFailure, match="wrong arguments for calculator"):
        find("tools", "calculator").call(arguments)


def test_tool_files_define_tool_and_session_replaces_python() -> None:
    for name in names("tools"):
        tool = find("tools", name)
        assert isinstance(tool, Tool)
        assert tool.name == name.removesuffix("_session")


def test_calculator_has_no_effects() -> None:
    assert find("tools", "calculator").effects == "none"


def _returning(value: object) -> Tool:
    def probe() -> object:
        """Returns or raises."""
        if isinstance(value, BaseException):
            raise value
        return value

    return Tool(probe)


@pytest.mark.parametrize(
    ("value", "read", "error_class"),
    [
        ({"a": "Zoë", "on": date(2026, 1, 2), 3: [None, True]}, '{"a": "Zoë", "on": "2026-01-02", "3": [null, true]}', None),
        ([1, 2.5], "[1, 2.5]", None),
        ({(1, 2): 3}, "{(1, 2): 3}", None),
        ("a\ud800b\0", "a?b\ufffd", None),
        (None, "None", None),
        (SystemExit(3), "probe failed: SystemExit: 3", "tool_crash"),
        (KeyboardInterrupt(), "probe failed: KeyboardInterrupt: ", "tool_crash"),
        (TimeoutError("of its own"), "probe failed: TimeoutError: of its own", "tool_crash"),
    ],
)  # fmt: skip
def test_run_within_returns_any_result_or_exception_as_text(value: object, read: str, error_class: str | None) -> None:
    tool = _returning(value)
    result = run_within(tool, lambda: tool.run({}), 10)
    assert (result.content, result.error_class) == (read, error_class)

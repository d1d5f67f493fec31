"""Patterns mean the same on every Python that agentrl runs on.

Before 3.11.5, which Debian 12 has not, `re` was wrong about a group repeated possessively whose inside looks around or can
match in more than one way (CPython's issue 106052): `42` was read as 4. So no pattern has such a group.
"""

import importlib
import pkgutil
import re
from collections.abc import Iterator
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

import pytest

from agentrl import workflow

ROOMS = ("call_json", "chat", "datasets", "dialects", "judging", "rewards", "runtime", "sql", "tool_formats", "tools")
PLAIN = {op.LITERAL, op.NOT_LITERAL, op.IN, op.ANY}


def patterns() -> Iterator[tuple[str, re.Pattern[str]]]:
    """Those that modules of the library keep, with their names."""
    for room in ROOMS:
        package = importlib.import_module(f"agentrl.workflow.{room}")
        found = [package.__name__]
        if hasattr(package, "__path__"):
            found += [module.name for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
        for name in found:
            for key, value in vars(importlib.import_module(name)).items():
                if isinstance(value, re.Pattern):
                    yield f"{name}.{key}", value


def possessive_groups(parsed: Any) -> Iterator[Any]:
    """What is repeated possessively, wherever it stands in a parsed pattern."""
    for code, value in parsed:
        if code is op.POSSESSIVE_REPEAT:
            yield value[2]
        for part in parts(code, value):
            yield from possessive_groups(part)


def parts(code: Any, value: Any) -> list[Any]:
    if code in (op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT):
        return [value[2]]
    if code is op.BRANCH:
        return list(value[1])
    if code is op.SUBPATTERN:
        return [value[3]]
    if code in (op.ASSERT, op.ASSERT_NOT):
        return [value[1]]
    if code is op.ATOMIC_GROUP:
        return [value]
    if code is op.GROUPREF_EXISTS:
        return [part for part in value[1:] if part is not None]
    return []


def is_certain(parsed: Any) -> bool:
    """Whether it matches in one way only, and looks at nothing but what it takes."""
    for code, value in parsed:
        fixed = code in (op.MAX_REPEAT, op.MIN_REPEAT) and value[0] == value[1]
        if code not in PLAIN and not (fixed or code in (op.BRANCH, op.SUBPATTERN, op.POSSESSIVE_REPEAT)):
            return False
        if not all(map(is_certain, parts(code, value))):
            return False
    return True


def test_patterns_avoid_possessive_repeats_broken_in_older_re() -> None:
    seen = list(patterns())
    assert len(seen) > 50
    wrong = [
        name
        for name, pattern in seen
        if not all(map(is_certain, possessive_groups(_parser.parse(pattern.pattern, pattern.flags & ~re.UNICODE.value))))
    ]
    assert wrong == []


@pytest.mark.parametrize("pattern", [r"(?:[a-c]|(?<=c)x)++", r'(?:a|""?b)*+c', r"(?:a|b(?=c))?+"])
def test_patterns_check_finds_possessive_repeat(pattern: str) -> None:
    assert not all(map(is_certain, possessive_groups(_parser.parse(pattern))))


def test_patterns_check_covers_the_library() -> None:
    rooms = {module.name for module in pkgutil.iter_modules(workflow.__path__)}
    assert set(ROOMS) <= rooms

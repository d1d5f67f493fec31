"""What stands in a notebook or a script is taken along as a module; what cannot be is refused with what to do."""

import importlib.util
import json as js
import linecache
import sys
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agentrl.api.notebook_source import SourceModule, literal, path_of
from agentrl.workflow.errors import ConfigError
from agentrl.workflow.plugins import code_folder, find
from agentrl.workflow.settings import settings

CELL = '''
import json
import json as j
from pathlib import Path
from functools import lru_cache, wraps
import threading
import urllib.request
import xml.etree.ElementTree as trees
import importlib.metadata as about

FACTOR = 3
NAMES = {"one": [1, 2.5, None], "two": ("x",)}
LOCK = threading.Lock()
clash = 1

def loud(function):
    @wraps(function)
    def inner(*given):
        return function(*given) * FACTOR
    return inner

class Base:
    """A base."""
    start = FACTOR

class Solver(Base):
    def __init__(self, bias=0):
        self.bias = bias

    def rollout(self, task, llm):
        return self.start + self.bias + helper(task)

@lru_cache
def helper(task):
    text = """a text
  with its own indents"""
    return len(j.dumps(NAMES)) + even(2) + len(text)

def parts(task, llm):
    return urllib.request.urlopen.__name__, trees.fromstring("<a/>").tag, about.version("pytest")

def even(n):
    return True if n == 0 else odd(n - 1)

def odd(n):
    return False if n == 0 else even(n - 1)

@loud
def solve(task, llm, more=FACTOR):
    LOCAL = [FACTOR for FACTOR in range(3)]
    return helper(task) + more + len(LOCAL)

def holds(task, llm):
    with LOCK:
        return 1

def missing(task, llm):
    return not_made_yet(task)

def outer(bias):
    def inside(task, llm):
        return bias + FACTOR
    return inside

inside = outer(40)
unnamed = lambda task, llm: 1
solver = Solver(7)
locked = Solver(LOCK)
'''


@pytest.fixture
def cell() -> Iterator[Any]:
    """A notebook's cell that was run: its names live in `__main__`, its source in linecache."""
    name = "<ipython-input-1-abc>"
    main = types.ModuleType("__main__")
    linecache.cache[name] = (len(CELL), None, CELL.splitlines(keepends=True), name)
    before = sys.modules["__main__"]
    sys.modules["__main__"] = main
    exec(compile(CELL, name, "exec"), vars(main))
    yield main
    sys.modules["__main__"] = before
    del linecache.cache[name]


def loaded(text: str, folder: Path) -> Any:
    """A module of that text, as another process imports it."""
    file = folder / "written.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location("written", file)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_captured_function_includes_names_it_uses(cell: Any, tmp_path: Path) -> None:
    made = SourceModule()
    made.add("solve", cell.solve)
    assert loaded(made.text, tmp_path).solve("t", None) == cell.solve("t", None)
    for absent in ("Path", "LOCK", "Solver", "class ", "clash", "__main__"):
        assert absent not in made.text


def test_captured_function_imports_package_parts(cell: Any, tmp_path: Path) -> None:
    made = SourceModule()
    made.add("parts", cell.parts)
    assert "import urllib.request\n" in made.text
    assert loaded(made.text, tmp_path).parts("t", None) == cell.parts("t", None)


def test_captured_class_includes_bases_and_object_its_state(cell: Any, tmp_path: Path) -> None:
    made = SourceModule()
    made.add_instance("mine", cell.solver)
    assert loaded(made.text, tmp_path).mine.rollout("t", None) == cell.solver.rollout("t", None)


def test_captured_closure_includes_its_variables(cell: Any, tmp_path: Path) -> None:
    made = SourceModule()
    made.add("inside", cell.inside)
    assert loaded(made.text, tmp_path).inside("t", None) == 43


def test_captured_name_not_defined_yet_raises_on_use(cell: Any, tmp_path: Path) -> None:
    made = SourceModule()
    made.add("missing", cell.missing)
    with pytest.raises(NameError, match="not_made_yet"):
        loaded(made.text, tmp_path).missing("t", None)


REFUSED: dict[str, tuple[Callable[[SourceModule, Any], None], str]] = {
    "a lock": (lambda made, cell: made.add("holds", cell.holds), "'holds' uses 'LOCK', a lock of this process"),
    "what an object holds": (lambda made, cell: made.add_instance("x", cell.locked), "The Solver holds 'bias', a lock"),
    "a lambda": (
        lambda made, cell: made.add("unnamed", cell.unnamed),
        "Workers cannot import a lambda: it has no name. Write it as def",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_captured_process_state_is_refused_with_remedy(cell: Any, name: str) -> None:
    take, said = REFUSED[name]
    with pytest.raises(ConfigError, match=said):
        take(SourceModule(), cell)


def test_captured_function_of_hidden_module_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hidden_rewards.py").write_text("def right(episode):\n    return 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import hidden_rewards  # type: ignore[import-not-found]

    with pytest.raises(ConfigError, match="Add its folder to PYTHONPATH"):
        path_of(hidden_rewards.right, "reward", settings(), True)


def test_captured_source_missing_is_reported(cell: Any) -> None:
    linecache.cache["<ipython-input-1-abc>"] = (0, None, [], "<ipython-input-1-abc>")
    with pytest.raises(ConfigError, match=r"The source of 'even' is not available\. Move it"):
        SourceModule().add("even", cell.even)


@dataclass
class Odd:
    """Its repr is a constant's."""

    value: int = 1

    def __repr__(self) -> str:
        return "1"


def test_literal_takes_only_values_that_read_back() -> None:
    kept = (1, 2.5, "a\n'\"", b"\x00", None, True, (1,), [1, [2]], {"a": {1: None}}, {1, 2})
    assert [literal(value) for value in kept] == [repr(value) for value in kept]
    for value in (Odd(), [Odd()], float("nan"), threading.Lock(), js, "x" * 2_000_000, print, range(3)):
        assert literal(value) is None


def test_path_of_names_importable_and_writes_others(cell: Any, home: Path) -> None:
    where = settings()
    assert path_of("any:path", "x", where, True) == "any:path"
    assert path_of(literal, "x", where, True) == "agentrl.api.notebook_source:literal"
    first, second = (path_of(cell.even, "x", where, True) for _ in range(2))
    assert first == second
    assert len(list((where.root / "code").iterdir())) == 1
    assert find("agents", first)(4) is True
    with pytest.raises(ConfigError, match="Workers on other machines cannot import 'even'"):
        path_of(cell.even, "x", where, False)


SCRIPT = """
import functools

class Tool:
    def __init__(self, function):
        self.function = function

@Tool
def calculator(text):
    return text

def solve(task, llm):
    return calculator.function("42")
"""
GUARD = "\n\nif __name__ == '__main__':\n    raise SystemExit(solve(None, None))\n"


def test_captured_script_is_copied_entirely_if_needed(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text, whole in ((SCRIPT + GUARD, True), (SCRIPT, False)):
        file = tmp_path / "script.py"
        file.write_text(text)
        main: Any = types.ModuleType("__main__")
        main.__file__ = str(file)
        monkeypatch.setitem(sys.modules, "__main__", main)
        exec(compile(SCRIPT, str(file), "exec"), vars(main))
        linecache.checkcache(str(file))
        if not whole:
            with pytest.raises(ConfigError, match="uses 'calculator', a Tool of this process"):
                path_of(main.solve, "solve", settings(), is_local=True)
            continue
        path = path_of(main.solve, "solve", settings(), is_local=True)
        (written,) = code_folder(settings()).glob("*.py")
        assert written.read_text() == text
        assert find("agents", path)(None, None) == "42"

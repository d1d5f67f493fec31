"""Source code from a notebook or a script, as a module that other processes can import.

The source of a function or class is taken along with what it names: imports, constants, and other functions and classes that
were written there. Whatever else it names, a client or a model that lives in this process, cannot be taken along, and is
refused with what to do.
"""

import __future__

import ast
import inspect
import linecache
import symtable
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from agentrl.workflow.errors import ConfigError

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
MAX_LITERAL = 1 << 20
"""Characters of a constant that is taken along."""
MAIN = "__main__"


class Captured:
    """The text of a module, built from the objects that it must contain."""

    def __init__(self, importable: "Importable") -> None:
        """Take whether another process finds a module of a name."""
        self._importable = importable
        self._imports: dict[str, str] = {}
        self._constants: dict[str, str] = {}
        self._bodies: dict[str, str] = {}
        self._asked: set[str] = set()
        self._annotations = False

    @property
    def text(self) -> str:
        """The module's source."""
        future = ["from __future__ import annotations"] if self._annotations else []
        parts = ["\n".join([*future, *sorted(self._imports.values())]), "\n".join(self._constants.values())]
        return "\n\n".join(part for part in (*parts, *self._bodies.values()) if part) + "\n"

    def add(self, name: str, value: Any, who: str = "") -> None:
        """Add the value under the name that `who` uses.

        Raises:
            ConfigError: it cannot be taken along.
        """
        if name in self._asked:
            return
        self._asked.add(name)
        if isinstance(value, ModuleType):
            self._import(name, value, who)
        elif isinstance(value, FunctionType | type):
            self._add_code(name, value, who)
        elif (text := literal(value)) is not None:
            self._constants[name] = f"{name} = {text}"
        elif (path := _public_path(value)) is not None:
            self._from(name, *path)
        else:
            kind = type(value).__name__
            said = f"{who!r} uses {name!r}, {_article(kind)} {kind} of this process, which workers do not have."
            guard = "with `if __name__ == '__main__':` before what it does"
            raise ConfigError(said, f"Create it inside {who!r}, or move both to a file; a script {guard}.")

    def add_instance(self, name: str, value: Any) -> None:
        """Add an object: its class, and its attributes if they are constants.

        Raises:
            ConfigError: it holds something else.
        """
        kind = type(value)
        self.add(kind.__name__, kind, name)
        state = {}
        for key, held in vars(value).items() if hasattr(value, "__dict__") else ():
            state[key] = literal(held)
            if state[key] is None:
                what = type(held).__name__
                said = f"The {kind.__name__} holds {key!r}, {_article(what)} {what} of this process, which workers do not have."
                raise ConfigError(said, "Create it on first use, or pass the class.")
        fields = ", ".join(f"{key!r}: {text}" for key, text in state.items())
        lines = [f"{name} = {kind.__name__}.__new__({kind.__name__})"]
        self._bodies[name] = "\n".join([*lines, *([f"vars({name}).update({{{fields}}})"] if fields else [])])

    def _import(self, name: str, module: ModuleType, who: str) -> None:
        if not self._importable(module.__name__):
            raise _unreachable(module.__name__, who)
        short = module.__name__ == name
        self._imports[name] = f"import {name}" if short else f"import {module.__name__} as {name}"

    def _import_parts(self, name: str, module: ModuleType, text: str) -> None:
        """Imports the parts of a package that the text reads as its attributes: importing the package alone may not do that."""
        for chain in _chains(text):
            parts = chain.split(".")
            whole = module.__name__
            for part in parts[1:] if parts[0] == name else ():
                whole = f"{whole}.{part}"
                if isinstance(sys.modules.get(whole), ModuleType):
                    self._imports[whole] = f"import {whole}"

    def _from(self, name: str, module: str, attribute: str) -> None:
        self._imports[name] = f"from {module} import {attribute}" + ("" if attribute == name else f" as {name}")

    def _add_code(self, name: str, value: Any, who: str) -> None:
        path = _public_path(value)
        if path is not None and path[0] != MAIN:
            if not self._importable(path[0]):
                raise _unreachable(path[0], who or name)
            self._from(name, *path)
            return
        node, text = _definition(value)
        if node.name != name:
            self._claim(node.name, name)
        for used, found in _named(value, text):
            self.add(used, found, node.name)
            if isinstance(found, ModuleType):
                self._import_parts(used, found, text)
        self._annotations |= _postpones_annotations(value)
        self._bodies[node.name] = text
        if node.name != name:
            self._bodies[name] = f"{name} = {node.name}"

    def _claim(self, name: str, alias: str) -> None:
        """Keeps a name for what is called otherwise where it is used."""
        if name in self._asked:
            raise ConfigError(f"{alias!r} and another {name!r} cannot be in one module.", "Give them different names.")
        self._asked.add(name)


def guarded_script(value: Any) -> str | None:
    """Return this process's script if it defines the value and guards its actions with `if __name__ == "__main__"`.

    So it can be imported, and makes again whatever lives beside the value: clients, graphs, tools.
    """
    main = sys.modules[MAIN]
    file, name = getattr(main, "__file__", None), getattr(value, "__qualname__", "")
    if not file or getattr(value, "__module__", "") != MAIN or getattr(main, name, None) is not value:
        return None
    try:
        text = Path(file).read_text(encoding="utf-8")
        return text if any(_is_guard(node) for node in ast.parse(text).body) else None
    except (OSError, ValueError, SyntaxError):
        return None


def _is_guard(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("__name__ == '__main__'", "'__main__' == __name__")


class Importable:
    """Modules that another process of this machine can import."""

    def __init__(self, places: Iterable[str]) -> None:
        """Take the folders in which it looks."""
        self._places = set(places)

    def __call__(self, module: str) -> bool:
        """Return whether it does."""
        top = module.partition(".")[0]
        if top in sys.builtin_module_names or top in sys.stdlib_module_names:
            return top != MAIN
        found = sys.modules.get(top)
        if folders := getattr(found, "__path__", None):
            return any(str(Path(folder).absolute().parent) in self._places for folder in folders)
        file = getattr(found, "__file__", None)
        return file is not None and str(Path(file).absolute().parent) in self._places


def literal(value: Any) -> str | None:
    """Return the value as an expression of constants; None if that is impossible."""
    try:
        text = repr(value)
        if len(text) > MAX_LITERAL or type(value).__module__ != "builtins":
            return None
        return text if _same(ast.literal_eval(text), value) else None
    except Exception:  # noqa: BLE001 - anybody's __repr__
        return None


def _same(read: Any, value: Any) -> bool:
    return type(read) is type(value) and bool(read == value)


def _public_path(value: Any) -> tuple[str, str] | None:
    """(module, name) under which the value is found again; None if there is no such place."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or not name.isidentifier():
        return None
    return (module, name) if getattr(sys.modules.get(module), name, None) is value else None


def _definition(value: Any) -> tuple[Definition, str]:
    """The statement that defines it, and its text.

    Raises:
        ConfigError: its source is not known, or it is none that can stand alone.
    """
    name = getattr(value, "__name__", "")
    if name == "<lambda>":
        raise ConfigError("Workers cannot import a lambda: it has no name.", "Write it as def name(...): ...")
    code = next(_codes(value), None)
    for file in _files_of_main() if code is None else [code.co_filename]:
        lines = linecache.getlines(file)
        found = [
            node
            for node in _definitions(lines, isinstance(value, type))
            if node.name == name and (code is None or _first_line(node) <= code.co_firstlineno <= (node.end_lineno or 0))
        ]
        if found:
            return _with_text(max(found, key=_first_line), lines)
    raise ConfigError(f"The source of {name!r} is not available.", "Move it to a file, and pass 'module:name' or import it.")


def _definitions(lines: list[str], of_classes: bool) -> list[Definition]:
    try:
        nodes = list(ast.walk(ast.parse("".join(lines))))
    except (SyntaxError, ValueError, RecursionError):
        return []
    kinds = ast.ClassDef if of_classes else (ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in nodes if isinstance(node, Definition) and isinstance(node, kinds)]


def _files_of_main() -> list[str]:
    """The files that what stands in this process's main module may be from: a notebook's cells, the newest first; a script."""
    cells = [name for name in reversed(list(linecache.cache)) if "ipython" in name or "ipykernel" in name]
    return [*cells, getattr(sys.modules[MAIN], "__file__", None) or ""]


def _with_text(node: Definition, lines: list[str]) -> tuple[Definition, str]:
    text = textwrap.dedent("".join(lines[_first_line(node) - 1 : node.end_lineno])).rstrip("\n")
    try:
        same = ast.dump(ast.parse(text).body[0]) == ast.dump(node)
    except SyntaxError:
        same = False
    return node, text if same else ast.unparse(node)


def _first_line(node: Definition) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def _codes(value: Any) -> Iterator[CodeType]:
    if not isinstance(value, type):
        yield inspect.unwrap(value).__code__
        return
    for held in vars(value).values():
        function = getattr(held, "__func__", getattr(held, "fget", held))
        if isinstance(function, FunctionType) and function.__qualname__.startswith(value.__qualname__ + "."):
            yield function.__code__


def _postpones_annotations(value: Any) -> bool:
    return any(code.co_flags & __future__.annotations.compiler_flag for code in _codes(value))


def _named(value: Any, text: str) -> Iterator[tuple[str, Any]]:
    """What the definition reads from around it, by name, as far as it is there now."""
    around = _surroundings(value)
    for name in sorted(_free_names(symtable.symtable(text, "captured", "exec")) & around.keys()):
        yield name, around[name]


def _chains(text: str) -> set[str]:
    """The dotted names that the text reads: `urllib.request.urlopen`."""
    nodes = ast.walk(ast.parse(text))
    return {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute) and _is_chain(node)}


def _is_chain(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and _is_chain(node.value))


def _free_names(table: symtable.SymbolTable) -> set[str]:
    own = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    if table.get_type() == "module":
        found = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_referenced() and symbol.get_name() not in own}
    else:
        found = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global()}
    for child in table.get_children():
        found |= _free_names(child)
    return found - own if table.get_type() == "module" else found


def _surroundings(value: Any) -> Mapping[str, Any]:
    functions = [inspect.unwrap(value)] if not isinstance(value, type) else _methods(value)
    around: dict[str, Any] = dict(vars(sys.modules[value.__module__])) if value.__module__ in sys.modules else {}
    for function in functions:
        around |= function.__globals__
    for function in functions:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                around[name] = cell.cell_contents
            except ValueError:  # not yet set
                continue
    return around


def _methods(kind: type) -> list[FunctionType]:
    held = (getattr(held, "__func__", getattr(held, "fget", held)) for held in vars(kind).values())
    return [each for each in held if isinstance(each, FunctionType)]


def _unreachable(module: str, who: str) -> ConfigError:
    said = f"{who!r} is of the module {module!r}, which other processes cannot import." if who else f"{module!r} is not found."
    return ConfigError(said, "Add its folder to PYTHONPATH, or start Python in its folder.")


def _article(word: str) -> str:
    return "an" if word[:1].lower() in "aeiou" else "a"

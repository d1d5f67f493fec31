"""Import paths, `package.module:name`, by which workers import a user's functions, classes and objects.

An object of a module that workers can import has such a path already. For an object of a notebook or a script, the source is
written into a module in the data folder, together with everything that it uses: imports, constants, other functions and
classes. The module is named by the hash of its text, so a run can be resumed and scored again later. Nothing is pickled: an
object that only this process has (a client, a lock) raises an error with its name.
"""

import __future__

import ast
import hashlib
import inspect
import json
import linecache
import subprocess
import symtable
import sys
import textwrap
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from agentrl.api.store import write_once
from agentrl.workflow.errors import ConfigError
from agentrl.workflow.plugins import CODE_PREFIX, HERE, code_folder, lend
from agentrl.workflow.settings import Settings

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
MAX_CONSTANT_CHARS = 1 << 20
MAIN = "__main__"
_objects_here: dict[str, Any] = {}
"""A mapping from a path to the object that only this process has."""


def path_of(value: Any, name: str, where: Settings, is_local: bool) -> str:
    """Return the path from which workers can import the object. A text is returned unchanged. Raise ConfigError if workers
    could not import the object; the hint says what to do.

    Args:
        value: a function, a class, or an instance of a class.
        name: a name for the object, used if the object has none and its source is written into a new module.
        where: the settings with the data folder.
        is_local: True if the workers read this machine's files.
    """
    if isinstance(value, str):
        return value
    _refuse_constant(value, name)
    path = _import_path(value)
    if path and path[0] != MAIN:
        if _is_importable(path[0]):
            return ":".join(path)
        if is_local:
            raise _unreachable_error(path[1], path[0])
    if not is_local:
        called = getattr(value, "__name__", type(value).__name__)
        how = "Put it into a module on the workers' PYTHONPATH, and pass 'module:name'."
        raise ConfigError(f"Workers on other machines cannot import {called!r}.", how)
    module = SourceModule()
    if not _is_code(value):
        module.add_instance(name, value)
        return f"{_write_module(module.text, where)}:{name}"
    try:
        module.add(value.__name__, value)
        text = module.text
    except ConfigError:
        script = _guarded_script(value)
        if script is None:
            raise
        text = script
    return f"{_write_module(text, where)}:{value.__name__}"


def path_here(value: Any, name: str, where: Settings) -> str:
    """Return an import path. In this process the path leads to this very object. Other processes import a copy from the
    object's source, if the source is available.

    Args:
        value, name, where: as in `path_of`.
    """
    if isinstance(value, str):
        return value
    _refuse_constant(value, name)
    try:
        path = path_of(value, name, where, is_local=True)
    except ConfigError:
        paths = (path for path, other in _objects_here.items() if other is value)
        path = next(paths, f"{HERE}:{name}_{len(_objects_here)}")
        _objects_here[path] = value
    if path.startswith((CODE_PREFIX, HERE)):
        lend(path, value)
    return path


class SourceModule:
    """The source of a new module, built from the objects that the module must contain."""

    def __init__(self) -> None:
        self._imports: dict[str, str] = {}
        self._constants: dict[str, str] = {}
        self._bodies: dict[str, str] = {}
        self._names: set[str] = set()
        self._postpones_annotations = False

    @property
    def text(self) -> str:
        """The module's source."""
        future = ["from __future__ import annotations"] if self._postpones_annotations else []
        parts = ["\n".join([*future, *sorted(self._imports.values())]), "\n".join(self._constants.values())]
        return "\n\n".join(part for part in (*parts, *self._bodies.values()) if part) + "\n"

    def add(self, name: str, value: Any, user: str = "") -> None:
        """Add the value to the module under a name. Raise ConfigError if the value's source is not available, or only this
        process has the value.

        Args:
            user: the function or class that uses the name, for the error message.
        """
        if name in self._names:
            return
        self._names.add(name)
        if isinstance(value, ModuleType):
            self._add_import(name, value.__name__)
        elif (text := literal(value)) is not None:
            self._constants[name] = f"{name} = {text}"
        elif (path := _import_path(value)) and path[0] != MAIN:
            self._add_import(name, *path)
        elif _is_code(value):
            self._add_code(name, value)
        else:
            what = f"{user!r} uses {name!r}, {_with_article(type(value).__name__)} of this process, which workers do not have."
            guard = "In a script, write `if __name__ == '__main__':` before the code that starts the run."
            raise ConfigError(what, f"Create {name!r} inside {user!r}, or move {user!r} and {name!r} into a file. {guard}")

    def add_instance(self, name: str, value: Any) -> None:
        """Add an instance: its class, and its attributes, which must be constants. Raise ConfigError if an attribute is not a
        constant.
        """
        kind = type(value)
        self.add(kind.__name__, kind, name)
        fields = []
        for key, attribute in getattr(value, "__dict__", {}).items():
            text = literal(attribute)
            if text is None:
                held = _with_article(type(attribute).__name__)
                message = f"The {kind.__name__} holds {key!r}, {held} of this process, which workers do not have."
                raise ConfigError(message, "Create it on first use, or pass the class.")
            fields.append(f"{key!r}: {text}")
        lines = [f"{name} = {kind.__name__}.__new__({kind.__name__})"]
        if fields:
            lines.append(f"vars({name}).update({{{', '.join(fields)}}})")
        self._bodies[name] = "\n".join(lines)

    def _add_import(self, name: str, module: str, attribute: str = "") -> None:
        if not _is_importable(module):
            raise _unreachable_error(attribute or name, module)
        suffix = "" if name == (attribute or module) else f" as {name}"
        self._imports[name] = f"from {module} import {attribute}{suffix}" if attribute else f"import {module}{suffix}"

    def _add_code(self, name: str, value: Any) -> None:
        defined, text = value.__name__, _definition(value)
        if defined != name and defined in self._names:
            raise ConfigError(f"{name!r} and another {defined!r} cannot be in one module.", "Give them different names.")
        self._names.add(defined)
        scope = _scope_of(value)
        for used in sorted(_free_names(symtable.symtable(text, "captured", "exec")) & scope.keys()):
            self.add(used, scope[used], defined)
            if isinstance(scope[used], ModuleType):
                self._import_submodules(used, scope[used].__name__, text)
        flag = __future__.annotations.compiler_flag
        self._postpones_annotations |= any(function.__code__.co_flags & flag for function in _functions(value))
        self._bodies[defined] = text
        if defined != name:
            self._bodies[name] = f"{name} = {defined}"

    def _import_submodules(self, name: str, package: str, text: str) -> None:
        """Import the submodules of a package that the text reads as attributes."""
        for node in ast.walk(ast.parse(text)):
            first, _, rest = ast.unparse(node).partition(".") if isinstance(node, ast.Attribute) else ("", "", "")
            module = f"{package}.{rest}"
            if first == name and isinstance(sys.modules.get(module), ModuleType):
                self._imports[module] = f"import {module}"


def literal(value: Any) -> str | None:
    """Return the value as a Python expression of constants; None if no such expression exists."""
    try:
        text = repr(value)
        if len(text) > MAX_CONSTANT_CHARS or type(value).__module__ != "builtins":
            return None
        parsed = ast.literal_eval(text)
        return text if type(parsed) is type(value) and bool(parsed == value) else None
    except Exception:  # noqa: BLE001 - a user's __repr__
        return None


# where it stands


def _import_path(value: Any) -> tuple[str, str] | None:
    """Return (module, name) of the value in this process; None if no module has the value."""
    name = getattr(value, "__qualname__", "")
    if name and isinstance(name, str):
        module = getattr(value, "__module__", None)
        return (module, name) if isinstance(module, str) and getattr(sys.modules.get(module), name, None) is value else None
    for other in list(sys.modules.values()):
        if isinstance(other, ModuleType) and other.__name__ != MAIN:
            for key, member in list(vars(other).items()):
                if member is value:
                    return other.__name__, key
    return None


def _is_importable(module: str) -> bool:
    top = module.partition(".")[0]
    if top in sys.builtin_module_names or top in sys.stdlib_module_names:
        return top != MAIN
    package = sys.modules.get(top)
    places = list(getattr(package, "__path__", ())) or [getattr(package, "__file__", None)]
    folders = {*_import_folders(), str(Path.cwd())}
    return any(str(Path(place).absolute().parent) in folders for place in places if place)


@cache
def _import_folders() -> tuple[str, ...]:
    """Return the folders of `sys.path` in a worker that this process starts, without its working directory."""
    printed = subprocess.run(
        [sys.executable, "-P", "-c", "import json, sys; print(json.dumps(sys.path))"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return tuple(str(Path(folder).absolute()) for folder in json.loads(printed.stdout) if folder)


def _write_module(text: str, where: Settings) -> str:
    name = f"{CODE_PREFIX}{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    write_once(code_folder(where) / f"{name}.py", text)
    return name


def _guarded_script(value: Any) -> str | None:
    """Return the source of this process's script if the script defines the value and has an `if __name__ == "__main__"` guard.

    Workers can import such a script without starting its actions. The import creates everything that the value uses: clients,
    graphs, tools.
    """
    file = getattr(sys.modules[MAIN], "__file__", None)
    if not file or (_import_path(value) or ("",))[0] != MAIN:
        return None
    guards = ("__name__ == '__main__'", "'__main__' == __name__")
    try:
        text = Path(file).read_text(encoding="utf-8")
        tests = [ast.unparse(node.test) for node in ast.parse(text).body if isinstance(node, ast.If)]
    except (OSError, ValueError, SyntaxError):
        return None
    return text if any(test in guards for test in tests) else None


# its source


def _is_code(value: Any) -> bool:
    """Return True if the value is a class, a function, or a wrapped function (`@lru_cache`)."""
    is_wrapper = "__wrapped__" in getattr(value, "__dict__", {})
    return isinstance(value, type) or isinstance(inspect.unwrap(value) if is_wrapper else value, FunctionType)


def _functions(value: Any) -> list[FunctionType]:
    """Return the function without its wrappers, or, for a class, the functions that the class defines."""
    if not isinstance(value, type):
        return [inspect.unwrap(value)]
    members = [getattr(member, "__func__", getattr(member, "fget", member)) for member in vars(value).values()]
    inside = f"{value.__qualname__}."
    return [member for member in members if isinstance(member, FunctionType) and member.__qualname__.startswith(inside)]


def _definition(value: Any) -> str:
    """Return the source of the statement that defines the value."""
    name = getattr(value, "__name__", "")
    if name == "<lambda>":
        raise ConfigError("Workers cannot import a lambda: it has no name.", "Write it as def name(...): ...")
    codes = [function.__code__ for function in _functions(value)]
    kinds = ast.ClassDef if isinstance(value, type) else (ast.FunctionDef, ast.AsyncFunctionDef)
    for file in [codes[0].co_filename] if codes else _files_of_main():
        lines = linecache.getlines(file)
        with suppress(SyntaxError, ValueError, RecursionError):
            nodes = [node for node in ast.walk(ast.parse("".join(lines))) if isinstance(node, Definition)]
            matches = [
                node
                for node in nodes
                if isinstance(node, kinds) and node.name == name
                and (not codes or _first_line(node) <= codes[0].co_firstlineno <= (node.end_lineno or 0))
            ]  # fmt: skip
            if matches:
                return _text_of(max(matches, key=_first_line), lines)
    raise ConfigError(f"The source of {name!r} is not available.", "Move it to a file, and pass 'module:name' or import it.")


def _files_of_main() -> list[str]:
    """Return the files that may define a class without methods: the cells of a notebook, newest first, then the script."""
    cells = [name for name in reversed(list(linecache.cache)) if "ipython" in name or "ipykernel" in name]
    return [*cells, getattr(sys.modules[MAIN], "__file__", None) or ""]


def _first_line(node: Definition) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def _text_of(node: Definition, lines: list[str]) -> str:
    text = textwrap.dedent("".join(lines[_first_line(node) - 1 : node.end_lineno])).rstrip("\n")
    with suppress(SyntaxError):
        if ast.dump(ast.parse(text).body[0]) == ast.dump(node):
            return text
    return ast.unparse(node)  # dedenting changed a text of several lines


def _free_names(table: symtable.SymbolTable) -> set[str]:
    """Return the global names that a module reads or defines."""
    names = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global()}
    return names.union(*map(_free_names, table.get_children()))


def _scope_of(value: Any) -> Mapping[str, Any]:
    """Return the values of the names that the definition can read: the globals, and the variables of enclosing functions."""
    scope: dict[str, Any] = dict(vars(sys.modules[value.__module__])) if value.__module__ in sys.modules else {}
    functions = _functions(value)
    for function in functions:
        scope |= function.__globals__
    for function in functions:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # the cell is empty
                scope[name] = cell.cell_contents
    return scope


# refusals


def _refuse_constant(value: Any, name: str) -> None:
    """Raise ConfigError if the value is a number, a list or another built-in value."""
    if type(value).__module__ == "builtins" and not callable(value):
        what = {"solve": "agent"}.get(name, name.partition("_")[0])
        how = "Pass a function, a class or an object of one, a name, or a path: 'module:name'."
        raise ConfigError(f"{value!r:.60} is not a valid {what}.", how)


def _unreachable_error(name: str, module: str) -> ConfigError:
    message = f"{name!r} is of the module {module!r}, which workers cannot import."
    return ConfigError(message, "Add its folder to PYTHONPATH, or start Python in its folder.")


def _with_article(word: str) -> str:
    return f"{'an' if word[:1].lower() in 'aeiou' else 'a'} {word}"

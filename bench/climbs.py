"""Counts the files, returns and climbs of journeys through the code: `python -m bench.climbs`.

A journey is a list of walks. A walk follows values from the function in which it begins: it enters the functions that get one
of them, or something made of it, as an argument or as their object, in the order of evaluation, depth first, each function
once. It stops when it enters the function in which it ends. A *return* enters a file that the journey has left before. A
*climb* enters a package of a higher layer than the function before it; the layers are those of import-linter's contracts in
`pyproject.toml`.

The calls are read from syntax trees and type annotations. So a walk does not see decorators, queues, futures, HTTP and plug-ins
(a journey says where it goes on), implementations of a protocol, methods of values without an annotated type, and SQL. It does
not enter what a function that runs once per process calls, `raise` and `except`. All branches count, whatever a run takes.

`python -m bench.climbs FROM [TO]` prints one walk, step by step. `--at FOLDER` reads another checkout.
"""

import argparse
import ast
import re
import tomllib
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = "agentrl"
JOURNEYS = {
    "a step: engine to row": [
        ("workflow.inference.decoding_batch:Batch._answer", "workflow.inference.decoding_batch:ActiveTurn.finish"),
        ("workers.jobs.episode_loop:GroupRollout.handle", "workflow.store.row_codecs:token_row"),
    ],
    "an update: rows to commit": [
        ("workflow.store.training_groups:load_groups", ""),
        ("workers.jobs.train:_train_iteration(work)", "workflow.store.train_commits:commit_update"),
    ],
    "a config: submit to train job": [
        ("workers.requests.submit:prepare(config)", ""),
        ("cli.ensure_workers:send_run", "workflow.store.planning:insert_submission"),
        ("workers.jobs.train:_run_iteration", "workflow.experiment:Experiment.load"),
    ],
    "an HTTP completion: socket to row": [
        ("workers.serving.endpoint_app:Endpoint._forward_call", "workers.serving.forwarding:Forwarding._send"),
        ("workers.jobs.sampling_server:SamplingServer._sample", "workers.jobs.sampling_server:EpisodeServer.take"),
        ("workers.jobs.agent_rollout:AgentRollout._answer", "workflow.engines:Engine.submit"),
        ("workers.jobs.agent_rollout:AgentRollout._commit", "workflow.store.row_codecs:token_row"),
    ],
}
"""Journey -> its walks: (where it begins, where it ends; empty: with its first function). A walk follows the parameters in
parentheses; without these, all of a function, and all but the object of a method."""
ONCE = {"cache", "lru_cache", "Once"}
"""Decorators of functions that run once per process."""
ELEMENTS = {"list", "tuple", "set", "frozenset", "Sequence", "Iterable", "Iterator", "Collection"}
MAPPINGS = {"dict", "Mapping", "MutableMapping", "defaultdict"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Place:
    """A definition: its module, its name there (`Class.method`) and its node."""

    module: str
    name: str
    node: ast.AST

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"


@dataclass(frozen=True)
class Type:
    """An annotation, and the module whose names it uses."""

    module: str
    node: ast.expr


@dataclass
class Code:
    """The package's definitions and imports."""

    folder: Path
    places: dict[tuple[str, str], Place] = field(default_factory=dict)
    imports: dict[tuple[str, str], str] = field(default_factory=dict)
    modules: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        for path in sorted((self.folder / PACKAGE).rglob("*.py")):
            parts = path.relative_to(self.folder / PACKAGE).with_suffix("").parts
            module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            self.modules.add(module)
            tree = ast.parse(path.read_text())
            for node in ast.walk(tree):
                self._note_import(module, node)
            self._note(module, "", tree.body)

    def _note_import(self, module: str, node: ast.AST) -> None:
        if isinstance(node, ast.Import | ast.ImportFrom):
            source = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                self.imports[module, alias.asname or alias.name] = (source + alias.name).removeprefix(f"{PACKAGE}.")

    def _note(self, module: str, owner: str, body: Sequence[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, Function | ast.ClassDef):
                name = owner + node.name
                self.places[module, name] = Place(module, name, node)
            if isinstance(node, ast.ClassDef):
                self._note(module, f"{node.name}.", node.body)

    def find(self, module: str, name: str) -> Place | str | None:
        """Return what a module means by a name: a definition, the name of a module of the package, or None."""
        if (module, name) in self.places:
            return self.places[module, name]
        target = self.imports.get((module, name))
        if target is None or target in self.modules:
            return target
        source, _, last = target.rpartition(".")
        return self.find(source, last) if source in self.modules else None

    def class_of(self, kind: Type | None) -> Place | None:
        """Return the class that an annotation names."""
        match kind.node if kind else None:
            case ast.Constant(value=str(text)):
                return self.class_of(Type(kind.module, ast.parse(text, mode="eval").body))
            case ast.BinOp(left=left, right=right):
                return self.class_of(Type(kind.module, left)) or self.class_of(Type(kind.module, right))
            case ast.Name(id=name):
                found = self.find(kind.module, name)
            case ast.Attribute(value=ast.Name(id=module), attr=name):
                source = self.find(kind.module, module)
                found = self.find(source, name) if isinstance(source, str) else None
            case _:
                return None
        return found if _is_class(found) else None

    def member(self, owner: Place, name: str) -> Place | Type | None:
        """Return a class's method, or the type of its attribute, its own or one that it inherits."""
        if method := self.places.get((owner.module, f"{owner.name}.{name}")):
            return method
        if kind := next((kind for node in ast.walk(owner.node) if (kind := self._attribute(owner, node, name))), None):
            return kind
        above = (self.class_of(Type(owner.module, base)) for base in owner.node.bases)
        return next((found for base in above if base and (found := self.member(base, name))), None)

    def _attribute(self, owner: Place, node: ast.AST, name: str) -> Type | None:
        """Return the type of the attribute if that statement of the class says it."""
        match node:
            case ast.AnnAssign(target=ast.Name(id=target) | ast.Attribute(attr=target), annotation=kind) if target == name:
                return Type(owner.module, kind)
            case ast.Assign(targets=targets, value=value):
                for target, part in pairs(targets, value):
                    if isinstance(target, ast.Attribute) and target.attr == name:
                        return Type(owner.module, part.func) if isinstance(part, ast.Call) else self._parameter(owner, part)
        return None

    def _parameter(self, owner: Place, value: ast.expr) -> Type | None:
        """Return the type of a parameter of the class's `__init__`."""
        made = self.places.get((owner.module, f"{owner.name}.__init__"))
        if made is None or not isinstance(value, ast.Name):
            return None
        return next(
            (Type(owner.module, one.annotation) for one in arguments(made) if one.arg == value.id and one.annotation), None
        )


def arguments(place: Place) -> list[ast.arg]:
    """Return the parameters of a function."""
    given = place.node.args
    return [*given.posonlyargs, *given.args, *given.kwonlyargs]


def pairs(targets: Sequence[ast.expr], value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield each assigned target with its value."""
    for target in targets:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            yield from zip(target.elts, value.elts, strict=False)
        else:
            yield target, value


class Arrived(Exception):
    """The walk has entered its last function."""


@dataclass
class Walk:
    """The functions that are entered between two functions, in order."""

    code: Code
    end: str
    steps: list[Place] = field(default_factory=list)

    def enter(self, place: Place, followed: Set[str]) -> None:
        """Enter a function, in which these parameters are followed."""
        if place in self.steps:
            return
        self.steps.append(place)
        if str(place) == self.end:
            raise Arrived
        if not ONCE.intersection(ast.unparse(one).partition("(")[0] for one in place.node.decorator_list):
            Body(self, place, set(followed)).read()

    def call(self, place: Place, bound: bool, call: ast.Call, carries: Callable[[ast.expr], bool]) -> None:
        """Enter what a call runs; `bound`: of an object that is followed."""
        if _is_class(place):
            for name in ("__init__", "__post_init__"):
                if isinstance(made := self.code.member(place, name), Place):
                    self.call(made, True, call, carries)
            return
        names = [one.arg for one in arguments(place)]
        own = "." in place.name and "staticmethod" not in map(ast.unparse, place.node.decorator_list)
        followed = {names[0]} if own and names and bound else set()
        followed |= {name for name, value in zip(names[own:], call.args, strict=False) if carries(value)}
        followed |= {word.arg or "" for word in call.keywords if carries(word.value)}
        self.enter(place, followed)


@dataclass
class Body:
    """One function while its calls are followed: the names of followed values, and the types of its variables."""

    walk: Walk
    place: Place
    followed: set[str]
    types: dict[str, Type] = field(default_factory=dict)

    def read(self) -> None:
        """Follow every call of the function."""
        self._bind_arguments(self.place.node)
        for statement in self.place.node.body:
            self._follow(statement)

    def _bind_arguments(self, node: Function) -> None:
        owner = self.place.name.rpartition(".")[0]
        for number, argument in enumerate(arguments(Place(self.place.module, node.name, node))):
            if argument.annotation is not None:
                self.types[argument.arg] = Type(self.place.module, argument.annotation)
            elif owner and not number:
                self.types[argument.arg] = Type(self.place.module, ast.Name(owner))

    def _carries(self, node: ast.AST) -> bool:
        return any(isinstance(part, ast.Name) and part.id in self.followed for part in ast.walk(node))

    def _follow(self, node: ast.AST) -> None:
        """Follow the calls in a node, in the order of their evaluation."""
        match node:
            case ast.Raise() | ast.ExceptHandler() | ast.Assert():
                return
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._bind_arguments(node)
                children = node.body
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                children = [*node.generators, *(part for part in ast.iter_child_nodes(node) if part not in node.generators)]
            case ast.For() | ast.AsyncFor() | ast.comprehension():
                self._follow(node.iter)
                self._bind(node.target, self._element(self._type(node.iter)), self._carries(node.iter))
                children = node.body if isinstance(node, ast.For | ast.AsyncFor) else node.ifs
            case ast.withitem(context_expr=value, optional_vars=target):
                self._follow(value)
                if target is not None:
                    self._bind(target, self._element(self._type(value)), self._carries(value))
                return
            case ast.Match(subject=subject, cases=children):
                self._follow(subject)
                if self._carries(subject):
                    captures = (part for case in children for part in ast.walk(case.pattern) if isinstance(part, ast.MatchAs))
                    self.followed |= {part.name for part in captures if part.name}
            case _:
                children = list(ast.iter_child_nodes(node))
        for child in children:
            self._follow(child)
        self._note(node)

    def _note(self, node: ast.AST) -> None:
        """Bind the names that a node assigns, or enter what it calls."""
        match node:
            case ast.Assign(targets=targets, value=value):
                for target, part in pairs(targets, value):
                    self._bind(target, self._type(part), self._carries(part))
            case ast.AugAssign() | ast.NamedExpr():
                self._bind(node.target, self._type(node.value), self._carries(node.value))
            case ast.AnnAssign(value=value):
                self._bind(node.target, Type(self.place.module, node.annotation), bool(value) and self._carries(value))
            case ast.Call() if self._carries(node):
                self._call(node)
            case ast.Attribute(ctx=ast.Load()) if self._carries(node):
                found = self._meaning(node)
                if _is_property(found):
                    self.walk.enter(found, {one.arg for one in arguments(found)})

    def _call(self, node: ast.Call) -> None:
        """Enter the called function, and those that are passed to it."""
        called = self._meaning(node.func)
        if isinstance(called, Place):
            self.walk.call(called, self._carries(node.func), node, self._carries)
        elif isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name) and called is None:
            self.followed.add(node.func.value.id)  # `found.append(step)`
        for number, passed in enumerate([*node.args, *(word.value for word in node.keywords)]):
            found = self._meaning(passed) if isinstance(passed, ast.Name | ast.Attribute) else None
            if _is_function(found) and not _is_property(found):
                rest = ast.Call(node.func, node.args[number + 1 :], node.keywords)  # of `partial`, what it is called with
                self.walk.call(found, self._carries(passed), rest, self._carries)

    def _bind(self, target: ast.expr, kind: Type | None, followed: bool) -> None:
        if isinstance(target, ast.Name):
            self.types.pop(target.id, None)
            if kind is not None:
                self.types[target.id] = kind
        elif isinstance(target, ast.Tuple) and kind is not None and isinstance(kind.node, ast.Subscript):
            parts = kind.node.slice.elts if isinstance(kind.node.slice, ast.Tuple) else ()
            for name, part in zip(target.elts, parts, strict=False):
                self._bind(name, Type(kind.module, part), followed)
        if followed:
            self.followed |= {part.id for part in ast.walk(target) if isinstance(part, ast.Name)}

    def _meaning(self, node: ast.expr) -> Place | Type | str | None:
        """Return what an expression names: a definition, a value of a type, or a module."""
        code = self.walk.code
        if isinstance(node, ast.Name):
            return self.types.get(node.id) or code.find(self.place.module, node.id)
        if isinstance(node, ast.Attribute):
            base = self._meaning(node.value)
            if isinstance(base, str):
                return code.find(base, node.attr)
            owner = base if _is_class(base) else code.class_of(self._type(node.value))
            return code.member(owner, node.attr) if owner else None
        return self._type(node)

    def _type(self, node: ast.expr) -> Type | None:
        """Return the type of an expression's value, as far as annotations say."""
        match node:
            case ast.Name() | ast.Attribute():
                found = self._meaning(node)
                return found if isinstance(found, Type) else _returned(found) if _is_property(found) else None
            case ast.Call():
                return self._result(node)
            case ast.Subscript(value=base):
                return self._element(self._type(base), of_mapping=True)
            case ast.IfExp(body=value) | ast.NamedExpr(value=value) | ast.Await(value=value) | ast.BoolOp(values=[value, *_]):
                return self._type(value)
        return None

    def _result(self, call: ast.Call) -> Type | None:
        """Return the type of what a call returns."""
        match call:
            case ast.Call(func=ast.Attribute(value=base, attr="get" | "pop")) if _head(self._type(base)) in MAPPINGS:
                return self._element(self._type(base), of_mapping=True)
            case ast.Call(func=ast.Attribute(value=base, attr="values")) if _head(kind := self._type(base)) in MAPPINGS:
                return Type(kind.module, ast.Subscript(ast.Name("list"), kind.node.slice.elts[-1]))
            case ast.Call(func=ast.Name(id="list" | "sorted" | "tuple" | "set" | "replace"), args=[first, *_]):
                return self._type(first)
        found = self._meaning(call.func)
        if _is_class(found):
            return Type(found.module, ast.Name(found.node.name))
        return found if isinstance(found, Type) else _returned(found)

    def _element(self, kind: Type | None, of_mapping: bool = False) -> Type | None:
        """Return the type of what a container yields, or what it has under a key."""
        if kind is None or not isinstance(kind.node, ast.Subscript):
            return kind
        parts = kind.node.slice.elts if isinstance(kind.node.slice, ast.Tuple) else [kind.node.slice]
        if _head(kind) in MAPPINGS:
            return Type(kind.module, parts[-1 if of_mapping else 0])
        return Type(kind.module, parts[0]) if _head(kind) in ELEMENTS else None


def _head(kind: Type | None) -> str:
    node = kind.node.value if kind and isinstance(kind.node, ast.Subscript) else None
    return node.id if isinstance(node, ast.Name) else ""


def _is_class(found: object) -> bool:
    return isinstance(found, Place) and isinstance(found.node, ast.ClassDef)


def _is_property(found: object) -> bool:
    return _is_function(found) and any("property" in ast.unparse(one) for one in found.node.decorator_list)


def _is_function(found: object) -> bool:
    return isinstance(found, Place) and isinstance(found.node, Function)


def _returned(found: object) -> Type | None:
    return Type(found.module, found.node.returns) if _is_function(found) and found.node.returns else None


def layers_of(folder: Path) -> dict[str, int]:
    """Return package -> its layer, 0 for the highest."""
    contracts = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    by_container = {one["containers"][0].removeprefix(PACKAGE): one["layers"] for one in contracts if one["type"] == "layers"}
    found: dict[str, int] = {}
    for layer in by_container[""]:
        for line in by_container.get(f".{layer}", [""]):
            names = [f"{layer}.{name.strip()}" for name in line.split("|")] if line else layer.split(" | ")
            found |= dict.fromkeys(names, len(set(found.values())))
    return found


@dataclass
class Count:
    """The counts of a journey."""

    functions: int = 0
    files: set[str] = field(default_factory=set)
    returns: int = 0
    climbs: int = 0


def layer(layers: dict[str, int], place: Place) -> int:
    """Return the layer of a definition's package."""
    parts = place.module.split(".")
    return layers.get(".".join(parts[:2]), layers.get(parts[0], -1))


def walk(code: Code, start: str, end: str) -> list[Place]:
    """Return the functions of the walk, in order.

    Raises:
        SystemExit: there is no such function, or the walk does not reach its end.
    """
    start, *followed = re.findall(r"[\w.:]+", start)
    for name in filter(None, (start, end)):
        if tuple(name.split(":")) not in code.places:
            raise SystemExit(f"There is no {name!r}.")
    made = Walk(code, end)
    first = code.places[start.partition(":")[0], start.partition(":")[2]]
    names = [one.arg for one in arguments(first)]
    try:
        made.enter(first, set(followed or (names[1:] if "." in first.name and names[1:] else names)))
    except Arrived:
        return made.steps
    if not end:
        return made.steps
    raise SystemExit(f"The walk from {start!r} does not reach {end!r}: it enters {len(made.steps)} functions.")


def count(code: Code, layers: dict[str, int], steps: Sequence[Place], into: Count) -> None:
    """Add a walk to the counts of its journey."""
    into.functions += len(steps)
    for number, place in enumerate(steps):
        before = steps[number - 1] if number else None
        if before is None or before.module != place.module:
            into.returns += place.module in into.files
        into.files.add(place.module)
        into.climbs += before is not None and layer(layers, place) < layer(layers, before)


def main() -> None:
    """Print the table, or one walk."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ends", nargs="*", metavar="MODULE:FUNCTION", help="from, to")
    parser.add_argument("--at", type=Path, default=Path(), help="the checkout")
    asked = parser.parse_args()
    code, layers = Code(asked.at), layers_of(asked.at)
    if asked.ends:
        total, steps = Count(), walk(code, *(*asked.ends, "")[:2])
        for number, place in enumerate(steps):
            climbs = number and layer(layers, place) < layer(layers, steps[number - 1])
            print("^" if climbs else " ", f"{layer(layers, place):3}", place)
        count(code, layers, steps, total)
        print(total.functions, "functions,", len(total.files), "files,", total.returns, "returns,", total.climbs, "climbs")
        return
    print(f"{'journey':50} {'functions':>9} {'files':>6} {'returns':>8} {'climbs':>7}")
    for journey, walks in JOURNEYS.items():
        total = Count()
        for start, end in walks:
            count(code, layers, walk(code, start, end), total)
        print(f"{journey:50} {total.functions:9} {len(total.files):6} {total.returns:8} {total.climbs:7}")


if __name__ == "__main__":
    main()

"""Database views as classes: a class declares the columns of one view, and an instance is a row of that view."""

from abc import ABCMeta
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import FrozenInstanceError
from typing import Any, ClassVar, NamedTuple, dataclass_transform, get_type_hints

from agentrl.workflow.tables.column_meanings import MEANINGS


class Column(NamedTuple):
    """A column of a view: the SQL that computes it, and its meaning."""

    sql: str
    meaning: str


def column(sql: str, meaning: str = "") -> Any:
    """Declare a column of a view. `sql` is an SQL expression over the view's source. `{seconds:START,END}` in it is replaced by
    the seconds between two timestamps. `meaning` is the meaning of the column; empty to use the meaning of its name in
    MEANINGS.
    """
    return Column(sql, meaning)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(column,))
class _ViewType(ABCMeta):
    """The metaclass of views."""

    def __new__(
        cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], view: str = "", source: str | Sequence[str] = ()
    ) -> "_ViewType":
        hints = namespace.get("__annotations__", {}) if view else {}
        declared = {field: namespace.pop(field, None) or Column(field, "") for field in hints}
        namespace["__slots__"] = tuple(declared)
        namespace["VIEW"] = view
        namespace["SOURCES"] = (source,) if isinstance(source, str) else tuple(source)
        namespace["COLUMNS"] = {
            field: Column(sql, meaning or MEANINGS.get(field, "")) for field, (sql, meaning) in declared.items()
        }
        return super().__new__(cls, name, bases, namespace)


class ViewRow(Mapping[str, Any], metaclass=_ViewType):
    """An immutable row of a view. It has an attribute for each column, and is also a mapping from column names to values.

    A subclass declares a view: `class RunRow(ViewRow, view="v_runs", source="runs r")`. The view selects its columns from this
    source. A view with several sources contains the rows of all sources. The docstring of the class is the meaning of the view.
    """

    __slots__: tuple[str, ...]
    VIEW: ClassVar[str]
    SOURCES: ClassVar[tuple[str, ...]]
    COLUMNS: ClassVar[Mapping[str, Column]]

    def __init__(self, **values: Any) -> None:
        """Create a row from its values by column name. Raise TypeError if a value is missing, or has no column."""
        if values.keys() != self.COLUMNS.keys():
            raise TypeError(f"{type(self).__name__} has the columns {', '.join(self.COLUMNS)}, not {', '.join(values)}.")
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"cannot delete field {name!r}")

    def __getitem__(self, name: str) -> Any:
        if name not in self.COLUMNS:
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.COLUMNS)

    def __len__(self) -> int:
        return len(self.COLUMNS)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={self[name]!r}' for name in self)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), dict(self))

    @classmethod
    def meaning(cls) -> str:
        """Return the meaning of the view, which is the docstring of the class."""
        text = " ".join(str(cls.__doc__).split())
        return text[0].lower() + text[1:].removesuffix(".")

    @classmethod
    def types(cls) -> dict[str, Any]:
        """Return the Python type of each column."""
        hints = get_type_hints(cls)
        return {name: hints[name] for name in cls.COLUMNS}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """Return the schema of the row as JSON, for OpenAPI."""
        from typing_extensions import TypedDict

        return handler(TypedDict(cls.__name__, cls.types()))  # type: ignore[operator]


def _restore(kind: type[ViewRow], values: Mapping[str, Any]) -> ViewRow:
    return kind(**values)

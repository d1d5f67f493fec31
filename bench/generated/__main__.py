"""`python -m bench.generated`: write files that repeat a declaration.

`agentrl/api/run_options.py` and `docs/options.md` come from the config's fields, `agentrl/workflow/tables/column_kinds.py` from
the tables, `docs/views.md` from the views.

With `--check` nothing is written, and the exit code is 1 if a file is not what would be written (`make lint`).
"""

import sys
import types
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from sqlalchemy import JSON, Boolean

from agentrl.workflow.config import DESCRIPTIONS, FIELDS, FLAG_OF, KEYS, SECTIONS, RunConfig
from agentrl.workflow.tables.columns import Utc
from agentrl.workflow.tables.schema import metadata
from agentrl.workflow.tables.views import VIEWS

ROOT = Path(__file__).parents[2]
TRAINER = {"algorithm", "agent", "model", "env", "rewards", "hooks", "config"}
"""Keywords that `Trainer` declares itself."""
HEAD = '''"""The keywords of `agentrl.Trainer`, typed. Made from `workflow.config` by `make generated`; do not edit."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict


class RunOptions(TypedDict, total=False):
    """Options of a run by their names; a section takes a mapping of its keys."""

'''


TABLE_HEAD = """# Options of a run

Made from the config's fields by `make generated`; do not edit. A key is written in a YAML file, as `-s KEY=VALUE`, as the
variable `AGENTRL_RUN_KEY` (with `__` for a dot), or as a keyword of `agentrl.Trainer`. The
[reasons for the defaults](algorithms.md#defaults-and-why) are beside the algorithms.
"""


def main() -> int:
    """Write the files, or compare them; return the exit code."""
    contents = {
        "agentrl/api/run_options.py": "".join(_keywords()),
        "docs/options.md": "".join(_table()),
        "docs/views.md": "".join(_views()),
        "agentrl/workflow/tables/column_kinds.py": "".join(_column_kinds()),
    }
    stale = [name for name, text in contents.items() if not (ROOT / name).exists() or (ROOT / name).read_text() != text]
    if "--check" in sys.argv[1:]:
        for name in stale:
            print(f"{name} does not fit its declaration: run `make generated`.", file=sys.stderr)
        return 1 if stale else 0
    for name in stale:
        (ROOT / name).write_text(contents[name])
    return 0


def _keywords() -> Iterator[str]:
    yield HEAD
    names = {flag.keyword: key for key, flag in FLAG_OF.items()}
    leaves = [key.rpartition(".")[2] for key in KEYS]
    names |= {leaf: key for key, leaf in zip(KEYS, leaves, strict=True) if leaves.count(leaf) == 1 and leaf not in SECTIONS}
    for name in sorted(names.keys() - TRAINER):
        yield f"    {name}: {_type_text(FIELDS[names[name]][1].annotation)}\n"
    for name in sorted(SECTIONS.keys() - TRAINER - names.keys()):
        yield f"    {name}: Mapping[str, Any]\n"


def _type_text(annotation: Any) -> str:
    """Return how Python writes a field's type, with what is also accepted: one text for several."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return " | ".join(_type_text(part) for part in parts)
    if annotation is type(None):
        return "None"
    if origin is Literal:
        return "Literal[" + ", ".join(f'"{part}"' for part in parts) + "]"
    if origin is tuple:
        inner = "int" if "int" in str(parts[0]) else "str"
        return f"{inner} | Sequence[{inner}]" if inner == "int" or "str" in str(parts[0]) else "Sequence[Any]"
    if origin is dict:
        return "str | Mapping[str, Any]"
    return str(annotation.__name__) if isinstance(annotation, type) else "Any"


def _table() -> Iterator[str]:
    yield TABLE_HEAD
    defaults = RunConfig().flat()
    for section in ("", *SECTIONS):
        keys = [key for key in KEYS if key.rpartition(".")[0] == section]
        yield f"\n## {section or 'The run'}\n\n| key | option of `submit` | default | what it is |\n|---|---|---|---|\n"
        for key in keys:
            flag = FLAG_OF.get(key)
            typed = ", ".join(f"`{name}`" for name in flag.names) if flag else ""
            yield f"| `{key}` | {typed} | {_default_text(defaults[key])} | {_cell(DESCRIPTIONS[key])} |\n"


def _default_text(value: Any) -> str:
    if value in (None, [], {}, ""):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


KINDS_HEAD = '''"""Columns that SQLite returns as text or numbers. Made from `tables.schema` by `make generated`; do not edit.

A read without SQLAlchemy finds the type of a result column here, by its name.
"""

'''
KINDS = {
    "DOCUMENTS": (JSON, "JSON; SQLite returns its text."),
    "FLAGS": (Boolean, "Booleans; SQLite returns 0 or 1."),
    "MOMENTS": (Utc, "Moments in UTC; SQLite returns ISO text without a zone."),
}


def _column_kinds() -> Iterator[str]:
    """Yield the module's text.

    Raises:
        ValueError: two tables have a column of this name, and its types differ.
    """
    yield KINDS_HEAD
    kinds: dict[str, set[str]] = {}
    for table in metadata.tables.values():
        for column in table.columns:
            kind = next((kind for kind, (type_, _) in KINDS.items() if isinstance(column.type, type_)), "")
            kinds.setdefault(column.name, set()).add(kind)
    if mixed := [name for name, its in kinds.items() if len(its) > 1]:
        raise ValueError(f"Columns of one name need one type, but these have several: {', '.join(mixed)}.")
    for kind, (_, meaning) in KINDS.items():
        names = sorted(name for name, its in kinds.items() if its == {kind})
        yield f"{kind} = frozenset(\n    {{\n" + "".join(f'        "{name}",\n' for name in names) + "    }\n)\n"
        yield f'"""{meaning}"""\n'


VIEWS_HEAD = """# Views

Made from the declarations of the views by `make generated`; do not edit. `agentrl sql --schema v_episodes` prints the columns
of a view. In all views, iterations and epochs are counted from 1, and times are in UTC. A column may be NULL if its type says
so.
[Queries](queries.md) shows how to use the views, [stability](stability.md#views) how they may change.
"""
SQL_TYPES = {int: "integer", float: "float", bool: "boolean", str: "text", datetime: "time"}


def _views() -> Iterator[str]:
    yield VIEWS_HEAD
    for view, kind in VIEWS.items():
        meaning = kind.meaning()
        yield f"\n## {view}\n\nA row is {meaning}.\n\n| column | type | meaning |\n|---|---|---|\n"
        for name, hint in kind.types().items():
            yield f"| `{name}` | {_sql_type(hint)} | {_cell(kind.COLUMNS[name].meaning)} |\n"


def _sql_type(hint: Any) -> str:
    parts = get_args(hint) if get_origin(hint) is types.UnionType else (hint,)
    (text,) = {SQL_TYPES.get(part, "JSON") for part in parts if part is not types.NoneType}
    return f"{text}, NULL" if types.NoneType in parts else text


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())

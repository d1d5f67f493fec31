"""`python -m bench.generated`: write `agentrl/api/run_options.py` and `docs/options.md` from the config's fields.

With `--check` nothing is written, and the exit code is 1 if a file is not what would be written (`make lint`).
"""

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from agentrl.workflow.config import DESCRIPTIONS, FIELDS, FLAG_OF, KEYS, SECTIONS, RunConfig

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
    contents = {"agentrl/api/run_options.py": "".join(_keywords()), "docs/options.md": "".join(_table())}
    stale = [name for name, text in contents.items() if not (ROOT / name).exists() or (ROOT / name).read_text() != text]
    if "--check" in sys.argv[1:]:
        for name in stale:
            print(f"{name} does not fit the config: run `make generated`.", file=sys.stderr)
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


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())

"""Sources of rows: a file, a folder with one or more files for each split, or a dataset of the hub.

`formats.READERS` lists the file formats. In a folder, the split is part of the file's name or of the name of a folder above the
file (`train.parquet`, `data/train-00000-of-00002.parquet`, `test/rows.jsonl`), as on the hub. A hub dataset is `OWNER/NAME`, or
`OWNER/NAME:CONFIG` if it has several configs. Code that belongs to a dataset is never run.
"""

import hashlib
import re
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from agentrl.workflow.config import DatasetConfig
from agentrl.workflow.dataset_rows.filters import RowFilter
from agentrl.workflow.dataset_rows.formats import READERS, SourceRow, check_regular, plain_value, read_rows
from agentrl.workflow.errors import DatasetError, did_you_mean
from agentrl.workflow.plugins import names
from agentrl.workflow.runtime import hub
from agentrl.workflow.trajectory import storable

SPLIT_WORDS = {
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval"),
    "train": ("train", "training"),
}
"""A mapping from a split to the words for it in file names."""
MAX_FILES = 10_000
MAX_DEPTH = 4
"""The maximum number of nested folders (`MAX_DEPTH`) and of files (`MAX_FILES`) that are searched."""
_HUB_NAME = re.compile(r"[\w][\w.-]*/[\w][\w.-]*(:[\w.-]+)?", re.ASCII)
_WORD = re.compile(r"[A-Za-z0-9]+")


def kind_of_source(name: str) -> Literal["file", "folder", "hub", "plugin"]:
    """Return the kind of source that a dataset's name refers to. A name without a slash and without a file suffix is a plug-in
    or, if no plug-in has this name and a folder does, that folder.
    """
    if Path(name).suffix.lower() in READERS or expand_home(name).is_file():
        return "file"
    if "/" not in name and not name.startswith((".", "~")):
        is_folder = name not in ("", *names("datasets")) and ":" not in name and Path(name).is_dir()
        return "folder" if is_folder else "plugin"
    if expand_home(name).is_dir() or not _HUB_NAME.fullmatch(name):
        return "folder"
    return "hub"


def expand_home(name: str) -> Path:
    """Return a dataset's name as a path with `~` expanded. Raise DatasetError if the name contains a NUL character."""
    if "\0" in name:
        raise DatasetError(f"The name of the dataset {name!r:.200} holds a NUL character.", "Leave it out.")
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def source_files(name: str, split: str) -> list[Path]:
    """Return the split's files in order; empty for a plug-in or a dataset of the hub. Raise DatasetError if the file or folder
    has no such split, or the split has files of two formats.
    """
    kind, path = kind_of_source(name), expand_home(name)
    if kind == "file":
        if split != "train":
            message = f"{str(path)!r} has only the split 'train', and {split!r} was requested."
            raise DatasetError(message, "Pass --split train, or name the other split's file.")
        return [path]
    return _split_files(path, split) if kind == "folder" else []


def read_source(config: DatasetConfig) -> Iterator[SourceRow]:
    """Return the rows of a file, a folder or a hub dataset. Rename columns by `config.map`, and keep the rows that pass
    `config.filter`. Raise DatasetError if the source cannot be read, or its first row lacks a column that `config.map` names.
    """
    rows = _read_hub(config) if kind_of_source(config.name) == "hub" else _read_files(config.name, config.split)
    if config.filter:
        rows = _keep(rows, RowFilter(config.filter, config.name))
    return _rename_all(rows, config) if config.map else rows


def _keep(rows: Iterator[SourceRow], condition: RowFilter) -> Iterator[SourceRow]:
    with closing(condition):
        yield from condition.select(rows)
        condition.check_columns()


def hash_source(name: str, split: str) -> str:
    """Return the SHA-256 of the split's current files; empty if the name is neither a file nor a folder."""
    if kind_of_source(name) not in ("file", "folder"):
        return ""
    digest = hashlib.sha256()
    try:
        for path in source_files(name, split):
            check_regular(path)
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    except OSError as error:
        raise DatasetError(f"Cannot read the dataset {str(path)!r}: {error.strerror}.", "Check the path.") from error
    return digest.hexdigest()


def nested_value(values: dict[str, Any], column: str) -> Any:
    """Return the value of a column, or of a key in a column (`COLUMN.KEY`). Raise KeyError if the column or the key does not
    exist.
    """
    if column in values:
        return values[column]
    head, _, rest = column.partition(".")
    inner = values.get(head)
    if rest and isinstance(inner, dict):
        with suppress(KeyError):
            return nested_value(inner, rest)
    raise KeyError(column)


def _read_files(name: str, split: str) -> Iterator[SourceRow]:
    files, folder = source_files(name, split), expand_home(name)
    if kind_of_source(name) == "file":
        yield from read_rows(files[0], files[0].stem)
        return
    is_unique = len({path.stem for path in files}) == len(files)
    for path in files:
        inner = Path(path.name) if is_unique else path.relative_to(folder)
        label = split if len(files) == 1 else str(inner.with_suffix(""))
        yield from read_rows(path, storable(f"{Path(name).name}/{label}"), f"{inner}, ")


def _split_files(folder: Path, split: str) -> list[Path]:
    if not folder.is_dir():
        raise DatasetError(f"There is no dataset {str(folder)!r}: no such folder.", "Check the path.")
    files = [path for path in islice(_walk(folder, MAX_DEPTH), MAX_FILES) if path.suffix.lower() in READERS]
    if not files:
        scripts = sorted(path.name for path in folder.glob("*.py"))[:1]
        if scripts:
            message = f"The dataset {str(folder)!r} needs its own code ({scripts[0]}), which is not run."
            raise DatasetError(message, "Run that code yourself, and write the dataset's rows as .jsonl or .parquet.")
        raise DatasetError(f"The folder {str(folder)!r} has no files with rows.", f"Files may be {', '.join(READERS)}.")
    splits = {path: _split_of(path.relative_to(folder)) for path in files}
    if not any(splits.values()):
        splits = dict.fromkeys(files, "train")
    split_name = _named_split(split) or split
    chosen = sorted(path for path in files if splits[path] == split_name or split_name in _words(path.relative_to(folder)))
    if not chosen:
        split_names = sorted(set(filter(None, splits.values())))
        raise DatasetError(
            f"{str(folder)!r} has no split {split!r}.", f"{did_you_mean(split, split_names)} Pass it as --split."
        )
    formats = sorted({path.suffix for path in chosen})
    if len(formats) > 1:
        message = f"{str(folder)!r} holds the split {split!r} as {' and as '.join(formats)}."
        raise DatasetError(message, f"Name one: --dataset {chosen[0]}")
    return chosen


def _walk(folder: Path, depth: int) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir() and depth > 1:
            yield from _walk(path, depth - 1)
        elif path.is_file():
            yield path


def _words(path: Path) -> list[str]:
    return [word.lower() for part in reversed((*path.parts[:-1], path.stem)) for word in _WORD.findall(part)]


def _split_of(path: Path) -> str:
    """Return the split that a path names; empty if it names none. The name nearest to the path's end decides."""
    return next(filter(None, map(_named_split, _words(path))), "")


def _named_split(word: str) -> str:
    return next((split for split, aliases in SPLIT_WORDS.items() if word in aliases), "")


def _read_hub(config: DatasetConfig) -> Iterator[SourceRow]:
    name, _, part = config.name.partition(":")
    answer = hub.ask_hub("dataset", name)
    if answer == "unknown":
        message = f"There is no folder {name!r} here, and the hub has no such dataset, or you may not see it."
        raise DatasetError(message, "Check the name, or log in: hf auth login")
    if answer == "away":
        if not hub.has_fetched_dataset(name):
            message = f"There is no folder {name!r} here, and the hub does not answer."
            raise DatasetError(message, "Pass a file or folder with rows.")
        hub.go_offline()  # then only files fetched before can be used
    label = f"{name}/{config.split}"
    for number, values in enumerate(_stream_hub(config, name, part, answer == "known"), start=1):
        yield SourceRow(label, number, "row", plain_value(values))


def _stream_hub(config: DatasetConfig, name: str, part: str, streaming: bool) -> Iterator[dict[str, Any]]:
    try:
        from datasets import load_dataset  # slow, and needed only here

        yield from load_dataset(name, part or None, split=config.split, streaming=streaming)
    except Exception as error:  # the hub's client raises dozens of kinds; its text says which
        reason = " ".join(str(error).split())[:300].rstrip(".")
        if "scripts are no longer supported" in reason:
            message = f"The dataset {name!r} needs its own code, which is not run."
            raise DatasetError(message, "Choose a copy of it in Parquet.") from error
        if "Bad split" in reason or "Unknown split" in reason:
            raise DatasetError(f"{name!r} has no split {config.split!r}: {reason}.", "Pass another --split.") from error
        if "Config name is missing" in reason:
            raise DatasetError(f"{name!r} has several configs: {reason}.", f"Name one: --dataset {name}:CONFIG") from error
        raise DatasetError(f"The dataset {name!r} cannot be read ({type(error).__name__}: {reason}).", "Try again.") from error


def _rename_all(rows: Iterator[SourceRow], config: DatasetConfig) -> Iterator[SourceRow]:
    columns = [column for column in config.map.values() if column not in config.map]
    pairs, is_first = tuple(config.map.items()), True
    for row in rows:
        values = row.values
        if values is None:
            yield row
            continue
        try:
            fields = {field: values[column] if column in values else nested_value(values, column) for field, column in pairs}
        except KeyError as error:
            column = str(error.args[0])
            problem = f"no column {column!r}"
            if is_first and column.partition(".")[0] not in values:
                hint = f"{did_you_mean(column, values)} Correct --map."
                raise DatasetError(f"{config.name!r}, {row.place}: {problem}.", hint) from error
            yield row._replace(values=None, problem=problem + _known_keys(values, column))
            is_first = False
            continue
        for column in columns:
            values.pop(column, None)
        values.update(fields)
        yield row
        is_first = False


def _known_keys(values: dict[str, Any], column: str) -> str:
    head, _, key = column.rpartition(".")
    with suppress(KeyError):
        if head and isinstance(inner := nested_value(values, head), dict):
            return f"; {head!r}: {did_you_mean(key, list(inner)[:20])}".rstrip(".")
    return ""

"""Rows of files and folders: every format, other people's columns, filters, mixtures, and what is refused."""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from agentrl.workflow.config import DatasetConfig
from agentrl.workflow.dataset_rows.sources import hash_source, kind_of_source, read_source
from agentrl.workflow.datasets import LoadedTasks, absolute_name, load_tasks
from agentrl.workflow.errors import ConfigError, DatasetError

ROWS = [
    {"question": "What is 2 + 3?", "answer": "5", "level": "easy", "length": 14},
    {"question": "What is 20 + 30?", "answer": "50", "level": "hard", "length": 16},
    {"question": "What is 4 + 4?", "answer": "8", "level": "easy", "length": 14},
]
ASKED = {"role": "user", "content": "What is 2 + 3?"}


def write(path: Path, rows: Sequence[dict[str, Any]] = ROWS) -> Path:
    """Write the rows in the format of the file's suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    elif path.suffix == ".arrow":
        table = pyarrow.Table.from_pylist(list(rows))
        with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
    elif path.suffix in (".csv", ".tsv"):
        mark = "," if path.suffix == ".csv" else "\t"
        lines = [mark.join(rows[0]), *(mark.join(f'"{value}"' for value in row.values()) for row in rows)]
        path.write_text("\r\n".join(lines) + "\r\n", encoding="utf-8")
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(name: Path | str, **options: Any) -> LoadedTasks:
    return load_tasks(DatasetConfig(name=str(name), **options))


def refusal(name: Path | str, **options: Any) -> str:
    """The sentence and the hint with which a dataset is refused."""
    with pytest.raises((DatasetError, ConfigError)) as refused:
        load(name, **options)
    assert refused.value.exit_code == 2
    return str(refused.value)


@pytest.mark.parametrize("suffix", [".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow"])
def test_rows_of_every_file_format_give_same_tasks(tmp_path: Path, suffix: str) -> None:
    loaded = load(write(tmp_path / f"mine{suffix}"))
    first = 2 if suffix in (".csv", ".tsv") else 1
    assert [task.key for task in loaded.tasks] == [f"mine/{number}" for number in range(first, first + 3)]
    assert [(task.messages[0].content, task.reference) for task in loaded.tasks] == [
        (row["question"], row["answer"]) for row in ROWS
    ]
    assert loaded.tasks[1].metadata["level"] == "hard"


def test_rows_of_verl_and_trl_parquet_are_read(tmp_path: Path) -> None:
    verl = {
        "data_source": "openai/gsm8k",
        "prompt": [ASKED],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "5"},
        "extra_info": {"index": 0, "split": "train"},
    }
    (task,) = load(write(tmp_path / "verl.parquet", [verl])).tasks
    assert (task.messages[0].content, task.reference) == ("What is 2 + 3?", "5")
    assert task.metadata["extra_info"] == {"index": 0, "split": "train"}
    answer, worse = ({"role": "assistant", "content": text} for text in ("5", "6"))
    for number, row in enumerate(
        [
            {"prompt": [ASKED], "completion": [answer]},
            {"prompt": "What is 2 + 3?", "completion": "5"},
            {"prompt": [ASKED], "chosen": [answer], "rejected": [worse]},
            {"chosen": [ASKED, answer], "rejected": [ASKED, worse]},
        ]
    ):
        (task,) = load(write(tmp_path / f"trl{number}.parquet", [row])).tasks
        assert ([message.content for message in task.messages], task.reference) == (["What is 2 + 3?"], "5"), row


def test_map_reads_other_columns_and_names_the_nearest_one(tmp_path: Path) -> None:
    rows = [{"problem": "1+1?", "prompt": "unused", "solution": {"final": "2"}, "tier": 1}]
    file = write(tmp_path / "theirs.parquet", rows)
    (task,) = load(file, map="question=problem,answer=solution.final").tasks
    assert (task.messages[0].content, task.reference) == ("1+1?", "2")
    assert dict(task.metadata) == {"solution": {"final": "2"}, "tier": 1}
    assert "row 1: no column 'problm'. Did you mean 'problem'?" in refusal(file, map="question=problm,answer=tier")
    assert "--map question=COLUMN" in refusal(write(tmp_path / "none.jsonl", [{"problem": "1", "answer": "2"}]))
    near = refusal(write(tmp_path / "near.jsonl", [{"questoin": "1", "answer": "2"}]))
    assert "found none among 'questoin', 'answer' (--map question=questoin?)" in near
    theirs = refusal(write(tmp_path / "names.jsonl", [{"problem": "1", "solution": "2"}]))
    assert "(--map question=problem?)" in theirs, "what others call a question, not what is spelt like it"
    some = [{"q": {"text": "a"}, "answer": "1"}, {"q": {"txet": "b"}, "answer": "1"}, {"answer": "1"}]
    for number, rows in enumerate((some, some[1::-1])):
        file = write(tmp_path / f"some{number}.jsonl", rows)
        said = refusal(file, map="question=q.text")
        assert f"line {2 - number}: no column 'q.text'; 'q': Did you mean 'txet'?" in said
        assert len(load(file, map="question=q.text", skip_bad_rows=True).tasks) == 1
    with pytest.raises(ValueError, match="FIELD=COLUMN"):
        DatasetConfig(map="question")  # type: ignore[arg-type]


def test_filter_keeps_the_rows_for_which_its_condition_holds(tmp_path: Path) -> None:
    for suffix in (".jsonl", ".csv", ".parquet"):
        file = write(tmp_path / f"rows{suffix}")
        kept = load(file, filter="level = 'easy' and len(question) < 20").tasks
        assert [task.reference for task in kept] == ["5", "8"]
        assert [task.reference for task in load(file, filter="length + 0 > 15").tasks] == ["50"]
    nested = write(tmp_path / "nested.parquet", [{**row, "extra": {"tier": n}} for n, row in enumerate(ROWS)])
    assert [task.reference for task in load(nested, filter="extra->>'tier' >= 1").tasks] == ["50", "8"]
    sparse = write(tmp_path / "sparse.jsonl", [{"question": "a", "answer": "1"}, ROWS[1], ROWS[0]])
    assert [task.reference for task in load(sparse, filter="level = 'easy'").tasks] == ["5"], "a missing column is NULL"


def test_filter_refuses_conditions_that_do_not_work(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl")
    assert "no row of" in (said := refusal(file, filter="levle = 'easy'"))
    assert "Did you mean 'level'?" in said
    assert "has a column 'easy'" in refusal(file, filter="level = easy")
    assert "syntax error" in refusal(file, filter="level ==== 2")
    assert "does not work" in refusal(file, filter="1) FROM (SELECT 1); DROP TABLE x; SELECT (1")
    assert "does not work" in refusal(file, filter="load_extension('x')")
    assert "does not work" in refusal(file, filter="length(zeroblob(1000000000)) > 1")
    said = refusal(file, filter="question->>'a' = 1")
    assert "does not work (line 1): malformed JSON" in said
    assert "does not work (line 1): string or blob too big" in refusal(
        file, filter="replace(hex(zeroblob(5000000)), '0', 'ab') = ''"
    )
    endless = "(WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t) SELECT max(n) FROM t) > 0"
    assert "it takes too much work" in refusal(file, filter=endless)
    assert "No row passes --filter" in refusal(file, filter="length > 100")


def test_filter_judges_each_row_alone(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", [{**ROWS[number % 3], "number": number} for number in range(100)])
    for condition in ("number % 3 = 1", "sum(number) % 3 = 1", "max(number) OVER () % 3 = 1", '0 OR "number" % 3 = 1 -- all'):
        kept = load(file, filter=condition).tasks
        assert [task.metadata["number"] for task in kept] == list(range(1, 100, 3)), condition
    mixed = [{"question": str(n), "answer": "1", f"only{n}": n, "level": "easy" if n % 2 else None} for n in range(100)]
    kept = load(write(tmp_path / "mixed.jsonl", mixed), filter="level = 'easy' or only50 = 50").tasks
    assert [int(task.messages[0].content) for task in kept] == sorted([*range(1, 100, 2), 50])


def test_filter_names_rows_that_sql_cannot_hold(tmp_path: Path) -> None:
    rows = [*ROWS, {**ROWS[0], "level": "\ud800"}, {**ROWS[0], "level": 2**70}, {**ROWS[0], "level": {"a": "\ud800"}}, ROWS[2]]
    file = write(tmp_path / "rows.jsonl", rows)
    said = refusal(file, filter="level = 'easy'")
    assert "line 4: half a surrogate pair in a column that --filter reads" in said
    assert "line 5: a number in a column that --filter reads is too large for SQL" in said
    assert "line 6: half a surrogate pair" in said
    assert [task.key for task in load(file, filter="level = 'easy'", skip_bad_rows=True).tasks] == ["rows/1", "rows/3"]


def test_filter_takes_linear_time_for_long_texts(tmp_path: Path) -> None:
    """SQLite's own `instr` and `replace` would run for hours here, in one instruction, which nothing interrupts."""
    file = write(tmp_path / "rows.jsonl", [{**ROWS[0], "text": "a" * 4_000_000}])
    condition = "instr(text, substr(text, 1, 2000000) || 'b') = 0 AND replace(text, substr(text, 1, 2000000) || 'b', '') = text"
    assert len(load(file, filter=condition).tasks) == 1
    assert len(load(file, filter="instr(question, '2') = 9 AND replace(question, 'is', '') LIKE 'What  %'").tasks) == 1
    assert len(load(file, filter="instr(NULL, 'a') IS NULL AND replace('a', '', 'b') = 'a'").tasks) == 1


def test_folders_hold_split_in_file_and_folder_names(tmp_path: Path) -> None:
    hub, plain = tmp_path / "hub", tmp_path / "plain"
    for number in (0, 1):
        write(hub / "data" / f"train-0000{number}-of-00002.parquet", ROWS[number : number + 1])
    write(hub / "data" / "test-00000-of-00001.parquet", ROWS[2:])
    keys = [task.key for task in load(hub).tasks]
    assert keys == ["hub/train-00000-of-00002/1", "hub/train-00001-of-00002/1"]
    assert [(task.key, task.reference) for task in load(hub, split="test").tasks] == [("hub/test/1", "8")]
    assert "has no split 'tset'. Did you mean 'test'?" in refusal(hub, split="tset")
    write(plain / "val" / "rows.csv")
    assert len(load(plain, split="validation").tasks) == 3
    write(tmp_path / "unnamed" / "rows.jsonl")
    assert len(load(tmp_path / "unnamed").tasks) == 3
    write(plain / "val" / "rows.jsonl")
    assert "as .csv and as .jsonl. Name one: --dataset" in refusal(plain, split="validation")


def test_files_of_same_name_in_folders_have_own_keys(tmp_path: Path) -> None:
    for part in ("algebra", "geometry"):
        write(tmp_path / "sums" / part / "train-0.jsonl", [{**ROWS[0], "part": part}])
    assert [task.key for task in load(tmp_path / "sums").tasks] == ["sums/algebra/train-0/1", "sums/geometry/train-0/1"]
    write(tmp_path / "sums" / "geometry" / "train-0.jsonl", [{}])
    assert "geometry/train-0.jsonl, line 1: must have one of" in refusal(tmp_path / "sums")


def test_dataset_name_unfit_for_path_or_database_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "sums" / os.fsdecode(b"train-\xff.jsonl"), ROWS[:1])
    write(tmp_path / "sums" / "train-0.jsonl", ROWS[1:])
    assert [task.key for task in load(tmp_path / "sums").tasks] == ["sums/train-0/1", "sums/train-0/2", "sums/train-?/1"]
    assert "No such file" in refusal("~no_such_user/rows.jsonl")
    assert "holds a NUL character" in refusal("rows\0.jsonl")


def test_folders_of_the_datasets_library_are_read_without_it(tmp_path: Path) -> None:
    import datasets

    whole = datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS[:2]), "test": datasets.Dataset.from_list(ROWS[2:])})
    whole.save_to_disk(str(tmp_path / "saved"))
    assert [task.reference for task in load(tmp_path / "saved").tasks] == ["5", "50"]
    assert [task.reference for task in load(tmp_path / "saved", split="test").tasks] == ["8"]


def test_dataset_that_needs_own_code_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "scripted"
    folder.mkdir()
    (folder / "scripted.py").write_text("raise SystemExit")
    assert "needs its own code (scripted.py), which is not run. Run that code yourself" in refusal(folder)
    (folder / "scripted.py").unlink()
    assert "has no files with rows. Files may be .jsonl" in refusal(folder)
    assert "no such folder" in refusal(tmp_path / "absent")


def test_malformed_rows_are_named_by_file_and_line(tmp_path: Path) -> None:
    csv = tmp_path / "rows.csv"
    csv.write_text('question,answer\n"two\nlines",1\nb,2,3\n\nc\n')
    said = refusal(csv)
    assert "line 4: has 3 fields, and the header 2" in said
    assert "line 6: has 1 fields" in said
    folder = tmp_path / "folder"
    write(folder / "train-0.jsonl")
    write(folder / "train-1.jsonl", [{**ROWS[0], "answer": {}}])
    assert "train-1.jsonl, line 1: 'answer' must be text, not an object" in refusal(folder)
    large = write(tmp_path / "large.parquet", [ROWS[0], {**ROWS[1], "level": "a" * 10_000_000}, ROWS[2]])
    assert "row 2: the row has more than 8 MB" in refusal(large)
    assert [task.reference for task in load(large, skip_bad_rows=True).tasks] == ["5", "8"]
    write(tmp_path / "many.jsonl", [{"question": "a"}] * 3000)
    assert "has 1001 malformed rows" in refusal(tmp_path / "many.jsonl"), "a file that is wrong throughout is not read through"


def test_dataset_file_of_wrong_format_is_refused(tmp_path: Path) -> None:
    def file(name: str, content: bytes) -> Path:
        (tmp_path / name).write_bytes(content)
        return tmp_path / name

    latin = refusal(file("latin.csv", "question,answer\ncaf\xe9,1\n".encode("latin-1")))
    assert "line 2: not UTF-8 (byte 4). Convert it: iconv -f WINDOWS-1252 -t UTF-8 latin.csv" in latin
    assert "iconv -f UTF-16" in refusal(file("wide.csv", "question,answer\na,1\n".encode("utf-16")))
    assert "not CSV" in refusal(file("open.csv", b'question,answer\n"a,1\n'))
    assert "two columns called 'answer'" in refusal(file("twice.csv", b"answer,answer\n1,2\n"))
    assert "names no columns" in refusal(file("empty.csv", b""))
    assert "a column without a name" in refusal(file("nameless.csv", b"question,,answer\n"))
    assert "has only one column, 'question;answer': it has ';' where the separator ',' is expected" in refusal(
        file("semi.csv", b"question;answer\na;1\n")
    )
    assert "Convert it: tr '\\r' '\\n' < mac.csv" in refusal(file("mac.csv", b"question,answer\ra,1\r"))
    assert "convert it with iconv -f UTF-16" in refusal(file("wide.jsonl", '{"question": "a"}\n'.encode("utf-16")))
    assert "more than 8 MB" in refusal(file("long.csv", b"question,answer\n" + b"a" * 9_000_000 + b",1\n"))
    assert "has 2000 columns" in refusal(file("wide.csv", ",".join(map(str, range(2000))).encode()))
    assert "is not parquet that can be read" in refusal(file("text.parquet", b"question,answer\n"))
    whole = write(tmp_path / "whole.parquet").read_bytes()
    assert "is not parquet that can be read" in refusal(file("cut.parquet", whole[: len(whole) // 2]))
    assert "is not arrow that can be read" in refusal(file("text.arrow", b"x" * 100))
    assert "No such file" in refusal(tmp_path / "absent.parquet")
    assert "jq -c '.[]' rows.json > rows.jsonl" in refusal(file("rows.json", b"[]"))
    assert "Write its rows as .jsonl" in refusal(file("rows.jsonl.gz", b"\x1f"))
    assert len(load(file("LOUD.CSV", b"question,answer\na,1\n")).tasks) == 1
    deep = pyarrow.array([None], pyarrow.int8())
    for _ in range(40):
        deep = pyarrow.array([None], pyarrow.list_(deep.type))
    parquet.write_table(pyarrow.table({"question": ["a"], "answer": ["1"], "deep": deep}), tmp_path / "deep.parquet")
    assert "'deep' nests more than 32 levels" in refusal(tmp_path / "deep.parquet")


def test_dataset_file_without_end_is_refused_or_cut(tmp_path: Path) -> None:
    pipe, growing = tmp_path / "pipe.jsonl", write(tmp_path / "growing.jsonl")
    os.mkfifo(pipe)
    assert "it is a pipe or a device" in refusal(pipe)
    with pytest.raises(DatasetError, match="a pipe or a device"):
        hash_source(str(pipe), "train")
    rows = read_source(DatasetConfig(name=str(growing)))
    read = []
    for row in rows:
        read.append(row.number)
        with growing.open("a") as file:
            file.write(json.dumps(ROWS[0]) + "\n")
    assert read == [1, 2, 3], "a row that is appended while the file is read is not of this dataset"


def test_json_rows_are_bounded_and_unambiguous(tmp_path: Path) -> None:
    rows = [
        '{"question": "a", "answer": "1", "question": "b"}',
        '{"question": "a", "answer": "1", "extra": {"x": 1, "x": 2}}',
        json.dumps({"question": "a", "answer": "1", **dict.fromkeys(map(str, range(1000)), 0)}),
        '{"question": "a", "answer": "1", "extra": ' + "[" * 300 + "]" * 300 + "}",
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    said = refusal(tmp_path / "rows.jsonl")
    assert "line 1: the key 'question' stands twice in one object" in said
    assert "line 2: the key 'x' stands twice" in said
    assert "line 3: has 1002 columns; at most 1000 are read" in said
    assert "line 4: nested more than 200 levels" in said


def test_parquet_values_that_python_lacks_are_named_by_row(tmp_path: Path) -> None:
    text = pyarrow.Array.from_buffers(
        pyarrow.string(), 2, [None, pyarrow.py_buffer(b"\0\0\0\0\2\0\0\0\3\0\0\0"), pyarrow.py_buffer(b"\xff\xfea")]
    )
    days = pyarrow.array([0, 2**58], pyarrow.timestamp("ms"))
    columns = {"question": ["a", "b"], "answer": ["1", "2"]}
    parquet.write_table(pyarrow.table({**columns, "note": text}), tmp_path / "text.parquet")
    parquet.write_table(pyarrow.table({**columns, "day": days}), tmp_path / "days.parquet")
    parquet.write_table(pyarrow.table({**columns, "score": [1.0, float("inf")]}), tmp_path / "scores.parquet")
    assert "row 1: 'note' is not UTF-8" in refusal(tmp_path / "text.parquet")
    assert "row 2: 'day' has a value that cannot be read as timestamp[ms]" in refusal(tmp_path / "days.parquet")
    assert "row 2: an infinite number in 'score'" in refusal(tmp_path / "scores.parquet")
    assert [task.reference for task in load(tmp_path / "text.parquet", skip_bad_rows=True).tasks] == ["2"]
    whole = (tmp_path / "days.parquet").read_bytes()
    (tmp_path / "torn.parquet").write_bytes(whole[:20] + bytes(40) + whole[60:])
    assert "is not parquet that can be read" in refusal(tmp_path / "torn.parquet")


def test_csv_lines_within_quotes_end_with_lf_in_every_file(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_bytes(b'\xef\xbb\xbfquestion,answer\r\n"two\r\nlines",1\r\n"say ""a""",2\r\n')
    assert [task.messages[0].content for task in load(tmp_path / "rows.csv").tasks] == ["two\nlines", 'say "a"']


def test_answer_list_becomes_reference_and_aliases(tmp_path: Path) -> None:
    first, second = load(
        write(
            tmp_path / "rows.jsonl",
            [{"question": "a", "answer": ["Paris", "paris, France", 7]}, {"question": "b", "answer": ["x"]}],
        )
    ).tasks
    assert (first.reference, dict(first.metadata)) == ("Paris", {"aliases": ["paris, France", "7"]})
    assert (second.reference, dict(second.metadata)) == ("x", {})
    rows = [{"question": "a", "answer": answer, "aliases": []} for answer in ([], ["a", "b"], [["a"]], ["a", None])]
    said = refusal(write(tmp_path / "bad.jsonl", rows))
    assert "line 1: 'answer' is an empty list" in said
    assert "line 2: 'answer' is a list, so the row may not have 'aliases' as well" in said
    assert "line 3: 'answer' must be text, not a list" in said


def test_row_values_outside_json_become_text_or_null(tmp_path: Path) -> None:
    import datetime
    import decimal

    row = {
        **ROWS[0],
        "day": datetime.date(2026, 1, 2),
        "price": decimal.Decimal("1.5"),
        "score": float("nan"),
        "image": b"\xff",
    }
    (task,) = load(write(tmp_path / "odd.parquet", [row])).tasks
    assert dict(task.metadata) == {"level": "easy", "length": 14, "day": "2026-01-02", "price": "1.5", "score": None}


def test_datasets_are_joined_or_drawn_by_weight(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", [{"question": f"a{n}", "answer": str(n)} for n in range(100)])
    second = write(tmp_path / "b.csv", [{"question": f"b{n}", "answer": str(n)} for n in range(30)])
    assert len(load(f"{first},{second}").tasks) == 130
    mixed = load(f"{first}=0.8,{second}=0.2")
    keys = [task.key for task in mixed.tasks]
    assert mixed.shares == {str(first): (100, 100), str(second): (25, 30)}
    assert len(keys) == 125
    assert keys == [task.key for task in load(f"{first}=0.8,{second}=0.2").tasks], "the same draw each time"
    other = load_tasks(DatasetConfig(name=f"{first}=0.8,{second}=0.2"), seed=1).tasks
    assert keys != [task.key for task in other]
    few = load(f"{first}=0.8,{second}=0.2", max_tasks=10)
    assert few.shares == {str(first): (8, 10), str(second): (2, 10)}
    assert load(f"arithmetic,{first}", max_tasks=10).env == "", "their envs differ"
    assert "names" in refusal(f"{first},{first}")
    assert "gives some datasets a weight" in refusal(f"{first}=1,{second}")
    assert "is not a valid weight" in refusal(f"{first}=0,{second}=x")
    shutil.copy(first, tmp_path / "b.jsonl")
    write(tmp_path / "other" / "a.jsonl")
    assert "name their folders" in refusal(f"{first},{tmp_path / 'other' / 'a.jsonl'}")


def test_dataset_name_means_file_folder_hub_or_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own" / "data").mkdir(parents=True)
    (tmp_path / "gsm8k").mkdir()
    kinds = {
        "a.jsonl": "file",
        "own/data": "folder",
        "own": "folder",
        "./x": "folder",
        "openai/gsm8k": "hub",
        "openai/gsm8k:main": "hub",
    }
    assert {name: kind_of_source(name) for name in kinds} == kinds
    assert kind_of_source("gsm8k") == kind_of_source("package.module:name") == "plugin"
    assert absolute_name("a.jsonl=0.7,gsm8k=0.3") == f"{tmp_path / 'a.jsonl'}=0.7,gsm8k=0.3"


def test_hash_source_changes_with_the_rows(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl")
    before = hash_source(str(file), "train")
    write(file, ROWS[:2])
    assert before != hash_source(str(file), "train")
    assert hash_source("gsm8k", "train") == ""

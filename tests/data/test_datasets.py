"""Datasets: what is read, what is refused, and that every gold answer is worth 1.0."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.workers.requests.submit import prepare
from agentrl.workflow.config import DatasetConfig, build
from agentrl.workflow.datasets import Dataset, load_tasks
from agentrl.workflow.datasets.jsonl import read_rows
from agentrl.workflow.errors import ConfigError, DatasetError
from agentrl.workflow.plugins import find
from agentrl.workflow.rewards import score, total_reward
from agentrl.workflow.settings import settings
from agentrl.workflow.trajectory import Episode, Message, Step, Task, ToolCall, ToolResult
from tests.support.small_models import tiny_random

REPOSITORY = Path(__file__).parents[2]
GOOD = {"question": "1+1?", "answer": "2"}
GSM8K_ROW = {"question": "Half of 48?", "answer": "It is 48/2 = <<48/2=24>>24.\nWith 1,000: <<1000+24=1024>>1,024\n#### 1,024"}


@pytest.fixture
def gsm8k_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder that AGENTRL_GSM8K_DIR names."""
    yield from _named(tmp_path, monkeypatch)


@pytest.fixture
def published_gsm8k(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The published files; where they are missing: skip at home, fail in CI."""
    folder = Path(os.environ.get("AGENTRL_GSM8K_DIR", REPOSITORY / "../shared/data/gsm8k")).resolve()
    if not (folder / "train.jsonl").is_file():
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)("set AGENTRL_GSM8K_DIR to gsm8k's folder")
    yield from _named(folder, monkeypatch)


def _named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("AGENTRL_GSM8K_DIR", str(folder))
    settings.cache_clear()
    yield folder
    settings.cache_clear()


def write(path: Path, *rows: object) -> Path:
    """A file with one line per row: bytes as they are, values as JSON."""
    path.write_bytes(b"\n".join(row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows) + b"\n")
    return path


def problems_of(*rows: object) -> list[str]:
    """What is wrong with these rows."""
    return read_rows(row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows)[1]


def episode_of(task: Task, conversation: Sequence[Message]) -> Episode:
    """The episode of a policy that says what the conversation says."""
    episode = Episode(task)
    turns = conversation[len(task.messages) :]
    for position, message in enumerate(turns):
        if message.role == "assistant":
            answers = turns[position + 1 : position + 1 + len(message.tool_calls)]
            results = tuple(ToolResult(answer.content) for answer in answers) if message.tool_calls else None
            step = Step(len(episode.steps), (), (), (), (), "stop", message, 0, results=results)
            episode = episode.with_step(step)
    return replace(episode, status="done", stop_reason="answered")


def reward_of(dataset: Dataset, episode: Episode) -> float:
    """The scalar reward under the dataset's own env."""
    weights = find("envs", dataset.env).rewards
    return total_reward(score(episode, weights), weights)


@pytest.mark.slow
def test_gsm8k_gold_answers_earn_full_reward(published_gsm8k: Path) -> None:
    gsm8k = find("datasets", "gsm8k")
    tasks = [task for split in ("train", "test") for task in gsm8k.load(split)]
    assert len(tasks) == 8792
    poor = [
        task.key
        for task, conversation in zip(tasks, gsm8k.demonstrations(tasks, 0), strict=True)
        if reward_of(gsm8k, episode_of(task, conversation)) != 1.1
    ]
    assert poor == []


def test_row_texts_have_lf_line_ends(tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "def f():\r\n    pass\r\n"}], "answer": "a\r\nb"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (task,) = load_tasks(DatasetConfig(name=str(tmp_path / "rows.jsonl"))).tasks
    assert (task.messages[0].content, task.reference) == ("def f():\n    pass\n", "a\nb")


def test_gsm8k_demonstrations_call_calculator_where_possible(published_gsm8k: Path) -> None:
    gsm8k = find("datasets", "gsm8k")
    tasks = list(gsm8k.load("test"))
    for task, conversation in zip(tasks, gsm8k.demonstrations(tasks, 0), strict=True):
        calls = sum(len(message.tool_calls) for message in conversation)
        assert calls == task.metadata["annotations"]
        assert "<<" not in "".join(message.content for message in conversation[1:])
        assert score(episode_of(task, conversation), {"format": 1.0}) == {"format": 1.0}


def test_gsm8k_solution_becomes_calculator_calls(gsm8k_folder: Path) -> None:
    write(gsm8k_folder / "train.jsonl", GSM8K_ROW)
    gsm8k = find("datasets", "gsm8k")
    [task] = gsm8k.load("train")
    assert (task.key, task.reference, dict(task.metadata)) == ("gsm8k/train/1", "1024", {"annotations": 2})
    [conversation] = gsm8k.demonstrations([task], 0)
    said = [(m.role, m.content, [dict(call.arguments) for call in m.tool_calls]) for m in conversation]
    assert said == [
        ("user", "Half of 48?", []),
        ("assistant", "It is 48/2 =", [{"expression": "48/2"}]),
        ("tool", "24", []),
        ("assistant", "24.\nWith 1,000:", [{"expression": "1000+24"}]),
        ("tool", "1024", []),
        ("assistant", "1,024\n#### 1024", []),
    ]


def test_gsm8k_solution_without_computation_answers_directly(gsm8k_folder: Path) -> None:
    write(gsm8k_folder / "test.jsonl", {"question": "How many?", "answer": "Seven.\n#### 7"})
    gsm8k = find("datasets", "gsm8k")
    [conversation] = gsm8k.demonstrations(list(gsm8k.load("test")), 0)
    assert [message.content for message in conversation] == ["How many?", "Seven.\n#### 7"]


@pytest.mark.parametrize(
    ("annotation", "computes"),
    [
        ("<<1/3=0.33>>", True),
        ("<<2*1,000=2,000>>", True),
        ("<<5-5=0>>", True),
        ("<<40*.5=$20>>", True),
        ("<<48/2=25>>", False),
        ("<<5-5=1>>", False),
        ("<<3*x=12>>", False),
        ("<<1/0=0>>", False),
        ("<<48/2=half>>", False),
        ("<<1+1=2>> and <<2+2=5>>", False),
    ],
)
def test_gsm8k_row_with_wrong_annotation_has_no_demonstration(gsm8k_folder: Path, annotation: str, computes: bool) -> None:
    write(gsm8k_folder / "train.jsonl", {"question": "?", "answer": f"So {annotation} it is\n#### 7"}, GSM8K_ROW)
    gsm8k = find("datasets", "gsm8k")
    first, second = gsm8k.demonstrations(list(gsm8k.load("train")), 0)
    assert (first is not None) is computes
    assert second is not None


def test_gsm8k_rows_are_checked_like_other_files(gsm8k_folder: Path) -> None:
    write(gsm8k_folder / "train.jsonl", GSM8K_ROW, {"question": "?", "answer": "no mark"}, {"question": ""}, GSM8K_ROW)
    with pytest.raises(DatasetError) as caught:
        find("datasets", "gsm8k").load("train")
    assert "2 malformed rows" in str(caught.value)
    assert "line 2: no '#### ANSWER'" in str(caught.value)


def test_gsm8k_file_missing_is_named(gsm8k_folder: Path) -> None:
    with pytest.raises(DatasetError, match=r"Cannot read the dataset .*train\.jsonl"):
        find("datasets", "gsm8k").load("train")


@pytest.mark.slow
def test_gsm8k_without_hub_is_one_sentence(tmp_path: Path) -> None:
    # A process of its own, because the hub's client reads its environment when it is imported.
    code = "from agentrl.workflow.datasets.gsm8k import load\nload('train')"
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY)}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    last = ran.stderr.strip().splitlines()[-1]
    assert last.startswith("agentrl.workflow.errors.DatasetError: gsm8k cannot be loaded: ")
    assert "AGENTRL_GSM8K_DIR" in last


def test_arithmetic_test_answers_earn_one() -> None:
    arithmetic = find("datasets", "arithmetic")
    for task in load_tasks(DatasetConfig(name="arithmetic", max_tasks=64)).tasks:
        episode = episode_of(task, (*task.messages, Message("assistant", task.reference)))
        assert reward_of(arithmetic, episode) == 1.0


def test_jsonl_file_is_dataset(tmp_path: Path) -> None:
    path = write(
        tmp_path / "mine.jsonl",
        {"question": "1+1?", "answer": "2", "source": "me"},
        b"",
        {"prompt": "a\tb\n?", "reference": 0.5},
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "3?"}], "answer": 3},
    )
    loaded = load_tasks(DatasetConfig(name=str(path)))
    assert [(task.key, task.reference) for task in loaded.tasks] == [("mine/1", "2"), ("mine/3", "0.5"), ("mine/4", "3")]
    assert dict(loaded.tasks[0].metadata) == {"source": "me"}
    assert [message.role for message in loaded.tasks[2].messages] == ["system", "user"]
    assert (loaded.env, loaded.skipped) == ("math", ())


def test_row_reader_accepts_windows_line_ends_and_bom(tmp_path: Path) -> None:
    path = tmp_path / "windows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(json.dumps({**GOOD, "answer": str(n)}).encode() for n in (1, 2)) + b"\r\n")
    assert [task.reference for task in load_tasks(DatasetConfig(name=str(path))).tasks] == ["1", "2"]


def test_row_reader_accepts_openai_and_trl_forms(tmp_path: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "calculator", "arguments": '{"expression": "6*7"}'}}
    history = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "What is 6 "}, {"type": "text", "text": "times 7?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    ]
    lines = [{"prompt": history, "answer": 42}, {"messages": [*history, {"role": "user", "content": "Twice?"}], "answer": 84}]
    lines.append({"prompt": history[:2], "answer": 42})
    silent = {"id": "c2", "type": "function", "function": {"name": "clock", "arguments": ""}}
    thought = {"role": "assistant", "content": "", "reasoning": "hm", "tool_calls": [silent]}
    lines.append({"prompt": [*history[:2], thought, {**history[3], "tool_call_id": "c2"}], "answer": 42})
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    tasks = load_tasks(DatasetConfig(name=str(path))).tasks
    expected = (
        Message("system", "Be short."),
        Message("user", "What is 6 times 7?"),
        Message("assistant", "", tool_calls=(ToolCall("calculator", {"expression": "6*7"}),)),
        Message("tool", "42", name="calculator"),
    )
    called = Message("assistant", "", "hm", (ToolCall("clock", {}),))
    assert [task.messages for task in tasks] == [
        expected, (*expected, Message("user", "Twice?")), expected[:2],
        (*expected[:2], called, Message("tool", "42", name="clock")),
    ]  # fmt: skip
    other = replace(expected[2], tool_calls=(ToolCall("calculator", {"expression": "6*8"}),))
    changed = replace(tasks[0], messages=(*expected[:2], other, expected[3]))
    assert changed.content_hash != tasks[0].content_hash


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (b'{"question": "\xff", "answer": "1"}', r"not UTF-8 \(byte 15\)"),
        (b'{"question": ', "not JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[1]", "must be an object, not a list"),
        (b'{"question": "a", "answer": NaN}', "NaN is not a valid JSON number"),
        (b'{"question": "a", "answer": "1", "weight": -Infinity}', "-Infinity is not a valid JSON number"),
        (b'{"question": "a", "answer": 1e999}', "too large"),
        ({"answer": "1"}, "'question', 'prompt', 'messages'; found none"),
        ({"question": "a"}, "'answer', 'reference'; found none"),
        ({"question": "a", "prompt": "b", "answer": "1"}, "found 'question' and 'prompt'"),
        ({"question": " ", "answer": "1"}, "'question' is empty"),
        ({"question": "a", "answer": ""}, "'answer' is empty"),
        ({"question": 5, "answer": "1"}, "'question' must be text, not a number"),
        ({"question": "a", "answer": None}, "'answer' must be text, not null"),
        ({"question": "a", "answer": True}, "'answer' must be text, not a boolean"),
        ({"question": "a\x1b[2J", "answer": "1"}, r"control character U\+001B in 'question' \(character 2\)"),
        ({"question": "a\x00", "answer": "1"}, r"U\+0000"),
        (b'{"question": "\\ud800", "answer": "1"}', r"U\+D800"),
        ({"question": "a", "answer": "1", "note": "\x00"}, "NUL"),
        (b'{"question": "a", "answer": "1", "note": "\\udc00"}', "surrogate"),
        ({"question": "a" * 2_000_000, "answer": "1"}, "the prompt has 2.0 MB; at most 1 MB"),
        ({"question": "a", "answer": "1", "note": "a" * 10_000_000}, "the row has more than 8 MB"),
        ({"messages": [], "answer": "1"}, "'messages' is an empty list"),
        ({"messages": {}, "answer": "1"}, "'messages' must be a list, not an object"),
        (b'{"question": "?", "answer": ' + b"1" * 5000 + b"}", "a number of 5000 digits is too large"),
        ({"messages": [{"role": "user"}], "answer": "1"}, r"'messages\[0\].content' must be text, not null"),
        (
            {"messages": [{"role": "tool", "content": "x"}], "answer": "1"},
            "this tool result has no earlier call of an assistant",
        ),
        ({"messages": [{"role": "robot", "content": "x"}], "answer": "1"}, r"messages\[0\].role must be one of"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image_url"}]}], "answer": "1"},
            "only parts of type text are accepted",
        ),
        (
            {"messages": [{"role": "assistant", "content": "x"}], "answer": "1"},
            "the last message must be the user's or a tool's",
        ),
        ({"messages": [{"role": "user", "content": "a" * 600_000}] * 2, "answer": "1"}, "the prompt has 1.2 MB"),
    ],
)
def test_malformed_row_is_named_with_line_and_fault(row: object, why: str) -> None:
    [problem] = problems_of(GOOD, row)
    assert problem.startswith("line 2: ")
    assert re.search(why, problem)


def test_row_with_escaped_backslash_before_u0000_is_text() -> None:
    assert problems_of({"question": "a", "answer": "1", "note": "\\u0000"}) == []


def test_load_tasks_counts_repeated_row_once(tmp_path: Path) -> None:
    file = write(tmp_path / "own.jsonl", GOOD, {**GOOD, "answer": "3"}, GOOD, {**GOOD, "id": 7}, GOOD)
    loaded = load_tasks(DatasetConfig(name=str(file)))
    assert [task.key for task in loaded.tasks] == ["own/1", "own/2", "own/4"]
    assert (loaded.repeated, loaded.skipped) == (2, ())
    few = load_tasks(DatasetConfig(name=str(file), max_tasks=3))
    assert ([task.key for task in few.tasks], few.repeated) == (["own/1", "own/2", "own/4"], 1), "the first tasks, not rows"
    prepared = prepare(None, build({"dataset.name": str(file), "model.path": str(tiny_random(tmp_path / "model"))}))
    assert f"{file}: 2 rows say the same as an earlier row; each task is used once." in prepared.remarks


def test_load_tasks_shows_twenty_faults_and_counts_others(tmp_path: Path) -> None:
    path = write(tmp_path / "bad.jsonl", GOOD, *[b"{"] * 25)
    with pytest.raises(DatasetError) as caught:
        load_tasks(DatasetConfig(name=str(path)))
    text = str(caught.value)
    assert "has 25 malformed rows" in text
    assert "line 21:" in text
    assert "line 22:" not in text
    assert "and 5 more" in text
    assert "skip_bad_rows" in caught.value.hint


def test_load_tasks_skips_bad_rows_on_request_and_reports_each(tmp_path: Path) -> None:
    path = write(tmp_path / "bad.jsonl", b"{", GOOD, {"question": "a"})
    loaded = load_tasks(DatasetConfig(name=str(path), skip_bad_rows=True))
    assert [task.key for task in loaded.tasks] == ["bad/2"]
    assert [problem.partition(":")[0] for problem in loaded.skipped] == ["line 1", "line 3"]


@given(st.lists(st.binary(max_size=40)))
def test_read_rows_reads_or_reports_every_line(lines: list[bytes]) -> None:
    rows, problems = read_rows(lines)
    texts = [line.removeprefix(b"\xef\xbb\xbf") if index == 0 else line for index, line in enumerate(lines)]
    assert len(rows) + len(problems) == sum(bool(text.strip()) for text in texts)


@given(st.text(), st.integers(), st.dictionaries(st.text(), st.text()))
def test_row_accepted_can_be_hashed_and_stored(question: str, answer: int, metadata: dict[str, str]) -> None:
    rows, problems = read_rows([json.dumps({**metadata, "question": question, "answer": answer}).encode()])
    assert len(rows) + len(problems) == 1
    for row in rows:
        json.dumps([row.messages[0].content, row.reference, row.metadata], ensure_ascii=False).encode()
        assert Task("k", row.messages, row.reference, row.metadata).content_hash


def test_max_tasks_takes_the_first_tasks(tmp_path: Path) -> None:
    path = write(tmp_path / "many.jsonl", *({**GOOD, "answer": str(n)} for n in range(5)))
    assert [task.key for task in load_tasks(DatasetConfig(name=str(path), max_tasks=2)).tasks] == ["many/1", "many/2"]


def test_load_tasks_refuses_unusable_files(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="No such file"):
        load_tasks(DatasetConfig(name=str(tmp_path / "absent.jsonl")))
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(DatasetError, match="Is a directory"):
        load_tasks(DatasetConfig(name=str(tmp_path / "folder.jsonl")))
    with pytest.raises(DatasetError, match=r"has no tasks\. Write one JSON object per line"):
        load_tasks(DatasetConfig(name=str(write(tmp_path / "empty.jsonl", b""))))
    with pytest.raises(DatasetError, match="only the split 'train'"):
        load_tasks(DatasetConfig(name=str(write(tmp_path / "one.jsonl", GOOD)), split="test"))


def test_dataset_unknown_name_split_and_option_are_refused() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'gsm8k'"):
        load_tasks(DatasetConfig(name="gsm8"))
    with pytest.raises(ConfigError, match="No dataset is called"):
        load_tasks(DatasetConfig(name="passwd\x1b"))
    with pytest.raises(DatasetError, match=r"There is no dataset '../../etc/passwd\\x1b'"):
        load_tasks(DatasetConfig(name="../../etc/passwd\x1b"))
    with pytest.raises(DatasetError, match=r"jsonl is a format.*--dataset FILE\.jsonl"):
        load_tasks(DatasetConfig(name="jsonl"))
    with pytest.raises(DatasetError, match=r"no split 'trian'\. Did you mean 'train'"):
        load_tasks(DatasetConfig(name="gsm8k", split="trian"))
    with pytest.raises(ConfigError, match="skip_bad_rows does not apply"):
        load_tasks(DatasetConfig(name="gsm8k", skip_bad_rows=True))


def test_dataset_loader_that_fails_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "from agentrl.workflow.datasets import Dataset\n"
    module += "raising = Dataset(load=lambda split: (1 / 0 for _ in 'a'), env='math')\n"
    module += "strange = Dataset(load=lambda split: iter(['2 + 2']), env='math')\n"
    (tmp_path / "users_loaders.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DatasetError, match=r"'users_loaders:raising' cannot be loaded: ZeroDivisionError: division by zero"):
        load_tasks(DatasetConfig(name="users_loaders:raising"))
    with pytest.raises(DatasetError, match="'users_loaders:strange' yields a str, not a Task"):
        load_tasks(DatasetConfig(name="users_loaders:strange"))


def test_dataset_with_duplicate_task_key_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "from agentrl.workflow.datasets import Dataset\nfrom agentrl.workflow.trajectory import Task\n"
    module += "twins = Dataset(load=lambda split: iter([Task('same', (), '1'), Task('same', (), '2')]), env='math')\n"
    (tmp_path / "users_twins.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DatasetError, match="2 tasks of 'users_twins:twins' have the key 'same'"):
        load_tasks(DatasetConfig(name="users_twins:twins"))

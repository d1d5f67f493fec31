"""Files to imitate: what a line may hold, what is learned of it, and which lines are refused with their number."""

import json
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from agentrl.workflow.config import DatasetConfig, ModelConfig
from agentrl.workflow.dataset_rows.formats import MAX_ROW_BYTES
from agentrl.workflow.errors import DatasetError
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.settings import settings
from agentrl.workflow.training.demonstrations import Demonstration, read_demonstrations
from agentrl.workflow.training.supervised import segments_of
from agentrl.workflow.trajectory import Message, ToolCall
from tests.support.small_models import chat
from tests.training.test_tune import agentrl

CALL = {"type": "function", "id": "c1", "function": {"name": "calculator", "arguments": '{"expression": "6*7"}'}}
TOOL = {"type": "function", "function": {"name": "calculator", "description": "Computes.", "parameters": {"type": "object"}}}
WHOLE = {
    "messages": [
        {"role": "system", "content": "Use the calculator."},
        {"role": "user", "content": "6 times 7?"},
        {"role": "assistant", "content": None, "reasoning_content": "I compute.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "name": "calculator", "content": "42"},
        {"role": "assistant", "content": "42"},
        {"role": "user", "content": "Thanks."},
    ],
    "tools": [TOOL],
}


def written(folder: Path, *rows: object) -> Path:
    file = folder / "talks.jsonl"
    file.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return file


def test_demonstrations_keep_calls_and_tools_up_to_last_answer(tmp_path: Path) -> None:
    (shown,) = read_demonstrations(DatasetConfig(name=str(written(tmp_path, WHOLE))))
    call = Message("assistant", "", "I compute.", (ToolCall("calculator", {"expression": "6*7"}),))
    assert shown.messages[2:] == (call, Message("tool", "42", name="calculator"), Message("assistant", "42"))
    assert shown.tools == (TOOL,)
    segments = segments_of(chat(), shown)
    learned = [chat().decode(ids) for ids, said in segments if said]
    assert [text.endswith("<|im_end|>") for text in learned] == [True, True]
    assert chat().parse(segments[1][0]) == call
    assert "calculator()" in chat().decode(segments[0][0])


def test_demonstrations_take_question_and_answer_under_any_name(tmp_path: Path) -> None:
    file = written(tmp_path, {"question": "a", "answer": "b"}, "", {"prompt": "a", "completion": "b", "id": 7})
    assert (
        read_demonstrations(DatasetConfig(name=str(file)))
        == [Demonstration((Message("user", "a"), Message("assistant", "b")))] * 2
    )
    assert len(read_demonstrations(DatasetConfig(name=str(file), max_tasks=1))) == 1


def test_demonstrations_of_trl_rows_are_read_from_parquet(tmp_path: Path) -> None:
    asked, good, bad = (
        {"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("assistant", "c"))
    )
    shown = Demonstration((Message("user", "a"), Message("assistant", "b")))
    for number, row in enumerate(
        [
            {"prompt": [asked], "completion": [good]},
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            {"chosen": [asked, good], "rejected": [asked, bad]},
        ]
    ):
        file = tmp_path / f"{number}.parquet"
        parquet.write_table(pyarrow.Table.from_pylist([row]), file)
        assert read_demonstrations(DatasetConfig(name=str(file))) == [shown], row


def test_demonstrations_of_other_columns_are_mapped_and_filtered(tmp_path: Path) -> None:
    rows = [{"problem": "a", "prompt": "unused", "solution": "b", "level": level} for level in ("easy", "hard")]
    options = {"map": {"question": "problem", "answer": "solution"}, "filter": "level = 'easy'"}
    shown = Demonstration((Message("user", "a"), Message("assistant", "b")))
    assert read_demonstrations(DatasetConfig(name=str(written(tmp_path, *rows)), **options)) == [shown]


def test_demonstrations_name_every_malformed_line(tmp_path: Path) -> None:
    user, said = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    lines: list[tuple[object, str]] = [
        ("{", "not JSON"),
        ("[]", "must be an object"),
        ({"question": "a"}, "must have one of"),
        ({"messages": []}, "it has no assistant message"),
        ({"messages": [user]}, "it has no assistant message"),
        ({"messages": [said]}, "must follow a message of another role"),
        ({"messages": [user, said, said]}, "must follow a message of another role"),
        ({"messages": [{"role": "robot", "content": "a"}, said]}, "role must be one of"),
        ({"messages": [user, {"role": "assistant", "content": ""}]}, "is empty"),
        ({"messages": [user, {"role": "assistant", "content": 7}]}, "must be text, not a number"),
        ({"messages": [user, {"role": "assistant", "tool_calls": [{}]}]}, "must hold a 'function'"),
        ({"messages": [user, {"role": "assistant", "tool_calls": 3}]}, "must be a list"),
        (
            {"messages": [user, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}]},
            "must be an object",
        ),
        ({"messages": [{**user, "tool_calls": [CALL]}, said]}, "only an assistant"),
        ({"messages": [user, said], "tools": [{"name": "f"}]}, "'tools'"),
        ({"question": "\x00", "answer": "b"}, "U+0000"),
        ({"question": "\ud800", "answer": "b"}, "U+D800"),
        ({"question": "a" * MAX_ROW_BYTES, "answer": "b"}, "the limit"),
        ("[" * 100_000, "nested too deeply"),
    ]
    for line, why in lines:
        with pytest.raises(DatasetError, match="1 malformed row") as refused:
            read_demonstrations(DatasetConfig(name=str(written(tmp_path, {"question": "a", "answer": "b"}, line))))
        assert "line 2: " in str(refused.value), line
        assert why in str(refused.value), line
    with pytest.raises(DatasetError, match="has no demonstrations"):
        read_demonstrations(DatasetConfig(name=str(written(tmp_path))))
    with pytest.raises(DatasetError, match="No such file"):
        read_demonstrations(DatasetConfig(name=str(tmp_path / "none.jsonl")))


def test_sft_trains_on_file_of_conversations(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, *[WHOLE] * 3, *({"question": f"{n} + {n}?", "answer": str(2 * n)} for n in range(13)))
    out, err = agentrl(capsys, "sft", "--dataset", str(file), "--model", "tiny", "--epochs", "2", "--batch-size", "8", "--json")
    told = json.loads(out)
    assert (told["name"], told["examples"], told["steps"]) == ("tiny-talks", 16, 4)
    assert "Learned from 16 demonstrations." in err
    assert "agentrl chat --model tiny-talks" in err
    assert f"--dataset {file} --model" not in err, "lines without an answer are no tasks"
    assert Policy.load(ModelConfig(), str(settings().models_dir / "tiny-talks"), device="cpu").kind == "full"
    assert "malformed" in agentrl(capsys, "sft", "--dataset", str(written(tmp_path, "{")), "--name", "x", code=2)[1]

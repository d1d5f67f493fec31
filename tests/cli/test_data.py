"""`agentrl data`: rows as a model reads them, what is wrong with them, and rows divided."""

import json
import resource
from pathlib import Path

import pytest

from agentrl.cli.main import main
from tests.support.small_models import tiny_random

ROWS = [
    {"question": "What is 12 plus 7?", "answer": "19"},
    {"question": "What is  12 PLUS 7?", "answer": "20"},
    {"question": "What is 8 minus 1?", "answer": "7"},
    {"question": "What is 8 minus 1?", "answer": "7"},
    {"question": "What is 9 minus 1?", "reference": None},
]


def write(file: Path, rows: list[dict[str, str]]) -> str:
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def output(words: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    assert main(["data", *words]) == code, capsys.readouterr().err
    captured = capsys.readouterr()
    return captured.out if code == 0 else captured.err


def test_data_show_renders_tasks_as_the_model_reads_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, model = write(tmp_path / "rows.jsonl", ROWS), str(tiny_random(tmp_path / "model"))
    assert "=== rows/1\nuser: What is 12 plus 7?\n--- reference: 19\n" in output(["show", file, "-n", "2"], capsys)
    (task,) = json.loads(output(["show", file, "-n", "1", "--model", model, "--env", "arithmetic", "--json"], capsys))
    assert "calculator(expression)" in task["prompt"], "the env's system prompt"
    assert task["prompt"].endswith("<|im_start|>assistant\n")
    assert task["tokens"] > 10


@pytest.mark.usefixtures("home")
def test_data_show_names_missing_tiny_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    csv = tmp_path / "rows.csv"
    csv.write_text("question,answer\na,1\n")
    said = output(["show", str(csv), "--model", "tiny"], capsys, code=8)
    assert f"agentrl sft --dataset {csv} --model tiny" in said
    assert "then pass --model tiny-arithmetic" in said
    said = output(["show", f"arithmetic=0.9,{csv}=0.1", "--model", "tiny"], capsys, code=8)
    assert "Train another's: agentrl sft --dataset arithmetic" in said


def test_data_check_counts_faulty_tasks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, model = tmp_path / "sums", str(tiny_random(tmp_path / "model"))
    write(folder / "train.jsonl", ROWS)
    write(folder / "test.jsonl", ROWS[2:3])
    found = json.loads(output(["check", str(folder), "--model", model, "--json"], capsys))
    assert (found["tasks"], found["identical"], found["contradictory"], found["without_reference"]) == (4, 1, 1, 1)
    assert found["repeated"] == ["sums/train/2 asks the same question as sums/train/1"]
    assert found["shared"] == ["sums/train/3 asks the same question as sums/test/1 of test"]
    assert len(found["prompt_tokens"]) == 4
    assert (found["problems"], found["too_long"]) == ([], 0)
    text = output(["check", str(folder), "--model", model], capsys)
    assert "1 question also in test:\n  sums/train/3" in text
    assert "1 of the repeated questions have different references" in text
    bad = write(tmp_path / "bad.jsonl", [{"question": "a", "answer": "no number"}])
    assert "1 of 1 task of" in output(["check", bad], capsys, code=2)
    assert "--samples requires a model" in output(["check", bad, "--samples", "2"], capsys, code=2)


def test_data_split_keeps_equal_questions_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"problem": f"What is {n // 2} plus 1?", "solution": str(n)} for n in range(200)]
    file, out = write(tmp_path / "rows.jsonl", rows), tmp_path / "out"
    words = ["split", file, "--map", "question=problem,answer=solution", "--out", str(out), "--share", "0.2", "--json"]
    counts = json.loads(output(words, capsys))
    assert counts["train"] + counts["test"] == 200
    assert 20 <= counts["test"] <= 60
    assert json.loads(output(["check", str(out), "--json"], capsys))["shared"] == []
    before = (out / "test.jsonl").read_bytes()
    assert "exists" in output(words, capsys, code=3)
    output([*words, "--force"], capsys)
    assert (out / "test.jsonl").read_bytes() == before, "the same rows each time"
    assert "its rows are generated" in output(["split", "arithmetic", "--out", str(tmp_path / "none")], capsys, code=2)


def test_data_split_writes_all_files_or_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "rows.jsonl", [{"question": f"{'a' * 9000} {n}", "answer": str(n)} for n in range(100)])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))  # writes fail as on a full disk
    try:
        assert "no space is left" in output(["split", file, "--out", str(tmp_path / "out")], capsys, code=4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list((tmp_path / "out").iterdir()) == []
    malformed = write(tmp_path / "bad.jsonl", [*ROWS, {"question": "a"}])
    assert "1 malformed row" in output(["split", malformed, "--out", str(tmp_path / "out")], capsys, code=2)
    assert "No row is in the split 'test'" in output(
        ["split", file, "--out", str(tmp_path / "out"), "--share", "0"], capsys, code=2
    )
    assert list((tmp_path / "out").iterdir()) == []

"""Whether rewards can score a dataset's tasks: each task's own reference must earn full marks."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.cli.main import main
from agentrl.workers.requests.submit import prepare
from agentrl.workflow import reference_check
from agentrl.workflow.config import DatasetConfig, build
from agentrl.workflow.datasets import load_tasks
from agentrl.workflow.envs import Env
from agentrl.workflow.errors import DatasetError
from agentrl.workflow.plugins import find, names
from agentrl.workflow.reference_check import SAMPLE_SIZE, check_sample, comparing_rewards, reference_problems
from agentrl.workflow.trajectory import Message, Task
from tests.data.test_datasets import write
from tests.rewards.test_code import box as box
from tests.rewards.test_code import human
from tests.rewards.test_math_answer import held as held
from tests.support.small_models import tiny_random

MONEY = ("\\frac{1}{2}", "x + 1", "\\$10", "\\$1,250", "-\\$5", "$10$", "10", "$10")


def tasks(*references: str) -> list[Task]:
    return [Task(f"t/{number}", (Message("user", "?"),), reference) for number, reference in enumerate(references)]


def test_reference_problems_names_unscorable_rows() -> None:
    problems = reference_problems(tasks("72", "x > 5", "1,250", "19, 46 and 82"), ["numeric_answer"])
    assert [problem.partition(": ")[0] for problem in problems] == ["t/1", "t/3"]
    assert "numeric_answer: the reference 'x > 5' of task 't/1' is not one number" in problems[0]


def test_reference_problems_finds_a_wrong_solution(box: None) -> None:
    task = load_tasks(DatasetConfig(name="code_tiny", max_tasks=1)).tasks[0]
    wrong = Task(task.key, task.messages, "def f(x, y): return None", task.metadata)
    assert reference_problems([task, wrong], ["tests_passed"]) == [f"{task.key}: tests_passed: its own reference earns 0"]


def test_reference_problems_accepts_docstring_with_code_block(box: None, tmp_path: Path) -> None:
    row = human(
        "same", 'def same(n):\n    """n\n\n    ```python\n    same(1) == 2\n    ```\n    """\n', "    return n\n",
        "    assert candidate(1) == 1",
    )  # fmt: skip
    loaded = load_tasks(DatasetConfig(name=str(write(tmp_path / "own.jsonl", row)))).tasks
    assert reference_problems(loaded, ["tests_passed"]) == []


def test_reference_problems_accepts_one_right_alias() -> None:
    (several,) = tasks("Paris,\nthe capital")
    aliased = replace(several, metadata={"aliases": ["Paris"]})
    assert reference_problems([aliased], ["text_answer"]) == []
    assert reference_problems([several], ["text_answer"]) == ["t/0: text_answer: its own reference earns 0"]


def test_math_answer_reads_references_with_a_dollar_sign(held: None) -> None:
    assert reference_problems(tasks(*MONEY), ["math_answer"]) == []


@pytest.mark.parametrize("name", [name for name in names("datasets") if name not in ("code", "jsonl", "gsm8k", "echo")])
def test_shipped_datasets_references_earn_full_marks(box: None, name: str) -> None:
    loaded = load_tasks(DatasetConfig(name=name, max_tasks=4))
    rewards = comparing_rewards(find("envs", loaded.env).rewards)
    assert rewards
    assert reference_problems(loaded.tasks, rewards) == []


def test_submit_refuses_a_sampled_row_that_cannot_be_scored(tmp_path: Path) -> None:
    rows = [{"question": f"What is {number}?", "answer": str(number)} for number in range(3)]
    file = write(tmp_path / "own.jsonl", *rows, {"question": "How many?", "answer": "5 to 7"})
    with pytest.raises(DatasetError, match=r"1 of 4 checked tasks cannot be scored: own/4: numeric_answer: "):
        prepare(None, build({"dataset.name": str(file), "model.path": str(tmp_path)}))


def test_submit_accepts_references_unread_by_zero_weight_reward(tmp_path: Path) -> None:
    file = write(tmp_path / "own.jsonl", {"question": "The capital of France?", "answer": "Paris"})
    asked = {"dataset.name": str(file), "model.path": str(tiny_random(tmp_path / "model"))}
    with pytest.raises(DatasetError, match="is not one number"):
        prepare(None, build(asked))
    assert prepare(None, build(asked | {"rewards": {"text_answer": 1.0}})).experiment.weights["numeric_answer"] == 0.0


def test_submit_warns_that_tiny_model_knows_one_env(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_random(tmp_path / "model")
    (folder / "training.json").write_text('{"stage": "sft", "base": "tiny", "env": "arithmetic"}')
    asked = {"dataset.name": "qa", "model.path": str(folder)}
    (remark,) = [each for each in prepare(None, build(asked)).remarks if "was trained only for" in each]
    assert "the env 'arithmetic': in 'qa' it writes noise" in remark
    assert not [
        each for each in prepare(None, build(asked | {"dataset.name": "arithmetic"})).remarks if "was trained only for" in each
    ]
    for tools, told in ((("calculator",), 0), (("echo",), 1)):  # what the model reads decides, not the env's name
        monkeypatch.setattr(sys.modules[__name__], "own_env", Env(tools=tools, rewards={"numeric_answer": 1.0}), raising=False)
        remarks = prepare(None, build(asked | {"dataset.name": "arithmetic", "env": f"{__name__}:own_env"})).remarks
        assert len([each for each in remarks if "was trained only for" in each]) == told


def test_file_of_model_names_no_code_to_import(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_random(tmp_path / "model")
    (folder / "training.json").write_text('{"stage": "sft", "base": "tiny", "env": "hidden_code:Env"}')
    (tmp_path / "hidden_code.py").write_text("from agentrl.workflow.envs import Env\n")
    monkeypatch.chdir(tmp_path)
    remarks = prepare(None, build({"dataset.name": "arithmetic", "model.path": str(folder)})).remarks
    assert [each for each in remarks if "was trained only for the env 'hidden_code:Env'" in each]
    assert "hidden_code" not in sys.modules


def test_check_sample_tries_the_same_tasks_once_until_a_change(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def problems(sample: list[Task], rewards: list[str]) -> list[str]:
        tried.append(len(sample))
        return []

    home.mkdir()
    monkeypatch.setattr(reference_check, "reference_problems", problems)
    many = tasks(*map(str, range(100)))
    for _ in range(2):
        check_sample(many, ["numeric_answer"], 0)
    check_sample(many, ["numeric_answer"], 1)
    check_sample(many, ["numeric_answer", "text_answer"], 0)
    assert tried == [SAMPLE_SIZE] * 3


def test_data_check_lists_all_rows_that_cannot_be_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"question": f"What is {number}?", "answer": str(number)} for number in range(50)]
    file = str(write(tmp_path / "own.jsonl", *rows))
    assert main(["data", "check", file]) == 0
    assert "50 tasks" in capsys.readouterr().err
    write(tmp_path / "own.jsonl", *rows, {"question": "a", "answer": "x"}, {"question": "b", "answer": "\\pm 7"})
    assert main(["data", "check", file, "--reward", "numeric_answer", "--json"]) == DatasetError.exit_code
    shown = capsys.readouterr()
    assert [problem.partition(":")[0] for problem in json.loads(shown.out)["problems"]] == ["own/51", "own/52"]
    assert "2 of 52 tasks" in shown.err
    assert main(["data", "check", file, "--reward", "length"]) == 2

"""arithmetic: the same tasks for ever, no question in two splits, and a teacher who is right about half the time."""

from collections import Counter

import pytest

from agentrl.workflow.datasets.arithmetic import MISTAKE_RATE, OPERATORS, SPLITS, arithmetic
from agentrl.workflow.envs.arithmetic import arithmetic as env
from agentrl.workflow.errors import DatasetError
from agentrl.workflow.rewards import score
from agentrl.workflow.trajectory import Episode, Message, Step, Task


def answered(task: Task, text: str) -> Episode:
    step = Step(0, task.messages, (), (), (), "stop", Message("assistant", text), 0)
    return Episode(task, steps=(step,), status="done", stop_reason="answered")


@pytest.mark.parametrize("split", SPLITS)
def test_arithmetic_split_is_sized_and_repeatable(split: str) -> None:
    tasks = list(arithmetic.load(split))
    assert len(tasks) == SPLITS[split]
    assert tasks == list(arithmetic.load(split))
    assert len({task.key for task in tasks}) == len(tasks)
    assert min(Counter(task.metadata["level"] for task in tasks).values()) >= len(tasks) // 3


def test_arithmetic_question_is_in_one_split() -> None:
    questions = {split: {task.messages[0].content for task in arithmetic.load(split)} for split in SPLITS}
    assert not questions["train"] & questions["test"]
    assert not questions["warmup"] & (questions["train"] | questions["test"])
    assert len(questions["train"]) == SPLITS["train"]
    assert len(questions["test"]) == SPLITS["test"]


def test_arithmetic_unknown_split_is_refused() -> None:
    with pytest.raises(DatasetError, match="no split 'dev'"):
        arithmetic.load("dev")


def test_arithmetic_gold_answer_earns_one() -> None:
    for split in ("train", "test"):
        for task in arithmetic.load(split):
            assert score(answered(task, task.reference), env.rewards) == {"numeric_answer": 1.0}


def test_arithmetic_reference_equals_calculator() -> None:
    calculator = env.toolset()["calculator"]
    for task in arithmetic.load("test"):
        words = [OPERATORS.get(word, word) for word in task.metadata["words"].split()]
        assert calculator.call({"expression": "".join(words)}) == task.reference


def test_arithmetic_teacher_calls_always_and_errs_often() -> None:
    tasks = list(arithmetic.load("warmup"))[:3000]
    assert arithmetic.demonstrations is not None
    demonstrations = list(arithmetic.demonstrations(tasks, 0))
    calculator = env.toolset()["calculator"]
    for task, (question, calling, result, answer) in zip(tasks, demonstrations, strict=True):
        (call,) = calling.tool_calls
        assert (question,) == task.messages
        assert result.content == answer.content == calculator.call(call.arguments)
    right = sum(demo[-1].content == task.reference for task, demo in zip(tasks, demonstrations, strict=True)) / len(tasks)
    expected = (2 * (1 - MISTAKE_RATE) + (1 - MISTAKE_RATE) ** 2) / 3
    assert expected - 0.03 < right < expected + 0.05
    assert demonstrations == list(arithmetic.demonstrations(tasks, 0))
    assert demonstrations != list(arithmetic.demonstrations(tasks, 1))

"""The comparison of two episodes: their calls are compared as JSON values."""

from typing import Any

import pytest

from agentrl.cli.replay_diff import _differing_parts
from agentrl.workflow.analysis.episode_diff import compare
from agentrl.workflow.trajectory import Episode, Message, Task, ToolCall
from tests.support.told_turns import turn


def episode_that_calls(value: Any) -> Episode:
    call = ToolCall("lookup", {"key": value})
    step = turn(0, (1,), (2,), message=Message("assistant", "", "", (call,)))
    return Episode(Task("t", (), ""), 0, (step,), "done", "answered", reward=1.0, id=1)


@pytest.mark.parametrize(
    ("left", "right", "texts"),
    [
        (1, True, ("1", "true")),
        (1, 1.0, ("1", "1.0")),
        (1, "1", ("1", '"1"')),
        ([{"a": 0}], [{"a": False}], ('[{"a": 0}]', '[{"a": false}]')),
        (float("nan"), float("nan"), None),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, None),
    ],
)
def test_compare_compares_arguments_as_json(left: Any, right: Any, texts: tuple[str, str] | None) -> None:
    calls = compare(episode_that_calls(left), episode_that_calls(right)).calls
    assert [part for call in calls for part in _differing_parts(call)] == ([(", key", texts)] if texts else [])

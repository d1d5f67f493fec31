"""Whoever decides the next turn, one recorder commits it: what it knows of an episode is what the rows say."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from agentrl.workers.jobs.episode_recorder import EpisodeRecorder
from agentrl.workflow.annotations import Annotation
from agentrl.workflow.config import RunConfig
from agentrl.workflow.envs import Env
from agentrl.workflow.errors import Fenced
from agentrl.workflow.hooks import Hook
from agentrl.workflow.rewards import Judge, judges_of
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.reads import episode_rows
from agentrl.workflow.store.rollout_claims import Outcome
from agentrl.workflow.store.tool_calls import record_result
from agentrl.workflow.trajectory import Episode, ToolResult
from bench.faults.invariants import dump
from tests.support.played_runs import CALL, EXPIRED, answered, claim, sampled, start, submission, values


def _length(text: str) -> str:
    """How long the text is."""
    return str(len(text))


length = Judge(_length, asks=lambda episode: {"text": episode.final_answer})
LENGTH = f"{__name__}:length"


class Diary(Hook):
    """Writes down what it is told of the first episode."""

    def __init__(self) -> None:
        self.pages: list[str] = []

    def _write(self, place: str, episode: Episode) -> None:
        if episode.id == 1:
            self.pages.append(f"{place}, {len(episode.steps)} steps")

    def on_rollout_start(self, episode: Episode) -> None:
        self._write("begun", episode)

    def on_trace_start(self, episode: Episode) -> None:
        self._write("to sample", episode)

    def on_trace_end(self, episode: Episode) -> None:
        self._write("recorded", episode)

    def on_rollout_end(self, episode: Episode) -> Mapping[str, float]:
        self._write("over", episode)
        return {"bonus": 0.25}


class Veto(Hook):
    """Lets nothing be sampled."""

    def on_trace_start(self, episode: Episode) -> None:
        raise PermissionError("not today")


def group_of(db: Database, **changes: Any) -> int:
    """The only group, of two episodes, of a new run."""
    return start(db, replace(submission(tasks=1), **changes))[0]


def recorder_of(db: Database, group: int, *hooks: Hook) -> EpisodeRecorder:
    """A recorder of the group, whose last claim has run out."""
    work = claim(db, group, lease=EXPIRED)
    limits = RunConfig.model_validate(work.config).rollout
    return EpisodeRecorder(db, work, Env(), hooks, judges_of(work.weights), limits, on_end=lambda episode: None)


def stored(db: Database) -> list[tuple[Any, ...]]:
    """The steps of every episode as the rows have them."""
    return [episode_rows.find_episode(db, number).episode.steps for number in values(db, "SELECT id FROM episodes ORDER BY id")]


def answer_all(db: Database, result: ToolResult) -> None:
    """Records the result of every call, as a tools worker would."""
    for number in values(db, "SELECT id FROM tool_calls WHERE result IS NULL"):
        assert record_result(db, number, result, datetime.now(UTC), "tools:1")


def test_recorder_suffices_from_first_turn_to_reward(database: Database) -> None:
    diary, ended = Diary(), list[int]()
    recorder = recorder_of(database, group_of(database, weights={LENGTH: 0.5}), diary)
    recorder.on_end = lambda episode: ended.append(episode.id)
    first, second = recorder.episodes
    recorder.begin()
    assert recorder.begin_step(recorder.episodes[first])
    turns = [sampled(recorder.work, position, calls=(CALL, CALL)) for position in (0, 1)]
    assert [len(calls) for calls in recorder.commit_sampled(turns)] == [2, 2]
    answer_all(database, answered("7"))
    assert recorder.commit_results({first: (answered("7"),) * 2}) == [first], "the other may go on later, or never"
    assert recorder.begin_step(recorder.episodes[first])
    assert recorder.commit_sampled([sampled(recorder.work, index=1)]) == [[]]
    assert [len(steps) for steps in stored(database)] == [2, 1]
    outcomes, asked = recorder.ask_judges({first: "answered"})
    assert (outcomes, list(asked), len(asked[first])) == ([], [first], 1)
    answer_all(database, ToolResult("2"))
    assert recorder.commit_results({first: (ToolResult("2"),)}) == []
    assert list(recorder.episodes) == [second]
    record = episode_rows.find_episode(database, first)
    assert (record.episode.status, record.episode.stop_reason) == ("done", "answered")
    assert {row["part"]: row["value"] for row in record.rewards} == {LENGTH: 2.0, "bonus": 0.25}
    assert not recorder.has_ended
    recorder.finish([Outcome(second, "failed", error_class="EnvError", error="gone")])
    assert (recorder.episodes, recorder.has_ended) == ({}, True)
    assert ended == [first, second]
    turn = ["to sample, {0} steps", "recorded, {1} steps"]
    told = [page.format(index, index + 1) for index in (0, 1) for page in turn]
    assert diary.pages == ["begun, 0 steps", *told, "over, 2 steps"]


def test_recorder_state_equals_state_read_from_rows(sqlite: Database) -> None:
    group = group_of(sqlite)
    recorder = recorder_of(sqlite, group)
    recorder.commit_sampled([sampled(recorder.work, calls=(CALL,)), sampled(recorder.work, 1)])
    heir = recorder_of(sqlite, group)
    assert heir.episodes == recorder.episodes
    answer_all(sqlite, answered())
    heir.commit_results({1: (answered(),)})
    assert recorder_of(sqlite, group).episodes == heir.episodes


@pytest.mark.parametrize("is_lost", [False, True])
def test_recorder_counts_rewards_that_tools_gave(sqlite: Database, is_lost: bool) -> None:
    group = group_of(sqlite)
    recorder = recorder_of(sqlite, group)
    recorder.commit_sampled([sampled(recorder.work, calls=(CALL,)), sampled(recorder.work, 1)])
    result = replace(answered(), annotations=(Annotation("call:1:0", "reward", "progress", {"value": 0.75}, source="tool"),))
    answer_all(sqlite, result)
    recorder.commit_results({1: (result,)})
    recorder = recorder_of(sqlite, group) if is_lost else recorder
    outcomes, _ = recorder.ask_judges({1: "answered", 2: "answered"})
    assert [(outcome.parts or {}).get("progress") for outcome in outcomes] == [0.75, None]


def test_recorder_ends_episode_that_hook_vetoes(sqlite: Database) -> None:
    recorder = recorder_of(sqlite, group_of(sqlite), Veto())
    assert not recorder.begin_step(recorder.episodes[1])
    assert list(recorder.episodes) == [2]
    assert values(sqlite, "SELECT error FROM episodes WHERE status = 'failed'") == ["PermissionError: not today"]


def test_recorder_of_lost_group_changes_nothing(database: Database) -> None:
    group = group_of(database)
    zombie = recorder_of(database, group)
    recorder_of(database, group)
    before, known = dump(database), dict(zombie.episodes)
    failure = Outcome(1, "failed", error_class="EnvError", error="gone")
    with pytest.raises(Fenced):
        zombie.commit_sampled([sampled(zombie.work)])
    with pytest.raises(Fenced):
        zombie.finish([failure])
    assert dump(database) == before
    assert zombie.episodes == known


def test_recorder_reports_waiting_calls_until_one_is_observed(sqlite: Database) -> None:
    recorder = recorder_of(sqlite, group_of(sqlite))
    recorder.commit_sampled([sampled(recorder.work, calls=(CALL,))])
    for _ in range(2):
        recorder.report_wait("Nobody serves the tools.")
    answer_all(sqlite, answered())
    recorder.commit_results({1: (answered(),)})
    recorder.finish([Outcome(1, "failed", error_class="EnvError", error="gone")])
    assert values(sqlite, "SELECT kind FROM events WHERE kind <> 'submitted'") == ["waiting", "going_on"]

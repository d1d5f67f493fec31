"""A step is stored exactly as it was sampled, its calls are answered once in effect, whatever is repeated or comes late."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import text

from agentrl.workflow.store import rollout_claims, steps, tool_calls
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.episode_loader import pack, unpack
from agentrl.workflow.store.migrate import downgrade, upgrade
from agentrl.workflow.store.reads import episode_rows, turn_rows
from agentrl.workflow.store.rollout_claims import Outcome
from agentrl.workflow.store.tool_calls import UNKNOWN_OUTCOME
from agentrl.workflow.trajectory import CallRecord, Message, Task, ToolCall, storable
from tests.support.played_runs import CALL, EXPIRED, answered, claim, fail, sampled, start, step, submission, task, values


def test_step_is_read_exactly_as_written(database: Database) -> None:
    group, _ = start(database, submission())
    work = claim(database, group, lease=EXPIRED)
    one = sampled(work, calls=(CALL, CALL))
    ((first, second),) = steps.commit_sampled(database, work.fence, [one])
    pending = claim(database, group, "host:2", EXPIRED).episodes[0]
    assert pending.steps == (one.step,)
    assert pending.steps[0].pending
    for call in (second, first):
        assert tool_calls.record_result(database, call, answered(f"answer {call}"), datetime.now(UTC), "tools:1")
    work = claim(database, group, "host:3", EXPIRED)
    results = steps.load_results(database, [first, second])
    observed = replace(one.step, results=(results[first], results[second]))
    steps.commit_observed(database, work.fence, [(one.episode, observed)])
    assert claim(database, group, "host:4").episodes[0].steps == (observed,)
    assert values(database, "SELECT tool_seconds FROM episodes WHERE id = :e", e=one.episode) == [1.0]


def test_step_commit_repeated_changes_nothing(database: Database) -> None:
    group, _ = start(database, submission())
    work = claim(database, group)
    one = sampled(work, calls=(CALL,))
    ids = steps.commit_sampled(database, work.fence, [one])
    other = replace(one, step=replace(one.step, sampled_ids=(9,), behavior_logprobs=(-9.0,)))
    assert steps.commit_sampled(database, work.fence, [other]) == ids
    assert steps.list_calls(database, one.episode, 0) == ids[0]
    counted = episode_rows.find_episode(database, one.episode)
    assert counted.episode.steps == (one.step,)
    assert (counted.row["steps"], counted.row["sampled_tokens"], counted.row["tool_calls"]) == (1, 2, 1)
    observed = (one.episode, replace(one.step, results=(answered(error_class="tool_error"),)))
    steps.commit_observed(database, work.fence, [observed])
    steps.commit_observed(database, work.fence, [observed])
    assert episode_rows.find_episode(database, one.episode).row["tool_errors"] == 1


def test_call_result_that_is_first_counts(database: Database) -> None:
    group, _ = start(database, submission())
    work = claim(database, group)
    ((call,),) = steps.commit_sampled(database, work.fence, [sampled(work, calls=(CALL,))])
    assert tool_calls.find_call(database, call) is not None
    assert tool_calls.record_result(database, call, answered("42"), datetime.now(UTC), "tools:1")
    assert not tool_calls.record_result(database, call, answered("43"), datetime.now(UTC), "tools:2")
    assert steps.load_results(database, [call])[call] == answered("42")
    assert tool_calls.find_call(database, call) is None


def test_call_results_of_threads_count_once(database: Database) -> None:
    group, _ = start(database, submission())
    work = claim(database, group)
    ((call,),) = steps.commit_sampled(database, work.fence, [sampled(work, calls=(CALL,))])
    now = datetime.now(UTC)
    with ThreadPoolExecutor(10) as pool:
        counted = list(
            pool.map(lambda n: tool_calls.record_result(database, call, answered(str(n)), now, "tools:1"), range(10))
        )
    assert sum(counted) == 1
    assert steps.load_results(database, [call])[call].content == str(counted.index(True))


def test_call_with_effects_starts_once_then_is_unknown(database: Database) -> None:
    group, _ = start(database, submission())
    work = claim(database, group)
    once = replace(CALL, effects="once")
    ((call,),) = steps.commit_sampled(database, work.fence, [sampled(work, calls=(once,))])
    assert tool_calls.start_once(database, call, "tools:1", 60) == "ours"
    assert tool_calls.start_once(database, call, "tools:2", 60) == "running"
    with database.engine.begin() as tx:
        tx.execute(text("UPDATE tool_calls SET lease_until = 0"))
    assert tool_calls.start_once(database, call, "tools:2", 60) == "lost"
    assert tool_calls.record_result(database, call, UNKNOWN_OUTCOME, datetime.now(UTC), "tools:2")
    assert values(database, "SELECT status || starts FROM tool_calls") == ["unknown_outcome1"]


def test_open_calls_are_those_of_running_episodes(database: Database) -> None:
    group, other = start(database, submission())
    work, over = claim(database, group), claim(database, other)
    records = [sampled(work, calls=(CALL, CALL)), sampled(work, position=1, calls=(CALL,))]
    (first, second), (third,) = steps.commit_sampled(database, work.fence, records)
    steps.commit_sampled(database, over.fence, [sampled(over, calls=(CALL,))])
    fail(database, over, 0)
    tool_calls.record_result(database, second, answered(), datetime.now(UTC), "tools:1")
    assert tool_calls.lost_calls(database, max_sends=3) == [first, third]
    tool_calls.count_sending(database, [third])
    assert tool_calls.lost_calls(database, max_sends=3) == [first], "the other was sent three times"
    assert tool_calls.lost_calls(database, max_sends=3) == []
    assert values(database, "SELECT sends FROM tool_calls ORDER BY id") == [3, 1, 3, 1]


def test_call_that_could_not_be_sent_has_result_at_once(database: Database) -> None:
    group, _ = start(database, submission())
    work = claim(database, group)
    unread = ToolCall("", {}, "no JSON")
    refused = CallRecord(unread, "none", answered("no JSON", "parse_error"))
    ((call,),) = steps.commit_sampled(database, work.fence, [sampled(work, calls=(refused,))])
    assert tool_calls.find_call(database, call) is None
    assert episode_rows.find_episode(database, work.episodes[0].id or 0).episode.steps[0].message.tool_calls == (unread,)


def test_restarted_episode_keeps_old_steps_by_attempt(database: Database) -> None:
    group, _ = start(database, submission())
    work = claim(database, group)
    ((call,),) = steps.commit_sampled(database, work.fence, [sampled(work, calls=(CALL,))])
    steps.restart_episode(database, work.fence, work.episodes[0].id or 0)
    assert tool_calls.find_call(database, call) is None
    steps.commit_sampled(database, work.fence, [sampled(work)])
    assert values(database, "SELECT attempt FROM steps ORDER BY id") == [0, 1]
    assert len(episode_rows.find_episode(database, work.episodes[0].id or 0).episode.steps) == 1


PLACED = {
    "its first part": ("It is 42.<|im_end|>", "It is 42.", ""),
    "both parts": ("<think>\nso \U0001f98a e\u0301\n</think>\n\nIt is 42.<|im_end|>", "It is 42.", "so \U0001f98a e\u0301"),
    "after characters of other sizes": ("\u00e9\u4e2d\U0001f98a It is \U0001f98a.", "It is \U0001f98a.", ""),
    "what cannot be stored": ("a\0b\ud800c", "a\0b\ud800c", ""),
}


@pytest.mark.parametrize("case", PLACED)
def test_step_parts_that_text_contains_are_stored_once(database: Database, case: str) -> None:
    written, content, thought = PLACED[case]
    work = claim(database, start(database, submission())[0])
    message = Message("assistant", content, thought)
    steps.commit_sampled(database, work.fence, [replace(sampled(work), step=replace(step(), message=message), text=written)])
    check_parts(database, work.episodes[0].id, content, thought)
    assert values(database, "SELECT content || thought FROM steps") == [""]
    downgrade(database, "0027")
    assert values(database, "SELECT content || '/' || thought FROM steps") == [f"{storable(content)}/{thought}"]
    upgrade(database)
    check_parts(database, work.episodes[0].id, content, thought)


def test_step_parts_that_text_lacks_are_stored(database: Database) -> None:
    work = claim(database, start(database, submission())[0])
    message = Message("assistant", "one two", "three four")
    steps.commit_sampled(database, work.fence, [replace(sampled(work), step=replace(step(), message=message), text="one.two")])
    assert values(database, "SELECT content || thought FROM steps") == ["one twothree four"]
    check_parts(database, work.episodes[0].id, "one two", "three four")


def check_parts(db: Database, episode: int, content: str, thought: str) -> None:
    """Every reader returns the content and the thought of the only step."""
    parts = {"content": storable(content), "thought": storable(thought)}
    record = episode_rows.find_episode(db, episode)
    message = record.episode.steps[0].message
    assert {"content": message.content, "thought": message.thought} == parts
    (row,) = db.ask(lambda tx: turn_rows.load_steps(tx, [1]))
    paths = {name: db.ask(lambda tx, name=name: turn_rows.load_text(tx, episode, f"steps/0/{name}")) for name in parts}
    assert {name: record.steps[0][name] for name in parts} == {name: row[name] for name in parts} == paths == parts
    assert {name: row[f"{name}_chars"] for name in parts} == {name: len(part) for name, part in parts.items()}


HOSTILE = "a\0b\ud800c\x1b[31m\u202e"


def test_store_takes_nul_and_lone_surrogates(database: Database) -> None:
    odd = Task("train/0", (Message("user", HOSTILE),), HOSTILE, {"note": HOSTILE, "number": float("inf")})
    group, *_ = start(database, replace(submission(), tasks=[odd, task(1)]))
    work = claim(database, group)
    call = CallRecord(ToolCall(HOSTILE, {HOSTILE: [HOSTILE, float("nan")]}), "none", None)
    turn = replace(step(calls=(call,), text=HOSTILE), prompt=(Message("tool", HOSTILE, name=HOSTILE),))
    one = replace(sampled(work), step=turn, text=HOSTILE, calls=(call,))
    ((stored,),) = steps.commit_sampled(database, work.fence, [one])
    assert tool_calls.record_result(database, stored, answered(HOSTILE), datetime.now(UTC), "tools:1")
    outcome = Outcome(one.episode, "failed", final_answer=HOSTILE, error_class="X", error=HOSTILE)
    rollout_claims.finish_episodes(database, work.fence, [outcome], work.reward_set, work.weights)
    rollout_claims.fail_attempt(database, work.fence, "X", HOSTILE, 1)
    record = episode_rows.find_episode(database, one.episode)
    assert record.episode.steps[0].sampled_ids == turn.sampled_ids
    assert record.row["final_answer"].startswith("a\ufffdb")
    assert record.row["final_answer"].endswith("c\x1b[31m\u202e")


@given(st.text(st.characters()))
def test_clean_text_is_storable_in_every_database(written: str) -> None:
    kept = storable(written)
    assert "\0" not in kept.encode("utf-8").decode()
    assert storable(kept) == kept
    assert kept == written or "\0" in written or any("\ud800" <= letter <= "\udfff" for letter in written)


@given(st.lists(st.integers(-(2**31), 2**31 - 1)), st.lists(st.floats(width=32, allow_nan=False)))
def test_packed_ids_and_logprobs_are_read_back_exactly(ids: list[int], logprobs: list[float]) -> None:
    assert unpack("i", pack("i", ids)) == ids
    assert unpack("f", pack("f", logprobs)) == logprobs

"""Calls that are out: taken when all are answered, sent again when they seem lost, and heard of by whoever waits."""

from collections.abc import Callable
from datetime import UTC, datetime
from queue import SimpleQueue

import pytest

from agentrl.workers.jobs import pending_calls
from agentrl.workers.jobs.inbox import InboxEvent
from agentrl.workers.jobs.pending_calls import PendingCalls
from agentrl.workflow.errors import InfraError, ServiceError
from agentrl.workflow.store import steps
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.tool_calls import record_result
from agentrl.workflow.trajectory import ToolResult
from tests.support.played_runs import CALL, answered, claim, sampled, start, submission
from tests.workers.test_resume import sent as sent
from tests.workers.test_workers import in_memory as in_memory


class Waiting:
    """The first two episodes of a run have two calls each, which are out."""

    def __init__(self, db: Database) -> None:
        work = claim(db, start(db, submission(tasks=1))[0])
        self.db, self.told, self.inbox = db, list[str](), SimpleQueue[InboxEvent]()
        self.ids = steps.commit_sampled(db, work.fence, [sampled(work, place, calls=(CALL, CALL)) for place in (0, 1)])
        self.calls = PendingCalls(db, work.fence.group, self.inbox, self.told.append)
        for episode, ids in zip((1, 2), self.ids, strict=True):
            self.calls.add(episode, ids, {})
            self.calls.send([episode])

    def answer(self, call: int, content: str = "42") -> None:
        """Records the call's result, as a tools worker would."""
        assert record_result(self.db, call, answered(content), datetime.now(UTC), "tools:1")


@pytest.fixture
def overdue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was sent seems lost."""
    monkeypatch.setattr(pending_calls, "RESEND_SECONDS", -1000.0)


def contents(taken: dict[int, tuple[ToolResult, ...]]) -> dict[int, list[str]]:
    return {episode: [result.content for result in results] for episode, results in taken.items()}


def test_pending_calls_take_results_in_order_once_all_are_there(sqlite: Database, sent: Callable[[], list[int]]) -> None:
    waiting = Waiting(sqlite)
    (first, second), (third, _) = waiting.ids
    waiting.answer(second, "b")
    waiting.answer(third, "c")
    assert waiting.calls.take_answered({1, 2}) == {}
    waiting.answer(first, "a")
    assert waiting.calls.take_answered({2, 7}) == {}, "only of those that are asked for"
    assert contents(waiting.calls.take_answered({1, 2})) == {1: ["a", "b"]}
    assert waiting.calls.take_answered({1, 2}) == {}
    assert waiting.calls.by_episode.keys() == {2}


def test_pending_calls_resend_only_calls_without_result(sqlite: Database, sent: Callable[[], list[int]], overdue: None) -> None:
    waiting = Waiting(sqlite)
    (first, second), others = waiting.ids
    assert sent() == [first, second, *others]
    waiting.answer(first)
    waiting.calls.take_answered({1, 2})
    waiting.calls.send_overdue()
    assert sent() == [second, *others]
    assert all("sent once without an answer. Is a tools worker running?" in told for told in waiting.told)


@pytest.mark.parametrize(("reason", "error"), [("It has no calculator.", ServiceError), ("", InfraError)])
def test_pending_calls_give_up_with_last_reason(
    sqlite: Database, sent: Callable[[], list[int]], overdue: None, reason: str, error: type[Exception]
) -> None:
    waiting = Waiting(sqlite)
    for _ in range(pending_calls.RESENDS):
        waiting.calls.send_overdue()
    if reason:
        waiting.calls.note_refusal(1, waiting.ids[0][0], reason)
    with pytest.raises(error, match=reason or "sent 6 times without an answer"):
        waiting.calls.send_overdue()


def test_pending_calls_wait_while_others_are_answered(
    sqlite: Database, sent: Callable[[], list[int]], overdue: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending_calls, "MAX_SENDINGS", 20)
    waiting = Waiting(sqlite)
    for _ in range(pending_calls.MAX_SENDINGS):
        pending_calls._replies().answer(10**6)
        waiting.calls.send_overdue()
    assert waiting.told == []
    pending_calls._replies().answer(10**6)
    with pytest.raises(InfraError, match="sent 21 times without an answer"):
        waiting.calls.send_overdue()


def test_pending_calls_message_is_the_same_for_every_episode(
    sqlite: Database, sent: Callable[[], list[int]], overdue: None
) -> None:
    waiting = Waiting(sqlite)
    waiting.calls.send_overdue()
    assert len(waiting.told) == 2
    assert len(set(waiting.told)) == 1


def test_pending_calls_reply_wakes_only_its_waiter(sqlite: Database, sent: Callable[[], list[int]]) -> None:
    waiting = Waiting(sqlite)
    replies = pending_calls._replies()
    (first, second), (third, _) = waiting.ids
    replies.answer(first)
    replies.answer(third, "It has no calculator.")
    assert [waiting.inbox.get_nowait() for _ in range(2)] == [
        InboxEvent(group=1, episode=1, call=first),
        InboxEvent(group=1, episode=2, call=third, reason="It has no calculator."),
    ]
    waiting.calls.forget()
    replies.answer(second)
    waiting.calls.note_refusal(2, third, "It has no calculator.")
    assert waiting.inbox.empty()
    assert waiting.told == []

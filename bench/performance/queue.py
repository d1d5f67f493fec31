"""A call of a tool that does nothing, through the queue: from the commit of the step that asks to the result that is read.

Everything is real: the message, Redis, a tools process, the result's row in SQLite, the wake-up. Beside it, in turns, the same
message about a call that is answered already: what Celery, Redis, one read and the wake-up take where nothing is to be done.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

from agentrl.workflow.store import steps
from agentrl.workflow.store.rollout_claims import GroupWork
from bench.performance.cases import Cases
from bench.performance.fleet import Fleet, fleet
from bench.performance.report import Comparison, Measured, Table, load
from tests.support.played_runs import CALL, claim, sampled, start, submission

IN_FLIGHT = (1, 16)
ROUNDS = 40
WARM_UP = 10
COLUMNS = ("calls at once", "p50 ms", "p90 ms", "p99 ms", "p50 ms, nothing to do", "p99 ms, nothing to do", "calls/s")


def measure() -> Measured:
    """One call at a time, and sixteen."""
    with fleet() as crew:
        crew.worker("tools")
        os.environ.update({name: value for name, value in crew.environment.items() if name.startswith("AGENTRL_")})
        caller = Caller(crew)
        rows, comparisons, cases = [], [], Cases()
        for count in IN_FLIGHT:
            with cases.case(f"tool call, {count} at once"):
                found, idle = _turns(caller, count)
                shown = [1000 * _quantile(found, share) for share in (0.5, 0.9, 0.99)]
                none = [1000 * _quantile(idle, share) for share in (0.5, 0.99)]
                rows.append([str(count), *shown, *none, count / _quantile(found, 0.5)])
                what = "the message alone"
                comparisons.append(Comparison(f"tool call, {count} at once, p50", [shown[0]], [none[0]], "ms", what, "less"))
    table = Table("a tool call through the queue", COLUMNS, [*rows, *cases.rows()], load())
    return Measured([table], comparisons, cases.unmeasured)


def _turns(caller: "Caller", count: int) -> tuple[list[float], list[float]]:
    found: list[float] = []
    idle: list[float] = []
    rounds = ROUNDS * (8 if count == 1 else 1)
    for number in range(-WARM_UP, rounds):
        calls = caller.asks(count)
        taken, again = caller.waits(calls), caller.waits(calls)
        if number >= 0:
            found += taken
            idle += again
    return found, idle


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[int(len(values) * share)]


class Caller:
    """The rollout's side: one group whose episodes ask for tools, step after step."""

    def __init__(self, crew: Fleet) -> None:
        from agentrl.workers.stack.replies import Replies  # not above: its settings are the crew's
        from agentrl.workflow.settings import settings

        settings.cache_clear()
        self._db = crew.database
        self._replies = Replies(settings())
        self._work = _group(self._db, max(IN_FLIGHT))
        self._step = 0

    def asks(self, count: int) -> list[int]:
        """T1 of so many episodes, a call in each; the calls' ids."""
        records = [sampled(self._work, position, self._step, (CALL,)) for position in range(count)]
        self._step += 1
        return [call for (call,) in steps.commit_sampled(self._db, self._work.fence, records)]

    def waits(self, calls: Sequence[int]) -> list[float]:
        """Sends the calls; seconds until each one's result was read."""
        from agentrl.workers.stack.dispatch import send_calls

        answered: SimpleQueue[int] = SimpleQueue()
        began = time.perf_counter()
        for call in calls:
            self._replies.expect(call, lambda call, reason: answered.put(call))
        send_calls(calls, self._replies.address)
        taken: dict[int, float] = {}
        while len(taken) < len(calls):
            woken = [answered.get(timeout=60), *(answered.get() for _ in range(answered.qsize()))]
            results = steps.load_results(self._db, woken)
            taken |= dict.fromkeys(results, time.perf_counter() - began)
        return list(taken.values())


def _group(db: Any, episodes: int) -> GroupWork:
    wanted = submission(tasks=1, tasks_per_iteration=1)
    rollouts = {**wanted.config["rollout"], "group_size": episodes}
    (group,) = start(db, replace(wanted, group_size=episodes, config={**wanted.config, "rollout": rollouts}))
    return claim(db, group, lease=3600)

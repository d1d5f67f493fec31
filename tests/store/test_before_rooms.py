"""A store of before the rooms, a run in it broken off in the middle: nothing of it is lost, and it goes on as it would have.

`before_rooms.tar.xz` was made by the last commit that imported `workflow.losses`: a finished run, an evaluation
of it, and a run that was killed in its third iteration; their rewards come from a file that imports by the old names, and from
a path with one. `expected.json` has what that run came to where it was left alone, by the same code.
"""

import json
import struct
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, func, insert, inspect, select, text

from agentrl.workflow.store.connect import Database
from agentrl.workflow.tables.schema import metadata
from tests.support.played_runs import values
from tests.support.real_stack import Stack

CONTINUED = "UPDATE steps SET parent_step = number - 1 WHERE number > 0 AND new_row IS NULL"
"""What migration 0009 makes of older steps."""
KEPT = Path(__file__).with_name("before_rooms.tar.xz")


def fill(database: Database, script: str) -> None:
    """Copies the rows of a SQLite dump into a migrated database."""
    kept = create_engine("sqlite://")
    with kept.connect() as source, database.engine.begin() as target:
        source.connection.executescript(script)  # type: ignore[attr-defined]
        there = inspect(source).get_table_names()
        for table in (table for table in metadata.sorted_tables if table.name in there):  # later ones are empty
            columns = [table.c[column["name"]] for column in inspect(source).get_columns(table.name)]
            rows = [dict(row) for row in source.execute(select(*columns).order_by(*table.primary_key)).mappings()]
            if rows:
                target.execute(insert(table), rows)
            if rows and database.engine.dialect.name == "postgresql" and "id" in table.c:
                highest = select(func.max(table.c.id)).scalar_subquery()
                target.execute(select(func.setval(func.pg_get_serial_sequence(table.name, "id"), highest)))
        target.execute(text(CONTINUED))
    kept.dispose()


def came_to(database: Database, run: str) -> list[list[object]]:
    """Iteration, reward and sampled ids of each of its episodes."""
    query = """
        SELECT i.number, e.id, e.reward, t.sampled_ids
        FROM episodes e JOIN groups g ON g.id = e.group_id JOIN iterations i ON i.id = g.iteration_id
        JOIN runs r ON r.id = g.run_id
        JOIN steps s ON s.episode_id = e.id AND s.attempt = e.attempt JOIN step_tokens t ON t.step_id = s.id
        WHERE r.name = :run ORDER BY i.number, g.id, e.id, s.id
    """
    found: dict[int, list[object]] = {}
    with database.read() as tx:
        for number, episode, reward, ids in tx.execute(text(query), {"run": run}):
            of_it = found.setdefault(episode, [number, reward, []])
            of_it[2] += struct.unpack(f"<{len(ids) // 4}i", ids)  # type: ignore[operator]
    return list(found.values())


@pytest.fixture
def stack(database: Database, short_folder: Path) -> Iterator[Stack]:
    with tarfile.open(KEPT) as kept:
        kept.extractall(short_folder, filter="data")
    fill(database, (short_folder / "store.sql").read_text().replace("@HERE@", str(short_folder)))
    made = Stack(
        short_folder / "home",
        AGENTRL_DATABASE_URL=database.engine.url.render_as_string(hide_password=False),
        PYTHONPATH=str(short_folder),
    )
    yield made
    made.close()


@pytest.mark.slow
def test_a_store_of_before_is_resumed_verified_rescored_compared_and_trained_on(
    stack: Stack, database: Database, short_folder: Path
) -> None:
    expected = json.loads((short_folder / "expected.json").read_text())["episodes"]
    stack.agentrl("resume", "broken-off")
    stack.wait_for("broken-off")
    assert came_to(database, "broken-off") == expected
    assert values(database, "SELECT count(*) FROM events WHERE kind = 'code_changed'") == [0]
    for episode in (1, len(expected)):
        stack.agentrl("replay", str(episode), "--verify", "all")
    stack.agentrl("rescore", "first", "--reward", "numeric_answer=1", "--name", "plain")
    stack.agentrl("eval", "--policy", "first@2", "-n", "4", "--group-size", "2")
    assert "-eval-1\n" in stack.agentrl("compare", "first@1", "first@2")  # the first was measured before
    stack.agentrl("submit", "--from-groups", "first", "--name", "onward", "--wait")

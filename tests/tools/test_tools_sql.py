"""sql: rows as text, for whoever may only read; nothing that a model writes changes the database or leaves it."""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Engine, create_engine, make_url, text

from agentrl.workflow.datasets.text_to_sql import DATABASE, FOLDER
from agentrl.workflow.errors import AccessDenied, ConfigError, ServiceError, ToolFailure
from agentrl.workflow.rewards import score
from agentrl.workflow.sql import query_process
from agentrl.workflow.sql.query_process import read
from agentrl.workflow.tools.sql import MAX_CELL, MAX_ROWS, sql_over
from tests.rewards.test_rewards import episode, turn
from tests.store.test_user_sql import ATTACKS, POSTGRES_ATTACKS, SQLITE_ATTACKS

SCRIPT = """
CREATE TABLE runs (id INTEGER PRIMARY KEY, name TEXT, size REAL);
CREATE TABLE events (kind TEXT);
INSERT INTO runs VALUES (1, 'one', 1.5), (2, NULL, 2), (3, 'th|ree', 0);
"""
ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT {} FROM n"


@pytest.fixture(params=["file", "script"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A SQLite file, or a script that makes one."""
    if request.param == "script":
        (tmp_path / "shop.sql").write_text(SCRIPT)
        return str(tmp_path / "shop.sql")
    with sqlite3.connect(tmp_path / "shop.db") as made:
        made.executescript(SCRIPT)
    made.close()
    return str(tmp_path / "shop.db")


def test_sql_tool_returns_rows_as_lines(database: str) -> None:
    tool = sql_over(database)
    tool.check()
    assert (
        tool.call({"query": "SELECT * FROM runs WHERE id < 3;"}) == "id | name | size\n1 | one | 1.5\n2 | NULL | 2.0\n(2 rows)"
    )
    assert tool.call({"query": "SELECT 1 AS a WHERE 0"}) == "a\n(0 rows)"
    assert tool.call({"query": "SELECT x'00ff' AS a"}) == "a\nx'00ff'\n(1 row)"


def test_sql_tool_without_query_lists_tables(database: str) -> None:
    assert "CREATE TABLE runs (id INTEGER PRIMARY KEY, name TEXT, size REAL)" in sql_over(database).call({})


def test_sql_tool_cuts_long_answers_with_notice(database: str) -> None:
    tool = sql_over(database)
    told = tool.call({"query": ENDLESS.format("i") + " LIMIT 1000"}).splitlines()
    assert len(told) == MAX_ROWS + 2
    assert told[-1] == f"(more than {MAX_ROWS} rows; these are the first)"
    assert tool.call({"query": "SELECT printf('%.*c', 5000, 'x') AS x"}).splitlines()[1] == "x" * MAX_CELL + "..."
    wide = ", ".join(f"printf('%.*c', 200, 'x') AS c{number}" for number in range(100))
    assert tool.call({"query": f"SELECT {wide}"}).endswith("more characters]")


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("SELEC 1", "Invalid query: near"),
        ("SELECT nobody FROM runs", "no such column: nobody"),
        ("SELECT 1; SELECT 2", "Only one statement"),
        ("SELECT 1\x00", "NUL"),
        ("SELECT '\ud800'", "surrogate"),
        ("SELECT " + "1+" * 60_000 + "1", "characters"),
        (ENDLESS.format("count(*)"), "too much work"),
        ("-- nothing", "gives no rows"),
    ],
)
def test_sql_tool_explains_failed_query(database: str, query: str, said: str) -> None:
    with pytest.raises(ToolFailure, match=said):
        sql_over(database).call({"query": query})


def test_sql_tool_stops_endless_query_by_work_not_clock(database: str) -> None:
    for _ in range(2):
        with pytest.raises(ToolFailure, match="takes too much work"):
            sql_over(database).call({"query": ENDLESS.format("max(i)")})


SERIES = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 100000) SELECT {} FROM n"
SET = "replace(hex(zeroblob(150000)), '0', '1') || '0'"
LONG_WORK = {
    "ltrim": f"SELECT length(ltrim(hex(zeroblob(1900000)), {SET}))",
    "rtrim": f"SELECT length(rtrim(hex(zeroblob(1900000)), {SET}))",
    "instr": "SELECT instr(zeroblob(3900000), CAST(zeroblob(1900000) || 'x' AS BLOB))",
    "rows of much work": SERIES.format("sum(length(hex(randomblob(1900000 + i % 2))))"),
    "digits": SERIES.format("sum(length(printf('%.3000000f', i / 3.0)))"),
    "a sort of much": SERIES.format("hex(zeroblob(1900000)) || i") + " ORDER BY 1",
    "names of names": "WITH a0 AS (SELECT 1 x), "
    + ", ".join(f"a{i} AS (SELECT b.x FROM a{i - 1} b, a{i - 1} c)" for i in range(1, 40))
    + " SELECT count(*) FROM a39",
}


@pytest.mark.parametrize("query", LONG_WORK.values(), ids=LONG_WORK)
@pytest.mark.slow
def test_sql_tool_ends_process_of_uncounted_work(monkeypatch: pytest.MonkeyPatch, query: str) -> None:
    monkeypatch.setattr(query_process, "CPU_SECONDS", 1)
    before = time.process_time()
    with pytest.raises(ToolFailure, match="takes too much"):
        sql_over(FOLDER / DATABASE).call({"query": query})
    assert time.process_time() - before < 1.0
    assert read(str(FOLDER / DATABASE), "SELECT 1")[1] == [(1,)]


def test_sql_tool_stops_waiting_query(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query_process, "WALL_SECONDS", 0.2)
    with pytest.raises(ToolFailure, match="too much work"):
        sql_over(FOLDER / DATABASE).call({"query": LONG_WORK["ltrim"]})


@pytest.mark.slow
def test_sql_tool_counts_work_of_each_query_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    query_process.readers.forget()
    monkeypatch.setattr(query_process, "CPU_SECONDS", 1)
    for _ in range(8):
        query = SERIES.format("sum(length(hex(randomblob(200000))))").replace("LIMIT 100000", "LIMIT 400")
        assert read(str(FOLDER / DATABASE), query)[1] == [(160_000_000,)]


def test_sql_tool_keeps_values(database: str) -> None:
    query = "SELECT 1, -9223372036854775808, 9e999, 0.1, NULL, '', 'caf\u00e9\n\U0001f600', x'', x'00ff', '{\"bytes\": 1}'"
    values = (1, -(2**63), float("inf"), 0.1, None, "", "caf\u00e9\n\U0001f600", b"", b"\x00\xff", '{"bytes": 1}')
    assert read(database, query)[1] == [values]


def test_sql_tool_limits_answer_of_many_numbers(database: str) -> None:
    with pytest.raises(AccessDenied, match="longer than"):
        read(database, ENDLESS.format(", ".join(["NULL"] * 2000)), 1000)


@pytest.mark.parametrize("attack", [*ATTACKS, *SQLITE_ATTACKS])
def test_sql_tool_only_reads_sqlite(database: str, tmp_path: Path, attack: str) -> None:
    query = {**ATTACKS, **SQLITE_ATTACKS}[attack].format(folder=tmp_path)
    with pytest.raises(ToolFailure):
        sql_over(database).call({"query": query})
    assert read(database, "SELECT count(*) FROM runs")[1] == [(3,)]
    assert read(database, "SELECT count(*) FROM sqlite_master")[1] == [(2,)]
    assert not (tmp_path / "stolen.db").exists()


@given(st.text())
def test_sql_tool_answers_or_refuses_any_query(query: str) -> None:
    with suppress(ToolFailure):
        assert sql_over(FOLDER / DATABASE).call({"query": query})


def test_sql_tool_reads_changed_script_again(tmp_path: Path) -> None:
    script = tmp_path / "a.sql"
    script.write_text("CREATE TABLE a (b); INSERT INTO a VALUES (1);")
    assert read(str(script), "SELECT b FROM a")[1] == [(1,)]
    script.write_text("CREATE TABLE a (b); INSERT INTO a VALUES (22);")
    assert read(str(script), "SELECT b FROM a")[1] == [(22,)]


def test_sql_tool_invalid_database_is_refused_before_run(tmp_path: Path) -> None:
    for wrong in ("", str(tmp_path), str(tmp_path / "nowhere.db")):
        with pytest.raises(ConfigError, match="AGENTRL_SQL_DATABASE"):
            sql_over(wrong).check()
    with pytest.raises(ServiceError, match="There is no database"):
        sql_over(tmp_path / "nowhere.db").call({"query": "SELECT 1"})
    (tmp_path / "noise.db").write_bytes(b"no database at all, certainly not" * 100)
    with pytest.raises(ServiceError, match="not a database"):
        sql_over(tmp_path / "noise.db").call({"query": "SELECT * FROM a"})
    (tmp_path / "bad.sql").write_text("CREATE TABL")
    with pytest.raises(ServiceError, match="not a SQLite script"):
        sql_over(tmp_path / "bad.sql").call({"query": "SELECT 1"})


# --- Postgres -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def reader(empty_postgres: str, postgres_server: Engine) -> Iterator[str]:
    """URL of a login that may only read two tables."""
    owner = create_engine(empty_postgres, isolation_level="AUTOCOMMIT")
    with owner.connect() as tx:
        tx.execute(text("CREATE TABLE runs (id int PRIMARY KEY, name text, size float)"))
        tx.execute(text("CREATE TABLE events (kind text)"))
        tx.execute(text("INSERT INTO runs VALUES (1, 'one', 1.5), (2, NULL, 2)"))
        tx.execute(
            text(
                "CREATE FUNCTION write_for_all() RETURNS text LANGUAGE sql SECURITY DEFINER "
                "AS 'INSERT INTO events VALUES (''x'') RETURNING kind'"
            )
        )
        tx.execute(text("CREATE ROLE tool_reader LOGIN"))
        tx.execute(text("GRANT SELECT ON runs, events TO tool_reader"))
    yield make_url(empty_postgres).set(username="tool_reader", drivername="postgresql").render_as_string(False)
    with owner.connect() as tx:
        tx.execute(text("DROP OWNED BY tool_reader"))
        tx.execute(text("DROP ROLE tool_reader"))
    owner.dispose()


@pytest.mark.slow
def test_sql_tool_uses_readonly_postgres_login(reader: str, tmp_path: Path) -> None:
    tool = sql_over(reader)
    tool.check()
    assert tool.call({"query": "SELECT * FROM runs ORDER BY id"}) == "id | name | size\n1 | one | 1.5\n2 | NULL | 2.0\n(2 rows)"
    assert "public | runs | id integer, name text, size double precision" in tool.call({})
    with pytest.raises(ToolFailure, match="does not exist"):
        tool.call({"query": "SELECT nothing FROM runs"})
    for attack in ({**ATTACKS, **POSTGRES_ATTACKS, "a function of another's": "SELECT write_for_all()"}).values():
        with pytest.raises(ToolFailure):
            tool.call({"query": attack.format(folder=tmp_path)})
    assert tool.call({"query": "SELECT count(*) FROM runs"}).splitlines()[1] == "2"


def test_sql_tool_reads_postgres_of_any_encoding(reader: str, postgres_server: Engine) -> None:
    with postgres_server.connect() as server:
        server.execute(text("DROP DATABASE IF EXISTS bytes"))
        server.execute(text("CREATE DATABASE bytes ENCODING 'SQL_ASCII' LOCALE 'C' TEMPLATE template0"))
    url = make_url(reader).set(database="bytes")
    with psycopg.connect(url.set(username=postgres_server.url.username).render_as_string(False)) as owner:
        owner.execute("CREATE TABLE notes (kind varchar, text text)")
        owner.execute("INSERT INTO notes VALUES ('utf8', 'caf\u00e9'), ('latin1', E'caf\\xe9')".encode())
        owner.execute("GRANT SELECT ON notes TO tool_reader")
    try:
        tool = sql_over(url.render_as_string(False))
        found = tool.call({"query": "SELECT * FROM notes ORDER BY kind DESC"})
        assert found == "kind | text\nutf8 | caf\u00e9\nlatin1 | caf\\xe9\n(2 rows)"
        assert tool.call({"query": "SELECT kind FROM notes WHERE text = 'caf\u00e9'"}) == "kind\nutf8\n(1 row)"
    finally:
        with postgres_server.connect() as server:
            server.execute(text("DROP DATABASE bytes WITH (FORCE)"))


def test_sql_tool_refuses_postgres_login_that_may_write(reader: str, empty_postgres: str) -> None:
    with pytest.raises(ServiceError, match="may do more than read"):
        sql_over(empty_postgres).check()
    owner = create_engine(empty_postgres, isolation_level="AUTOCOMMIT")
    with owner.connect() as tx:
        for right in ("UPDATE (kind)", "DELETE"):
            tx.execute(text(f"GRANT {right} ON events TO tool_reader"))
            with pytest.raises(ServiceError, match="may do more than read"):
                sql_over(reader).call({"query": "SELECT 1"})
            tx.execute(text(f"REVOKE {right} ON events FROM tool_reader"))
            assert sql_over(reader).call({"query": "SELECT 1 AS a"}) == "a\n1\n(1 row)"
    owner.dispose()


def test_sql_tool_without_postgres_is_system_failure() -> None:
    with pytest.raises(ServiceError, match="does not answer"):
        sql_over("postgresql://nobody@127.0.0.1:1/none").call({"query": "SELECT 1"})


# What a value may hold that Python's own do not, and how it is read.
ODD_VALUES = {
    "(repeat('[', 3000) || repeat(']', 3000))::json": "[" * 3000 + "]" * 3000,
    "('1' || repeat('0', 5000))::jsonb": "1" + "0" * 5000,
    "ARRAY[('1' || repeat('0', 5000))::json]": "{1" + "0" * 5000 + "}",
    "'infinity'::timestamp": "infinity",
    "'0044-03-15 BC'::date": "0044-03-15 BC",
    "'24:00'::time": "24:00:00",
    "interval '170000000 years'": "170000000 years",
    "'{1,2}'::int[]": "{1,2}",
    "ROW(1, 'a')": "(1,a)",
    "int4range(1, 5)": "[1,5)",
    "'\"\\ud800\"'::json": '"\\ud800"',
}


def test_sql_tool_reads_any_postgres_value(reader: str) -> None:
    assert {value: read(reader, f"SELECT {value}")[1][0][0] for value in ODD_VALUES} == ODD_VALUES
    numbers = read(reader, "SELECT 1, 1.50, 1e0::float8, true, '\\xff'::bytea, NULL, 'NaN'::float8 = 'NaN'")[1]
    assert numbers == [(1, Decimal("1.50"), 1.0, True, b"\xff", None, True)]


def test_sql_tool_refuses_long_postgres_answer_and_continues(reader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query_process, "WALL_SECONDS", 20.0)
    for much in (
        "repeat('x', 5000000)",
        "array_agg(repeat('x', 1000000)) FROM generate_series(1, 5)",
        "generate_series(1, 600000)",
    ):
        with pytest.raises(AccessDenied, match="answer is longer than 4000000"):
            read(reader, f"SELECT {much}", 1_000_000)
    assert read(reader, "SELECT 1")[1] == [(1,)]


@pytest.mark.slow
def test_sql_tool_refuses_postgres_value_beyond_memory(reader: str) -> None:
    with pytest.raises(AccessDenied, match=r"too much|longer than"):
        read(reader, "SELECT repeat('x', 1000000000)")
    assert read(reader, "SELECT 1")[1] == [(1,)]


def test_sql_reward_of_unreadable_postgres_value_is_wrong(reader: str) -> None:
    for value in ODD_VALUES:
        answered = episode(turn(f"SELECT {value}"), reference="SELECT 1")
        answered = replace(answered, task=replace(answered.task, metadata={"database": reader}))
        assert score(answered, {"sql_match": 1.0}) == {"sql_match": 0.0}

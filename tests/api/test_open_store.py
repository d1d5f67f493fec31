"""`agentrl.open`: a store's runs and episodes as values, tables and datasets; what is hostile in them stays text."""

import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

import agentrl
from agentrl.api import lists
from agentrl.workflow.errors import AccessDenied, ConfigError, NotFoundError, ServiceError, StateError
from agentrl.workflow.settings import settings
from agentrl.workflow.store import steps, token_removal, train_commits
from agentrl.workflow.store.connect import Database
from tests.support.played_runs import CALL, claim, finish, ready, sampled, start, submission, update_of

HOSTILE = "<script>alert(1)</script>\x1b[2J" + "x" * 100_000


@pytest.fixture
def store(database: Database) -> agentrl.Store:
    """Two runs: one that has trained an iteration, and one of which nothing is done."""
    work = ready(database, submission("first", epochs=2))
    train_commits.commit_update(database, work, update_of(work), 3)
    start(database, submission("second"))
    return agentrl.open(database.url.render_as_string(hide_password=False))


def test_store_run_takes_name_number_or_newest(store: agentrl.Store) -> None:
    assert [run.name for run in store.runs()] == ["second", "first"]
    assert [run.name for run in store.runs(text="fir")] == ["first"]
    first = store.run("first")
    assert (first.status, store.run(first.id).name, store.run().name) == ("running", "first", "second")
    assert first.config["rollout"]["group_size"] == 2
    assert first.last.version == 1


def test_store_run_has_curve_iterations_and_events(store: agentrl.Store) -> None:
    first = store.run("first")
    curve = first.curve()
    assert (curve.iterations, curve.rewards) == ((1,), (0.5,))
    assert curve.to_pandas()["reward"].tolist() == [0.5]
    assert [row.status for row in first.iterations()] == ["done", "planned"]
    assert [row.loss for row in first.updates(iteration=1)] == [0.5]
    assert len(list(first.groups(iteration=1))) == 2
    assert first.evals().head() == []
    assert "no iteration has ended" in repr(store.run("second").curve())


def test_store_list_is_paged_and_becomes_table_frame_and_dataset(store: agentrl.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lists, "PAGE", 3)
    done = store.run("first").episodes(status="done")
    assert [row.reward for row in done] == [0.0, 1.0, 0.0, 1.0]
    assert [row.reward for row in done.head(2)] == [0.0, 1.0]
    table, frame = done.to_arrow(), done.to_pandas()
    assert table.num_rows == len(frame) == 4
    assert str(frame["parent_id"].dtype) == "Int64"
    assert frame["reward"].sum() == 2.0
    assert str(table.schema.field("started_at").type) == "timestamp[us, tz=UTC]"
    nothing = store.run("second").episodes(status="done")
    assert nothing.to_arrow().schema == table.schema, "whatever is in it"
    assert nothing.to_dataset().num_rows == 0


def test_store_episodes_dataset_has_conversations(store: agentrl.Store) -> None:
    found = store.episodes("first", min_reward=1).to_dataset()
    assert found["reward"] == [1.0, 1.0]
    roles = [[message["role"] for message in messages] for messages in found["messages"]]
    assert roles == [["user", "assistant"]] * 2
    assert "messages" not in store.episodes("first").to_dataset(messages=False).column_names


def test_store_episode_is_complete(store: agentrl.Store) -> None:
    number = store.episodes("first", min_reward=1).head(1)[0].id
    found = store.episode(number)
    assert isinstance(found.value, agentrl.Episode)
    assert found.value.steps[0].sampled_ids
    assert found.rewards == {"default": {"numeric_answer": 1.0}}
    assert found.messages[-1] == {"role": "assistant", "content": "42", "reasoning_content": "thinking"}
    assert repr(found) == f"<episode {number} of first: done (answered), reward 1.0>"


def test_store_episode_without_tokens_has_texts_but_no_value(database: Database) -> None:
    work = ready(database, submission("first"))
    train_commits.commit_update(database, work, update_of(work), 3)
    token_removal.remove_tokens(database, *token_removal.count_tokens(database, ["first"]))
    store = agentrl.open(database.url.render_as_string(hide_password=False))
    found = store.episode(2)
    assert found.messages[-1] == {"role": "assistant", "content": "42", "reasoning_content": "thinking"}
    assert (found.rewards, found.annotations) == ({"default": {"numeric_answer": 1.0}}, ())
    assert store.episodes("first", min_reward=1).to_dataset()["messages"][0][-1]["content"] == "42"
    assert "42" in found._repr_html_()
    with pytest.raises(StateError, match=r"The tokens of run 'first' were removed on \d{4}"):
        _ = found.value


def test_store_writes_calls_like_chat_api(database: Database) -> None:
    (group,) = start(database, submission("calling", tasks=1))
    work = claim(database, group)
    steps.commit_sampled(database, work.fence, [sampled(work, 0, 0, (CALL,))])
    finish(database, work, 0)
    store = agentrl.open(database.url.render_as_string(hide_password=False))
    said = store.episode(work.episodes[0].id).messages[-1]
    ((call,),) = [said["tool_calls"]]
    assert json.loads(call["function"]["arguments"]) == dict(CALL.call.arguments)
    (row,) = store.episodes("calling", status="done").to_dataset()["messages"]
    assert row[-1]["tool_calls"][0]["function"] == call["function"]


def test_store_sql_is_read_only_and_returns_frame(store: agentrl.Store) -> None:
    found = store.sql("SELECT run, count(*) AS episodes FROM v_episodes GROUP BY run ORDER BY run")
    assert [row["run"] for row in found] == ["first", "second"]
    assert list(found.to_pandas().columns) == ["run", "episodes"]
    with pytest.raises(AccessDenied):
        store.sql("DELETE FROM runs")


@pytest.mark.parametrize("shown", ["store", "run", "episodes", "episode", "curve", "table", "events"])
def test_store_shows_notebook_text_and_never_markup(store: agentrl.Store, database: Database, shown: str) -> None:
    hostile = {"said": HOSTILE.replace("\x00", "")}
    for change in (
        "UPDATE episodes SET final_answer = :said",
        "UPDATE events SET detail = :said",
        "UPDATE tasks SET reference = :said",
    ):
        database.write(lambda tx, change=change: tx.execute(text(change), hostile))
    run = store.run("first")
    values: dict[str, Any] = {
        "store": store,
        "run": run,
        "episodes": run.episodes(),
        "episode": run.episode(run.episodes().head(1)[0].id),
        "curve": run.curve(),
        "table": store.sql("SELECT final_answer FROM v_episodes"),
        "events": run.events(),
    }
    html = values[shown]._repr_html_()
    assert "<script>" not in html
    assert "\x1b" not in html
    assert len(html) < 100_000


def test_store_missing_row_is_error_with_next_step(store: agentrl.Store, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="There is no run 'frist'"):
        store.run("frist")
    with pytest.raises(NotFoundError):
        store.episode(2**80)
    with pytest.raises(ConfigError, match=r"Unknown filter 'statuss'.*status"):
        store.run("first").episodes(statuss="done")
    with pytest.raises(NotFoundError, match="There is no store"):
        agentrl.open(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="empty text"):
        agentrl.open("")
    with pytest.raises(ConfigError, match="not a policy version"):
        store.run("first").policy("newest")
    with pytest.raises(NotFoundError, match="there is no best version"):
        _ = store.run("first").best


def test_store_hides_password() -> None:
    from agentrl.api.store import Store

    where = settings().model_copy(update={"database_url": "postgresql://me:hidden@host:5432/db"})
    assert repr(Store(where)) == "<store postgresql://me@host:5432/db>"


def test_open_takes_folder_or_file(sqlite: Database) -> None:
    file = Path(str(sqlite.url.database))
    start(sqlite, submission("here"))
    assert agentrl.open(file).run().name == "here"
    file.rename(file.with_name("agentrl.db"))
    with agentrl.open(file.parent) as store:
        assert store.run().name == "here"
    assert store.run().name == "here"


def test_store_context_closes_its_connections(database: Database) -> None:
    start(database, submission("here"))
    with agentrl.open(database.url.render_as_string(hide_password=False)) as store:
        store._db._is_current, store._db._file, store._db._parts = False, None, {}  # reads with SQLAlchemy
        assert store.run().name == "here"
        whole = store._db._database
        assert isinstance(whole, Database)
        assert whole.engine.pool.checkedin() == 1
    assert whole.engine.pool.checkedin() == 0  # type: ignore[attr-defined]
    assert store.run().name == "here"
    store.close()


def others(file: Path, *statements: str) -> Path:
    """A database of somebody else."""
    with closing(sqlite3.connect(file)) as made:
        for statement in statements:
            made.execute(statement)
        made.commit()
    return file


def dump(file: Path) -> list[str]:
    """What stands in it."""
    with closing(sqlite3.connect(file)) as read:
        return list(read.iterdump())


NEWER = ("CREATE TABLE alembic_version (version_num TEXT)", "INSERT INTO alembic_version VALUES ('9999')")


def test_open_refuses_foreign_store_and_leaves_it(tmp_path: Path) -> None:
    notes, empty = tmp_path / "notes.db", tmp_path / "empty.db"
    notes.write_text("x")
    empty.touch()
    foreign = others(tmp_path / "foreign.db", "CREATE TABLE theirs (a)")
    newer = others(tmp_path / "newer.db", *NEWER)
    before = [dump(foreign), dump(newer)]
    for file, kind, said in (
        (notes, ServiceError, "file is not a database"),
        (empty, NotFoundError, "There is no store"),
        (foreign, ServiceError, "is not an agentrl database"),
        (newer, ServiceError, "A newer agentrl wrote this database"),
    ):
        with pytest.raises(kind, match=said):
            agentrl.open(file).runs().head()
        with pytest.raises(kind, match=said):
            agentrl.Trainer.attach("any", store=file)
        if file != empty:
            with pytest.raises(ServiceError, match=said):
                agentrl.Trainer(store=file, strategy="threads").fit(train_dataset="arithmetic")
    assert (notes.read_text(), empty.stat().st_size) == ("x", 0)
    assert [dump(foreign), dump(newer)] == before
    for other in (7, b"x"):
        with pytest.raises(ConfigError, match="A store must be a folder, a file or a URL"):
            agentrl.open(other)  # type: ignore[arg-type]


def test_open_reports_host_not_found() -> None:
    with pytest.raises(ServiceError, match=r"does not answer: .*resolve host"):
        agentrl.open("postgresql://me:hidden@no-such-host.invalid/db").runs().head()


def test_error_in_notebook_is_its_sentence() -> None:
    error = agentrl.AgentRLError("It is not there.", "Make it.")
    assert error._render_traceback_() == ["AgentRLError: It is not there.", "  Make it."]


def test_public_names_exist_and_load_lazily() -> None:
    assert all(hasattr(agentrl, name) for name in agentrl.__all__)
    assert sorted(agentrl.__all__) == sorted(name for names in agentrl._MODULES.values() for name in names)
    with pytest.raises(AttributeError, match="no attribute 'Trainr'"):
        _ = agentrl.Trainr
    heavy = "{'torch', 'transformers', 'pandas', 'pyarrow', 'sqlalchemy', 'datasets', 'pydantic'}"
    code = f"import sys, agentrl; loaded = {heavy} & set(sys.modules); assert not loaded, loaded"
    subprocess.run([sys.executable, "-c", code], check=True)
    heavy_store = "{'torch', 'transformers', 'pandas', 'pyarrow', 'datasets'}"
    code = f"import sys, agentrl; agentrl.open; loaded = {heavy_store} & set(sys.modules); assert not loaded, loaded"
    subprocess.run([sys.executable, "-c", code], check=True)

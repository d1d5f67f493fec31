"""Lists come in pages: every row once while others are added, the same on both databases; what is hostile gets one sentence."""

import copy
import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from sqlalchemy import text

from agentrl.workflow.errors import ConfigError, NotFoundError
from agentrl.workflow.store import planning, steps, tool_calls, train_commits
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.driver_reader import Reader
from agentrl.workflow.store.reads import (
    changes,
    episode_rows,
    eval_results,
    group_rows,
    iteration_rows,
    ledger,
    open_work,
    paging,
    run_rows,
)
from agentrl.workflow.store.reads.episode_rows import EpisodeFilter, list_episodes
from agentrl.workflow.store.reads.event_rows import AnnotationFilter, EventFilter, list_annotations, list_events
from agentrl.workflow.store.reads.group_rows import GroupFilter, list_groups
from agentrl.workflow.store.reads.iteration_rows import IterationFilter, list_iterations
from agentrl.workflow.store.reads.paging import MAX_SIZE, Page, Paging, decode_cursor, iterate_rows, select_values
from agentrl.workflow.store.reads.run_rows import RUN_ORDERS, RunFilter, list_runs
from agentrl.workflow.tables.view_row import ViewRow
from agentrl.workflow.tables.views import VIEWS, RunRow
from tests.conftest import created
from tests.support.grown_stores import grown_postgres, grown_sqlite, grown_store  # noqa: F401 - fixtures
from tests.support.played_runs import (
    CALL,
    claim,
    claim_training,
    play,
    ready,
    sampled,
    start,
    submission,
    update_of,
    value,
    values,
)

SHAPE = {"old": 1, "large": 2, "live": 2}
LISTS: dict[str, tuple[Callable[..., Page[Any]], object]] = {
    "runs": (list_runs, RunFilter()),
    "iterations": (list_iterations, IterationFilter("large")),
    "updates": (iteration_rows.list_updates, iteration_rows.UpdateFilter("large")),
    "groups": (list_groups, GroupFilter("large")),
    "episodes": (list_episodes, EpisodeFilter("large")),
    "annotations": (list_annotations, AnnotationFilter("large")),
    "evals": (eval_results.list_evals, eval_results.EvalFilter()),
    "events": (list_events, EventFilter("large")),
}
"""Every list, and a filter that leaves some rows."""

ORDERS = {
    "runs": RUN_ORDERS,
    "groups": group_rows.GROUP_ORDERS,
    "episodes": episode_rows.EPISODE_ORDERS,
    "evals": eval_results.EVAL_ORDERS,
}


grown = grown_store(SHAPE)


def pages(list_page: Callable[..., Page[Any]], db: Any, chosen: object, paging: Paging) -> Iterator[Page[Any]]:
    """The list's pages, one after the other."""
    while True:
        page = list_page(db, chosen, paging)
        yield page
        if not page.next:
            return
        paging = replace(paging, cursor=page.next)


# rows


def test_annotations_are_listed_by_run_episode_kind_and_name(grown: Database) -> None:
    listed = list_annotations(grown, AnnotationFilter("large")).rows
    assert {(row.run, row.kind, row.name, row.data["value"]) for row in listed} == {("large", "reward", "own", 0.5)}
    only = list_annotations(grown, AnnotationFilter(episode=listed[0].episode_id, source="agent", name="own")).rows
    assert [row.id for row in only] == [listed[0].id]
    assert not list_annotations(grown, AnnotationFilter("large", kind="message")).rows


def test_newest_run_and_last_episode_skip_evaluations(database: Database) -> None:
    assert (run_rows.find_newest_run(database), episode_rows.find_last_episode(database)) == (None, None)
    ready(database, submission("before", kind="eval"))
    assert (run_rows.find_newest_run(database), episode_rows.find_last_episode(database)) == ("before", (4, "before"))
    ready(database, submission("trained"))
    ready(database, submission("after", kind="eval"))
    assert (run_rows.find_newest_run(database), episode_rows.find_last_episode(database)) == ("trained", (8, "trained"))


def test_row_has_columns_of_its_view_in_order(database: Database) -> None:
    kinds = {kind.VIEW: kind for kind in ViewRow.__subclasses__()}
    assert kinds.keys() == {*VIEWS, "events"}
    with database.read() as tx:
        shown = {view: list(tx.execute(text(f"SELECT * FROM {view} LIMIT 0")).keys()) for view in kinds}
    assert {view: list(kind.COLUMNS) for view, kind in kinds.items()} == shown


def test_row_has_values_of_declared_types(grown: Database) -> None:
    driver = Reader(grown.url.render_as_string(hide_password=False), lambda: pytest.fail("the driver suffices"))
    for db in (grown, driver):
        for view, kind in VIEWS.items():
            rows = db.ask(lambda tx, kind=kind: select_values(tx, kind, "LIMIT 500"))
            assert rows, view
            TypeAdapter(list[kind]).validate_python([dict(row) for row in rows], strict=True)  # type: ignore[valid-type]


def test_row_is_frozen_mapping_of_its_columns(database: Database) -> None:
    start(database, submission())
    row = run_rows.describe_run(database, "first")
    assert (row.run, row["run"], row.get("nothing"), len(row)) == ("first", "first", None, 23)
    assert row == dict(row) == {**row}
    with pytest.raises(FrozenInstanceError):
        row.run = "second"  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        del row.run
    with pytest.raises(KeyError):
        row["VIEW"]
    with pytest.raises(TypeError, match="RunRow has the columns id, run, "):
        RunRow(**{**row, "other": 1})
    assert copy.deepcopy(row) == row
    assert repr(row).startswith("RunRow(id=1, run='first', kind='train', ")


# pages


def test_pages_in_any_order_make_up_the_list(grown: Database) -> None:
    for name, (list_page, chosen) in LISTS.items():
        for word in ORDERS.get(name, {}):
            for sort in (word, f"-{word}"):
                whole = list_page(grown, chosen, Paging(MAX_SIZE, sort=sort))
                size = max(1, len(whole.rows) // 3)
                assert not whole.next
                assert tuple(iterate_rows(list_page, grown, chosen, Paging(size, sort=sort))) == whole.rows, (name, sort)
        whole = list_page(grown, chosen, Paging(MAX_SIZE))
        parts = list(pages(list_page, grown, chosen, Paging(max(1, len(whole.rows) // 4))))
        assert [row for part in parts for row in part.rows] == list(whole.rows), name
        assert len(whole.rows) < 4 or len(parts) in (4, 5, 6, 7), name


def test_narrowed_pages_make_up_the_list(grown: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    list_page, chosen = LISTS["episodes"]
    for sort in (f"{way}{word}" for word in ORDERS["episodes"] for way in ("", "-")):
        whole = list_page(grown, chosen, Paging(MAX_SIZE, sort=sort)).rows
        size = len(whole) // 8
        monkeypatch.setattr(paging, "SAMPLE_ROWS", 4 * (size + 1))
        assert tuple(iterate_rows(list_page, grown, chosen, Paging(size, sort=sort))) == whole, sort
        second = list_page(grown, chosen, Paging(1, offset=size, sort=sort)).rows
        assert second == whole[size : size + 1], sort


def test_pages_hold_each_initial_row_once_during_inserts(database: Database) -> None:
    for number in range(6):
        start(database, submission(f"run-{number}", tasks=4))
    seen: dict[str, list[int]] = {}
    for name, list_page, chosen, sort in (
        ("newest first", list_runs, RunFilter(), "-id"),
        ("by name", list_runs, RunFilter(), "run"),
        ("oldest first", list_runs, RunFilter(), "id"),
    ):
        found = seen.setdefault(name, [])
        for at, page in enumerate(pages(list_page, database, chosen, Paging(2, sort=sort))):
            found += [row.id for row in page.rows]
            if at < 3:
                start(database, submission(f"{name[0]}-{at}"))
    assert seen["newest first"] == [6, 5, 4, 3, 2, 1]
    for found in seen.values():
        assert len(found) == len(set(found))
        assert {1, 2, 3, 4, 5, 6} <= set(found)


def test_page_ends_with_the_list(database: Database) -> None:
    start(database, submission(tasks=4))  # 4 episodes of the first iteration
    assert [len(page.rows) for page in pages(list_episodes, database, EpisodeFilter("first"), Paging(2))] == [2, 2]
    assert list_episodes(database, EpisodeFilter("first", status="done")) == Page(())
    assert len(list_episodes(database, EpisodeFilter("first"), Paging(3, offset=2)).rows) == 2


def test_driver_reader_gives_the_same_pages(grown: Database) -> None:
    reader = Reader(grown.url.render_as_string(hide_password=False), lambda: pytest.fail("the driver suffices"))
    for name, (list_page, chosen) in LISTS.items():
        assert list_page(reader, chosen, Paging(7)) == list_page(grown, chosen, Paging(7)), name


# filters


def test_list_filters_keep_rows_that_meet_all(grown: Database) -> None:
    def check(list_page: Callable[..., Page[Any]], base: Any, meets: Callable[[Any], object], **asked: Any) -> None:
        everything = list_page(grown, base, Paging(MAX_SIZE)).rows
        met = tuple(row for row in everything if meets(row))
        assert 0 < len(met) < len(everything), asked
        assert list_page(grown, replace(base, **asked), Paging(MAX_SIZE)).rows == met, asked

    episodes, groups, annotations = EpisodeFilter("large"), GroupFilter("large"), AnnotationFilter("large")
    group, episode = list_episodes(grown, episodes).rows[0].group_id, 130
    check(list_episodes, episodes, lambda row: row.group_id == group, group=group)
    check(list_episodes, EpisodeFilter("old"), lambda row: row.error == "the reward raised", text="REWARD raised")
    check(list_episodes, episodes, lambda row: "84" in row.final_answer, text="84")
    check(list_episodes, EpisodeFilter("old"), lambda row: row.error_class == "RewardError", error_class="RewardError")
    cut_off = ("max_steps", "max_tokens", "timeout")
    check(list_episodes, episodes, lambda row: row.stop_reason in cut_off, truncated=True)
    check(list_episodes, episodes, lambda row: row.stop_reason not in cut_off, truncated=False)
    fates = {row.episode_id: row.fate for number in (1, 2, 3) for row in ledger.list_fates(grown, "large", number)}
    check(list_episodes, episodes, lambda row: fates[row.id] == "no_variance", fate="no_variance")
    check(list_episodes, episodes, lambda row: row.status == "done" and row.reward >= 1, outcome="solved")
    check(list_episodes, episodes, lambda row: row.status == "done" and row.reward < 1, outcome="unsolved")
    check(list_groups, groups, lambda row: row.iteration == 2 and row.task == "train/20", iteration=2, task="train/20")
    check(list_iterations, IterationFilter("large"), lambda row: row.iteration > 1, after=1)
    check(list_iterations, IterationFilter("live"), lambda row: row.status == "running", status="running")
    check(list_annotations, annotations, lambda row: row.episode_id == episode, episode=episode)
    check(list_runs, RunFilter(), lambda row: row.kind == "fork", kind="fork")
    check(list_runs, RunFilter(), lambda row: "AR" in row.run.upper(), text="aR")
    check(eval_results.list_evals, eval_results.EvalFilter(), lambda row: row.measures == "old", measures="old")
    check(list_events, EventFilter("large"), lambda row: row.kind == "done", kind="done")


@pytest.mark.parametrize("word", ["%", "_", "!", "\\", "100%", "a'b", ":run", "\0", "\ud800", "x" * 5000])
def test_text_filter_is_literal(database: Database, word: str) -> None:
    start(database, submission("plain"))
    assert list_runs(database, RunFilter(text=word)).rows == ()
    assert list_episodes(database, EpisodeFilter("plain", text=word, task=word)).rows == ()
    with pytest.raises(ConfigError, match="The status is one of planned, running"):
        list_episodes(database, EpisodeFilter("plain", status=word))


@pytest.mark.parametrize("number", [2**63, -(2**63), 10**30])
def test_number_filter_out_of_range_matches_nothing(database: Database, number: int) -> None:
    start(database, submission())
    assert list_episodes(database, EpisodeFilter("first", iteration=number, group=number)).rows == ()
    assert list_annotations(database, AnnotationFilter(episode=number)).rows == ()
    assert ledger.list_fates(database, "first", number) == []


def test_run_filter_takes_name_or_number_of_existing_run(database: Database) -> None:
    start(database, submission())
    assert list_episodes(database, EpisodeFilter("1")) == list_episodes(database, EpisodeFilter("first"))
    for name, (list_page, chosen) in LISTS.items():
        asked = {"evals": {"measures": "nobody"}, "runs": {}}.get(name, {"run": "nobody"})
        if asked:
            with pytest.raises(NotFoundError, match="There is no run 'nobody'"):
                list_page(database, replace(chosen, **asked))  # type: ignore[type-var]


# what may have changed


def test_changed_since_cursor_omits_finished_rows(database: Database) -> None:
    def changed(since: str) -> tuple[list[int], list[int], list[int]]:
        return (
            [row.iteration for row in list_iterations(database, IterationFilter("first", since=since)).rows],
            [row.iteration for row in list_groups(database, GroupFilter("first", since=since)).rows],
            [row.iteration for row in list_episodes(database, EpisodeFilter("first", since=since)).rows],
        )

    work = ready(database, submission(tasks=2, epochs=2))
    before = changes.mark_changes(database, "first")
    assert changed(before) == ([1], [1, 1], [1] * 4)
    train_commits.commit_update(database, work, update_of(work), 3)
    assert changed(before) == ([1, 2], [1, 1, 2, 2], [1] * 4 + [2] * 4)
    after = changes.mark_changes(database, "first")
    assert changed(after) == ([2], [2, 2], [2] * 4)
    assert list_episodes(database, EpisodeFilter("first", since=after, iteration=1)).rows == ()
    for group in values(database, "SELECT id FROM groups WHERE status = 'planned' ORDER BY id"):
        play(database, group)
    work = claim_training(database, value(database, "SELECT max(id) FROM iterations"))
    train_commits.commit_update(database, work, update_of(work), 3)
    assert changed(after) == ([2], [2, 2], [2] * 4)
    assert changed(changes.mark_changes(database, "first")) == ([], [], [])


def test_events_cursor_misses_no_late_commit(postgres: Database) -> None:
    start(postgres, submission())
    with postgres.engine.begin() as late:
        planning.log(late, 1, "late")
        for _ in range(changes.LATE_EVENTS - 1):
            postgres.write(lambda tx: planning.log(tx, 1, "early"))
        mark = changes.mark_changes(postgres, "first")
    kinds = [row.kind for row in list_events(postgres, EventFilter("first", since=mark), Paging(MAX_SIZE)).rows]
    assert kinds.count("late") == 1
    for _ in range(2 * changes.LATE_EVENTS):
        postgres.write(lambda tx: planning.log(tx, 1, "later"))
    mark = changes.mark_changes(postgres, "first")
    assert len(list_events(postgres, EventFilter("first", since=mark), Paging(MAX_SIZE)).rows) == changes.LATE_EVENTS


# open work, fates


def test_open_work_shows_holder_and_waiting_calls(database: Database) -> None:
    groups = start(database, submission())
    work = claim(database, groups[0])
    ((call,),) = steps.commit_sampled(database, work.fence, [sampled(work, calls=(CALL,))])
    tool_calls.start_once(database, call, "host:3:tools", 60)
    found = {(row.queue, row.id): row for row in open_work.list_open_work(database)}
    assert found.keys() == {("rollout", groups[0]), ("rollout", groups[1]), ("tools", call)}
    assert found["rollout", groups[0]].lease_until is not None
    assert (found["rollout", groups[1]].lease_until, found["rollout", groups[1]].worker) == (None, "")
    assert found["tools", call].worker == "host:3:tools"
    assert len(open_work.list_open_work(database, limit=1)) == 1


def test_list_fates_agrees_with_ledger(grown: Database) -> None:
    fates = ledger.list_fates(grown, "large", 2)
    counted = {row["iteration"]: row for row in ledger.count_fates(grown, "large")}[2]
    assert {fate: sum(row.fate == fate for row in fates) for fate in ledger.FATES} == {
        fate: counted[fate] for fate in ledger.FATES
    }


# hostile cursors


def encoded(value: object) -> str:
    return urlsafe_b64encode(json.dumps(value).encode()).decode()


HOSTILE = [
    "x", "=", "é", "\0", "a" * 100_000, encoded([]), encoded({}), encoded(5), encoded(["changes"]), encoded(None),
    encoded([[[[[]]]]]), "W1tbW1tbW1tb" * 80, encoded(["changes", 1, 10**40, 0]), encoded(["changes", 1, "0", 0]),
    encoded(["changes", 2, 0, 0]), encoded(["changes", 1, None, None]), "\ud800",
]  # fmt: skip


@pytest.mark.parametrize("cursor", HOSTILE, ids=range(len(HOSTILE)))
def test_cursor_that_is_hostile_gets_one_sentence(database: Database, cursor: str) -> None:
    start(database, submission())
    for name, (list_page, chosen) in LISTS.items():
        asked = replace(chosen, run="first") if hasattr(chosen, "run") else chosen  # type: ignore[type-var]
        refused(lambda list_page=list_page, asked=asked: list_page(database, asked, Paging(cursor=cursor)))
        if hasattr(chosen, "since") and name != "runs":
            refused(lambda list_page=list_page, asked=asked: list_page(database, replace(asked, since=cursor)))


def test_cursor_is_refused_at_any_recursion_depth() -> None:
    def decode(frames: int) -> object:
        return decode(frames - 1) if frames else decode_cursor(urlsafe_b64encode(b"[" * 740).decode(), "runs")

    refused(lambda: decode(300))


def refused(read: Callable[[], object]) -> None:
    with pytest.raises(ConfigError, match="is not a cursor of this list with this filter and order") as caught:
        read()
    assert caught.value.exit_code == 2
    assert len(str(caught.value)) < 400


def test_cursor_is_refused_by_other_list_filter_order_or_run(grown: Database) -> None:
    chosen = EpisodeFilter("large")
    cursor = list_episodes(grown, chosen, Paging(2, sort="reward")).next
    assert list_episodes(grown, chosen, Paging(9, cursor, sort="reward")).rows
    refused(lambda: list_episodes(grown, chosen, Paging(2, cursor)))
    refused(lambda: list_episodes(grown, chosen, Paging(2, cursor, sort="-reward")))
    refused(lambda: list_episodes(grown, EpisodeFilter("old"), Paging(2, cursor, sort="reward")))
    refused(lambda: list_episodes(grown, replace(chosen, status="done"), Paging(2, cursor, sort="reward")))
    refused(lambda: list_groups(grown, GroupFilter("large"), Paging(2, cursor, sort="reward")))
    refused(lambda: list_episodes(grown, replace(chosen, since=changes.mark_changes(grown, "old"))))
    refused(lambda: list_episodes(grown, replace(chosen, since=cursor)))


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.none())


@given(at=VALUES, last=VALUES, sort=st.sampled_from(["run", "reward", "id"]))
def test_cursor_made_by_hand_is_valid_or_refused(two_runs: Database, at: object, last: object, sort: str) -> None:
    real = list_runs(two_runs, RunFilter(), Paging(1, sort=sort)).next
    digest, *_ = json.loads(urlsafe_b64decode(real + "=="))
    with suppress(ConfigError):
        list_runs(two_runs, RunFilter(), Paging(1, encoded([digest, at, last]), sort=sort))


@pytest.fixture(scope="module")
def two_runs(postgres_server: Any, migrated_name: str) -> Iterator[Database]:
    """Two runs, on the database that forgives less."""
    with created(postgres_server, migrated_name) as url:
        database = Database(url)
        for name in ("first", "second"):
            start(database, submission(name))
        yield database
        database.close()


@pytest.mark.parametrize(
    "paging", [Paging(0), Paging(-1), Paging(MAX_SIZE + 1), Paging(offset=-1), Paging(offset=2**63), Paging(sort="x")]
)
def test_paging_refuses_size_or_order_of_no_list(sqlite: Database, paging: Paging) -> None:
    start(sqlite, submission())
    with pytest.raises(ConfigError):
        list_episodes(sqlite, EpisodeFilter("first"), paging)

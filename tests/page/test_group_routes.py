"""What the page is told of a group: siblings side by side, and where they part, on both databases."""

import random
import time
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import BaseModel
from sqlalchemy import text

from agentrl.workers.page.read_only import ReadOnlyStore
from agentrl.workers.page.routes.episode_routes import Tokens, WholeEpisode
from agentrl.workers.page.routes.group_routes import WholeGroup
from agentrl.workers.page.shown.whole_group import GroupAnswer, load_group_answer
from agentrl.workflow.analysis.alignment import Alignment, align
from agentrl.workflow.settings import Settings
from agentrl.workflow.store import planning, token_removal, train_commits
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.driver_reader import DriverTransaction
from agentrl.workflow.store.row_codecs import pack
from agentrl.workflow.trajectory import CallRecord, Message, Step, ToolCall, ToolResult
from bench.performance import synthetic
from tests.support.page_answers import PageOver
from tests.support.played_runs import altered, claim, claim_training, finish, play, start, submission, update_of
from tests.support.told_turns import FAST, SLOWER, commit, commit_each, ids_of, make_tokenizer, turn


def group_of(db: Database, size: int) -> tuple[int, list[int]]:
    """A group of that many episodes that have not begun, and their numbers."""
    wanted = submission(tasks=1, tasks_per_iteration=1)
    config = {**wanted.config, "rollout": {**wanted.config["rollout"], "group_size": size}, "algorithm": {"name": "grpo"}}
    (group,) = start(db, replace(wanted, config=config, group_size=size))
    return group, [*range(1, size + 1)]


def lines(**named: str) -> dict[int, bytes]:
    """Lines of letters, by the number in their names."""
    return {int(name[1:]): pack("i", map(ord, letters)) for name, letters in named.items()}


def turn_of(index: int, position: int) -> Step:
    """A turn of 160 tokens, in which siblings part after the twentieth."""
    message = Message("assistant", "w " * 200)
    return turn(index, (*range(59), position if index > 20 else 0), (*range(100),), message=message)


# alignment


def test_align_makes_tree_of_shared_prefixes() -> None:
    found = align(lines(_1="abcx", _2="abcyz", _3="abq", _4="abcyw"))
    assert found.common == 2
    told = [(branch.start, branch.end, branch.members) for branch in found.branches]
    assert told == [
        (0, 2, (1, 2, 3, 4)), (2, 3, (1, 2, 4)), (2, 3, (3,)), (3, 4, (1,)), (3, 4, (2, 4)), (4, 5, (2,)), (4, 5, (4,)),
    ]  # fmt: skip
    assert found.alone_from == {1: 3, 2: 4, 3: 2, 4: 4}


def test_align_handles_equal_rows_and_prefixes() -> None:
    found = align(lines(_1="abc", _2="abc", _3="ab", _4=""))
    assert found.common == 0
    assert found.alone_from == {1: 3, 2: 3, 3: 2, 4: 0}
    assert [branch.members for branch in found.branches] == [(1, 2, 3, 4), (1, 2, 3), (1, 2)]
    assert align({}) == Alignment(0, [], {})
    assert align(lines(_7="abc")).alone_from == {7: 0}


def test_align_branches_make_up_each_row() -> None:
    draw = random.Random(7)
    for _ in range(200):
        made = {number: pack("i", [draw.randrange(2) for _ in range(draw.randrange(6))]) for number in range(5)}
        found = align(made)
        for number, line in made.items():
            mine = [branch for branch in found.branches if number in branch.members]
            told = b"".join(made[branch.members[0]][branch.start * 4 : branch.end * 4] for branch in mine)
            assert told == line
            others = [other for key, other in made.items() if key != number]
            alone = found.alone_from[number]
            assert all(not other.startswith(line[: alone * 4 + 4]) for other in others) or alone == len(line) // 4


# the route


def test_group_route_shows_siblings_side_by_side(database: Database) -> None:
    group, _ = group_of(database, 2)
    work = claim(database, group)
    call = CallRecord(ToolCall("calculator", {"expression": "6*7"}), "none", ToolResult("42", None))
    for position in (0, 1):
        commit(database, work, turn(0, (1, 2), (3, 4 + position)), position, (call,))
        prompt = (Message("tool", "42"), Message("user", "and then?"))
        commit(database, work, turn(1, (9,), (5,), prompt=prompt), position)
        ended = finish(database, work, position, float(position))
    assert ended.iteration is not None
    training = claim_training(database, ended.iteration)
    advantage = 0.5 / (0.5**0.5 + 1e-6)
    train_commits.commit_update(database, training, update_of(training, advantages={1: -advantage, 2: advantage}), 3)
    found = PageOver(database).read(f"/api/groups/{group}")
    assert (found["group"]["id"], found["group"]["run_id"], found["left_out"]) == (group, 1, 0)
    assert (found["credit"]["algorithm"], found["credit"]["group_mean"]) == ("grpo", 0.5)
    first, second = found["siblings"]
    assert [(each["kind"], each["text"]) for each in first["text"]] == [
        ("message", "asked 0"), ("sampled", "turn 0"), ("tool", "42"), ("message", "and then?"), ("sampled", "turn 1"),
    ]  # fmt: skip
    assert [(part["part"], part["value"]) for part in second["parts"]] == [("numeric_answer", 1.0)]
    assert (first["fate"], second["fate"]) == ("trained", "trained")
    assert second["advantage"]["agrees"]
    parting = found["parting"]
    assert (parting["common_tokens"], parting["common_text"]) == (3, None)
    assert [(at["episode"], at["step"], at["kind"], at["token_index"], at["token"]) for at in parting["at"]] == [
        (1, 0, "sampled", 3, 4), (2, 0, "sampled", 3, 5),
    ]  # fmt: skip
    assert [(each["from_token"], each["to_token"], each["episodes"]) for each in parting["tree"]] == [
        (0, 3, [1, 2]), (3, 6, [1]), (3, 6, [2]),
    ]  # fmt: skip


def test_group_route_shows_divergence_in_tokens_of_run(database: Database, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path / "model")
    group, _ = group_of(database, 2)
    work = claim(database, group)
    for position, said in enumerate(("é is right", "é was")):
        commit(database, work, turn(0, ids_of(tokenizer, "ask: "), ids_of(tokenizer, said)), position)
    with altered(database, "runs", "base", "id = 1", str(tokenizer)):
        parting = PageOver(database).read(f"/api/groups/{group}")["parting"]
    assert parting["common_text"] == "ask: é "
    assert [at["token_text"] + at["next"] for at in parting["at"]] == ["is right", "was"]
    assert [each["text"] for each in parting["tree"]] == ["ask: é ", "is right", "was"]


def test_group_route_with_removed_tokens_has_no_tree(database: Database, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path / "model")
    group, _ = group_of(database, 2)
    work = claim(database, group)
    for position in (0, 1):
        commit(database, work, turn(0, (1, 2), (3, position)), position)
    planning.stop(database, "first", "cancelled")
    with altered(database, "runs", "base", "id = 1", str(tokenizer)):
        before = PageOver(database).read(f"/api/groups/{group}")
        token_removal.remove_tokens(database, *token_removal.count_tokens(database, ["first"]))
        after = PageOver(database).read(f"/api/groups/{group}")
    assert len(before["parting"]["tree"]) == 3
    assert (after["parting"]["tree"], after["parting"]["at"], after["parting"]["common_tokens"]) == ([], [], 0)
    assert after["parting"]["tokens_removed"].startswith("The tokens of run 'first' were removed on ")
    assert {**after, "parting": None} == {**before, "parting": None}


def test_group_answer_asks_once_for_removed_tokens(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    group, _ = group_of(database, 4)
    work = claim(database, group)
    for position in range(4):
        commit(database, work, turn(0, (1, 2), (3, position)), position)
    queries: list[str] = []

    def read(tx: DriverTransaction) -> GroupAnswer:
        rows = tx.rows
        monkeypatch.setattr(tx, "rows", lambda query, values: queries.append(query) or rows(query, values))
        return load_group_answer(tx, group)

    store = ReadOnlyStore(Settings(database_url=database.url.render_as_string(hide_password=False)))
    assert len(store.ask(read).lines) == 4
    assert sum("tokens_removed_at IS NOT NULL" in query for query in queries) == 1


def test_group_route_before_start_or_missing(database: Database) -> None:
    made = planning.submit(database, submission())
    groups = planning.start_iteration(database, planning.open_iterations(database, made.id)[0])
    page = PageOver(database)
    found = page.read(f"/api/groups/{groups[0]}")
    assert found["parting"]["common_tokens"] == 0
    assert [each["text"] for each in found["siblings"]] == [[], []]
    for number in (0, -1, 999, 10**30):
        assert page.ask(f"/api/groups/{number}")[0] == 404
    assert page.ask("/api/groups/one")[0] == 422


def test_group_route_counts_omitted_siblings(database: Database) -> None:
    group, _ = group_of(database, 70)
    play(database, group)
    found = PageOver(database).read(f"/api/groups/{group}")
    assert (len(found["siblings"]), found["left_out"]) == (64, 6)
    assert found["credit"]["group_size"] == 70


def test_group_route_sends_hostile_texts_as_json(database: Database) -> None:
    group, _ = group_of(database, 2)
    work = claim(database, group)
    huge = "\ud800<script>\x00" * 1_000_000
    commit(database, work, turn(0, (2**31 - 1, -1), (-2,), message=Message("assistant", huge)))
    with database.engine.begin() as tx:
        tx.execute(text("""UPDATE steps SET prompt = '[{"role": "user"}, 7, {"role": "tool", "content": "\\ud800"}]'"""))
    found = PageOver(database).read(f"/api/groups/{group}")
    said = found["siblings"][0]["text"]
    assert [each["text"] for each in said[:3]] == ["", "7", "?"]
    assert len(said[3]["text"]) == 4000
    assert said[3]["cut"]["text"] == len(huge)


def test_group_route_answers_eight_long_siblings(database: Database) -> None:
    group, ids = group_of(database, 8)
    work = claim(database, group)
    for index in range(200):
        commit_each(database, work, {position: turn_of(index, position) for position in range(len(ids))})
    page = PageOver(database)
    found = page.read(f"/api/groups/{group}")
    assert found["parting"]["common_tokens"] == 21 * 160 + 59
    took = min(_seconds(page, f"/api/groups/{group}") for _ in range(3))
    assert took < 0.4 * SLOWER


def _seconds(page: PageOver, path: str) -> float:
    began = time.perf_counter()
    page.read(path)
    return time.perf_counter() - began


@pytest.mark.parametrize(("what", "documented"), [("groups", WholeGroup), ("episodes", WholeEpisode)])
def test_routes_of_grown_database_answer_as_documented(database: Database, what: str, documented: type[BaseModel]) -> None:
    with database.engine.begin() as tx:
        synthetic.fill(tx, {"old": 1, "large": 4, "live": 2})
    page = PageOver(database)
    for number in range(1, 40, 5):
        documented.model_validate(page.read(f"/api/{what}/{number}"))
    Tokens.model_validate(page.read("/api/episodes/20/tokens"))
    assert min(_seconds(page, f"/api/{what}/20") for _ in range(3)) < FAST * SLOWER

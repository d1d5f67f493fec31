"""What the page is told of one episode: turns, texts, tokens, why it has its advantage, on both databases."""

import math
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from agentrl.workers.page.routes.episode_routes import MAX_TOKENS
from agentrl.workers.page.shown.token_texts import join_pieces
from agentrl.workflow.analysis.token_strip import ELSEWHERE, GUIDED
from agentrl.workflow.store import planning, rollout_claims, steps, token_removal, train_commits
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.forks import Fork
from agentrl.workflow.store.rollout_claims import GroupWork, Outcome
from agentrl.workflow.token_chains import INHERITED, UNREAD
from agentrl.workflow.trajectory import CallRecord, Message, ToolCall, ToolResult
from tests.support.page_answers import PageOver
from tests.support.played_runs import (
    CALL,
    altered,
    answered,
    claim,
    claim_training,
    fail,
    finish,
    play,
    sampled,
    start,
    step,
    submission,
    update_of,
    value,
)
from tests.support.told_turns import FAST, SLOWER, commit, ids_of, make_tokenizer, turn


def first_work(db: Database, name: str = "first") -> GroupWork:
    """The claim of the first group of a new run; its episodes are 1 and 2."""
    return claim(db, start(db, submission(name))[0])


def trained(
    db: Database, algorithm: dict[str, Any], rewards: tuple[float, ...] = (0.0, 1.0), guided: tuple[int, ...] = ()
) -> int:
    """A run of one group under that algorithm, its second episode one turn longer; the iteration that is to be recorded.

    A grammar chose the tokens at the places `guided` of the longer one's last turn.
    """
    wanted = submission(tasks=1, tasks_per_iteration=1)
    group = start(db, replace(wanted, config={**wanted.config, "algorithm": algorithm}))[0]
    work = claim(db, group)
    for position in (0, 1):
        commit(db, work, turn(0, (1, 2), (3, 4)), position)
    commit(db, work, turn(1, (5,), (6, 7, 8), guided=guided), 1)
    for position, reward in enumerate(rewards):
        ended = finish(db, work, position, reward)
    assert ended.iteration is not None
    return ended.iteration


def record(db: Database, iteration: int, advantages: dict[int, float]) -> None:
    """The update of the iteration, with these advantages."""
    work = claim_training(db, iteration)
    train_commits.commit_update(db, work, update_of(work, advantages=advantages), 3)


# the whole episode


def test_episode_route_has_task_turns_calls_rewards_and_commands(database: Database) -> None:
    work = first_work(database)
    (call,) = steps.commit_sampled(database, work.fence, [sampled(work, 0, 0, (CALL,))])[0]
    with database.engine.begin() as tx:
        tx.execute(text("UPDATE tool_calls SET status = 'done', result = '42' WHERE id = :id"), {"id": call})
    seen = replace(step(0, (CALL,)), results=(answered(),))
    steps.commit_observed(database, work.fence, [(1, seen)])
    prompt = (Message("tool", "42", name="calculator"), Message("tool", "43", name="calculator"), Message("user", "go on"))
    commit(database, work, turn(1, (9,), (5, 6, 7), prompt=prompt))
    finish(database, work, 0, 1.0)
    found = PageOver(database).read("/api/episodes/1")
    assert found["episode"]["status"] == "done"
    assert found["episode"]["run_id"] == 1
    assert found["task"]["messages"] == [{"role": "user", "content": f"What is 6*{found['task']['key'][-1]}?"}]
    first, second = found["turns"]
    assert (first["thought"], first["content"], first["text"]) == ("thinking", "42", "42")
    assert first["mean_logprob"] == pytest.approx(-(0.125 + 2.0**-22) / 2)
    (told,) = first["calls"]
    assert (told["tool"], told["arguments"], told["result"]) == ("calculator", {"expression": "6*7"}, "42")
    assert second["parent_step"] == 0
    assert [(said["content"], said.get("edited", False)) for said in second["messages"]] == [("43", True), ("go on", False)]
    assert found["chains"] == [
        {"chain": 0, "steps": [0, 1], "from_step": None, "shared_tokens": None, "start": 0, "end": 9}
    ]  # fmt: skip
    assert [(part["part"], part["value"]) for part in found["rewards"]] == [("numeric_answer", 1.0)]
    assert (found["next_turn"], found["parent"], found["forks"], found["agent"]) == (None, None, [], None)
    assert found["commands"]["verify"] == "agentrl replay 1 --verify all"
    assert found["commands"]["fork"] == "agentrl fork 1 --step 1"
    assert found["commands"]["whatif"] is None  # nothing is trained yet


def test_episode_route_links_siblings_before_and_after(database: Database) -> None:
    first_work(database)
    page = PageOver(database)
    ids = sorted(row["id"] for row in page.read("/api/runs/1/episodes", group=1, sort="-id")["rows"])
    beside = [page.read(f"/api/episodes/{episode}")["beside"] for episode in ids]
    assert [each["previous"] for each in beside] == [None, *ids[:-1]]
    assert [each["next"] for each in beside] == [*ids[1:], None]
    assert len(ids) > 1


def test_episode_route_pages_every_turn(database: Database) -> None:
    work = first_work(database)
    for index in range(7):
        commit(database, work, turn(index, (1,), (2, 3)))
    page, shown, at = PageOver(database), [], 0
    while at is not None:
        found = page.read("/api/episodes/1", turn=at, size=3)
        shown += [each["step"] for each in found["turns"]]
        at = found["next_turn"]
    assert shown == [*range(7)]
    assert page.ask("/api/episodes/1", size=0)[0] == 422
    assert page.read("/api/episodes/1", turn=99)["turns"] == []


def test_episode_route_of_missing_episode_is_404(database: Database) -> None:
    page = PageOver(database)
    for number in (1, -1, 2**63, 10**30):
        for path in ("", "/tokens"):
            status, document = page.ask(f"/api/episodes/{number}{path}")
            assert (status, document["error"]) == (404, f"There is no episode {number}.")
    assert page.ask("/api/episodes/one")[0] == 422


def test_episode_route_before_start_has_no_turns_or_tokens(database: Database) -> None:
    planning.submit(database, submission())
    page = PageOver(database)
    found = page.read("/api/episodes/1")
    assert (found["turns"], found["chains"], found["fate"]["fate"]) == ([], [], "open")
    assert (found["commands"]["verify"], found["commands"]["rescore"]) == (None, None)
    assert page.read("/api/episodes/1/tokens")["total"] == 0


def test_episode_route_of_failed_episode_explains_lack_of_update(database: Database) -> None:
    work = first_work(database)
    commit(database, work, turn(0, (1,), (2,)))
    fail(database, work, 0)
    found = PageOver(database).read("/api/episodes/1")
    assert found["fate"]["sentence"] == "not trained: it failed (the reward raised)"
    assert found["advantage"]["how"] == "No update has used it."


def test_episode_route_cuts_long_texts_and_gives_paths(database: Database) -> None:
    work = first_work(database)
    long = "ab😀" * 10_000
    call = CallRecord(ToolCall("calculator", {"expression": long}), "none", ToolResult(long, None))
    prompt = (Message("user", long),)
    made = turn(0, (1,), (2,), prompt=prompt, message=Message("assistant", long, long, (call.call,)))
    commit(database, work, made, calls=(call,))
    page = PageOver(database)
    (found,) = page.read("/api/episodes/1")["turns"]
    assert {*found["cut"]} == {"thought", "content", "text"}
    assert found["cut"]["content"] == 30_000
    assert len(found["content"]) == 20_000
    shown = [found, found["messages"][0], found["calls"][0]]
    paths = [path for each in shown for path in each["of"].values()]
    assert {*paths} >= {"steps/0/thought", "steps/0/messages/0/content", f"calls/{found['calls'][0]['id']}/result"}
    for path in paths:
        whole, at = "", 0
        while at is not None:
            part = page.read("/api/episodes/1/text", of=path, start=at, size=25_000)
            whole, at = whole + part["text"], part["next"]
        assert part["total"] == len(whole)
        assert long in whole if path.endswith("arguments") else whole == long


def test_episode_text_route_of_wrong_path_is_404(database: Database) -> None:
    commit(database, first_work(database), turn(0, (1,), (2,)))
    page = PageOver(database)
    for path in (
        "",
        "steps",
        "steps/9/text",
        "steps/-1/text",
        "steps/0/prompt",
        "steps/0/messages/7/content",
        "calls/999/result",
        "calls/99999999999999999999/result",
        "annotations/1/data",
        "task/metadata",
        "../runs/1",
        "steps/٣/text",
        "x" * 200,
    ):
        assert page.ask("/api/episodes/1/text", of=path)[0] == 404, path


def test_episode_text_route_refuses_call_of_other_episode(database: Database) -> None:
    work = first_work(database)
    steps.commit_sampled(database, work.fence, [sampled(work, 1, 0, (CALL,))])
    call = value(database, "SELECT id FROM tool_calls")
    page = PageOver(database)
    assert page.ask("/api/episodes/1/text", of=f"calls/{call}/arguments")[0] == 404
    assert page.read("/api/episodes/2/text", of=f"calls/{call}/arguments")["text"] == '{"expression": "6*7"}'


def test_episode_route_sends_hostile_values_as_valid_json(database: Database) -> None:
    work = first_work(database)
    bad = "\ud800</script>\x00\x1b[2J\u202e"
    deep: Any = "x"
    for _ in range(200):
        deep = [deep]
    call = CallRecord(ToolCall("a/b\ud800😀", {bad: bad, "deep": deep, "nan": math.nan}), "none", ToolResult(bad, None))
    odd = turn(0, (1, 2**31 - 1, -5), (2, 3), prompt=(Message("user", bad),), behavior_logprobs=(math.nan, -math.inf))
    commit(database, work, replace(odd, message=Message("assistant", bad, bad, (call.call,))), calls=(call,))
    with database.engine.begin() as tx:
        change = "UPDATE steps SET prompt = :prompt, logprob_sum = :inf"
        prompt = '[{"role": "user", "content": "\\ud800 half"}, {"role": 3}, "none", null, {"role": "tool", "content": 5}]'
        tx.execute(text(change), {"prompt": prompt, "inf": -math.inf})
    page = PageOver(database)
    (found,) = page.read("/api/episodes/1")["turns"]
    assert found["mean_logprob"] is None
    assert [said["content"] for said in found["messages"]] == ["? half", "", "none", "None", "5"]
    assert found["calls"][0]["arguments"].startswith("{")  # too deep to show as it is
    tokens = page.read("/api/episodes/1/tokens")
    assert tokens["ids"] == [1, 2**31 - 1, -5, 2, 3]
    assert tokens["logprobs"] == [None] * 5
    assert tokens["metrics"][0]["source"] == "missing"


def test_episode_route_serves_10_mb_message_in_parts(database: Database) -> None:
    work = first_work(database)
    huge = "0123456789" * 1_000_000
    call = CallRecord(ToolCall("read", {"file": huge}), "none", ToolResult(huge, None))
    made = turn(0, (1,), (2,), prompt=(Message("user", huge),), message=Message("assistant", huge, huge, (call.call,)))
    commit(database, work, made, calls=(call,))
    page = PageOver(database)
    found = page.read("/api/episodes/1")
    assert found["turns"][0]["messages"][0]["cut"] == {"content": 10_000_000}
    part = page.read("/api/episodes/1/text", of="steps/0/content", start=9_999_990)
    assert (part["text"], part["total"], part["next"]) == ("0123456789", 10_000_000, None)
    assert page.read("/api/episodes/1/text", of="steps/0/content", start=2**53)["text"] == ""


def test_episode_route_stays_small_with_many_long_texts(database: Database) -> None:
    work = first_work(database)
    for index in range(150):
        commit(database, work, turn(index, (1,), (2,), message=Message("assistant", "c" * 30_000, "t" * 30_000)))
    turns = PageOver(database).read("/api/episodes/1")["turns"]
    assert sum(len(each["content"]) + len(each["thought"]) for each in turns) < 2_200_000
    assert {each["cut"]["content"] for each in turns} == {30_000}
    assert min(len(each["content"]) for each in turns) == 200


def test_episode_route_commands_use_number_for_unsafe_name(database: Database) -> None:
    commit(database, first_work(database), turn(0, (1,), (2,)))
    page = PageOver(database)
    for name in ("a b; rm -rf $HOME'\"😀/x", "--help", "a\x15touch x\n", "a\n", "a\x1b[201~b", ""):
        with altered(database, "runs", "name", "id = 1", name):
            found = page.read("/api/episodes/1")["commands"]
        assert found["export"] == "agentrl ui --export 1 --episode 1 --out 1.html", name
    assert page.read("/api/episodes/1")["commands"]["export"] == "agentrl ui --export first --episode 1 --out first.html"


# chains, forks, tokens


def test_episode_route_lists_agent_chains_with_shared_parts(database: Database) -> None:
    work = first_work(database)
    commit(database, work, turn(0, (1, 2, 3), (4, 5)))
    commit(database, work, turn(1, (6,), (7,), parent=0))
    commit(database, work, turn(2, (8,), (9, 10), chain=1, parent=0, shared=4, new_row="it edited its history"))
    commit(database, work, turn(3, (20,), (21,), chain=2, parent=-1, new_row="a conversation of its own", delivered=False))
    page = PageOver(database)
    found = page.read("/api/episodes/1")
    assert [(chain["steps"], chain["from_step"], chain["start"], chain["end"]) for chain in found["chains"]] == [
        ([0, 1], None, 0, 7), ([2], 0, 7, 14), ([3], None, 14, 16),
    ]  # fmt: skip
    assert [(each["trains"], each["why_not"]) for each in found["turns"]] == [(True, None)] * 3 + [(False, UNREAD)]
    tokens = page.read("/api/episodes/1/tokens")
    assert tokens["ids"] == [1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 8, 9, 10, 20, 21]
    assert tokens["logprobs"][10] == tokens["logprobs"][3] == -0.5
    told = [
        (each["start"], each["end"], each["kind"], each["step"], each["chain"], each["why_not"]) for each in tokens["segments"]
    ]
    assert told == [
        (0, 3, "prompt", 0, 0, None), (3, 5, "sampled", 0, 0, None), (5, 6, "prompt", 1, 0, None),
        (6, 7, "sampled", 1, 0, None),
        (7, 10, "prompt", 0, 1, None), (10, 11, "sampled", 0, 1, ELSEWHERE), (11, 12, "prompt", 2, 1, None),
        (12, 14, "sampled", 2, 1, None), (14, 15, "prompt", 3, 2, None), (15, 16, "sampled", 3, 2, UNREAD),
    ]  # fmt: skip
    for first in range(17):
        for size in (1, 2, 5):
            part = page.read("/api/episodes/1/tokens", start=first, size=size)
            assert part["ids"] == tokens["ids"][first : first + size]
            assert part["logprobs"] == tokens["logprobs"][first : first + size]
            assert sum(each["end"] - each["start"] for each in part["segments"]) == len(part["ids"])


def test_episode_route_of_fork_has_turns_of_parent(database: Database) -> None:
    work = first_work(database)
    for index in range(3):
        commit(database, work, turn(index, (index,), (10 + index,)))
    finish(database, work, 0, 1.0)
    commit(database, work, turn(0, (1,), (2,)), 1)
    finish(database, work, 1, 0.0)
    wanted = replace(submission("forked", kind="fork"), tasks=(), fork=Fork(1, 2))
    group = start(database, wanted)[0]
    forked = claim(database, group)
    number = forked.episodes[0].id
    commit(database, forked, turn(2, (50,), (51,)))
    page = PageOver(database)
    found = page.read(f"/api/episodes/{number}")
    assert [(each["step"], each["inherited"], each["why_not"]) for each in found["turns"]] == [
        (0, True, INHERITED), (1, True, INHERITED), (2, False, None),
    ]  # fmt: skip
    assert found["parent"] == {"id": 1, "step": 2}
    assert page.read(f"/api/episodes/{number}/tokens")["ids"] == [0, 10, 1, 11, 50, 51]
    assert page.read(f"/api/episodes/{number}/text", of="steps/1/content")["text"] == "turn 1"
    forks = page.read("/api/episodes/1")["forks"]
    assert [(each["run"], each["step"]) for each in forks] == [("forked", 2)] * len(forks)
    assert number in [each["id"] for each in forks]


def test_episode_route_with_removed_tokens_keeps_texts(database: Database) -> None:
    record(database, trained(database, {"name": "grpo"}), {1: -0.5, 2: 0.5})
    page = PageOver(database)
    before = page.read("/api/episodes/2")
    assert before["tokens_removed"] is None
    token_removal.remove_tokens(database, *token_removal.count_tokens(database, ["first"]))
    after = page.read("/api/episodes/2")
    sentence = after["tokens_removed"]
    assert re.fullmatch(r"The tokens of run 'first' were removed on \d{4}-\d\d-\d\d\.", sentence)
    needy = dict.fromkeys(("verify", "fork", "rescore", "whatif"))
    assert all(before["commands"][name] for name in needy)
    assert after == {**before, "tokens_removed": sentence, "commands": {**before["commands"], **needy}}
    assert page.ask("/api/episodes/2/tokens") == (
        409, {"error": sentence, "hint": "Its texts, tool calls and rewards are still stored: agentrl episodes first"},
    )  # fmt: skip
    assert page.read("/api/runs/1")["run"]["tokens_removed_at"] is not None


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A model's folder with a tokenizer."""
    return make_tokenizer(tmp_path / "a model")


def test_tokens_route_uses_tokenizer_of_run(database: Database, tokenizer: Path) -> None:
    said = "ab é😀<|end|>ß"
    ids = ids_of(tokenizer, said)
    commit(database, first_work(database), turn(0, ids, (*ids, 99_999, -3)))
    page = PageOver(database)
    with altered(database, "runs", "base", "id = 1", str(tokenizer)):
        found = page.read("/api/episodes/1/tokens")
        texts = found["texts"]
        assert found["why_no_texts"] is None
        assert "".join(texts[: len(ids)]) == said
        assert texts[len(ids) :] == [*texts[: len(ids)], "", ""]
        assert "é" in texts
        assert texts[texts.index("😀") + 1 :][:3] == ["", "", ""]
        for first in range(2 * len(ids)):
            part = page.read("/api/episodes/1/tokens", start=first, size=2)
            assert part["texts"] == texts[first : first + 2]


def test_tokens_route_without_tokenizer_gives_ids_and_reason(database: Database, tmp_path: Path) -> None:
    commit(database, first_work(database), turn(0, (1,), (2,)))
    (tmp_path / "tokenizer.json").write_text('{"decoder": ')
    page = PageOver(database)
    for base, why in (
        ("tiny", "not on this machine"),
        ("../..", "not on this"),
        (str(tmp_path), "cannot be read"),
        ("", "not on"),
    ):
        with altered(database, "runs", "base", "id = 1", base):
            found = page.read("/api/episodes/1/tokens")
            assert (found["ids"], found["texts"]) == ([1, 2], None)
            assert why in found["why_no_texts"]


def test_join_pieces_replaces_broken_letters_without_shift() -> None:
    assert join_pieces([b"\xf0\x9f", b"\x98", b"\x80a", b"b"]) == ["😀", "", "a", "b"]
    assert join_pieces([b"\xe2\x82", b"A", b"\xc3"]) == ["\ufffd", "A", "\ufffd"]
    assert join_pieces([b"", b"\x80\x80", b"\xc3", b"", b"\xa9\xc3", b"\xa9"]) == ["", "\ufffd\ufffd", "é", "", "é", ""]


# advantages


@pytest.mark.parametrize(
    ("algorithm", "expected", "said"),
    [
        ({"name": "grpo", "convention": "verl", "scale": "group"}, 0.5 / (math.sqrt(0.5) + 1e-6), "deviation of the group"),
        ({"name": "grpo", "convention": "trl", "scale": "group"}, 0.5 / (math.sqrt(0.5) + 1e-4), "deviation of the group"),
        ({"name": "grpo", "convention": "verl", "scale": "batch"}, 0.5 / (math.sqrt(0.5) + 1e-6), "deviation of the update"),
        ({"name": "dr_grpo", "convention": "verl", "scale": "none"}, 0.5, "reward - group mean"),
        ({"name": "rloo", "convention": "verl"}, 1.0, "mean of the other 1"),
        ({"name": "pass_at_k", "convention": "verl"}, 1.0 / (math.sqrt(0.5) + 1e-6), "lead over the second"),
        ({"name": "opo", "convention": "verl"}, 1.0 - 5 / 7, "weighed by the tokens"),
    ],
)  # fmt: skip
def test_episode_advantage_is_explained_in_numbers(
    database: Database, algorithm: dict[str, Any], expected: float, said: str
) -> None:
    iteration = trained(database, algorithm)
    record(database, iteration, {1: -1.0, 2: expected})
    found = PageOver(database).read("/api/episodes/2")["advantage"]
    assert found["value"] == pytest.approx(expected)
    assert found["computed"] == pytest.approx(expected, abs=1e-9)
    assert found["agrees"]
    assert said in found["formula"]
    assert found["calculation"].endswith(f"= {expected:.4g}")
    assert found["how"] == f"{found['formula']}: {found['calculation']}"
    assert (found["reward"], found["group_mean"]) == (1.0, 0.5)
    tokens = PageOver(database).read("/api/episodes/2/tokens")
    assert {each["advantage"] for each in tokens["segments"] if each["kind"] == "sampled"} == {found["value"]}
    assert tokens["metrics"][1]["source"] == "stored"


def test_episode_reason_that_contradicts_record_says_so(database: Database) -> None:
    iteration = trained(database, {"name": "grpo"})
    record(database, iteration, {1: 0.0, 2: 0.25})
    page = PageOver(database)
    found = page.read("/api/episodes/2")["advantage"]
    assert found["agrees"] is False
    assert "the update recorded 0.25" in found["calculation"]
    assert "it was left out, because sampler and trainer differ" in page.read("/api/episodes/1")["advantage"]["formula"]


def test_episode_returns_are_computed_if_record_agrees(database: Database) -> None:
    iteration = trained(database, {"name": "reinforce", "discount": 0.5})
    returns = [0.5**place for place in range(4, -1, -1)]
    record(database, iteration, {1: 0.0, 2: sum(returns) / 5})
    page = PageOver(database)
    found = page.read("/api/episodes/2/tokens")
    assert found["advantages"] == [None, None, *map(pytest.approx, returns[:2]), None, *map(pytest.approx, returns[2:])]
    assert found["metrics"][1]["source"] == "computed"
    part = page.read("/api/episodes/2/tokens", start=3, size=3)
    assert part["advantages"] == found["advantages"][3:6]


def test_episode_marks_tokens_that_a_grammar_chose(database: Database) -> None:
    iteration = trained(database, {"name": "reinforce", "discount": 0.5}, guided=(0, 2))
    record(database, iteration, {1: 0.0, 2: 1.75 / 3})
    found = PageOver(database).read("/api/episodes/2/tokens")
    assert found["advantages"] == [None, None, *map(pytest.approx, (0.25, 0.5)), None, None, pytest.approx(1.0), None]
    told = [(each["start"], each["end"], each["trains"], each["why_not"]) for each in found["segments"]]
    assert told == [
        (0, 2, False, None), (2, 4, True, None), (4, 5, False, None),
        (5, 6, False, GUIDED), (6, 7, True, None), (7, 8, False, GUIDED),
    ]  # fmt: skip
    part = PageOver(database).read("/api/episodes/2/tokens", start=6, size=2)
    assert part["advantages"] == found["advantages"][6:8]
    assert [(each["start"], each["end"], each["trains"]) for each in part["segments"]] == [(6, 7, True), (7, 8, False)]


def test_episode_credit_weighs_only_tokens_that_train(database: Database) -> None:
    iteration = trained(database, {"name": "opo"}, guided=(0, 2))
    record(database, iteration, {1: -0.6, 2: 0.4})
    page = PageOver(database)
    assert [page.read(f"/api/episodes/{number}")["advantage"]["agrees"] for number in (1, 2)] == [True, True]
    segments = page.read("/api/episodes/2/tokens")["segments"]
    assert [each["advantage"] for each in segments if each["kind"] == "sampled"] == [0.4, None, 0.4, None]


def test_episode_whitened_returns_use_the_whole_update(database: Database) -> None:
    iteration = trained(database, {"name": "reinforce_plus_plus", "discount": 1.0})
    mean = 5 / 7
    deviation = math.sqrt((5 * (1 - mean) ** 2 + 2 * mean**2) / 6 + 1e-8)
    record(database, iteration, {1: -mean / deviation, 2: (1 - mean) / deviation})
    for number, expected in ((1, -mean / deviation), (2, (1 - mean) / deviation)):
        found = PageOver(database).read(f"/api/episodes/{number}/tokens")
        assert found["advantages"] is None
        told = [each["advantage"] for each in found["segments"] if each["trains"]]
        assert told == [pytest.approx(expected)] * len(told)
        assert found["metrics"][1]["source"] == "computed"


@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "ppo"},
        {"name": "mine.py:own"},
        {"name": "grpo", "kl_coef": 0.1, "kl_in": "reward"},
        {"name": "reinforce"},
        {"name": 3},
    ],
)
def test_episode_advantage_without_rows_says_what_is_missing(database: Database, algorithm: dict[str, Any]) -> None:
    iteration = trained(database, algorithm)
    record(database, iteration, {1: 0.1, 2: 0.2})
    page = PageOver(database)
    found = page.read("/api/episodes/2/tokens")
    assert found["metrics"][1]["source"] == "missing"
    assert "0.2" in found["metrics"][1]["how"]
    assert {each["advantage"] for each in found["segments"]} == {None}
    assert page.read("/api/episodes/2")["advantage"]["computed"] is None


def test_episode_trained_by_other_run_has_its_advantage(database: Database) -> None:
    for group in start(database, submission(kind="serve")):
        play(database, group)
    other = planning.submit(database, submission("other"))
    with database.engine.begin() as tx:
        iteration = tx.execute(text("SELECT id FROM iterations WHERE run_id = :id"), {"id": other.id}).scalars().first()
        query = (
            "INSERT INTO consumptions (run_id, iteration_id, episode_id, stage, advantage) VALUES (:run, :it, 1, 'train', 0.5)"
        )
        tx.execute(text(query), {"run": other.id, "it": iteration})
    found = PageOver(database).read("/api/episodes/1")
    assert (found["advantage"]["value"], found["advantage"]["run"]) == (0.5, "other")
    assert [each["run"] for each in found["read_by"]] == ["other"]
    assert found["commands"]["whatif"].startswith("agentrl whatif other --iteration 1 ")


# a large one


def test_episode_route_answers_32_000_tokens_and_200_turns(database: Database) -> None:
    work = first_work(database)
    call = CallRecord(ToolCall("calculator", {"expression": "6*7"}), "none", ToolResult("42 " * 100, None))
    for index in range(200):
        made = turn(index, tuple(range(60)), tuple(range(100)), message=Message("assistant", "words " * 60, "thought " * 60))
        commit(database, work, made, calls=(call,))
    page = PageOver(database)
    assert page.read("/api/episodes/1/tokens", size=1)["total"] == 32_000
    asked: list[tuple[str, dict[str, int]]] = [("/api/episodes/1", {})]
    asked += [("/api/episodes/1/tokens", {"start": at, "size": MAX_TOKENS}) for at in (0, 16_000, 31_000)]
    asked += [("/api/episodes/1/text", {"of": "steps/199/content"})]  # type: ignore[dict-item]
    for path, how in asked:
        best = min(_seconds(page, path, how) for _ in range(3))
        assert best < FAST * SLOWER, (path, best)


def _seconds(page: PageOver, path: str, asked: dict[str, Any]) -> float:
    began = time.perf_counter()
    page.read(path, **asked)
    return time.perf_counter() - began


def test_episode_route_places_step_reward_under_its_turn(database: Database) -> None:
    work = first_work(database)
    for index in range(2):
        commit(database, work, turn(index, (1,), (2,)))
    parts = {"numeric_answer": 1.0, "format": (0.5, 0.25)}
    outcome = Outcome(1, "done", "answered", 1.375, parts, "42")
    rollout_claims.finish_episodes(database, work.fence, [outcome], work.reward_set, work.weights)
    turns = PageOver(database).read("/api/episodes/1")["turns"]
    assert [each["rewards"][0]["value"] for each in turns] == [0.5, 0.25]

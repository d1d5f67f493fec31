"""One episode in the terminal: its tokens, its differences from another one, and its advantage, as the page shows them."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from agentrl.workers.stack.process import database as process_database
from agentrl.workflow.settings import settings
from agentrl.workflow.store import steps, token_removal, train_commits
from agentrl.workflow.store.connect import Database
from agentrl.workflow.trajectory import CallRecord, Message, PolicyRef, ToolCall
from tests.conftest import forget_process
from tests.support.page_answers import PageOver
from tests.support.played_runs import altered, answered, claim, claim_training, finish, start, submission, update_of
from tests.support.told_turns import commit, ids_of, make_tokenizer, turn
from tests.support.typed import agentrl

MODEL = "letters"
EXPRESSIONS = ("6*7", "6+\u200b7")
RETURNED = ("0\n" * 300 + "42", "0\n" * 300 + "13")


@pytest.fixture
def model(store_home: Path) -> Path:
    """The folder of the run's model, which is not where the run found it: only its name is the same."""
    return make_tokenizer(store_home / "models" / MODEL)


@pytest.fixture
def here(model: Path) -> Iterator[Database]:
    """The store of this process's commands."""
    forget_process()
    yield process_database()
    process_database().close()
    forget_process()


def play(db: Database, model: Path, algorithm: dict[str, Any]) -> int:
    """A run of one group; the iteration that is to be trained. Episode 1 has a call and two tries at the answer, of which one
    begins another chain; a grammar chose a token of it. Episode 2 calls with other arguments.
    """
    wanted = submission(tasks=1, tasks_per_iteration=1)
    policy = PolicyRef(f"/gone/{MODEL}", "hash")
    group = start(db, replace(wanted, policy=policy, config={**wanted.config, "algorithm": algorithm}))[0]
    work = claim(db, group)
    for position, (expression, content) in enumerate(zip(EXPRESSIONS, RETURNED, strict=True)):
        said = f"<call>{expression}</call>\n"
        call = CallRecord(ToolCall("calculator", {"expression": expression}), "none", None)
        made = turn(0, ids_of(model, "ask"), ids_of(model, said), message=Message("assistant", said, "", (call.call,)))
        commit(db, work, made, position, (call,))
        observed = replace(made, results=(answered(content),))
        with db.engine.begin() as tx:
            episode = work.episodes[position].id
            query = "UPDATE tool_calls SET status = 'done', result = :result WHERE episode_id = :episode"
            tx.execute(text(query), {"result": content, "episode": episode})
        steps.commit_observed(db, work.fence, [(episode, observed)])
    commit(db, work, turn(1, (9,), ids_of(model, "42"), guided=(0,)))
    commit(db, work, turn(2, (8,), ids_of(model, "no"), chain=1, parent=0, shared=4, new_row="it edited its history"))
    finish(db, work, 0, 1.0)
    ended = finish(db, work, 1, 0.0)
    assert ended.iteration is not None
    return ended.iteration


def record(db: Database, iteration: int, advantages: dict[int, float]) -> None:
    """The update of the iteration, with these advantages."""
    work = claim_training(db, iteration)
    train_commits.commit_update(db, work, update_of(work, advantages=advantages), 3)


@pytest.mark.parametrize(("algorithm", "source"), [({"name": "grpo"}, "stored"), ({"name": "reinforce"}, "missing")])
def test_replay_tokens_equal_those_of_the_page(
    here: Database, model: Path, capsys: pytest.CaptureFixture[str], algorithm: dict[str, Any], source: str
) -> None:
    record(here, play(here, model, algorithm), {1: 0.70710678, 2: -0.70710678})
    page = PageOver(settings()).read("/api/episodes/1/tokens")
    expected = [
        {
            "id": page["ids"][place],
            "text": page["texts"][place],
            "logprob": page["logprobs"][place],
            "advantage": segment["advantage"],
            **{name: segment[name] for name in ("step", "chain", "trains", "why_not")},
        }
        for segment in page["segments"]
        for place in range(segment["start"], segment["end"])
        if segment["kind"] == "sampled" and segment["chain"] == {0: 0, 1: 0, 2: 1}[segment["step"]]
    ]
    shown = json.loads(agentrl(capsys, "replay", "1", "--tokens", "--json")[0])
    numbers = [token.pop("token") for token in shown["tokens"]]
    assert shown["tokens"] == expected
    assert shown["metrics"] == page["metrics"]
    assert shown["metrics"][1]["source"] == source
    of_steps = [token["step"] for token in expected]
    assert numbers == [place for step in (0, 1, 2) for place in range(of_steps.count(step))]
    part = json.loads(agentrl(capsys, "replay", "1", "--tokens", "--step", "2", "--limit", "1", "--json")[0])
    assert (part["total"], [token["text"] for token in part["tokens"]]) == (of_steps.count(2), ["n"])
    out, told = agentrl(capsys, "replay", "1", "--tokens", "--limit", str(of_steps.index(1) + 1))
    assert f"  advantage: {page['metrics'][1]['how']}\n" in out
    assert "  does not train (step 1): the grammar of its turn chose it, not the policy\n" in out
    lines = out.splitlines()
    assert lines[-2].endswith(r"'\n'")
    assert lines[-1].split() == ["1", "0", str(expected[of_steps.index(1)]["id"]), "-0.500", "0.607", "no", "'4'"]
    assert f"Only the first {of_steps.index(1) + 1} of {len(of_steps)} sampled tokens are shown." in told


def test_replay_tokens_says_what_is_missing(here: Database, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    iteration = play(here, model, {"name": "grpo"})
    out, _ = agentrl(capsys, "replay", "2", "--tokens")
    assert "  advantage: No update has used this episode.\n" in out
    assert "  lowest logprob: -0.500 at step 0, token 0" in out
    assert re.search(r"lowest -0\.500 at token 0 \(id \d+, '.+'\)\n", agentrl(capsys, "replay", "2")[0])
    assert out.splitlines()[6].split() == ["step", "token", "id", "logprob", "prob", "text"]
    with altered(here, "runs", "base", "id = 1", "/gone/other"):
        out, _ = agentrl(capsys, "replay", "2", "--tokens")
        assert "  The tokenizer of '/gone/other' is not on this machine. Tokens are shown by their ids.\n" in out
        assert re.search(r"lowest -0\.500 at token 0 \(id \d+\)\n", agentrl(capsys, "replay", "2")[0])
        assert out.splitlines()[7].split() == ["step", "token", "id", "logprob", "prob"]
    for words, code in ((("--step", "1"), 5), (("--diff", "1"), 2), (("--verify", "all"), 2)):
        agentrl(capsys, "replay", "2", "--tokens", *words, code=code)
    agentrl(capsys, "replay", "2", "--limit", "1", code=2)
    record(here, iteration, {1: 0.5, 2: -0.5})
    token_removal.remove_tokens(here, *token_removal.count_tokens(here, ["first"]))
    for words in (("--tokens",), ("--diff", "1")):
        assert "The tokens of run 'first' were removed on " in agentrl(capsys, "replay", "2", *words, code=6)[1]


def test_replay_diff_shows_arguments_and_text(here: Database, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    play(here, model, {"name": "grpo"})
    out, _ = agentrl(capsys, "replay", "1", "--diff", "2", code=1)
    first = out.splitlines()[1:4]
    ids = [ids_of(model, letter)[0] for letter in "*+"]
    assert first == [
        "  first: step 0, sampled token 7, after '<call>6'",
        f"    episode 1: {ids[0]} '*', then '7</call>\\n'",
        f"    episode 2: {ids[1]} '+', then '\\u200b7</call>\\n'",
    ]
    assert "  step 0, call 0, expression\n    episode 1: '6*7'\n    episode 2: '6+\\u200b7'\n" in out
    (left, right) = [line for line in out.splitlines() if line.startswith("    episode ")][-2:]
    assert left.endswith(r"\n42'")
    assert right.endswith(r"\n13'"), "the texts are cut where they are equal"
    shown = json.loads(agentrl(capsys, "replay", "1", "--diff", "2", "--json", code=1)[0])
    assert shown["token"]["before"] == "<call>6"
    assert shown["token"]["after"] == ["7</call>\n", "\u200b7</call>\n"]
    (call,) = shown["calls"]
    assert [call[side] for side in ("left", "right")] == [
        {"tool": "calculator", "arguments": {"expression": expression}} for expression in EXPRESSIONS
    ]
    with altered(here, "runs", "base", "id = 1", "/gone/other"):
        out, _ = agentrl(capsys, "replay", "1", "--diff", "2", code=1)
        assert f"    episode 1: {ids[0]}\n" in out
        assert "  The tokenizer of '/gone/other' is not on this machine. Tokens are shown by their ids.\n" in out


def test_why_shows_formula_rewards_and_update(here: Database, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    iteration = play(here, model, {"name": "grpo"})
    out, _ = agentrl(capsys, "why", "2")
    assert out.splitlines()[2:4] == ["  rewards    its own: 0; of the other 1 of its group: 1", "  read by    no update"]
    record(here, iteration, {1: 0.5 / (0.5**0.5 + 1e-6), 2: -0.5 / (0.5**0.5 + 1e-6)})
    out, _ = agentrl(capsys, "why", "2")
    assert out.splitlines()[2:6] == [
        "  advantage  by grpo: (reward - group mean) / (deviation of the group + 1e-06)",
        "             (0 - 0.5) / (0.7071 + 1e-06) = -0.7071",
        "  rewards    its own: 0; of the other 1 of its group: 1",
        "  read by    the update of iteration 1 of first",
    ]
    shown = json.loads(agentrl(capsys, "why", "2", "--json")[0])
    page = PageOver(settings()).read("/api/episodes/2")
    assert (shown["explanation"], shown["read_by"]) == (page["advantage"], page["read_by"])
    assert [(one["id"], one["reward"]) for one in shown["group_rewards"]] == [(1, 1.0), (2, 0.0)]

"""Whole searches through the real stack: submitted, killed in the middle, resumed, looked at."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

import agentrl
from agentrl.workflow.plugins import find
from tests.support.played_runs import value, values
from tests.support.real_stack import Stack, embedded_stack
from tests.support.scripted_critic import RULES, ScriptedCritic, serving

ROWS = [{"messages": [{"role": "user", "content": f"{n} + 1?"}], "reference": str(n + 1)} for n in range(24)]
SEARCH = {"critic": "scripted", "choose_tasks": 3, "held_out_tasks": 6, "batch_tasks": 2}
BEAM = {"rounds": 6, "beam_width": 3, "branch_factor": 1}
"""One edit of each: no two questions are alike, so that the script's answers do not depend on which comes first."""
SEED = "Solve this: {question}"

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_programs_of_module")]


@pytest.fixture
def critic() -> ScriptedCritic:
    return ScriptedCritic("informed", 1)


@pytest.fixture
def stack(short_folder: Path, critic: ScriptedCritic) -> Iterator[Stack]:
    with serving(critic) as url, embedded_stack(short_folder, "30") as made:
        made.environment["AGENTRL_CRITIC_URL"] = url
        made.agentrl("sft", "--dataset", "arithmetic", "--model", "tiny", "--steps", "2")
        yield made


def config(folder: Path, name: str, **values: Any) -> str:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    asked = {
        "name": name,
        "env": "plain",
        "algorithm": {"name": "apo"},
        "dataset": {"name": str(folder / "rows.jsonl")},
        "model": {"path": "tiny-arithmetic"},
        "agent": "tests.search.ruled_agent:solve",
        "resources": {"prompt": SEED},
        "search": SEARCH | BEAM,
        **values,
    }
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(asked))
    return str(file)


def way(stack: Stack, run: str) -> list[tuple[str, str, float | None]]:
    """What was tried in order: text, task, reward."""
    query = """SELECT v.text || t.key || e.reward FROM groups g JOIN runs r ON r.id = g.run_id JOIN tasks t ON t.id = g.task_id
        JOIN group_resources l ON l.group_id = g.id JOIN resources v ON v.id = l.resource_id
        JOIN episodes e ON e.group_id = g.id WHERE r.name = :run ORDER BY g.slot, e.sample"""
    return values(stack.database, query, run=run)


def test_search_run_resumes_identically_after_kill(stack: Stack, critic: ScriptedCritic, short_folder: Path) -> None:
    stack.agentrl("submit", "--config", config(short_folder, "calm"), "--wait")
    asked = list(critic.asked)
    critic.asked.clear()
    stack.agentrl("submit", "--config", config(short_folder, "killed"))
    for groups in (4, 12, 25):  # while it samples: what it has asked a critic and not yet written, it must ask again
        stack.wait(
            lambda: value(stack.database, COUNT, run="killed") >= groups and value(stack.database, OPEN, run="killed") > 1,  # noqa: B023
            f"{groups} groups",
        )
        stack.kill_worker("rollout,train")
    stack.wait_for("killed")
    assert way(stack, "killed") == way(stack, "calm")
    assert sorted(critic.asked) == sorted(asked)  # each question once
    assert value(stack.database, "SELECT count(DISTINCT key) - count(*) FROM critic_calls") <= 0
    shown = json.loads(stack.agentrl("prompts", "killed", "--json"))
    best = next(row for row in shown["versions"] if row["chosen"])
    assert sum(advice in best["text"] for advice in RULES.values()) >= 2
    assert shown["held_out"]["tasks"] == 6
    assert shown["held_out"]["second"] == pytest.approx(best["mean_reward"])
    assert shown["held_out"]["low"] > 0
    text = stack.agentrl("prompts", "killed", "show", "best")
    assert text.strip() == best["text"]
    assert f"+{text}" in stack.agentrl("prompts", "killed", "diff", "0", "best")
    assert "there are 0 to" not in stack.agentrl("prompts", "killed", "diff", "0", "99", code=5)
    assert "Did you mean 'prompt'?" in stack.command("prompts", "killed", "--name", "promt").stderr
    run = agentrl.open(stack.home).run("killed")
    assert run.resources == {"prompt": best["text"]}
    assert len(list(run.prompts().rows())) == len(shown["versions"])
    assert {row.model for row in run.critic_calls().rows()} == {"scripted"}
    label = f"prompt @{best['version']}"
    assert shown["gained"] == f"The best version ({label}) scores 1 on 6 held-out tasks; the first scored 0.1."
    for said in (stack.agentrl("watch", "killed"), stack.agentrl("prompts", "killed")):
        assert shown["gained"] in said
        assert "better on 6, worse on 0, equal on 0" in said
        assert "one iteration" not in said
    tree = stack.agentrl("prompts", "killed").splitlines()[2:]
    assert tree[1].startswith("prompt @0 *")
    assert any(line.lstrip("`|- ").startswith(f"{label} *") for line in tree)
    assert any(line.startswith("|  |- prompt @") for line in tree)


COUNT = "SELECT count(*) FROM groups g JOIN runs r ON r.id = g.run_id WHERE r.name = :run AND g.status = 'done'"
OPEN = "SELECT count(*) FROM groups g JOIN runs r ON r.id = g.run_id WHERE r.name = :run AND g.status IN ('planned', 'running')"


def test_search_run_waits_for_silent_critic(stack: Stack, critic: ScriptedCritic, short_folder: Path) -> None:
    url = stack.environment["AGENTRL_CRITIC_URL"]
    stack.environment["AGENTRL_CRITIC_URL"] = "http://127.0.0.1:9"
    stack.agentrl("down")
    stack.agentrl("submit", "--config", config(short_folder, "waits"))
    said = "SELECT count(*) FROM events WHERE detail LIKE '%critic''s server at http://127.0.0.1:9 does not answer%'"
    stack.wait(lambda: value(stack.database, said) > 0, "the event")
    assert values(stack.database, "SELECT status FROM runs WHERE name = 'waits'") == ["running"]
    before = value(stack.database, "SELECT count(*) FROM episodes")
    stack.agentrl("down")
    stack.environment["AGENTRL_CRITIC_URL"] = url
    stack.agentrl("resume", "waits")
    stack.wait_for("waits")
    assert before > 0
    assert critic.asked


def test_search_runs_of_gepa_and_fast_use_same_queues(stack: Stack, short_folder: Path) -> None:
    searched = {
        "algorithm": {"name": "gepa"},
        "search": {**SEARCH, "max_rollouts": 60},
        "agent": "tests.search.ruled_agent:Rolls",
    }
    stack.agentrl("submit", "--config", config(short_folder, "gepa", **searched), "--wait")
    assert value(stack.database, "SELECT count(*) FROM v_resources WHERE run = 'gepa' AND chosen AND version > 0") == 1
    texts = {"system_prompt": "Add the numbers.", "tool:calculator": "Adds what it is given."}
    own = {"algorithm": {"name": "fast"}, "agent": None, "search": {}, "env": "arithmetic", "resources": texts}
    own |= {"dataset": {"name": "arithmetic", "max_tasks": 4}, "rollout": {"max_new_tokens": 8}}
    asked = config(short_folder, "fast", **{**own, "agent": {}})
    stack.agentrl("submit", "--config", asked, "--wait")
    assert value(stack.database, "SELECT count(*) FROM v_episodes WHERE run = 'fast' AND status = 'done'") == 4
    owners = "SELECT coalesce(prompt_step_id, id) FROM steps WHERE run = 'fast' AND number = 0"
    prompts = values(stack.database, f"SELECT prompt FROM steps WHERE id IN ({owners})")
    assert all("Add the numbers." in str(prompt) for prompt in prompts)
    episode = value(stack.database, "SELECT min(id) FROM v_episodes WHERE run = 'fast'")
    stack.agentrl("replay", str(episode), "--verify", "all")
    stack.agentrl("fork", str(episode), "--step", "0", "-n", "2", "--name", "forked", "--wait")
    assert (
        value(stack.database, "SELECT count(*) FROM v_episode_resources WHERE run = 'forked' AND name = 'system_prompt'") == 2
    )
    kept = "SELECT episodes_done FROM v_resources WHERE run = 'fast' AND name = 'system_prompt'"
    assert value(stack.database, kept) == 4, "a fork's episodes are its own run's"


def test_policy_of_search_run_generates_with_chosen_texts(stack: Stack, short_folder: Path) -> None:
    own = {"algorithm": {"name": "fast"}, "agent": {}, "search": {}, "env": "arithmetic"}
    own |= {"resources": {"system_prompt": "First."}, "dataset": {"name": "arithmetic", "max_tasks": 4}}
    stack.agentrl("submit", "--config", config(short_folder, "fast", **own, rollout={"max_new_tokens": 8}), "--wait")
    stack.database.write(
        lambda tx: tx.execute(text("UPDATE resources SET text = 'Best.', chosen = true"))
    )  # as if the search had found it
    run = agentrl.open(stack.home).run("fast")
    assert run.resources == {"system_prompt": "Best."}
    question, tools = agentrl.Message("user", "What is 2 plus 1?"), find("envs", "arithmetic").toolset().values()
    with run.last.open() as opened:
        first, best = (
            opened.generate([agentrl.Message("system", words), question], tuple(tools)).message for words in ("First.", "Best.")
        )
    assert run.last.generate(question.content) == best != first


def test_search_run_reports_critic_without_edits(stack: Stack, critic: ScriptedCritic, short_folder: Path) -> None:
    import subprocess
    import sys

    critic.mode = "I like it as it is."
    stack.agentrl("submit", "--config", config(short_folder, "vain", search=SEARCH | BEAM | {"rounds": 1}), "--wait")
    command = [sys.executable, "-m", "agentrl.cli", "prompts", "vain"]
    done = subprocess.run(command, env=stack.environment, capture_output=True, text=True, check=True)
    asked = value(stack.database, "SELECT count(*) FROM v_critic_calls WHERE run = 'vain'")
    assert f"The critic was called {asked} times, and none of its edits could be used." in done.stdout
    assert "agentrl sql" in done.stderr


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no critic": ({"search": {}}, "apo needs a critic model"),
    "no text": ({"resources": {}}, "No prompt to improve: the agent has no prompt"),
    "a text that nobody reads": (
        {"agent": {}, "resources": {"tone": "Kind."}},
        "resources.tone has no effect without an agent",
    ),
    "a misspelt algorithm": ({"algorithm": {"name": "appo"}}, "No algorithm is called 'appo'"),
}


def test_search_run_refused_writes_nothing(stack: Stack, short_folder: Path) -> None:
    import subprocess
    import sys

    for changes, said in REFUSED.values():
        command = [sys.executable, "-m", "agentrl.cli", "submit", "--config", config(short_folder, "refused", **changes)]
        done = subprocess.run(command, env=stack.environment, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (2, "")
        assert said in done.stderr

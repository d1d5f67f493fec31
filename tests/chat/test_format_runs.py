"""A run in another tool format: its model learns to write it, a run samples it, and what is stored needs no file any more."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.workflow.chat.templates import source_of
from agentrl.workflow.checkpoints.sealed_folder import RECORD
from agentrl.workflow.store.reads import episode_rows
from bench.faults.fork_server import Nursery
from tests.support.chat_families import FAMILIES
from tests.support.forked_stack import forked_stack
from tests.support.played_runs import value, values
from tests.support.real_stack import SMALL, Stack
from tests.support.small_models import tiny_random

NAMED = FAMILIES["named"][0]
LEARN = ("--steps", "80", "--batch-size", "16", "--learning-rate", "1e-2")


@pytest.fixture(scope="module")
def stack(module_folder: Path, forks: Nursery, migrated_file: Path) -> Iterator[Stack]:
    """A stack that did a run by a template of a person's own, whose file is gone, and one in a format that was chosen."""
    with forked_stack(module_folder, forks, migrated_file) as made:
        base, file = tiny_random(module_folder / "base"), module_folder / "named.jinja"
        file.write_text(NAMED)
        learn = ("sft", "--dataset", "arithmetic", "--model", str(base), *LEARN)
        made.agentrl(*learn, "--chat-template", str(file), "--name", "told")
        made.agentrl(*learn, "--tool-format", "pythonic", "--name", "chosen")
        run = ("submit", "--dataset", "arithmetic", "--max-tasks", "4", *SMALL, "--max-new-tokens", "40", "--wait")
        exact = ("-s", "model.numerics=exact")
        made.agentrl(*run, *exact, "--model", "told", "--chat-template", str(file), "--name", "by-file")
        file.unlink()
        made.agentrl(*run, *exact, "--model", "chosen", "--name", "by-record")
        yield made


@pytest.mark.slow
def test_sft_model_holds_its_template_and_format(stack: Stack) -> None:
    told, chosen = (stack.settings.models_dir / name for name in ("told", "chosen"))
    assert (source_of(told) or ("",))[0] == NAMED
    assert json.loads((told / RECORD).read_text())["tool_format"] == "named"
    assert json.loads((chosen / RECORD).read_text())["tool_format"] == "pythonic"


@pytest.mark.slow
@pytest.mark.parametrize(("run", "begins"), [("by-file", '<tool_call name="'), ("by-record", "[calculator(")])
def test_run_in_other_format_calls_tools_and_verifies(stack: Stack, run: str, begins: str) -> None:
    db = stack.database
    config = json.loads(stack.agentrl("config", "show", run, "--json"))
    assert config["model.tool_format"] == ("pythonic" if run == "by-record" else "named")
    assert config["model.chat_template"] == (NAMED if run == "by-file" else None)
    query = "FROM v_tool_calls c JOIN v_episodes e ON e.id = c.episode_id WHERE e.run = :run AND c.tool = 'calculator'"
    assert value(db, f"SELECT count(*) {query}", run=run) >= 1
    episodes = values(db, "SELECT id FROM v_episodes WHERE run = :run ORDER BY id", run=run)
    called = values(db, f"SELECT DISTINCT c.episode_id {query}", run=run)
    texts = values(db, "SELECT text FROM v_steps WHERE step = 0 AND episode_id = :e", e=called[0])
    assert texts[0].startswith(begins)
    assert episode_rows.find_episode(db, called[0]).episode.steps[0].message.tool_calls[0].name == "calculator"
    for episode in (episodes[0], called[0]):
        report = json.loads(stack.agentrl("replay", str(episode), "--verify", "all", "--json"))
        assert report["same"]


@pytest.mark.slow
def test_policy_in_other_format_is_evaluated_and_chatted_with(stack: Stack) -> None:
    stack.agentrl("eval", "--policy", "by-file", "--dataset", "arithmetic", "-n", "2")
    evals = values(stack.database, "SELECT run FROM v_runs WHERE kind = 'eval' ORDER BY id")
    config = json.loads(stack.agentrl("config", "show", evals[-1], "--json"))
    assert (config["model.tool_format"], config["model.chat_template"]) == ("named", NAMED)


@pytest.mark.slow
def test_template_that_drops_messages_starts_no_run(stack: Stack, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jinja"
    bad.write_text(NAMED.replace("<tool_response>\n{{ message.content }}\n", ""))
    before = value(stack.database, "SELECT count(*) FROM runs")
    stack.agentrl("submit", "--dataset", "arithmetic", "--model", "told", "--chat-template", str(bad), *SMALL, code=8)
    stack.agentrl("submit", "--dataset", "arithmetic", "--model", "told", "--tool-format", "name", *SMALL, code=2)
    assert value(stack.database, "SELECT count(*) FROM runs") == before

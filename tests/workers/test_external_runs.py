"""A run whose agents run elsewhere, from `submit` to its updates, on a real stack."""

import json
import sys
from pathlib import Path

import pytest

from tests.support.played_runs import value, values
from tests.support.real_stack import embedded_stack
from tests.support.small_models import tiny_random
from tests.workers.test_external_agents import AGENT


@pytest.mark.slow
def test_external_agents_train_a_run(short_folder: Path, tmp_path: Path) -> None:
    """The real stack, the real command: two iterations of a run whose agents no worker starts."""
    tasks, script = tmp_path / "tasks.jsonl", tmp_path / "agent.py"
    tasks.write_text("".join(json.dumps({"question": f"{n} + 1 =", "answer": str(n + 1)}) + "\n" for n in range(4)))
    script.write_text(AGENT)
    with embedded_stack(short_folder, idle_seconds="3600") as stack:
        stack.environment |= {"PYTHONPATH": str(Path(__file__).parents[2])}
        model = tiny_random(tmp_path / "model")
        words = [
            "--model",
            str(model),
            "--dataset",
            str(tasks),
            "--split",
            "train",
            "--group-size",
            "2",
            "--max-new-tokens",
            "8",
        ]
        words += ["--epochs", "1", "--tasks-per-iteration", "2", "--agent", "external", "--name", "elsewhere"]
        stack.agentrl("submit", *words, "--reward", "numeric_answer")
        stack.agentrl("agent", "poll", "--tasks", "1", "--", "true")  # while the endpoint is starting
        stack.agentrl(
            "agent", "poll", "--parallel", "2", "--tasks", "7", "--run", "elsewhere", "--", sys.executable, str(script)
        )
        stack.agentrl("watch", "elsewhere")
        assert not (stack.home / "stack" / "agents.log").exists(), "no agents worker was started"
        assert sorted(values(stack.database, "SELECT status FROM episodes")) == ["done"] * 7 + ["failed"]
        assert value(stack.database, "SELECT count(*) FROM iterations WHERE status = 'done'") == 2

"""Frameworks of the package index (`make clients`), unmodified, each in an environment of its own, against the endpoint."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.workflow.store.connect import Database
from tests.clients.scripted import ids_of
from tests.project.documents import DOCS
from tests.support.agents_stage import Stage, episode_of, group_of, run_agent, staged
from tests.support.scripted_engine import ScriptedEngine
from tests.support.served_endpoint import endpoint_over
from tests.workers.test_agent_endpoint import held
from tests.workers.test_agent_rollout import CHAT
from tests.workers.test_agent_rollout import db as db
from tests.workers.test_workers import in_memory as in_memory

PROGRAMS = sorted(Path(__file__).with_name("frameworks").glob("run_*.py"))
ENVIRONMENTS = DOCS.parent / "build" / "clients"
PINS = "# dependencies = "
"""How a program begins that has an environment of its own. The others run in that of the tests."""
RIGHT = ("7", "It is 7.", "漢字 🙂 It is 7.", {"value": 7})
MORE_CHAINS = {"run_autogen": 2, "run_langchain": 1, "run_llama_index": 1, "run_smolagents": 2}
"""Each scenario is one chain of tokens, except with a client that writes the history anew: so many more chains."""
ROOM = 100_000
"""The window in tokens: the tiny tokenizer needs one for nearly every letter of a framework's instructions."""


def test_manual_names_versions_of_frameworks() -> None:
    lists = [line.removeprefix(PINS) for file in PROGRAMS for line in file.read_text().splitlines() if line.startswith(PINS)]
    pinned = [pin for line in lists for pin in json.loads(line)]
    recipe = (DOCS.parent / "Makefile").read_text().partition("build/clients/.stamp: Makefile")[2].partition("\n\n")[0]
    pinned += re.findall(r"@?[\w/-]+@\d[\w.]*", recipe)
    manual = (DOCS / "agents.md").read_text()
    rows = [line for line in manual.splitlines() if line.startswith("| ")]
    for pin in pinned:
        version = re.split("==|(?<=.)@", pin)[-1]
        assert any(version in row for row in rows), pin


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_framework_calls_tools_and_answers(db: Database, tmp_path: Path, program: Path) -> None:
    python = Path(sys.executable)
    if PINS in program.read_text():
        python = ENVIRONMENTS / program.stem.removeprefix("run_") / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{python} is missing: make clients")
    engine = ScriptedEngine(lambda request: ids_of(CHAT, request))
    with staged(Stage(db, group_of(db), engine, CHAT, ROOM)) as stage, endpoint_over(db) as served:
        held(stage)
        key = run_agent(db, 1)
        variables = {"OPENAI_BASE_URL": f"{served.url}/v1", "OPENAI_API_KEY": key, "OPENAI_MODEL": "policy"}
        variables |= {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
        process = subprocess.run([python, program], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=300)
        steps = episode_of(db, 1).steps
    said = [json.loads(line) for line in process.stdout.splitlines() if line.startswith('["')]
    wrong = [(name, value) for name, value in said if value not in RIGHT]
    assert not wrong, process.stderr[-20_000:]
    assert process.returncode == 0, process.stderr[-20_000:]
    assert all(step.delivered for step in steps)
    assert {step.chain for step in steps} == set(range(len(said) + MORE_CHAINS.get(program.stem, 0)))

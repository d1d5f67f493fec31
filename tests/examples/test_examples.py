"""Every example runs as its page says, at a small size, and leaves the rows that it speaks of."""

import json
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.played_runs import value
from tests.support.real_stack import Stack, embedded_stack
from tests.support.scripted_critic import ScriptedCritic, serving
from tests.support.small_models import tiny_calling

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
NAMES = sorted(folder.name for folder in EXAMPLES.iterdir() if folder.is_dir() and not folder.name.startswith((".", "_")))
SMALL: dict[str, list[str]] = {
    "calc_agent": ["calc_agent.py", "--iterations", "1", "--tasks", "2", "--group-size", "2"],
    "train_math_agent": ["train_math_agent.py", "--iterations", "1", "--tasks", "2", "--group-size", "2"],
    "openai_agents_sdk": ["openai_agents_sdk.py", "--iterations", "1", "--tasks", "2", "--group-size", "2"],
    "langgraph_sql": ["langgraph_sql.py", "--iterations", "1", "--group-size", "2"],
    "own_env": ["own_env.py", "--iterations", "1", "--group-size", "2"],
    "prompt_only": ["prompt_only.py", "--rounds", "1", "--tasks", "12", "--critic", "scripted"],
}
ENDS = {"prompt_only": "versions tried", "own_env": "32 episodes", "openai_agents_sdk": "4 episodes"}


def test_examples_index_lists_each_with_short_page() -> None:
    listed = re.findall(r"^\| \[(\w+)\]\((\w+)\)", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == [(name, name) for name in NAMES]
    for name in NAMES:
        page = (EXAMPLES / name / "README.md").read_text()
        assert len(page.splitlines()) <= 40, name
        assert f"cd examples/{name}" in page
        for file in re.findall(r"^python (\S+\.py)", page, re.MULTILINE):
            assert (EXAMPLES / name / file).exists(), file


def test_examples_import_nothing_private() -> None:
    for file in EXAMPLES.glob("*/*.py"):
        assert not re.search(r"(from|import) agentrl\.|from tests|import tests", file.read_text()), file


@pytest.mark.parametrize(
    ("expression", "result"),
    [("71+59", "130"), ("48 + 24", "72"), ("5-20", "-15"), ("2*3-1", "5"), ("-4+1", "-3"), ("2**3", "error: ValueError")],
)
def test_example_calculator_reads_what_tiny_model_writes(expression: str, result: str) -> None:
    computed = runpy.run_path(str(EXAMPLES / "calc_agent" / "calc_agent.py"))["computed"]
    arguments = json.dumps({"expression": expression})
    assert computed(SimpleNamespace(function=SimpleNamespace(arguments=arguments))) == result


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, str]]:
    """A stack for all of them, whose workers ask a scripted critic, and a tiny model."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="arl-", dir="/tmp") as folder, serving(ScriptedCritic()) as url:
        model = tiny_calling(Path(folder) / "calling")
        with embedded_stack(Path(folder), "120") as stack:
            stack.environment["AGENTRL_CRITIC_URL"] = url
            yield stack, str(model)


def ran(stack: Stack, name: str, words: list[str]) -> str:
    place: Any = {"cwd": EXAMPLES / name, "env": stack.environment}
    done = subprocess.run([sys.executable, *words], **place, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, f"{name}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}\n{stack.logs()}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
@pytest.mark.parametrize("name", SMALL)
def test_example_trains(home: tuple[Stack, str], name: str) -> None:
    stack, model = home
    said = ran(stack, name, [*SMALL[name], "--model", model])
    run, status, _ = re.findall(r"^([a-z0-9._-]+): (\w+), (.*)$", said, re.MULTILINE)[-1]
    assert status == "done"
    assert ENDS.get(name, "") in said
    assert value(stack.database, "SELECT count(*) FROM v_episodes WHERE run = :run AND status <> 'done'", run=run) == 0
    assert value(stack.database, "SELECT count(*) FROM v_steps WHERE run = :run", run=run) > 0
    failed = "SELECT count(*) FROM v_episodes WHERE run = :run AND stop_reason = 'agent_error'"
    assert value(stack.database, failed, run=run) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_example_benchmark_measures_and_command_line_trains(home: tuple[Stack, str]) -> None:
    stack, model = home
    words = ["submit", "--dataset", "arithmetic", "--model", model, "--agent", "agent:solve", "--iterations", "1"]
    words += ["--tasks-per-iteration", "2", "--group-size", "2", "--max-new-tokens", "16", "--name", "typed", "--wait"]
    ran(stack, "openai_agent", ["-m", "agentrl.cli", *words])
    program = str(EXAMPLES / "benchmark" / "benchmark.py")
    said = ran(stack, "openai_agent", [program, "typed@0", "typed@1", "--tasks", "2"])
    assert len(re.findall(r"^typed@\d +mean [01]\.\d{3} \[.*\]  accuracy .*  n 2$", said, re.MULTILINE)) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_example_notebook_cells_run_in_order(home: tuple[Stack, str], tmp_path: Path) -> None:
    stack, model = home
    document = json.loads((EXAMPLES / "notebook" / "ten_lines.ipynb").read_text())
    cells = [cell for cell in document["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    script = tmp_path / "cells.py"
    script.write_text("\n\n".join("".join(cell["source"]) for cell in cells))
    stack.environment |= {"MODEL": model, "ITERATIONS": "1"}
    said = ran(stack, "notebook", [str(script)])
    assert re.search(r": done, 32 episodes$", said, re.MULTILINE)

"""Agents on other people's libraries, unmodified, on a real stack: what they did is in the rows, and scored."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from tests.clients.scripted import ONCE, PLAIN, TWICE
from tests.conftest import missing
from tests.support.real_stack import Stack, embedded_stack
from tests.support.small_models import tiny_random

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_programs_of_module")]
ROOT = Path(__file__).parents[2]
LITELLM = ROOT / "build" / "clients" / "litellm" / "bin" / "python"
"""Its pins are not ours: it has an environment of its own, as an agent may (`make test-slow` makes it)."""
ROOM = 32_768
"""Positions of the model, for what some libraries say first."""

CALLS = "SELECT count(*) FROM tool_calls WHERE run = :run AND kind = 'agent' AND status = 'done'"
STEPS = "SELECT count(*) FROM steps WHERE run = :run"
PARTS = "SELECT part, min(value) AS least FROM v_rewards WHERE run = :run GROUP BY part"
QUESTIONS = {ONCE: "7", TWICE: "20", PLAIN: "7"}


@pytest.fixture(scope="module")
def stack(module_folder: Path) -> Iterator[Stack]:
    with embedded_stack(module_folder, idle_seconds="3600") as made:
        made.environment["PYTHONPATH"] = str(ROOT)
        yield made


@pytest.fixture(scope="module")
def model(module_folder: Path) -> Path:
    """Weights that decide nothing, with room for long prompts."""
    folder = tiny_random(module_folder / "model")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": ROOM}))
    return folder


def measured(stack: Stack, model: Path, agent: str, *questions: str, more: tuple[str, ...] = ()) -> str:
    """The run that the agent made, in which it answered each question right."""
    file = stack.home.parent / "questions.jsonl"
    file.write_text("".join(json.dumps({"question": each, "answer": QUESTIONS[each]}) + "\n" for each in questions))
    words = ["--dataset", str(file), "--split", "train", "--env", "arithmetic", "--max-new-tokens", "128", "--group-size", "2"]
    engine = ["--engine", "tests.clients.scripted:scripted"]
    said = json.loads(stack.agentrl("eval", "--policy", str(model), *words, *engine, "--agent", agent, *more, "--json"))
    assert (said["episodes"], said["errors"], said["mean_reward"]) == (2 * len(questions), 0, 1.0)
    return str(said["run"])


def count(stack: Stack, query: str, run: str) -> int:
    with stack.database.read() as tx:
        return int(tx.execute(text(query), {"run": run}).scalar_one())


def parts(stack: Stack, run: str) -> dict[str, float]:
    """The least value of each part of the rewards."""
    with stack.database.read() as tx:
        return {row.part: row.least for row in tx.execute(text(PARTS), {"run": run})}


@pytest.mark.parametrize(
    "agent",
    [
        "examples.openai_agent.agent:solve",
        "examples.openai_agent.agent:solve_async",
        "tests.clients.agents:streaming",
        "tests.clients.agents:streaming_helper",
        "tests.clients.agents:pydantic_ai",
        "bench.learning.langgraph_agent:solve",
        "tests.clients.agents:openai_agents",
        "tests.clients.agents:previous_response",
        "tests.clients.agents:langchain_responses",
        "tests.clients.agents:pydantic_ai_responses",
        "tests.clients.agents:pydantic_ai_messages",
        "tests.clients.agents:anthropic_tools",
    ],
)
def test_client_agent_with_own_tools_is_recorded_by_turn(stack: Stack, model: Path, agent: str) -> None:
    run = measured(stack, model, agent, ONCE, TWICE)
    assert count(stack, STEPS, run) == 2 * (2 + 2)
    assert count(stack, CALLS, run) == 2 * (1 + 2)
    with stack.database.read() as tx:
        chains = tx.execute(text("SELECT max(chain) FROM steps WHERE run = :run"), {"run": run}).scalar_one()
    assert chains == 0


def test_client_stream_has_pieces_and_usage(stack: Stack, model: Path) -> None:
    found = parts(stack, measured(stack, model, "tests.clients.agents:streaming", ONCE))
    pieces = next(value for part, value in found.items() if part.endswith("pieces"))
    tokens = next(value for part, value in found.items() if part.endswith("tokens"))
    assert 1 < pieces < tokens


def test_client_concurrent_calls_are_own_steps(stack: Stack, model: Path) -> None:
    run = measured(stack, model, "tests.clients.agents:side_by_side", PLAIN)
    assert count(stack, STEPS, run) == 2 * (4 + 3)


def test_client_program_in_own_environment_is_agent(stack: Stack, model: Path) -> None:
    if not LITELLM.exists():
        missing("litellm (make build/clients/litellm/.stamp)")
    program = Path(__file__).with_name("litellm_agent.py")
    run = measured(stack, model, f"cmd:{LITELLM} {program}", ONCE, TWICE, more=("--agent-unsafe",))
    assert count(stack, STEPS, run) == 2 * (2 + 2)
    assert count(stack, CALLS, run) == 2 * (1 + 2)


def test_client_agent_is_trained_and_inspected(stack: Stack, model: Path) -> None:
    words = ["--dataset", "arithmetic", "--model", str(model), "--epochs", "1", "--max-tasks", "4", "--group-size", "2"]
    words += ["--tasks-per-iteration", "2", "--max-new-tokens", "16", "--agent", "examples.openai_agent.agent:solve"]
    assert stack.agentrl("submit", *words, "--name", "outside", "--wait") == "outside\n"
    assert "done" in stack.agentrl("runs")
    assert "outside" in stack.agentrl("replay")
    stack.agentrl("replay", "--verify", "rewards")
    assert "of outside" in stack.agentrl("why")

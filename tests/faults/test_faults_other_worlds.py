"""A fault at every point of a sandboxed tool, of a trainer with a critic, and of agents and their endpoint."""

from pathlib import Path

import pytest

from tests.conftest import missing
from tests.support.fault_loop import recovered

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_programs_of_module"), pytest.mark.timeout(1200)]

IN_SANDBOX = {
    "program.begun",
    "run_tool.after",
    "call.end",
}
"""Those where the tool was a program in the sandbox."""

IN_TRAINER = {
    "update.after",
    "checkpoint.written",
    "checkpoint.renamed",
    "commit_update.before",
    "commit_update.after",
    "optimizer.dropped",
}
"""Those where the run learned by PPO."""


OF_AGENTS = {
    *(f"agent.{name}" for name in ("claimed", "started", "over", "ended", "rewarded")),
    *(f"agent_call.{name}" for name in ("in", "sampled", "committed", "released")),
    *(f"endpoint.{name}" for name in ("in", "forwarded", "released")),
    *(f"{name}.{side}" for name in ("send_agent", "claim_agent", "finish_agent") for side in ("before", "after")),
    *(f"{name}.{side}" for name in ("open_attempts", "publish_address", "commit_calls") for side in ("before", "after")),
    *(f"{name}.{side}" for name in ("lose_agent", "restart_episode") for side in ("before", "after")),
}
"""Those where agents decided the turns, which called the endpoint."""


@pytest.fixture(scope="module")
def met(module_folder: Path) -> set[tuple[str, str]]:
    """World and point of each fault."""
    return recovered(module_folder, "--world", "critic", "--world", "agent", "--world", "boxed")


def test_faults_of_trainer_with_critic_change_nothing(met: set[tuple[str, str]]) -> None:
    assert met >= {("critic", point) for point in IN_TRAINER}


def test_faults_of_agents_and_endpoint_change_nothing(met: set[tuple[str, str]]) -> None:
    assert met >= {("agent", point) for point in OF_AGENTS}


def test_faults_of_sandboxed_program_change_nothing(met: set[tuple[str, str]]) -> None:
    if not any(world == "boxed" for world, _ in met):
        missing("a sandbox")
    assert met >= {("boxed", point) for point in IN_SANDBOX}

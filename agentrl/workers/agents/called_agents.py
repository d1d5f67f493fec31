"""Runs function agents as threads of this process, so that the agents can use the objects of this process.

Of the agent's limits, only the time limit applies: the other limits are limits of processes. An agent that exceeds the time
limit continues in its thread, but its result is ignored. The agent must read the model's address from `llm`, because all agents
of the process share one environment.
"""

import asyncio
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import Any

from agentrl.workers.agents.guardian import AgentReport, error_text
from agentrl.workers.agents.kept_output import KeptOutput
from agentrl.workflow import emitters
from agentrl.workflow.agents import LLM, AgentTask, read_result
from agentrl.workflow.agents.classes import as_function
from agentrl.workflow.config import AgentConfig
from agentrl.workflow.errors import ConfigError
from agentrl.workflow.plugins import find

LOOK_SECONDS = 0.1


def run(config: AgentConfig, task: AgentTask, llm: LLM, emit_key: str, is_stopped: Callable[[], bool]) -> AgentReport | None:
    """Call the agent in a thread, and wait until it ends. Return None if `is_stopped` returns True before that.

    Raises:
        ConfigError: the agent's path cannot be imported, or `config.frozen_clock` is set, which needs a separate process.
    """
    if config.frozen_clock:
        raise ConfigError(
            "agent.frozen_clock cannot be used here: the agent runs in your process, not in a separate one.",
            "Leave agent.frozen_clock out.",
        )
    agent, report = find("agents", config.name), AgentReport()

    def call() -> None:
        try:
            with emitters.sent(f"{llm.base_url}/annotations", emit_key):
                value = as_function(agent)(task, llm)
                read = read_result(asyncio.run(_awaited(value)) if isawaitable(value) else value)
            report.answer, report.rewards = read.answer, None if read.rewards is None else dict(read.rewards)
        except BaseException as error:  # noqa: BLE001 - anybody's code; its words go into the row
            report.error_class, report.error = type(error).__name__[:100], error_text(error)
            output = KeptOutput([llm.api_key, emit_key])
            output.add("".join(traceback.format_exception(error)).encode("utf-8", "replace"))
            report.output = output.text()

    thread = threading.Thread(target=call, name=f"agent {task.key}"[:60], daemon=True)
    thread.start()
    deadline = time.monotonic() + config.timeout_seconds
    while thread.is_alive():
        thread.join(LOOK_SECONDS)
        if thread.is_alive() and is_stopped():
            return None
        if thread.is_alive() and time.monotonic() > deadline:
            problem = f"it ran for more than {config.timeout_seconds:g} s (agent.timeout_seconds)"
            return AgentReport(error_class="timeout", error=problem)
    return report


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value

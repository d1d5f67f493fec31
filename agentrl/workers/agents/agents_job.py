"""The `agents` job: claim one attempt at an episode, run its agent, and write the agent's result to the row.

The agent gets two keys that belong to its episode: one for model requests, and one for annotations. The attempt's row stores a
hash of the first key. The agent's result goes through this job, never through the endpoint. If a worker is lost, its agents end
too, and the episodes start again with new agents. If a worker is asked to stop, it ends its agents at once.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from logging import getLogger

from agentrl.workers.agents import agent_programs, called_agents, processes
from agentrl.workers.agents.guardian import KILLED, AgentReport
from agentrl.workers.agents.kept_output import hide_keys
from agentrl.workers.agents.processes import AgentUnready
from agentrl.workers.stack.celery_app import app, row_id
from agentrl.workers.stack.dispatch import NO_REPLY
from agentrl.workers.stack.listening import accepts_connections
from agentrl.workers.stack.presence import find_endpoint_url
from agentrl.workers.stack.process import claim_name, database, heartbeat, stopping, threaded, write_when_possible
from agentrl.workers.stack.replies import Waker
from agentrl.workflow.agents import LLM, AgentTask, keys
from agentrl.workflow.errors import AccessDenied, AgentRLError, ConfigError, InfraError, ServiceError
from agentrl.workflow.resources import Prompt
from agentrl.workflow.runtime.faults import faultpoint
from agentrl.workflow.runtime.log_fields import log_fields
from agentrl.workflow.runtime.once_per_process import Once
from agentrl.workflow.settings import settings
from agentrl.workflow.store import agent_attempts
from agentrl.workflow.store.agent_attempts import AgentEnd, AgentWork
from agentrl.workflow.trajectory import Message

log = getLogger("agentrl.agents")
URL_SECONDS = 60.0
"""The longest wait for an endpoint, in seconds."""


@app.task(name="agentrl.agent", throws=(ServiceError, InfraError))
def agent(episode: int, attempt: int, reply_to: str) -> None:
    """Run the agent of this attempt at the episode. Do nothing if the attempt is over or another worker runs the agent."""
    episode = row_id(episode)
    if type(attempt) is not int or not 0 <= attempt < 2**31:
        raise ConfigError(f"The job's attempt must be a number, not {attempt!r:.100}.")
    url, emit_key, claim = _endpoint_url(), keys.new_emit_key(), claim_name()
    key = keys.sampling_key(emit_key)
    lease = settings().lease_seconds
    work = agent_attempts.claim_agent(database(), episode, attempt, claim, keys.key_hash(key), lease)
    if work is None:
        return
    faultpoint("agent.claimed")
    with log_fields(run=work.run, episode=episode, attempt=attempt):
        end = _run_claimed(work, claim, LLM(f"{url}/v1", key, work.run), emit_key)
    faultpoint("agent.over")
    if end is None:
        give_up = partial(agent_attempts.give_up_agent, database(), work.id, claim, "its agents worker was stopped")
        write_when_possible(give_up)
    elif end.error_class == KILLED:
        write_when_possible(partial(agent_attempts.give_up_agent, database(), work.id, claim, end.error, KILLED))
    else:
        write_when_possible(partial(agent_attempts.finish_agent, database(), work.id, claim, end))
    faultpoint("agent.ended")
    if reply_to != NO_REPLY:
        _waker().wake(reply_to, episode)


def _endpoint_url() -> str:
    """Return the URL at which agents reach the endpoint, after waiting up to URL_SECONDS until it accepts connections.

    After a restart of the stack, the stored URL is that of the previous endpoint until the new one stores its own.

    Raises:
        ServiceError: no endpoint is running.
    """
    deadline = time.monotonic() + URL_SECONDS
    while True:
        url = find_endpoint_url(database())
        if url is not None and accepts_connections(url):
            return url
        if stopping.wait(0.2) or time.monotonic() > deadline:
            where = "" if url is None else f" Nothing listens at {url}."
            raise ServiceError(f"No endpoint is running for the agents to call.{where}", "Start one: agentrl worker endpoint")


def _run_claimed(work: AgentWork, claim: str, llm: LLM, emit_key: str) -> AgentEnd | None:
    """Run the agent of a claimed attempt and return its result; None if the attempt is over or this worker must stop."""
    lost = threading.Event()
    heartbeat().hold_agent(work.id, claim, lost.set)
    try:
        report = _run(work, llm, emit_key, lambda: lost.is_set() or stopping.is_set())
    except AgentUnready as error:
        return AgentEnd(None, "AgentUnready", f"the agent {work.agent.name!r} cannot be loaded: {error}")
    except ConfigError as error:
        return AgentEnd(None, "AgentUnready", str(error))
    except AgentRLError as error:
        log.warning("an agent of %s was lost: %s", work.run, error)
        # A loss, so that an agent which ends who watches it does not begin anew for ever.
        return None if stopping.is_set() else AgentEnd(None, KILLED, str(error))
    finally:
        heartbeat().drop_agent(work.id, claim)
    if report is None:
        return None
    end, keys = AgentEnd(**asdict(report)), (llm.api_key, emit_key)
    answer = None if end.answer is None else hide_keys(end.answer, keys)
    return replace(end, answer=answer, error=hide_keys(end.error, keys))


def _run(work: AgentWork, llm: LLM, emit_key: str, is_stopped: Callable[[], bool]) -> AgentReport | None:
    agent = work.agent
    task = AgentTask(
        key=work.task,
        messages=[message_dict(message) for message in work.messages],
        metadata=dict(work.metadata),
        reference=_reference(work) if agent.show_reference else None,
        training=work.training,
        resources={name: Prompt(text) for name, text in work.resources.items()},
    )
    if threaded.is_set() and not agent.command and not agent.sandboxed:
        return called_agents.run(agent, task, llm, emit_key, is_stopped)
    clock = work.began.timestamp() if agent.frozen_clock else None
    with agent_programs.placed(agent, task, llm, work.config, emit_key, clock) as place:
        faultpoint("agent.started")
        return processes.run(place.order(agent, task, [llm.api_key, emit_key]), place.spec(agent), is_stopped)


def _reference(work: AgentWork) -> str:
    """Return the reference of the agent's task. Raise ConfigError if this worker may not read it."""
    try:
        return agent_attempts.load_reference(database(), work.task_id)
    except AccessDenied as error:
        problem = "agent.show_reference is set, but the login of this agents worker may not read references."
        raise ConfigError(problem, "Start an agents worker with the login of the database's owner.") from error


def message_dict(message: Message) -> dict[str, str]:
    """Return a message of a task as a dict of the chat completions API."""
    return {"role": message.role, "content": message.content}


@Once
def _waker() -> Waker:
    return Waker(settings())

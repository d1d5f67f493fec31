"""`agentrl agent poll`: runs a program for each task of a run whose agents run elsewhere (`--agent external`)."""

import time
from typing import Annotated

import typer

from agentrl.cli.console import say, show

ENDPOINT_SECONDS = 60.0
"""The longest time that `agent poll` waits for an endpoint that is starting, in seconds."""

agent = typer.Typer(help="Run the agents of runs with --agent external.", no_args_is_help=True, rich_markup_mode=None)


@agent.callback()
def group() -> None:
    """Run the agents of runs with --agent external."""


@agent.command("poll")
def poll(
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND...", help="The program and its arguments.", show_default=False)
    ],
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="The endpoint [that of this data folder].", show_default=False)
    ] = None,
    run: Annotated[str, typer.Option(metavar="RUN", help="Only tasks of this run [any].", show_default=False)] = "",
    parallel: Annotated[int, typer.Option(min=1, max=256, help="Maximum programs at once.")] = 1,
    tasks: Annotated[int | None, typer.Option(min=1, help="End after this many tasks [never].", show_default=False)] = None,
) -> None:
    """Ask an endpoint for tasks, and run COMMAND for each of them, until Ctrl-C.

    The program gets the task as JSON on its standard input and in the file AGENTRL_TASK, and the address and the key of its
    model in OPENAI_BASE_URL and similar variables. It may write its answer to the file AGENTRL_ANSWER. It runs in its own
    folder, without a sandbox, under the limits of the run. Ctrl-C ends the programs and gives their tasks back. On the machine
    on which the stack runs, the key for tasks is found in the data folder; elsewhere, set AGENTRL_TASKS_KEY. If
    AGENTRL_REWARDS_KEY is set, the rewards in the answers are sent too.
    """
    from agentrl.workers.agents.poller import Poller, TaskClient
    from agentrl.workers.serving.external_tasks import find_tasks_key
    from agentrl.workers.stack.worker import set_up_logging
    from agentrl.workflow.settings import settings

    url = url or _find_url()
    set_up_logging()
    with TaskClient(url, find_tasks_key(settings(), create=False), settings().rewards_key) as client:
        say(f"Asking {client.url} for tasks. Ctrl-C ends the programs and gives their tasks back.")
        Poller(client, command, run, parallel, tasks, show).poll()


def _find_url() -> str:
    """Return the URL of this data folder's endpoint. Wait for the endpoint if the embedded stack is starting it."""
    from agentrl.cli.resolve_targets import existing_database
    from agentrl.workers.stack import embedded
    from agentrl.workers.stack.presence import find_endpoint_url
    from agentrl.workflow.errors import ServiceError
    from agentrl.workflow.settings import settings
    from agentrl.workflow.store.endpoint_reads import some_run_has_agent

    database, deadline, is_announced = existing_database(), time.monotonic() + ENDPOINT_SECONDS, False
    while database is not None:
        if url := find_endpoint_url(database):
            return url
        is_starting = embedded.find_supervisor(settings()) is not None and some_run_has_agent(database)
        if not is_starting or time.monotonic() > deadline:
            break
        if not is_announced:
            say("The endpoint is starting.")
            is_announced = True
        time.sleep(0.2)
    raise ServiceError("No endpoint runs for this data folder.", "Submit a run with --agent external, or write --url URL.")

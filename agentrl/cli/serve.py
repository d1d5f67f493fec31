"""`agentrl serve`: serves a policy to any client of the OpenAI or the Anthropic API. Turns are recorded; nothing is trained."""

import json
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl.cli.console import say, show
from agentrl.cli.options import MinP, PolicyName, Stop, TemplateFile, ToolFormatName, TopK, TopP, chat_values
from agentrl.cli.resolve_targets import Trust, check_model_is_there, find_trusted_policy
from agentrl.workflow.errors import ConfigError
from agentrl.workflow.runtime.shown_text import format_count

if TYPE_CHECKING:
    import socket

    from agentrl.workers.requests.serve_request import Serving
    from agentrl.workflow.config import RunConfig
    from agentrl.workflow.store.connect import Database

HOST, PORT = "127.0.0.1", 8000


def serve(
    policy: PolicyName,
    host: Annotated[str, typer.Option(help="Address to listen at; one beyond this machine needs AGENTRL_SERVE_KEY.")] = HOST,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = PORT,
    name: Annotated[str | None, typer.Option(help="Name of the run [serve-N].", show_default=False)] = None,
    no_record: Annotated[bool, typer.Option("--no-record", help="Record nothing.")] = False,
    keep_days: Annotated[
        float | None,
        typer.Option(min=0, max=36_500, help="Delete episodes after this many days [never].", show_default=False),
    ] = None,
    idle_seconds: Annotated[float, typer.Option(min=0.1, max=86_400, help="End an episode after this idle time.")] = 600.0,
    temperature: Annotated[
        float | None, typer.Option(help="Default temperature of calls [the run's, else 1].", show_default=False)
    ] = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    stop: Stop = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Maximum tokens per turn [the model's window].", show_default=False)
    ] = None,
    engine: Annotated[str | None, typer.Option(help="Sampling engine [the run's, else rolling].", show_default=False)] = None,
    upstream: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Record a vLLM server: it samples, with the key AGENTRL_ENGINE_KEY.", show_default=False
        ),
    ] = None,
    tool_format: ToolFormatName = None,
    chat_template: TemplateFile = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**31 - 1, help="Seed of all random draws [random].", show_default=False)
    ] = None,
    strict_api: Annotated[
        bool, typer.Option("--strict-api", help="Refuse request fields that cannot be applied, instead of naming them.")
    ] = False,
    trust_remote_code: Trust = False,
) -> None:
    """Serve a policy to any client of the OpenAI or the Anthropic API, until Ctrl-C.

    The routes are POST /v1/chat/completions, /v1/responses, /v1/messages and /v1/completions, and GET /v1/models. Each client's
    requests are an episode of a run of the kind serve, for `agentrl episodes`, `replay` and `sql`. Requests with the same API
    key, or the same header X-Agentrl-Episode, belong to one client. A client's episode ends by POST /v1/episode/end (which may
    also set rewards), after --idle-seconds without a request, or when this process ends. The client chooses temperature, top_p,
    top_k, min_p and seed.
    """
    from secrets import randbelow

    from agentrl.workers.requests.serve_request import Serving
    from agentrl.workers.stack.listening import bind, is_loopback
    from agentrl.workers.stack.worker import set_up_logging
    from agentrl.workflow.settings import settings

    if no_record and (name is not None or keep_days is not None):
        raise ConfigError("--no-record excludes --name and --keep-days: nothing is stored.", "Leave them out.")
    if upstream is not None:
        engine = _use_upstream(upstream, engine)
    options: dict[str, Any] = {"temperature": temperature, "max_new_tokens": max_new_tokens, "engine": engine}
    options |= {"top_k": top_k, "top_p": top_p, "min_p": min_p, "stop": stop or None}
    chat = chat_values(tool_format, chat_template) | {"seed": randbelow(2**31) if seed is None else seed}
    chat |= {"agent.strict_api": strict_api}
    with closing(bind(host, port, "Pass another --port, or 0 for any.")) as listening:
        key = settings().serve_key
        if not all("!" <= letter <= "~" for letter in key):
            raise ConfigError(
                "AGENTRL_SERVE_KEY must be printable ASCII without spaces: HTTP headers cannot carry other characters.",
                "Set another.",
            )
        if not key and not is_loopback(listening):
            message = f"Cannot listen at {host} without a key: other machines can reach it."
            raise ConfigError(message, "Set AGENTRL_SERVE_KEY to the key that clients must send, or leave --host out.")
        origins = _read_origins(settings().serve_origins, key)
        config, ref, of = _served_config(policy, name, options, chat, trust_remote_code)
        set_up_logging()
        with _database(no_record) as db:
            how = Serving(key, idle_seconds, keep_days, not no_record, origins, upstream is not None)
            _serve(db, config, ref, of, listening, how)


def _use_upstream(url: str, engine: str | None) -> str:
    """Let the engine of this process sample with the server at the URL, and return the engine's name. Raise ConfigError if the
    URL is invalid, or the engine is none that uses a server.
    """
    from agentrl.workflow.inference.http import server_urls
    from agentrl.workflow.plugins import find
    from agentrl.workflow.settings import settings

    if not find("engines", engine or "openai").at_url:
        raise ConfigError(f"--upstream excludes --engine {engine}, which samples in this process.", "Leave --engine out.")
    os.environ["AGENTRL_ENGINE_URL"] = url
    settings.cache_clear()
    server_urls(settings())
    return engine or "openai"


def _read_origins(text: str, key: str) -> frozenset[str]:
    """Return the origins that AGENTRL_SERVE_ORIGINS lists. Raise ConfigError if a value is not an origin, or no key is set."""
    from agentrl.workers.http.calls import read_origins

    try:
        origins = read_origins(text)
    except ValueError as error:
        raise ConfigError(f"AGENTRL_SERVE_ORIGINS: {error}.", "Pass origins: https://app.example.org,...") from error
    if origins and not key:
        message = "AGENTRL_SERVE_ORIGINS requires a key, because it lets pages of other sites call this server."
        raise ConfigError(message, "Set AGENTRL_SERVE_KEY.")
    return origins


def _served_config(
    policy: str, name: str | None, options: dict[str, Any], chat: dict[str, Any], trust: bool
) -> "tuple[RunConfig, Any, str]":
    """Return the config with which to serve, the policy's weights and the name of the policy's run."""
    from agentrl.workers.requests.serve_request import serve_config
    from agentrl.workflow import engines
    from agentrl.workflow.config import build
    from agentrl.workflow.experiment import Experiment
    from agentrl.workflow.models.lookup import TINY_DATASET

    base, ref = find_trusted_policy(policy, trust)
    config = build(serve_config(base, name, options).flat() | chat)
    engines.check_options(Experiment(config).engine, config.rollout)
    if ref is None:
        check_model_is_there(policy, config, TINY_DATASET)
    return config, ref, "" if ref is None else str(base.name or "")


@contextmanager
def _database(no_record: bool) -> "Iterator[Database]":
    from agentrl.workers.serving.policy_server import unrecorded_database
    from agentrl.workers.stack.process import database

    with unrecorded_database() if no_record else nullcontext(database()) as db:
        yield db


def _serve(db: "Database", config: "RunConfig", ref: Any, of: str, listening: "socket.socket", how: "Serving") -> None:
    """Load the policy, print the address, and serve the policy until the process is stopped."""
    from agentrl.workers.requests.serve_request import serve_submission
    from agentrl.workers.serving.policy_server import open_run, serve_policy
    from agentrl.workers.stack.listening import url_of
    from agentrl.workers.stack.process import claim_name
    from agentrl.workflow.experiment import Experiment
    from agentrl.workflow.inference.open_policy import open_policy

    with open_policy(config, ref) as opened:
        settled = config.model_copy(update={"model": opened.policy.config})
        run = open_run(db, serve_submission(db, settled, opened.ref, of, how.keep_days), claim_name())
        what = f"{of}@{opened.ref.version}" if of else config.model.path
        for line in _greeting(run.name, what, url_of(listening), how):
            show(line)
        served = serve_policy(db, run, Experiment(settled), opened, listening, how)
    if served.was_ended:
        say(f"{run.name} was ended by another command.")
    show(f"{run.name}: {format_count(served.episodes, 'episode')}, {format_count(served.calls, 'request')}")


def _greeting(run: str, what: str, url: str, how: "Serving") -> "Iterator[str]":
    key_note = "the key is AGENTRL_SERVE_KEY" if how.key else "no key"
    recording = f"its episodes: agentrl episodes {run}" if how.records else "nothing is recorded"
    yield f"{run}: {what} at {url}/v1, {key_note}; {recording}"
    header = ' -H "Authorization: Bearer $AGENTRL_SERVE_KEY"' if how.key else ""
    body = json.dumps({"messages": [{"role": "user", "content": "What is 15 minus 8?"}]})
    yield f"  curl {url}/v1/chat/completions{header} -d '{body}'"

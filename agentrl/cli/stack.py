"""`agentrl up`, `down`, `worker`, `db` and `config`: the processes, the revision of the database, and the config of a run."""

import os
from contextlib import closing
from shlex import quote
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from agentrl.cli.console import Json, say, show, show_json, show_table
from agentrl.cli.options import Assignments, ConfigFile
from agentrl.workflow.errors import ConfigError, suggest

db = typer.Typer(help="The revision of the database.", no_args_is_help=True, rich_markup_mode=None)


class ConfigCommands(TyperGroup):
    """The subcommands of `agentrl config`. Users who mistype one, or type a run's name instead, are told the right command."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the subcommand that the words name. Raise ConfigError if there is no such subcommand."""
        if not ctx.resilient_parsing and args[0] not in self.commands:
            word = args[0][:100]
            hint = suggest(word, self.commands) or f"Show the config of a run: agentrl config show {quote(word)}"
            raise ConfigError(f"`agentrl config` has no subcommand {word!r}.", hint)
        return super().resolve_command(ctx, args)


config = typer.Typer(help="The config of a run.", cls=ConfigCommands, no_args_is_help=True, rich_markup_mode=None)


def up(
    foreground: Annotated[bool, typer.Option("--foreground", help="Run in the foreground until Ctrl-C.")] = False,
    separate: Annotated[
        bool, typer.Option("--separate", help="Separate processes for rollout and train (--max-staleness needs them).")
    ] = False,
    as_json: Json = False,
) -> None:
    """Start the embedded stack.

    The stack has a private Redis (unless AGENTRL_BROKER_URL is set), a worker for rollouts and training, a tools worker and a
    control loop. For a run with an agent, the stack also has an endpoint and an agents worker.
    """
    from agentrl.workers.stack import embedded, supervisor
    from agentrl.workers.stack.process import database
    from agentrl.workflow.settings import settings

    where = settings()
    database()
    before = embedded.find_supervisor(where)
    if foreground and before is None:
        embedded.check_separate(where, separate)
        say(f"The stack runs here until Ctrl-C; its logs are in {where.stack_dir}.")
        supervisor.main(stay=True, separate=separate)
        return
    started = embedded.ensure_running(where, stay=True, separate=separate)
    pid = embedded.find_supervisor(where)
    if as_json:
        show_json({"started": started, "pid": pid, "logs": where.stack_dir})
        return
    show(f"The stack {'runs' if started else 'runs already'} (supervisor {pid}); its logs are in {where.stack_dir}.")


def down() -> None:
    """Stop the embedded stack; unfinished runs continue at the next `up`."""
    from agentrl.cli.resolve_targets import existing_database
    from agentrl.workers.stack import embedded
    from agentrl.workflow.settings import settings
    from agentrl.workflow.store import control_reads

    if not embedded.stop(settings()):
        show("The stack is not running.")
        return
    show("The stack is stopped.")
    db = existing_database()
    if db is not None and (waiting := control_reads.count_running_runs(db)):
        say(f"{'A run is' if waiting == 1 else f'{waiting} runs are'} unfinished. To continue, type: agentrl up")


def worker(
    role: Annotated[
        str, typer.Argument(metavar="ROLE", help="rollout, tools, train, control, agents, endpoint, ranks or rollout,train.")
    ],
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="Threads [rollout 16, tools 64, train 1, agents 16].", show_default=False),
    ] = None,
    host: Annotated[str | None, typer.Option(help="endpoint: address to listen at [127.0.0.1].", show_default=False)] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="endpoint: port [AGENTRL_ENDPOINT_PORT].", show_default=False)
    ] = None,
) -> None:
    """Run one worker in this process until SIGTERM.

    The role ranks lends this host's devices to train workers on other hosts, for runs with update.hosts above 1.

    Agents send their requests to an endpoint; each agent has a key of its own. An endpoint speaks plain HTTP: let it listen at
    another address than 127.0.0.1 only in a network that you trust.
    """
    from agentrl.workers.stack import broker, worker
    from agentrl.workflow.settings import settings

    roles = [word.strip() for word in role.split(",") if word.strip()]
    if roles == ["endpoint"]:
        if concurrency is not None:
            raise ConfigError(
                "--concurrency does not apply to this role.", "To limit the endpoint's open calls, set AGENTRL_ENDPOINT_CALLS."
            )
        worker.run(roles, host=host or "127.0.0.1", port=port)
        return
    if host is not None or port is not None:
        raise ConfigError("--host and --port apply only to `agentrl worker endpoint`.", "Leave them out.")
    # A broker in the settings may come up later; the embedded one comes with a stack, or not at all.
    is_role = set(roles) <= worker.SHARED_ROLES or (len(roles) == 1 and roles[0] in worker.ROLES)
    if is_role and roles != ["ranks"] and not settings().broker_url:
        broker.require_broker(settings())
    worker.run(roles, concurrency)


@db.command("upgrade")
def upgrade() -> None:
    """Upgrade the database to this agentrl's revision.

    On Postgres this also creates the role with which `agentrl sql` reads, with the password in AGENTRL_READER_PASSWORD.
    """
    from agentrl.workflow.settings import settings
    from agentrl.workflow.store import migrate
    from agentrl.workflow.store.connect import Database

    with closing(Database(settings().database)) as database:
        before = migrate.current(database)
        migrate.upgrade(database)
        show(f"{before or 'empty'} -> {migrate.current(database)}")
        if weak := migrate.weak_passwords(database, settings()):
            say(f"Weak passwords: {', '.join(weak)}. Use 12 characters or more, and not the word `agentrl`.")


@db.command("current")
def current(as_json: Json = False) -> None:
    """Show the database's revision; exit 4 if this agentrl needs another revision."""
    from agentrl.workflow.settings import settings
    from agentrl.workflow.store import migrate
    from agentrl.workflow.store.connect import Database
    from agentrl.workflow.store.reads.user_sql import sqlite_file

    file = sqlite_file(settings())
    revision = None
    if file is None or file.exists():
        with closing(Database(settings().database)) as database:
            revision = migrate.current(database)
    if as_json:
        show_json({"current": revision, "head": migrate.head()})
    else:
        show(f"{revision or 'empty'} (this agentrl: {migrate.head()})")
    if revision != migrate.head():
        say("Run `agentrl db upgrade`.")
        raise typer.Exit(4)


@config.command("show")
def show_config(
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="Show the config stored with this run.", show_default=False)
    ] = None,
    file: ConfigFile = None,
    assignments: Assignments = None,
    origin: Annotated[bool, typer.Option("--origin", help="Show where each value comes from.")] = False,
    as_json: Json = False,
) -> None:
    """Show the config that a run would have (or has), as YAML.

    Values that the algorithm chose for options that were left out are printed as comments. So the file can be used with another
    algorithm too.
    """
    values, origins, settled = _config_values(file, assignments, run)
    if as_json:
        show_json([{"key": k, "value": v, "origin": origins[k]} for k, v in values.items()] if origin else values)
    elif origin:
        show_table(("key", "value", "origin"), [(key, _yaml(value), origins[key]) for key, value in values.items()])
    else:
        for key, value in values.items():
            show(f"# {key}: {_yaml(value)} ({origins[key]})" if key in settled else f"{key}: {_yaml(value)}")


def _config_values(
    file: Any, assignments: list[str] | None, run: str | None
) -> tuple[dict[str, Any], dict[str, str], set[str]]:
    """Return the values by key, the source of each value by key, and the keys whose value the algorithm chose."""
    from agentrl.workflow import trainers
    from agentrl.workflow.algorithms import resolve_run
    from agentrl.workflow.resolve import resolve

    if run is None:
        run_config, origins = resolve(file, {}, tuple(assignments or ()), os.environ)
        config = resolve_run(run_config)
        trainers.check(config)
        before, values = run_config.flat(), config.flat()
        settled = {key for key, value in values.items() if value != before[key]}
        return values, origins | dict.fromkeys(settled, run_config.algorithm.name), settled
    if file or assignments:
        raise ConfigError(f"A run excludes --config and -s: the config of {run!r:.60} is stored.", "Choose one.")
    from agentrl.cli.resolve_targets import stored_database
    from agentrl.workflow.experiment import Experiment
    from agentrl.workflow.store import run_names

    row = run_names.find_run(stored_database(), run)
    values = Experiment.load(row["config"]).config.flat()
    return values, dict.fromkeys(values, f"run {row['name']}"), set()


def _yaml(value: Any) -> str:
    import yaml

    text: str = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10_000)
    return text.removesuffix("...\n").strip()

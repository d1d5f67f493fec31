"""`agentrl doctor`: checks whether this machine has everything that a run needs. For each check it prints one line: ok, warn or
fail, and how to fix it.
"""

import shutil
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Annotated, Any, Literal

import typer

from agentrl.cli.console import Json, show_json, show_lines
from agentrl.cli.probe_process import probe_facts
from agentrl.workflow.errors import AgentRLError
from agentrl.workflow.installation import install_command
from agentrl.workflow.runtime.shown_text import format_count

PACKAGES = ("transformers", "peft", "bitsandbytes", "celery", "redis", "sqlalchemy", "alembic", "psycopg", "typer", "rich")
STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}
LOW_DISK = 2 * 2**30


@dataclass(frozen=True, slots=True)
class Check:
    """The result of a check: its name, its status, and what to do if it failed."""

    name: str
    state: Literal["ok", "warn", "fail"]
    found: str
    todo: str = ""


def doctor(
    model: Annotated[str | None, typer.Option(help="Also check this model's chat template.", show_default=False)] = None,
    as_json: Json = False,
) -> None:
    """Check the machine, the services, the models; exit 4 on a fail."""
    checks = list(_run_checks(model))
    if as_json:
        show_json([asdict(check) for check in checks])
    else:
        show_lines(
            (
                f"{check.state:4}  {check.name:9}  {check.found}" + (f"  ->  {check.todo}" if check.todo else ""),
                STYLES[check.state],
            )
            for check in checks
        )
    if any(check.state == "fail" for check in checks):
        raise typer.Exit(4)


def _run_checks(model: str | None) -> Iterator[Check]:
    from agentrl.workflow.settings import settings

    where = settings()
    yield _python()
    yield _packages()
    yield from _torch(where)
    yield _database(where)
    yield from _broker(where)
    if where.checkpoints:
        yield _checkpoints(where)
    if where.ranks_host:
        yield _ranks_host(where)
    yield from _engine(where)
    yield _sandbox(where)
    yield _disk(where)
    yield _gsm8k(where)
    yield _models(where)
    if model is not None:
        yield _template(model)


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    good = sys.version_info >= (3, 11)
    return Check("python", "ok" if good else "fail", version, "" if good else "Use Python 3.11 or newer.")


def _packages() -> Check:
    versions, missing = [], []
    for name in PACKAGES:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        return Check("packages", "fail", f"missing: {', '.join(missing)}", install_command(*missing))
    return Check("packages", "ok", ", ".join(versions))


def _torch(where: Any) -> Iterator[Check]:
    facts = probe_facts("torch", where.device)
    if "error" in facts:
        yield Check("torch", "fail", facts["error"], "Reinstall torch.")
        return
    parts = [facts["version"], *(facts["gpus"] or ["no GPU"])]
    parts.append(f"{where.threads} CPU threads (AGENTRL_THREADS)" if where.threads else f"{facts['threads']} CPU threads")
    yield Check("torch", "ok", ", ".join(parts))
    yield _device(where.device, facts["device"])
    yield _cpu(facts)


def _device(device: str, facts: dict[str, Any]) -> Check:
    if "unusable" in facts:
        description = f"{facts['name']} (AGENTRL_DEVICE={device}) cannot be used: {facts['unusable']}"
        todo = "Set AGENTRL_DEVICE to auto, cpu, cuda or cuda:N."
        if kernels := facts["kernels"]:
            description += f"; this build of torch has kernels for {', '.join(kernels)}"
            todo = "Install a build of torch for this card (https://pytorch.org/get-started), or set AGENTRL_DEVICE=cpu."
        return Check("device", "fail", description, todo)
    description = f"{facts['name']} runs a matrix product; LoRA computes in {facts['dtype']}"
    if "gpu" in facts:
        free, total = (facts[name] / 2**30 for name in ("free", "total"))
        description += f"; {facts['gpu']}, compute capability {facts['capability']}, {free:.1f} of {total:.1f} GiB free"
    return Check("device", "ok", description)


def _cpu(facts: dict[str, Any]) -> Check:
    """Report the dtypes for which the CPU sampler packs the weights. Weights of other dtypes are multiplied unpacked."""
    roads = [f"{dtype} {f'plain ({why})' if why else 'packed'}" for dtype, why in facts["lacking"].items()]
    return Check("cpu", "ok", f"{facts['cpu']}: {', '.join(roads)}")


def _database(where: Any) -> Check:
    from agentrl.workflow.store import migrate
    from agentrl.workflow.store.connect import Database
    from agentrl.workflow.store.reads.user_sql import sqlite_file

    try:
        file = sqlite_file(where)
        if file is not None and not file.exists():
            return Check("database", "ok", f"{file} does not exist; the first command that needs it creates it")
        with closing(Database(where.database)) as database:
            revision, head, url = migrate.current(database), migrate.head(), database.url.render_as_string(hide_password=True)
    except AgentRLError as error:
        return Check("database", "fail", error.message, error.hint)
    if revision != head:
        return Check("database", "fail", f"{url} is at revision {revision or 'none'}, not {head}", "agentrl db upgrade")
    return Check("database", "ok", f"{url} at {revision}")


def _broker(where: Any) -> Iterator[Check]:
    from agentrl.workers.stack import broker, embedded

    if not where.broker_url:
        server = broker.find_server(where)
        if server is None:
            yield Check("redis", "warn", "no server: the stack is one process", broker.server_hint())
        else:
            yield Check("redis", "ok", server)
        if embedded.find_supervisor(where) is None:
            yield Check("stack", "ok", "not running; `agentrl submit` starts it")
            return
    if not broker.is_answering(where):
        yield Check(
            "broker",
            "fail",
            "does not answer",
            "Check AGENTRL_BROKER_URL and AGENTRL_BROKER_PASSWORD." if where.broker_url else "agentrl up",
        )
        return
    yield Check("broker", "ok", "answers")
    log = embedded.log_file(where, "supervisor")
    yield from _workers(f"The stack starts it. If it does not start, read {log}" if embedded.find_supervisor(where) else "")


def _workers(coming: str) -> Iterator[Check]:
    from agentrl.cli.resolve_targets import existing_database
    from agentrl.workers.stack import presence
    from agentrl.workers.stack.celery_app import AGENTS
    from agentrl.workflow.store.endpoint_reads import some_run_has_agent

    try:
        db = existing_database()
        lost = presence.missing_control_hints(db) if db else []  # without a database there is no control loop either
        has_agent = db is not None and some_run_has_agent(db)
        is_started_here = db is not None and some_run_has_agent(db, elsewhere=False)
        url = presence.find_endpoint_url(db) if db else None
    except AgentRLError as error:
        yield Check("workers", "fail", error.message, error.hint)
        return
    served = presence.count_workers_by_queue()
    no_control = bool(lost)
    queues = [*served, *([AGENTS] if is_started_here and AGENTS not in served else [])]
    if has_agent and db:
        lost += presence.missing_endpoint_hints(db)
    for hint in (*presence.missing_worker_hints(queue for queue in queues if not served.get(queue)), *lost):
        problem, _, start = hint.partition(". Start one: ")
        yield Check("workers", "warn", problem, coming or start)
    there = [f"{queue} {count}" for queue, count in served.items() if count and "." not in queue]
    if there:
        yield Check("workers", "ok", ", ".join([*there, *([] if no_control or not db else ["control 1"])]))
    if url:
        yield Check("endpoint", "ok", url)


def _checkpoints(where: Any) -> Check:
    from agentrl.workflow import checkpoints

    try:
        checkpoints.check_place(where.checkpoint_root)
    except AgentRLError as error:
        return Check("store", "fail", error.message, error.hint)
    return Check("store", "ok", where.checkpoint_root)


def _ranks_host(where: Any) -> Check:
    from agentrl.workers.ranks.rendezvous import interfaces_at, listen

    try:
        with listen() as server:
            names = interfaces_at(server.getsockname()[0])
    except AgentRLError as error:
        return Check("ranks", "fail", error.message, error.hint)
    interface = ", ".join(sorted(set(names.values()))) or "the one that the environment names"
    return Check("ranks", "ok", f"other hosts can join updates at {where.ranks_host} (network interface: {interface})")


def _engine(where: Any) -> Iterator[Check]:
    from agentrl.workflow.engines import vllm
    from agentrl.workflow.inference.http import ask_servers, has_development_routes, names_loopback
    from agentrl.workflow.inference.server_responses import Cards

    if version := vllm.installed_version(where):
        yield Check("engine", "ok", f"vLLM {version} in {vllm.python_of(where).parents[1]}")
    if not where.engine_url:
        return
    try:
        answers = ask_servers(where, lambda connection: connection.read(Cards, "/v1/models").data)
    except AgentRLError as error:
        yield Check("engine", "fail", error.message, error.hint)
        return
    for url, cards in answers.items():
        if isinstance(cards, AgentRLError):
            yield Check("engine", "fail", cards.message, cards.hint)
            continue
        names = ", ".join(card.id for card in cards) or "nothing"
        yield Check("engine", "ok", f"{url} serves {names:.300}")
        if not names_loopback(url) and has_development_routes(where, url):
            message = f"Everyone who can reach the engine at {url} can control it: its development routes need no key."
            hint = "Start vLLM without VLLM_SERVER_DEV_MODE, or let it listen where agents and tools cannot reach it."
            yield Check("engine", "warn", message, hint)


def _sandbox(where: Any) -> Check:
    from agentrl.workflow.errors import SandboxUnavailable
    from agentrl.workflow.sandbox.find import attempts, install_hint

    if where.sandbox == "none-unsafe":
        return Check("sandbox", "warn", "none: model-written code runs with your rights", "Unset AGENTRL_SANDBOX.")
    try:
        tries = dict(attempts(where))
    except AgentRLError as error:
        return Check("sandbox", "fail", error.message, error.hint)
    lacking = [f"{kind}: {outcome.message}" for kind, outcome in tries.items() if isinstance(outcome, SandboxUnavailable)]
    for kind, outcome in tries.items():
        if not isinstance(outcome, SandboxUnavailable):
            return Check("sandbox", "ok", "; ".join([f"{kind} {_describe_sandbox(outcome)}", *lacking]))
    refused = f"none: code tools are refused, everything else works. {' '.join(lacking)}"
    if where.sandbox == "auto":
        return Check("sandbox", "warn", refused, install_hint(where))
    return Check("sandbox", "fail", refused, "Fix it, or unset AGENTRL_SANDBOX.")


def _describe_sandbox(sandbox: Any) -> str:
    from agentrl.workflow.sandbox.cgroups import parents

    program = "import sys; print(sys.executable, '.'.join(map(str, sys.version_info[:3])))"
    runs = f"runs {sandbox.run(program).output.strip()}"
    sandbox.close()
    if sandbox.kind == "docker" or "memory" in parents():
        return runs
    held = {"bwrap": "limited per process", "landlock": "checked ten times a second"}[sandbox.kind]
    return f"{runs}; control groups are not writable, so memory is {held}"


def _disk(where: Any) -> Check:
    folder = next(path for path in (where.root, *where.root.parents) if path.exists())
    free = shutil.disk_usage(folder).free
    description = f"{free / 2**30:.1f} GiB free for {where.root}"
    return (
        Check("disk", "ok", description)
        if free > LOW_DISK
        else Check("disk", "warn", description, "Free some disk space, or move AGENTRL_HOME.")
    )


def _gsm8k(where: Any) -> Check:
    """Check that gsm8k can be read from its folder, or is on the hub. The dataset is not downloaded."""
    from agentrl.workflow.datasets import gsm8k
    from agentrl.workflow.runtime import hub

    if where.gsm8k_dir is None:
        if hub.has_fetched_dataset(gsm8k.HUB_NAME):
            return Check("gsm8k", "ok", f"{gsm8k.HUB_NAME} is in the hub's cache")
        if hub.ask_hub("dataset", gsm8k.HUB_NAME) == "known":
            return Check("gsm8k", "ok", f"{gsm8k.HUB_NAME} can be downloaded from the hub")
        return Check("gsm8k", "warn", "gsm8k is not cached, and the hub does not answer", gsm8k.HINT)
    try:
        counts = {split: sum(1 for _ in gsm8k.load(split)) for split in gsm8k.SPLITS}
    except AgentRLError as error:
        return Check("gsm8k", "warn", error.message, "Correct AGENTRL_GSM8K_DIR.")
    tasks = ", ".join(f"{format_count(count, 'task')} in {split}" for split, count in counts.items())
    return Check("gsm8k", "ok", f"{where.gsm8k_dir}: {tasks}")


def _models(where: Any) -> Check:
    models = sorted(path.parent.name for path in where.models_dir.glob("*/config.json"))
    return Check("models", "ok", ", ".join(models) if models else "none yet; `agentrl sft` makes one")


def _template(model: str) -> Check:
    from agentrl.workflow.models.lookup import model_folder, resolve_model

    try:
        folder = model_folder(resolve_model(model, "arithmetic"))
    except AgentRLError as error:
        return Check("template", "fail", error.message, error.hint)
    facts = probe_facts("template", str(folder))
    if "error" in facts:
        return Check("template", "fail", facts["error"], "Pass an instruct model.")
    if facts["reason"]:
        return Check("template", "warn", facts["reason"], "It cannot be trained with tools. Pass --chat-template FILE.")
    pad = f"padding token {facts['pad']!r}" if facts["pad"] else "no padding token (none is needed)"
    return Check("template", "ok", f"keeps earlier turns unchanged, writes calls as {facts['calls']} does; {pad}")

